"""From the options of a command to a model that is bound to an open session."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcellar.cache import Cache
from kvcellar.cli.terminal import print_warning, progress_bar
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
    from kvcellar.models import LoadedModel, Runner

DEFAULT_CAPACITY = 8192
"""The most tokens that a cache may hold unless more is asked for; memory grows with use."""

KINDS: dict[str, Callable[[str, CacheConfig], CacheSession[Any]]] = {
    "contiguous": make_decode_session,
    "seq": make_seq_session,
    "tree": make_tree_session,
}


@dataclass(frozen=True, slots=True)
class Bound:
    """A model, the cache of an open session, and the runner that joins them."""

    model: LoadedModel
    cache: Any
    runner: Runner


@contextmanager
def bound_model(
    name: str,
    *,
    kind: str = "contiguous",
    backend: str = "torch",
    capacity: int | None = None,
    kv_dtype: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    n_sequences: int = 1,
) -> Iterator[Bound]:
    """Load a model and open a session for it, with progress on a terminal.

    What is wrong with the settings is found before anything is loaded.

    Raises:
        ConfigError: an unknown kind of cache or type of K and V, or a capacity that cannot work.
        BackendError, ModelError: from loading.
    """
    if kind not in KINDS:
        raise ConfigError(f"cache {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    make_config(
        ModelCacheParams(1, 1, 1), 1 if capacity is None else capacity, kv_dtype or "float32"
    )
    with progress_bar(f"starting {backend}") as report:
        load_backend(backend)
        from kvcellar.models import load_model

        model = load_model(
            name,
            backend=backend,
            dtype=dtype,
            device=device,
            progress=lambda fraction, what: report(fraction, f"{name}: {what}"),
        )
    config = make_config(
        model.params,
        _capacity(capacity, model, n_sequences),
        kv_dtype or (model.dtype if model.dtype in FLOAT_KV_DTYPES else "float32"),
    )
    with KINDS[kind](backend, config) as session:
        cache: Cache = session.cache
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner = model.bind(session)
        for warning in caught:
            print_warning(str(warning.message))
        yield Bound(model, cache, runner)


def _capacity(asked: int | None, model: LoadedModel, n_sequences: int) -> int:
    most = model.max_positions * n_sequences
    if asked is not None and asked > most:
        raise ConfigError(
            f"capacity {asked} is more than the {model.max_positions} positions that "
            f"{model.name!r} was made for; ask for up to {most}"
        )
    return asked or min(most, DEFAULT_CAPACITY)
