"""From the options of a command to a model that is bound to an open session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcellar.budget import MemoryBudget, format_size, parse_size, resident_bytes
from kvcellar.cache import Cache
from kvcellar.cli.terminal import progress_bar, shown_warnings
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES
from kvcellar.registry import (
    CacheSession,
    load_backend,
    make_decode_session,
    make_seq_session,
    make_tree_session,
)
from kvcellar.types import CacheConfig, ModelCacheParams, make_config

if TYPE_CHECKING:
    from kvcellar.agents import Capacity, MemoryPlan
    from kvcellar.models import LoadedModel, Runner

KINDS: dict[str, Callable[[str, CacheConfig], CacheSession[Any]]] = {
    "contiguous": make_decode_session,
    "seq": make_seq_session,
    "tree": make_tree_session,
}


@dataclass(frozen=True, slots=True)
class Bound:
    """A model, the cache of an open session, the runner that joins them, and the cache's size."""

    model: LoadedModel
    cache: Any
    runner: Runner
    capacity: Capacity


@contextmanager
def bound_model(
    name: str,
    *,
    kind: str = "contiguous",
    backend: str = "torch",
    capacity: int | None = None,
    kv_dtype: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    device: str | None = None,
    memory: str | None = None,
    n_sequences: int = 1,
    chat_template: str | None = None,
) -> Iterator[Bound]:
    """Load a model and open a session for it, with progress on a terminal.

    What is wrong with the settings is found before anything is loaded.

    Raises:
        ConfigError: an unknown kind of cache or type of K and V, a capacity that cannot work, or
            memory that does not hold the model.
        BackendError, ModelError: from loading.
    """
    limit_bytes = _limit_bytes(memory, device)
    if kind not in KINDS:
        raise ConfigError(f"cache {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    make_config(
        ModelCacheParams(1, 1, 128), 1 if capacity is None else capacity, kv_dtype or "float32"
    )
    with progress_bar(f"starting {backend}") as report:
        load_backend(backend)
        from kvcellar.agents import Capacity, choose_capacity
        from kvcellar.models import load_model

        def choose() -> Capacity:
            if capacity is not None:
                return Capacity(capacity, "as asked")
            return choose_capacity(
                name,
                None if limit_bytes is None else limit_bytes - resident_bytes(),
                kv_dtype=kv_dtype,
                dtype=dtype,
                weights=weights,
                backend=backend,
                device=device,
                most_sequences=n_sequences,
            )

        chosen = None
        reserve_bytes = 0
        if limit_bytes is not None:
            chosen = choose()
            reserve_bytes = _reserve(
                name, limit_bytes, chosen.cells, backend, dtype=dtype, weights=weights
            )
        with shown_warnings():
            model = load_model(
                name,
                backend=backend,
                dtype=dtype,
                weights=weights,
                device=device,
                chat_template=chat_template,
                progress=lambda fraction, what: report(fraction, f"{name}: {what}"),
            )
        chosen = chosen or choose()  # what is wrong with a model is said by loading it
    budget = None
    if limit_bytes is not None:
        model.touch_weights()  # they count, and would come with the first forward
        budget = MemoryBudget(limit_bytes, base_bytes=resident_bytes(), reserve_bytes=reserve_bytes)
    config = make_config(
        model.params,
        _checked(chosen.cells, model, n_sequences),
        kv_dtype or (model.dtype if model.dtype in FLOAT_KV_DTYPES else "float32"),
        budget=budget,
    )
    with KINDS[kind](backend, config) as session:
        cache: Cache = session.cache
        with shown_warnings():
            runner = model.bind(session)
        yield Bound(model, cache, runner, chosen)


def _limit_bytes(memory: str | None, device: str | None) -> int | None:
    """What the whole process may hold."""
    limit_bytes = None if memory is None else parse_size(memory)
    if limit_bytes is not None and device not in (None, "cpu"):
        raise ConfigError(
            f"--memory bounds what the process holds in main memory, and KV on {device!r} is not "
            f"there; leave one of the two out, or give a --capacity"
        )
    return limit_bytes


def memory_plan(memory: str | None, loading: dict[str, Any]) -> MemoryPlan | None:
    """How models and store share ``--memory``; None without it. Loads the backend, no model."""
    backend = loading.get("backend", "torch")
    limit_bytes = _limit_bytes(memory, loading.get("device"))
    if limit_bytes is None:
        return None
    with progress_bar(f"starting {backend}"):
        load_backend(backend)
        from kvcellar.agents import MemoryPlan

        return MemoryPlan.divide(limit_bytes, resident_bytes())


def _reserve(
    name: str,
    limit_bytes: int,
    capacity: int,
    backend: str,
    **loading: str | None,
) -> int:
    """Bytes to set aside for forwards; refuses a budget that the model alone would break."""
    from kvcellar.models.sizing import size_model

    spec = size_model(name, backend=backend, **loading)
    held_bytes = resident_bytes()
    if spec.weight_bytes + held_bytes >= limit_bytes:
        raise ConfigError(
            too_small(
                limit_bytes, spec.weight_bytes, held_bytes, loading.get("weights") or spec.dtype
            )
        )
    return spec.scratch_bytes(min(capacity, spec.max_positions))


def too_small(limit_bytes: int, weight_bytes: int, process_bytes: int, dtype: str) -> str:
    """That a budget does not hold a model, with both numbers."""
    return (
        f"a memory budget of {format_size(limit_bytes)} does not hold the model: its weights are "
        f"{format_size(weight_bytes)} in {dtype}, and the process takes "
        f"{format_size(process_bytes)} besides; give more than "
        f"{format_size(weight_bytes + process_bytes)}, or choose a smaller model"
    )


def _checked(cells: int, model: LoadedModel, n_sequences: int) -> int:
    most = model.max_positions * n_sequences
    if cells > most:
        raise ConfigError(
            f"capacity {cells} is more than the {model.max_positions} positions that "
            f"{model.name!r} was made for; ask for up to {most}"
        )
    return cells
