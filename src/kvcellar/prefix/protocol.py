"""Protocol of every prefix index, and the values that it takes and returns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvcellar.bookkeeping.cells.compaction import Relocation
from kvcellar.prefix.nodes import PathNode, Tokens
from kvcellar.sight import Sight
from kvcellar.types import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHandle:
    """The first ``length`` tokens of a path in an index, to be locked.

    It outlives splits. It is stale, and cannot be locked, once any of its tokens was evicted.
    """

    length: int
    node: object | None


class PrefixMatch(NamedTuple):
    """The longest beginning of a prompt that can be reused.

    Attributes:
        length: tokens whose KV is there, and from which *every* layer group can go on.
        cells: per layer group ``[length]``: the cell of each position, -1 where the group no longer
            holds it; what a query at ``length`` sees is always there. The arrays are the caller's
            own. Only safe to use while ``handle`` is locked, or before the next ``evict``.
        handle: to lock.
        n_matched: tokens that are the same, whole blocks. More than ``length`` where a window has
            moved on: the difference is what windows cost.
    """

    length: int
    cells: tuple[IntArray, ...]
    handle: PrefixHandle
    n_matched: int


class Inserted(NamedTuple):
    """Result of an insertion into an index.

    Attributes:
        n_present: tokens that were there before.
        handle: of all that is there now, to lock; its length is below the number of tokens where
            the last of them fill no block.
        adopted: per layer group, the cells that the index refers to from now on; the caller
            retains them, once each.
    """

    n_present: int
    handle: PrefixHandle
    adopted: tuple[IntArray, ...]


class Evicted(NamedTuple):
    """Result of an eviction from an index.

    Attributes:
        n_tokens: how many tokens; at least what was asked. None where it was snapshots alone.
        cells: per layer group, the cells that the index no longer refers to; the caller releases
            them, once each. A window holds fewer cells than tokens.
    """

    n_tokens: int
    cells: tuple[IntArray, ...]


class SizeInfo(NamedTuple):
    """Size of an index at one moment.

    Attributes:
        evictable: tokens that ``evict`` could give up now.
        protected: tokens on locked paths.
        evictable_cells: per layer group, the cells of the evictable tokens.
    """

    evictable: int
    protected: int
    evictable_cells: tuple[int, ...]

    @property
    def total(self) -> int:
        """Tokens stored."""
        return self.evictable + self.protected


class PrefixIndex(Protocol):
    """Token content to cells. Integers only; what each method promises is said in PathTree."""

    sights: tuple[Sight, ...]
    block_size: int

    @property
    def n_snapshots(self) -> int:
        """Slots of states that the index refers to."""
        ...

    def match_prefix(self, tokens: Tokens) -> PrefixMatch:
        """Return the longest stored prefix from which every layer group can go on."""
        ...

    def find_prefix(self, tokens: Tokens) -> PrefixHandle:
        """Return the longest stored prefix, whether it can be resumed or not."""
        ...

    def peek_prefix(self, tokens: Tokens) -> tuple[IntArray, ...]:
        """Return the cells of the longest stored prefix; to look is not to use."""
        ...

    def lock_handle(self, handle: PrefixHandle) -> None:
        """Protect a whole path from eviction."""
        ...

    def unlock_handle(self, handle: PrefixHandle) -> None:
        """Take one lock back."""
        ...

    def insert_prefix(self, tokens: Tokens, cells: Sequence[IntArray]) -> Inserted:
        """Store a history."""
        ...

    def evict(self, n_tokens: int) -> Evicted:
        """Give up at least ``n_tokens`` tokens, the least recently used first."""
        ...

    def evict_states(self, n_slots: int, held: Collection[int] = ()) -> Evicted:
        """Give up ``n_slots`` snapshots of states, or none where fewer may go; rows stay."""
        ...

    def states_costs(self, n_slots: int, late: Collection[int], own: int) -> list[int]:
        """Return what the next snapshots to go are worth, in tokens; change nothing."""
        ...

    def demote(self, handle: PrefixHandle) -> None:
        """Make what only this history needs the next to be evicted."""
        ...

    def drop_path(self, handle: PrefixHandle, keep: int = 0) -> Evicted:
        """Give up what only this history needs, down to ``keep`` tokens."""
        ...

    def chains(self) -> list[IntArray]:
        """Return the cells of stretches of histories in which nothing branches off."""
        ...

    def by_use(self) -> Iterator[PathNode]:
        """Yield what is stored, each node behind its parent, what was used last first."""
        ...

    def relocate(self, moved: Relocation) -> None:
        """Refer to cells where they are now that they were copied elsewhere."""
        ...

    def size_info(self) -> SizeInfo:
        """Return how much is stored, and how much of it could go."""
        ...

    def held_cells(self) -> tuple[IntArray, ...]:
        """Return every cell that the index refers to, per layer group."""
        ...

    def locked_cells(self) -> tuple[IntArray, ...]:
        """Return the cells that must not be evicted, per layer group."""
        ...

    def reset(self) -> tuple[IntArray, ...]:
        """Forget everything; return the cells to release, per layer group."""
        ...

    def check(self) -> None:
        """Assert the invariants."""
        ...
