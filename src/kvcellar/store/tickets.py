"""Tickets of saves: the request, and its state until it is written or failed."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcellar.backends.host_memory import Landing
from kvcellar.history import History
from kvcellar.store.values.layout import ModelKey, Rows, States, WindowRows
from kvcellar.store.values.references import Reference

Metadata = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""JSON of a caller's own, or a function that returns it."""


@dataclass(frozen=True, slots=True)
class HistoryState:
    """A state of a history that is to be published; what is None stays as it was before.

    Attributes:
        name: of the history.
        key: the model and layout of its rows.
        tokens: the whole history.
        parent: name of the history that it was forked from.
        parent_position: tokens in common since the fork.
        metadata: JSON of the caller's own, or what returns it.
    """

    name: str
    key: ModelKey
    tokens: History
    parent: str | None = None
    parent_position: int | None = None
    metadata: Metadata | None = None


class RowSource(Protocol):
    """Something that gives a history's rows: a cache, as someone joins it to the store.

    What is returned belongs to the store from then on: copies, which nobody writes to. Rows may
    still be on their way; the store asks ``landing`` after each call that gives some.
    """

    def landing(self) -> Landing:
        """Return when, and where, the rows that were read last are there."""
        ...

    def read_rows(self, p0: int, p1: int) -> Rows:
        """Return the K and V of positions ``[p0, p1)``, per full-history group."""
        ...

    def holds_boundary(self, n: int) -> bool:
        """Return true if what follows the first ``n`` tokens can be computed from what is here."""
        ...

    def read_window(self, n: int) -> Sequence[WindowRows]:
        """Return what each group with a window or chunk holds of the positions below ``n``.

        At least what a query at ``n`` sees of them, consecutive; more allow a resume at
        lengths before ``n`` too.
        """
        ...

    def read_states(self, n: int) -> States:
        """Return the states of recurrent layers after the first ``n`` tokens; () without any."""
        ...


class SaveState(enum.StrEnum):
    """State of a save.

    QUEUED: it waits to be written.
    PUBLISHED: it is on disk.
    SKIPPED: it was not taken, the queue being full.
    FAILED: it could not be written; the state before is the published one.
    """

    QUEUED = "queued"
    PUBLISHED = "published"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class SaveTicket:
    """One save and what becomes of it.

    Attributes:
        name: the history.
        n_tokens: tokens whose KV there was to save.
        n_stored: of these, leading ones that the save covers.
        n_shared: of these, tokens that were stored already.
        lacks_boundary: whether a boundary state at its end is missing: it can be resumed before it.
        state: see :class:`SaveState`.
        reason: why it was skipped or has failed.
        reference: what was published.
    """

    name: str
    n_tokens: int
    n_stored: int = 0
    n_shared: int = 0
    lacks_boundary: bool = False
    state: SaveState = SaveState.QUEUED
    reason: str = ""
    reference: Reference | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)
    _wait_for: Callable[[threading.Event], object] = threading.Event.wait

    @property
    def is_partial(self) -> bool:
        """True if it covers less than there was; the next save goes on from there."""
        return self.n_stored < self.n_tokens or self.lacks_boundary

    def wait(self, timeout_s: float | None = None) -> SaveState:
        """Wait until it is over, or for so long; return the state at that time.

        Raises:
            StoreError: no time was given, and nothing that is written ends; it may still happen.
        """
        if timeout_s is None:
            self._wait_for(self._is_over)
        else:
            self._is_over.wait(timeout_s)
        return self.state

    def end(self, state: SaveState, reason: str = "") -> None:
        """Say what became of it, to all who wait."""
        self.state, self.reason = state, reason
        self._is_over.set()
