"""Blocks and boundary states of the shared tier: what is known to be there, and the way to it."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError

from kvcellar.history import History
from kvcellar.store.shared.guarded_calls import N_THREADS, AwayError, Reach
from kvcellar.store.shared.places import ForeignError
from kvcellar.store.values.blocks import Info, Kind, Link, Sealed, opened
from kvcellar.store.values.format import DamagedError, read_from
from kvcellar.store.values.reports import EventKind, EventLog

PROBE_S = 1.0
"""How long a turn waits to hear what is there."""

FETCH_S = 30.0
"""How long one block may take; who waits for it leaves earlier where computing is faster."""

PUT_S = 60.0

TRUSTED_S = 600.0
"""How long a block that was there is believed to be there still, before one like it is put."""

MISSED_S = 5.0
"""How long a block that was not there is not asked for again."""

MOST_KNOWN = 1 << 14

MOST_BYTES = {Kind.BLOCK: 1 << 28, Kind.BOUNDARY: 1 << 30}
"""What is longer was written by nobody here, and is not read: a block of the largest models takes
an eighth of that, the window of one half."""


class SharedBlocks:
    """Content-addressed files, so that two who write one write the same. For any thread."""

    def __init__(self, reading: Reach, writing: Reach, events: EventLog) -> None:
        """Create a view that knows of no block yet."""
        self._reach = reading
        self._writing = writing
        self._events = events
        self._lock = threading.Lock()
        self._infos: dict[bytes, Info] = {}
        self._children: dict[tuple[bytes, Kind], set[bytes]] = {}
        self._there_s: dict[bytes, float] = {}
        self._missed_s: dict[bytes, float] = {}
        self._coming: dict[bytes, Future[bytes | None]] = {}

    # What is there -----------------------------------------------------------------------------

    def info(self, address: bytes) -> Info | None:
        """Return what is known of an address."""
        return self._infos.get(address)

    def children(self, parents: Sequence[bytes], kind: Kind) -> list[Info]:
        """Return blocks or boundary states that are known to follow any of these addresses."""
        with self._lock:
            return [
                self._infos[address]
                for parent in parents
                for address in self._children.get((parent, kind), ())
            ]

    def learn(self, infos: Iterable[Info]) -> None:
        """Take note of blocks that are there."""
        now = time.monotonic()
        with self._lock:
            if len(self._infos) > MOST_KNOWN:
                self._infos.clear()
                self._children.clear()
                self._there_s.clear()
            for info in infos:
                self._infos[info.address] = info
                self._children.setdefault((info.parent, info.kind), set()).add(info.address)
                self._there_s[info.address] = now

    def distrust(self) -> None:
        """Believe of no block that it is there still, before one like it is put."""
        with self._lock:
            self._there_s.clear()

    def forget(self, address: bytes) -> None:
        """Take note that a block is not there, or not as it should be."""
        with self._lock:
            self._there_s.pop(address, None)
            info = self._infos.pop(address, None)
            if info is not None:
                self._children[info.parent, info.kind].discard(address)

    def probe(self, kind: Kind, root: bytes, links: Sequence[Link], tokens: History) -> None:
        """Find out how many of a history's blocks, in their order, are there; waits a second.

        Of a boundary state nobody knows here how far it reaches back: it serves its end.
        """
        deadline = time.monotonic() + PROBE_S
        at, n = 0, 1  # mostly there is not even one
        while at < len(links) and not self._reach.is_away:
            some = links[at : at + n]
            sizes = self._sizes(kind, some, deadline)
            self.learn(
                Info(
                    kind,
                    link.address,
                    root,
                    link.parent,
                    link.start,
                    tokens[link.start : link.stop],
                    link.stop if kind is Kind.BOUNDARY else 0,
                    True,
                    size,
                    "",
                )
                for link, size in zip(some, sizes, strict=False)
            )
            if len(sizes) < len(some):
                return
            at, n = at + n, 4 * N_THREADS

    def _sizes(self, kind: Kind, links: Sequence[Link], deadline: float) -> list[int]:
        """Return the sizes of blocks up to the first that is not there."""
        now = time.monotonic()
        sizes: list[int] = []
        futures = []
        for link in links:
            if now - self._missed_s.get(link.address, -MISSED_S) < MISSED_S:
                break
            key = key_of(kind, link.address)
            futures.append(self._reach.begin(lambda place, key=key: place.size(key)))  # type: ignore[misc]
        for link, future in zip(links, futures, strict=False):
            try:
                size = future.result(max(0.0, deadline - time.monotonic()))
            except (AwayError, LateError):
                break
            except ForeignError:
                size = None
            if size is None:
                if len(self._missed_s) > MOST_KNOWN:
                    self._missed_s.clear()
                self._missed_s[link.address] = time.monotonic()
                break
            sizes.append(size)
        for future in futures:
            future.cancel()
        return sizes

    # Bytes -------------------------------------------------------------------------------------

    def expect(self, kind: Kind, address: bytes) -> None:
        """Begin to fetch a block that is wanted soon."""
        key = key_of(kind, address)
        if address not in self._coming:
            with contextlib.suppress(AwayError):
                most = MOST_BYTES[kind]
                self._coming[address] = self._reach.begin(lambda place: place.read(key, most))

    def fetch(self, kind: Kind, address: bytes) -> Sealed | None:
        """Return a verified block; a wrong one is removed, and that said."""
        self.expect(kind, address)
        future = self._coming.pop(address, None)
        try:
            data = None if future is None else future.result(FETCH_S)
        except (AwayError, LateError):
            return None
        except ForeignError as error:
            self._reject(kind, address, str(error))
            return None
        if data is None:
            self.forget(address)
            return None
        try:
            sealed = opened(read_from(io.BytesIO(data), len(data)))
            if sealed.info.address != address or sealed.info.kind is not kind:
                raise DamagedError(f"it is the file of {sealed.info.address.hex()}")
            sealed.check_finite()
        except DamagedError as error:
            self._reject(kind, address, str(error))
            return None
        return sealed

    def let_go(self) -> None:
        """Drop what was expected and never wanted."""
        while self._coming:
            with contextlib.suppress(KeyError):
                self._coming.popitem()[1].cancel()

    def _reject(self, kind: Kind, address: bytes, why: str) -> None:
        self.forget(address)
        said = f"{why}; removed from {self._reach.place.title}; what follows it is computed again"
        self._events.add(EventKind.DAMAGED, address.hex(), said)
        with contextlib.suppress(AwayError):
            self._reach.begin(lambda place: place.drop([key_of(kind, address)]))

    def missing(self, infos: Iterable[Info]) -> list[Info]:
        """Return the blocks that are not there; those that are are known from then on.

        Raises:
            AwayError: the place does not answer.
        """
        asked = []
        now = time.monotonic()
        for info in infos:
            if now - self._there_s.get(info.address, -TRUSTED_S) >= TRUSTED_S:
                key = key_of(info.kind, info.address)
                asked.append((info, self._writing.begin(lambda place, key=key: place.size(key))))  # type: ignore[misc]
        missing = []
        for info, future in asked:
            try:
                is_there = future.result() is not None
            except ForeignError:
                is_there = False
            if is_there:
                self.learn([info])
            else:
                missing.append(info)
        return missing

    def put(self, info: Info, data: bytes | memoryview) -> None:
        """Write a block, unless it is longer than any that would be read.

        Raises:
            AwayError: the place does not take it now.
        """
        if len(data) > MOST_BYTES[info.kind]:
            return
        key = key_of(info.kind, info.address)
        self._writing.ask(lambda place: place.write(key, data), PUT_S)
        self.learn([info])


def key_of(kind: Kind, address: bytes) -> str:
    """Return the name of a block or boundary state in a place."""
    folder = "blocks" if kind is Kind.BLOCK else "windows"
    text = address.hex()
    return f"{folder}/{text[:2]}/{text}"
