"""The nodes of the indexes that keep paths, and what is asked of their arrays of cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.errors import ConfigError, PrefixError
from kvcellar.history import History
from kvcellar.prefix.protocol import Tokens
from kvcellar.types import BoolArray, IntArray


class PathNode:
    """Tokens ``[start, stop)`` of every history that goes through it, and the cells of their KV.

    Attributes:
        owner: the index that it is in; None once it was evicted.
        parent: None for the root, which holds nothing.
        cells: ``[n_groups, stop - start]``, -1 where a group no longer holds the position.
        n_held: per layer group, how many of ``cells`` are not -1; [] where no group has a window.
        n_children: nodes that follow it.
        pins: locks on handles that end at this node.
        n_locked_children: children that are locked.
    """

    __slots__ = (
        "cells",
        "n_children",
        "n_held",
        "n_locked_children",
        "owner",
        "parent",
        "pins",
        "start",
        "stop",
    )

    def __init__(
        self,
        owner: object,
        parent: PathNode | None,
        start: int,
        cells: IntArray,
        n_held: list[int],
    ) -> None:
        self.owner: object | None = owner
        self.parent = parent
        self.start = start
        self.stop: int = start + cells.shape[1]
        self.cells = cells
        self.n_held = n_held
        self.n_children = 0
        self.pins = 0
        self.n_locked_children = 0

    @property
    def is_locked(self) -> bool:
        """True if a locked handle ends here or further down."""
        return self.pins > 0 or self.n_locked_children > 0


def token_array(tokens: Tokens) -> IntArray:
    """Return tokens as ``[n]`` int64, without a copy where they are that already.

    Raises:
        PrefixError: they are not a flat list of integers.
    """
    if isinstance(tokens, History):
        return tokens.tokens
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PrefixError(
            f"tokens are a flat list of integers, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64, copy=False)


def check_block_size(block_size: int) -> int:
    """Return the block size; raise a ConfigError where it is below 1."""
    if block_size < 1:
        raise ConfigError(f"a block holds at least 1 token, got block_size={block_size}")
    return block_size


def check_windows(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the windows as a tuple; raise a ConfigError where they are none or below 1."""
    if not windows or any(window is not None and window < 1 for window in windows):
        raise ConfigError(
            f"one window per layer group, None or at least 1, got windows={tuple(windows)}"
        )
    return tuple(windows)


def can_resume(cells: IntArray, windows: Sequence[int | None], first: int, floor: int) -> BoolArray:
    """Return for each length in ``(floor, stop]`` if every group holds the window before it.

    A sequence of L tokens goes on if positions ``[max(0, L - w + 1), L)`` have cells: the next
    query, at position L, sees those and itself.

    Args:
        cells: ``[n_groups, stop - first]``: the cells of positions ``[first, stop)``, -1 for none.
        windows: per group, None for all of the history, which is always there.
        first: at most ``floor + 1 - (w - 1)`` for the widest window w, and at most ``floor``; or 0.
        floor: lengths above it are tried.
    """
    positions = np.arange(first, first + cells.shape[1])
    lengths = positions[floor - first :] + 1
    ok = np.ones(lengths.size, dtype=np.bool_)
    for group, window in zip(cells, windows, strict=True):
        if window is None:
            continue
        last_missing = np.maximum.accumulate(np.where(group < 0, positions, first - 1))
        n_held = (positions - last_missing)[floor - first :]
        ok &= n_held >= np.minimum(window - 1, lengths)
    return ok


def owned(part: IntArray) -> IntArray:
    """Return the part, copied where it would keep a base of more than twice its size alive."""
    if part.base is None or 2 * part.size >= part.base.size:
        return part
    return part.copy()


def joined(parts: Sequence[IntArray]) -> IntArray:
    """Return one array of some, or of none."""
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
