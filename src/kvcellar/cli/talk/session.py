"""From the options of a command to a model that is bound to an open session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcellar.budget import MemoryBudget
from kvcellar.cache import Cache
from kvcellar.cli.common.options import one_adapter
from kvcellar.cli.common.terminal import progress_bar, shown_warnings
from kvcellar.errors import ConfigError
from kvcellar.models.options import CACHES, DEMO
from kvcellar.types import ModelCacheParams

if TYPE_CHECKING:
    from kvcellar.hosting.memory import Capacity
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
    limit_bytes = None
    if memory is not None:
        from kvcellar.hosting.loader import limit_of

        limit_bytes = limit_of(memory, options)
    adapter = one_adapter(options.adapters)
    capacity = 1 if options.capacity is None else options.capacity
    options.config_for(ModelCacheParams(1, 1, 128), capacity)
    model, chosen, budget = _load(options, limit_bytes, n_sequences)
    cells = _checked(chosen.cells, model, n_sequences)
    config = options.config_for(model.params, cells, budget, n_sequences)
    with CACHES[options.cache](model.backend, config) as session:
        cache: Cache = session.cache
        with shown_warnings():
            runner = model.bind(session, adapter=adapter)
        yield Bound(model, cache, runner, chosen)


def _load(
    options: LoadOptions, limit_bytes: int | None, n_sequences: int
) -> tuple[LoadedModel, Capacity, MemoryBudget | None]:
    """Load a model; return it, the capacity of its cache, and the budget of that."""
    with progress_bar("starting") as report:
        from kvcellar.hosting.memory import choose_capacity
        from kvcellar.models import load_model
        from kvcellar.models.backend_choice import chosen
        from kvcellar.models.text.rendering import prepare_renderer

        def told(part: float, what: str) -> None:
            report(part, f"{options.name}: {what}")

        options, _ = chosen(options, told)
        if options.model != DEMO:  # which has no template
            prepare_renderer()
        capacity, budget = None, None
        if limit_bytes is not None:
            from kvcellar.hosting.loader import budget_of_one

            capacity, budget = budget_of_one(options, limit_bytes, n_sequences)
        with shown_warnings():
            model = load_model(options, progress=told)
        # Without a limit loading says first what is wrong with a model.
        capacity = capacity or choose_capacity(options, most_sequences=n_sequences)
    return model, capacity, budget


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
