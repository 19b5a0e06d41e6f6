"""Memory for the states of recurrent layers: how many slots a cache gets, in bytes and numbers.

Answers that run live on two slots each while a step is open. All other slots hold snapshots: states
at positions from which a conversation can go on.
"""

from __future__ import annotations

from kvcellar.budget import format_size
from kvcellar.cache_config import CacheConfig
from kvcellar.checks import seen, whole
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import KvDtype
from kvcellar.types import ModelCacheParams

SHARE = 4
"""Snapshots take one part in so many of the memory for K, V and states, where nothing is said."""

LEAST_BYTES = 16_000_000
"""Bytes that snapshots may take however small the cache is, where nothing is said."""

LEAST, MOST = 4, 1024
"""Snapshots that fit at least and at most, where nothing is said."""

RUNNING = 4
"""Answers whose slots are counted beside snapshots; where more run, snapshots make room."""

LEAST_SLOTS = 2
"""Slots of a cache: one is read, another written. A model without recurrent layers has no use."""


def check_snapshot_bytes(asked: object) -> int | None:
    """Return bytes for snapshots as a plain number; None: nothing is said.

    Raises:
        ConfigError: they are no number of bytes, or none at all.
    """
    if asked is None:
        return None
    n_bytes = whole(asked, "snapshot_bytes")
    if n_bytes < 1:
        raise ConfigError(
            f"snapshots of {seen(asked)} bytes: without any, recurrent layers would read every "
            f"conversation from its beginning, turn after turn; give bytes for at least one "
            f"snapshot, such as 1GB, or leave it out"
        )
    return n_bytes


def slots_for(
    params: ModelCacheParams, capacity: int, kv: KvDtype, asked: int | None, n_running: int
) -> int:
    """Return the slots of a cache: those of running answers, and those for snapshots.

    Args:
        params: the model's facts.
        capacity: cells of the cache.
        kv: how K and V are stored.
        asked: bytes for snapshots; None: one part in ``SHARE``, within limits.
        n_running: answers that run at a time.

    Raises:
        ConfigError: so few bytes hold no snapshot, with the bytes of one.
    """
    if params.state is None:
        return LEAST_SLOTS
    size = params.state.slot_bytes
    running = LEAST_SLOTS * min(n_running, RUNNING)
    if asked is None:
        rows = capacity * sum(group.cell_bytes(kv) for group in params.groups)
        n_bytes = max(rows // (SHARE - 1), LEAST_BYTES)
        return running + min(max(n_bytes // size, LEAST), MOST)
    if asked < size:
        raise ConfigError(
            f"snapshots may take {format_size(asked)}, and one of this model takes "
            f"{format_size(size)}: its {len(params.state.layers)} recurrent layers could never go "
            f"on from anywhere; give at least as much, and some for each conversation"
        )
    return running + asked // size


def snapshots_in(params: ModelCacheParams, n_bytes: int, asked: int | None) -> int:
    """Return how many snapshots a cache of so many bytes has room for, as it shares them out.

    Args:
        params: the model's facts.
        n_bytes: for K, V and states together.
        asked: bytes for snapshots; None: one part in ``SHARE``.
    """
    if params.state is None or n_bytes <= 0:
        return 0
    n = (n_bytes // SHARE if asked is None else asked) // params.state.slot_bytes
    return min(n, MOST) if asked is None else n


def slots_bytes(params: ModelCacheParams, n_slots: int) -> int:
    """Return the bytes of so many slots; 0 for a model without recurrent layers."""
    return 0 if params.state is None else n_slots * params.state.slot_bytes


def what_resumes(config: CacheConfig, n_running: int) -> str:
    """Say from where conversations go on with a model; empty where that is from everywhere.

    Args:
        config: of its cache.
        n_running: answers that run at a time.
    """
    state = config.params.state
    if state is None:
        return ""
    n = max(0, config.n_slots - LEAST_SLOTS * min(n_running, RUNNING))
    return (
        f"recurrent layers ({len(state.layers)}): a conversation goes on from the nearest snapshot "
        f"of their states; {n:,} of {format_size(state.slot_bytes)} fit, "
        f"{format_size(n * state.slot_bytes)} in all (--snapshots)"
    )
