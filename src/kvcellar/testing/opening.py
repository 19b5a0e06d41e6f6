"""Sessions of a backend under test, each with its oracle beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcellar import (
    CacheConfig,
    CacheSession,
    make_config,
    make_decode_session,
    make_seq_session,
    make_tree_session,
)
from kvcellar.cache_config import SharedPrefix
from kvcellar.testing.adapter import BackendAdapter
from kvcellar.testing.cases import Case
from kvcellar.testing.dense import Token
from kvcellar.testing.driver import Driver

MAKERS: dict[str, Callable[[str, CacheConfig], CacheSession[Any]]] = {
    "decode": make_decode_session,
    "seq": make_seq_session,
    "tree": make_tree_session,
}


@contextmanager
def open_driver(
    adapter: BackendAdapter,
    case: Case,
    kind: str,
    salt: str = "",
    *,
    prefix: SharedPrefix | None = None,
    begin: Sequence[Token] = (),
    **settings: Any,
) -> Iterator[Driver]:
    """Open a session and yield its driver.

    Args:
        adapter: the backend.
        case: the model and its settings.
        kind: of the session.
        salt: other random numbers than without it.
        prefix: what every sequence of the cache begins with.
        begin: the tokens of it, as another driver knows them.
        settings: in place of those of the case.
    """
    values: dict[str, Any] = {
        "capacity": case.capacity,
        "min_chunk": case.min_chunk,
        "window_slack": case.window_slack,
        "kv_dtype": case.kv_dtype,
    } | settings
    config = make_config(case.params, prefix=prefix, **values)
    with MAKERS[kind](adapter.backend, config) as session:
        driver = Driver(adapter, case, kind, session.cache, salt)
        driver.begin_with = list(begin)
        yield driver
        driver.agrees()
