"""Events and reports of a store for its owner. Nothing is ever printed."""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_EVENTS = 10_000


class EventKind(enum.StrEnum):
    """Kinds of events that a store tells of.

    DAMAGED: a file's bytes are not what was written, or belong elsewhere; it is in quarantine.
    MISSING: a file that the catalogue lists is not there.
    UNREADABLE: a file could not be read (permissions, input/output error); it stays.
    REFERENCE_DAMAGED: a reference's file was; its state before is used where there is one.
    CATALOGUE_REBUILT: the catalogue could not be used; it was made again from the files.
    CATALOGUE_WRONG: the catalogue said something else than a file; it was corrected.
    WRITE_FAILED: a save could not be written; the state before is what is published.
    SAVE_SKIPPED: a save was not taken, the queue being full; nothing was changed.
    SAVE_PARTIAL: a save was taken with a shorter stored history than there is.
    JOURNAL_DAMAGED: the journal, or an entry of it, could not be used; what it alone said is lost.
    SHARED_AWAY: the shared tier does not answer; everything goes on without it.
    SHARED_BACK: it answers again.
    SHARED_DIVERGED: another machine has gone on with a history before this one's was handed in.
    EVICTED: a history's KV or older boundary states were given up for room; its tokens remain.
    """

    DAMAGED = "damaged"
    MISSING = "missing"
    UNREADABLE = "unreadable"
    REFERENCE_DAMAGED = "reference_damaged"
    CATALOGUE_REBUILT = "catalogue_rebuilt"
    CATALOGUE_WRONG = "catalogue_wrong"
    WRITE_FAILED = "write_failed"
    SAVE_SKIPPED = "save_skipped"
    SAVE_PARTIAL = "save_partial"
    JOURNAL_DAMAGED = "journal_damaged"
    EVICTED = "evicted"
    SHARED_AWAY = "shared_away"
    SHARED_BACK = "shared_back"
    SHARED_DIVERGED = "shared_diverged"


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """One thing that happened.

    Attributes:
        kind: see :class:`EventKind`.
        subject: the address or the name that it is about; the folder for the catalogue.
        detail: what was found, what was done, what it costs.
        at: seconds since 1970.
    """

    kind: EventKind
    subject: str
    detail: str
    at: float = field(default_factory=time.time)


class EventLog:
    """The latest events, and how many there were of each kind. For any thread."""

    def __init__(self, on_event: Callable[[StoreEvent], None] | None = None) -> None:
        """Create an empty log; ``on_event`` is called in the thread where something happens."""
        self._events: deque[StoreEvent] = deque(maxlen=MAX_EVENTS)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._on_event = on_event

    def add(self, kind: EventKind, subject: str, detail: str) -> None:
        """Add one event."""
        event = StoreEvent(kind, subject, detail)
        with self._lock:
            self._events.append(event)
            self._counts[kind.value] += 1
        if self._on_event is not None:
            self._on_event(event)

    def take(self) -> list[StoreEvent]:
        """Return the events since the last call, oldest first; of very many the latest 10,000."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def count(self, kind: EventKind) -> int:
        """Return how many events of one kind there were, those that were taken included."""
        with self._lock:
            return self._counts[kind.value]

    def counts(self) -> dict[str, int]:
        """Return how many events there were of each kind, those that were taken included."""
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier at one moment.

    Attributes:
        n_blocks: blocks and boundary states.
        size_bytes: bytes held.
        limit_bytes: bytes that it may hold.
    """

    n_blocks: int
    size_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class SharedStats:
    """The shared tier at one moment, as far as this store knows.

    Attributes:
        title: URL of the place, without what is secret in it.
        trouble: why it does not answer; empty where it does.
        n_waiting: histories that are not handed in whole.
    """

    title: str
    trouble: str
    n_waiting: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store at one moment.

    Attributes:
        warm: host RAM.
        cold: disk; references count to its bytes, and so does the quarantine.
        n_references: named histories.
        referenced_bytes: bytes of the blocks that some reference needs.
        unshared_bytes: what these would take if every reference had its own.
        quarantined_bytes: bytes of damaged files that are kept for inspection.
        queued_bytes: bytes that wait to be written.
        events: how many events there were of each kind since the store was opened.
        shared: the shared tier; None: there is none.
        n_pictures: pictures of histories, each once.
        picture_bytes: of their files, which are beside the limit.
    """

    warm: TierStats
    cold: TierStats
    n_references: int
    referenced_bytes: int
    unshared_bytes: int
    quarantined_bytes: int
    queued_bytes: int
    events: dict[str, int]
    shared: SharedStats | None = None
    n_pictures: int = 0
    picture_bytes: int = 0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Report of ``verify``: findings from reading every byte.

    Attributes:
        n_blocks: blocks and boundary states that are good.
        size_bytes: their bytes.
        damaged: addresses of files that went to the quarantine.
        n_references: references that are good.
        damaged_references: file names of references that could not be read.
        incomplete: references whose blocks are not all there, and how many tokens can be restored.
        seconds: how long it took.
    """

    n_blocks: int
    size_bytes: int
    damaged: list[str]
    n_references: int
    damaged_references: list[str]
    incomplete: dict[str, int]
    seconds: float

    @property
    def is_good(self) -> bool:
        """True if nothing was wrong."""
        return not (self.damaged or self.damaged_references or self.incomplete)


@dataclass(frozen=True, slots=True)
class GcReport:
    """Report of ``gc``: files and bytes that were removed.

    Attributes:
        n_blocks: blocks and boundary states that no reference needs, removed.
        freed_bytes: bytes of all that was removed.
        n_leftovers: half-written files of processes that ended, removed.
        n_quarantined: files removed from the quarantine.
        evicted: names of references whose KV was given up because the limit was exceeded.
        size_bytes: bytes that remain.
        n_pictures: pictures that nobody names, removed.
    """

    n_blocks: int
    freed_bytes: int
    n_leftovers: int
    n_quarantined: int
    evicted: list[str]
    size_bytes: int
    n_pictures: int = 0
