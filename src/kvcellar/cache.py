"""The neutral faces of a cache: what a runner or an engine may call, whatever the backend.

A face has no tensors and no code. The bookkeeping classes have these verbs; a backend's caches
add bytes to them. Which face a caller holds is decided by the factory that it called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcellar.bookkeeping.cells.compaction import Compacted
from kvcellar.bookkeeping.cells.growth import grown_size
from kvcellar.cache_config import CacheConfig, CacheUsage
from kvcellar.types import IntArray

__all__ = [
    "Cache",
    "DecodeCache",
    "SeqCache",
    "StateCache",
    "TreeCache",
    "TreeSeqCache",
    "grown_size",
]


@runtime_checkable
class Cache(Protocol):
    """Verbs that every cache answers. ``can_extend`` never changes state."""

    config: CacheConfig

    @property
    def capacity(self) -> int:
        """The most cells that a layer group may hold."""
        ...

    def can_extend(self, n: int = 1) -> bool:
        """Return true if ``n`` more tokens fit: the host's admission test."""
        ...

    @property
    def is_step_open(self) -> bool:
        """True if a step was begun and not all of its layers have written yet."""
        ...

    def cancel_step(self) -> None:
        """Take back the last step; a no-op where there is none. For a forward that raised."""
        ...

    def end_step(self) -> None:
        """Accept the finished step now rather than at the next verb."""
        ...

    def clear(self) -> None:
        """Forget every token."""
        ...

    def usage(self) -> CacheUsage:
        """Cells and bytes at this moment."""
        ...


@runtime_checkable
class DecodeCache(Cache, Protocol):
    """One sequence, contiguous: positions follow each other, ``rewind`` goes back."""

    @property
    def length(self) -> int:
        """Tokens held: the next token's position."""
        ...

    def resumable_from(self) -> int:
        """Return the length from which on ``rewind`` goes back to any.

        Below it, to 0, to points, and to where chunks begin in all groups that lack rows.
        """
        ...

    def keep_point(self, length: int) -> None:
        """Keep what is needed to rewind to ``length`` until it is rewound below."""
        ...

    def drop_point(self, length: int) -> None:
        """Keep what is needed to rewind to ``length`` no longer."""
        ...

    def check_resume(self, length: int, verb: str) -> int:
        """Return the length; raise RewindError if ``rewind`` would go back further."""
        ...

    def rewind(self, new_length: int) -> int:
        """Cut back to the first ``new_length`` tokens, or further; return the length it has."""
        ...


@runtime_checkable
class SeqCache(Cache, Protocol):
    """Many sequences over shared cells; ranges of positions are half-open."""

    def begin_step(self, stretches: Sequence[tuple[int, int]]) -> list[int]:
        """Say whose tokens the next forward brings, claim their cells, return their positions.

        A stretch is (seq_id, n_tokens): consecutive tokens of one sequence in the flat batch.
        """
        ...

    @property
    def block_size(self) -> int:
        """Cells that are taken and freed together: 1 for token cells."""
        ...

    def expect(self, seq_id: int, n_tokens: int) -> None:
        """Say how long a sequence will be: its cells then lie in fewer runs. A hint."""
        ...

    def can_begin_step(self, stretches: Sequence[tuple[int, int]]) -> bool:
        """Return true if ``begin_step`` with these stretches would find its cells."""
        ...

    def has_seq(self, seq_id: int) -> bool:
        """Return true if the sequence holds any tokens."""
        ...

    def seq_ids(self) -> list[int]:
        """Return the sequences that hold tokens."""
        ...

    def seq_len(self, seq_id: int) -> int:
        """Return the position that the sequence's next token gets."""
        ...

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> None:
        """Let ``dst`` share what ``src`` holds; moves no bytes."""
        ...

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int | None = None) -> int:
        """Drop positions of a sequence, and more where it could not go on; return its length."""
        ...

    def seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence."""
        ...

    def resumable_from(self, seq_id: int) -> int:
        """Return the length from which on it can be cut back to any; see ``resume_at`` below it."""
        ...

    def resume_at(self, seq_id: int, length: int) -> int:
        """Return the greatest length up to ``length`` that it can go on from exactly."""
        ...

    def keep_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length`` until it is cut back below."""
        ...

    def drop_point(self, seq_id: int, length: int) -> None:
        """Keep what is needed to resume at ``length`` no longer."""
        ...

    def can_resume(self, seq_id: int, length: int) -> bool:
        """Return true if the sequence can be cut back to ``length`` and go on exactly."""
        ...

    def seq_usage(self, seq_id: int) -> tuple[int, int]:
        """(cells, shared cells) of the sequence."""
        ...

    @property
    def n_free(self) -> int:
        """Cells that a step could claim: the fewest of all layer groups."""
        ...

    def n_missing_slots(self, n: int) -> int:
        """Return how many slots are missing so that a step could write ``n``; 0 or less: none."""
        ...

    def shared_slots(self) -> list[int]:
        """Return the slots of states that have several owners: one that lets go frees none."""
        ...

    def seq_table(self, seq_id: int, length: int | None = None) -> tuple[IntArray, ...]:
        """Per layer group the cell of each position, -1 where the group has none."""
        ...

    def seq_map(self, seq_id: int, tables: Sequence[IntArray]) -> None:
        """Start a sequence on cells that are taken already; they get one more owner."""
        ...

    def compact(self, histories: Iterable[Sequence[IntArray]], max_cells: int) -> Compacted:
        """Copy together what lies in crumbs; owners that are no sequences have to be told."""
        ...

    def retain_cells(self, cells: Sequence[IntArray]) -> None:
        """Add an owner that is no sequence, such as a prefix index."""
        ...

    def release_cells(self, cells: Sequence[IntArray]) -> None:
        """Drop an owner that is no sequence."""
        ...


@runtime_checkable
class StateCache(Cache, Protocol):
    """Cache whose slots' states, of recurrent layers, can be read and written: NumPy, float32."""

    def read_states(self, slots: IntArray) -> Sequence[Sequence[NDArray[np.float32]]]:
        """Return per recurrent layer its states in some slots, each ``[n, *shape]``."""
        ...

    def write_states(
        self, slots: IntArray, states: Sequence[Sequence[NDArray[np.float32]]]
    ) -> None:
        """Put back what ``read_states`` gave, in slots of the same order."""
        ...


@runtime_checkable
class TreeCache(Cache, Protocol):
    """One sequence with a draft tree."""

    def propose(self, parents: Sequence[int], seq_id: int = 0) -> list[int]:
        """Append a frontier, the next forward's queries; return its nodes' positions."""
        ...

    def has_tree(self, seq_id: int = 0) -> bool:
        """Return true if the sequence has proposed nodes that are not committed."""
        ...

    def commit(self, accepted: Sequence[int], seq_id: int = 0) -> list[int]:
        """Keep one chain of the tree as the next tokens; return the row map."""
        ...


@runtime_checkable
class TreeSeqCache(SeqCache, TreeCache, Protocol):
    """Many sequences, each with or without a draft tree, in one forward."""
