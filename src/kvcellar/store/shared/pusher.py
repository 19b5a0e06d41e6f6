"""Two threads that hand local states in to the shared tier, again and again until they are there.

The words of a turn go at once. The blocks follow when their history has rested for a moment, so
that a talk of short turns does not send one growing block again and again; and in a thread of their
own, so that no words wait for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from kvcellar.store.shared.guarded_calls import AwayError, Reach
from kvcellar.store.shared.histories import DivergedError, SharedHistories
from kvcellar.store.values.reports import EventKind, EventLog

REST_S = 2.0
"""How long a history rests before its blocks are sent."""

_TRY_AGAIN_S = 1.0

log = logging.getLogger("kvcellar.store")


class Pusher:
    """Histories that wait to be handed in. For any thread."""

    def __init__(self, histories: SharedHistories, reach: Reach, events: EventLog) -> None:
        """Start the threads; nothing waits yet."""
        self._histories = histories
        self._reach = reach
        self._events = events
        self._words: dict[str, None] = {}
        self._whole: dict[str, float] = {}
        """By name when its blocks are to be sent."""
        self._busy: set[str] = set()
        """Names of the histories that are being handed in, one by each thread."""
        self._serials: dict[str, int] = {}
        self.diverged: set[str] = set()
        """Names whose state another machine's has come before."""
        self._change = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(
                target=self._work, args=(is_whole,), name="kvcellar-shared-push", daemon=True
            )
            for is_whole in (False, True)
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, name: str, *, rest_s: float = REST_S) -> None:
        """Have a history handed in: its words now, its blocks when it has rested."""
        with self._change:
            self._words[name] = None
            self._whole[name] = time.monotonic() + rest_s
            self._change.notify_all()

    @property
    def n_waiting(self) -> int:
        """Histories that are not handed in whole."""
        return len(self._waiting())

    def _waiting(self) -> set[str]:
        return self._words.keys() | self._whole.keys() | self._busy

    def wait(self, name: str, serial: int, wait_s: float) -> bool:
        """Wait until the words of a state are in the tier; false where that takes too long.

        At once where the tier is away, or has another machine's state.
        """
        deadline = time.monotonic() + wait_s
        with self._change:
            while self._serials.get(name, 0) < serial:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._reach.is_away or name in self.diverged or self._is_closed:
                    return False
                self._change.wait(min(left_s, 0.1))
        return True

    def flush(self, wait_s: float, names: Iterable[str] | None = None) -> bool:
        """Send blocks without waiting for rest, and wait for it; false where it takes too long."""
        deadline = time.monotonic() + wait_s
        chosen = None if names is None else set(names)
        with self._change:
            for name in self._whole.keys() if chosen is None else self._whole.keys() & chosen:
                self._whole[name] = 0.0
            self._change.notify_all()
            while True:
                waiting = self._waiting()
                if not (waiting if chosen is None else waiting & chosen):
                    return True
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._reach.is_away or self._is_closed:
                    return False
                self._change.wait(min(left_s, 0.1))

    def close(self, wait_s: float) -> None:
        """Hand in what waits, for so long, and end; the rest goes with the next process."""
        self.flush(wait_s)
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join(wait_s)

    def _work(self, is_whole: bool) -> None:
        while (name := self._next(is_whole)) is not None:
            try:
                serial = self._histories.push(name, is_whole=is_whole)
            except AwayError:
                self._again(name, is_whole)
            except DivergedError:
                self._diverge(name)
            except Exception as error:  # whatever is wrong with a file, the others go on
                log.debug("a history could not be handed in", exc_info=True)
                self._events.add(EventKind.WRITE_FAILED, name, f"not in the shared tier: {error}")
            else:
                with self._change:
                    self._serials[name] = max(serial, self._serials.get(name, 0))
                    self.diverged.discard(name)
            with self._change:
                self._busy.discard(name)
                self._change.notify_all()

    def _next(self, is_whole: bool) -> str | None:
        """Return what is to be handed in now, words or all of it; None at the end."""
        with self._change:
            while not self._is_closed:
                wait_s: float | None = None
                if self._reach.is_away:
                    wait_s = _TRY_AGAIN_S
                elif is_whole:
                    # Its words first, and one at a time of each history.
                    free = self._whole.keys() - self._words.keys() - self._busy
                    name = min(free, key=self._whole.__getitem__, default=None)
                    if name is not None:
                        wait_s = self._whole[name] - time.monotonic()
                        if wait_s <= 0:
                            del self._whole[name]
                            self._busy.add(name)
                            return name
                else:
                    for name in self._words:
                        if name not in self._busy:
                            del self._words[name]
                            self._busy.add(name)
                            return name
                self._change.wait(wait_s)
            return None

    def _again(self, name: str, is_whole: bool) -> None:
        with self._change:
            if not is_whole:
                self._words.setdefault(name, None)
            self._whole.setdefault(name, 0.0)

    def _diverge(self, name: str) -> None:
        with self._change:
            self.diverged.add(name)
            self._whole.pop(name, None)
        self._events.add(
            EventKind.SHARED_DIVERGED,
            name,
            "another machine has gone on from an earlier state and came first; both are kept, this "
            "one here",
        )
