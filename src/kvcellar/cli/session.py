"""From the options of a command to a model that is bound to an open session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcellar.budget import MemoryBudget, format_size, resident_bytes
from kvcellar.cache import Cache
from kvcellar.cli.options import one_adapter
from kvcellar.cli.terminal import progress_bar, shown_warnings
from kvcellar.errors import ConfigError
from kvcellar.models.options import CACHES
from kvcellar.registry import load_backend
from kvcellar.types import ModelCacheParams

if TYPE_CHECKING:
    from kvcellar.agents import Capacity
    from kvcellar.models import LoadedModel, LoadOptions, Runner


@dataclass(frozen=True, slots=True)
class Bound:
    """A model, the cache of an open session, the runner that joins them, and the cache's size."""

    model: LoadedModel
    cache: Any
    runner: Runner
    capacity: Capacity


@contextmanager
def bound_model(
    options: LoadOptions,
    *,
    memory: str | None = None,
    n_sequences: int = 1,
) -> Iterator[Bound]:
    """Load a model and open a session for it, with progress on a terminal.

    What is wrong with the settings is found before anything is loaded.

    Args:
        options: of the model and its cache; what it may hold is worked out from ``memory``.
        memory: what the whole process may hold, as a text.
        n_sequences: conversations of the model's context, for the default capacity.

    Raises:
        ConfigError: an unknown type of K and V, a capacity that cannot work, several adapters, or
            memory that does not hold the model.
        BackendError, ModelError: from loading.
    """
    from kvcellar.agents.hosting import limit_of

    limit_bytes = limit_of(memory, options)
    adapter = one_adapter(options.adapters)
    capacity = 1 if options.capacity is None else options.capacity
    options.config_for(ModelCacheParams(1, 1, 128), capacity)
    model, chosen, reserve_bytes = _load(options, limit_bytes, n_sequences)
    budget = None
    if limit_bytes is not None:
        model.touch_weights()  # they count, and would come with the first forward
        held = _held_bytes(options)
        budget = MemoryBudget(limit_bytes, base_bytes=held, reserve_bytes=reserve_bytes)
    cells = _checked(chosen.cells, model, n_sequences)
    config = options.config_for(model.params, cells, budget, n_sequences)
    with CACHES[options.cache](options.backend, config) as session:
        cache: Cache = session.cache
        with shown_warnings():
            runner = model.bind(session, adapter=adapter)
        yield Bound(model, cache, runner, chosen)


def _load(
    options: LoadOptions, limit_bytes: int | None, n_sequences: int
) -> tuple[LoadedModel, Capacity, int]:
    """Load a model; return it, the capacity of its cache, and bytes to set aside for forwards."""
    with progress_bar(f"starting {options.backend}") as report:
        load_backend(options.backend)
        from kvcellar.agents import choose_capacity
        from kvcellar.models import load_model

        chosen, reserve_bytes = None, 0
        if limit_bytes is not None:
            _bound(options, limit_bytes)
            inside = replace(options, memory_bytes=limit_bytes - _held_bytes(options))
            chosen = choose_capacity(inside, most_sequences=n_sequences)
            reserve_bytes = _reserve(options, limit_bytes, chosen.cells)
        with shown_warnings():
            model = load_model(
                options, progress=lambda part, what: report(part, f"{options.name}: {what}")
            )
        # Without a limit loading says first what is wrong with a model.
        chosen = chosen or choose_capacity(options, most_sequences=n_sequences)
    return model, chosen, reserve_bytes


def _bound(options: LoadOptions, limit_bytes: int) -> None:
    """Have a card that the model runs on refuse more than a limit."""
    from kvcellar.models.loading import accelerator_memory

    card = accelerator_memory(options)
    if card is not None:
        card.bound(limit_bytes)


def _held_bytes(options: LoadOptions) -> int:
    """Return what the process holds now, of the card that the model runs on or of main memory."""
    from kvcellar.models.loading import accelerator_memory

    card = accelerator_memory(options)
    return resident_bytes() if card is None else card.held_bytes


def _reserve(options: LoadOptions, limit_bytes: int, capacity: int) -> int:
    """Return the bytes to set aside for forwards.

    Raises:
        ConfigError: the model alone would break the budget.
    """
    from kvcellar.models.sizing import size_model

    spec = size_model(options)
    held_bytes = _held_bytes(options)
    if spec.weight_bytes + held_bytes >= limit_bytes:
        held_in = spec.held_in if spec.is_in_blocks else options.weights or spec.dtype
        raise ConfigError(too_small(limit_bytes, spec.weight_bytes, held_bytes, held_in))
    return spec.scratch_bytes(min(capacity, spec.max_positions))


def too_small(limit_bytes: int, weight_bytes: int, process_bytes: int, dtype: str) -> str:
    """Say that a budget does not hold a model, with both numbers."""
    return (
        f"a memory budget of {format_size(limit_bytes)} does not hold the model: its weights are "
        f"{format_size(weight_bytes)} in {dtype}, and the process takes "
        f"{format_size(process_bytes)} besides; give more than "
        f"{format_size(weight_bytes + process_bytes)}, or choose a smaller model"
    )


def _checked(cells: int, model: LoadedModel, n_sequences: int) -> int:
    """Return a capacity that the model has positions for.

    Raises:
        ConfigError: it has fewer.
    """
    most = model.max_positions * n_sequences
    if cells > most:
        raise ConfigError(
            f"capacity {cells} is more than the {model.max_positions} positions that "
            f"{model.name!r} was made for; ask for up to {most}"
        )
    return cells
