"""The nodes of the indexes that keep paths, and what is asked of their arrays of cells."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvcellar.errors import ConfigError, PrefixError
from kvcellar.history import History
from kvcellar.sight import Sight
from kvcellar.types import BoolArray, IntArray

Tokens = History | IntArray | Sequence[int]
"""Token ids. A history or an int64 array costs nothing to take; a long list costs milliseconds."""


class PathNode(ABC):
    """Tokens ``[start, stop)`` of every history that goes through it, and the cells of their KV.

    Attributes:
        owner: the index that it is in; None once it was evicted.
        parent: None for the root, which holds nothing.
        cells: ``[n_groups, stop - start]``, -1 where a group no longer holds the position.
        n_held: per layer group, how many of ``cells`` are not -1; [] where every group keeps all.
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

    @abstractmethod
    def ids(self) -> IntArray:
        """Return the node's tokens, ``[stop - start]``; not to be written to."""

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


def cells_array(cells: Sequence[IntArray], n_groups: int, n_tokens: int) -> IntArray:
    """Copy cells that an index is given into one array, ``[n_groups, n_tokens]``.

    Raises:
        PrefixError: not one array per layer group, or not one cell per token.
    """
    sizes = [len(group) for group in cells]
    if sizes != [n_tokens] * n_groups:
        raise PrefixError(
            f"insert_prefix got {n_tokens} tokens and {sizes} cells for {n_groups} "
            f"layer groups; give each group one cell per token, -1 for none"
        )
    return np.array([token_array(group) for group in cells], dtype=np.int64)


def check_block_size(block_size: int) -> int:
    """Return the block size; raise a ConfigError where it is below 1."""
    if block_size < 1:
        raise ConfigError(f"a block holds at least 1 token, got block_size={block_size}")
    return block_size


def check_sights(sights: Sequence[Sight]) -> tuple[Sight, ...]:
    """Return the sights as a tuple; raise a ConfigError where they are none."""
    if not sights or not all(isinstance(sight, Sight) for sight in sights):
        raise ConfigError(f"an index takes a Sight per layer group, got {sights!r}")
    return tuple(sights)


def can_resume(cells: IntArray, sights: Sequence[Sight], first: int, floor: int) -> BoolArray:
    """Return for each length in ``(floor, stop]`` if every group holds what the next query sees.

    A sequence of L tokens goes on if positions ``[sight.first_seen(L), L)`` have cells: the next
    query, at position L, sees those and itself.

    Args:
        cells: ``[n_groups, stop - first]``: the cells of positions ``[first, stop)``, -1 for none.
        sights: per group; all of a history that is seen whole is always there.
        first: at most ``floor + 1 - n`` for the most positions n before its own that a query sees,
            and at most ``floor``; or 0.
        floor: lengths above it are tried.
    """
    positions = np.arange(first, first + cells.shape[1])
    lengths = positions[floor - first :] + 1
    ok = np.ones(lengths.size, dtype=np.bool_)
    for group, sight in zip(cells, sights, strict=True):
        if sight.is_full:
            continue
        last_missing = np.maximum.accumulate(np.where(group < 0, positions, first - 1))
        n_held = (positions - last_missing)[floor - first :]
        ok &= n_held >= sight.n_before(lengths)
    return ok


def owned(part: IntArray) -> IntArray:
    """Return the part, copied where it would keep a base of more than twice its size alive."""
    if part.base is None or 2 * part.size >= part.base.size:
        return part
    return part.copy()


def joined(parts: Sequence[IntArray]) -> IntArray:
    """Return one array of some, or of none."""
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def by_use(nodes: Iterable[PathNode], order: OrderedDict[PathNode, None]) -> Iterator[PathNode]:
    """Yield nodes, each behind its parent: the locked ones, then those used last first.

    Args:
        nodes: all but the root.
        order: the unlocked ones, the last used last, none behind its parent.
    """
    yield from sorted((node for node in nodes if node.is_locked), key=lambda node: node.start)
    yield from reversed(order)


def chains_of(
    nodes: Iterable[PathNode], root: PathNode, by_use: Iterable[PathNode]
) -> list[IntArray]:
    """Return the cells of stretches of paths in which nothing branches off, last used first.

    Args:
        nodes: all but the root.
        root: of the tree.
        by_use: those that are in an order, the last used last; the others count as used since.
    """
    used = {node: at for at, node in enumerate(by_use)}
    follows: dict[PathNode, PathNode] = {}
    heads: list[PathNode] = []
    for node in nodes:
        assert node.parent is not None
        if node.parent is not root and node.parent.n_children == 1:
            follows[node.parent] = node
        else:
            heads.append(node)
    heads.sort(key=lambda head: -used.get(head, len(used)))
    found = []
    for head in heads:
        parts, node = [head.cells], head
        while node in follows:
            node = follows[node]
            parts.append(node.cells)
        found.append(np.concatenate(parts, axis=1))
    return found
