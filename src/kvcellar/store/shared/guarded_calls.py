"""Asking a place without ever waiting long for it: in threads of its own, and not while it is away.

A place that failed is left alone for a while, longer each time; whoever asks meanwhile is told so
at once. Reading and writing are two reaches: a place that is full still answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvcellar.store.shared.places import PlaceError, SharedPlace
from kvcellar.store.values.reports import EventKind, EventLog

T = TypeVar("T")

N_THREADS = 8
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class AwayError(Exception):
    """The place does not answer now; not for callers of the store."""


class Reach:
    """A place that is asked only while it answers. For any thread.

    Attributes:
        place: what is asked.
        verb: what is asked of it, for events.
        trouble: what went wrong last; empty while it answers.
    """

    def __init__(self, place: SharedPlace, verb: str, events: EventLog) -> None:
        """Create a reach of a place that nobody has asked yet."""
        self.place = place
        self.verb = verb
        self.trouble = ""
        self._events = events
        self._pool = ThreadPoolExecutor(N_THREADS, "kvcellar-shared")
        self._lock = threading.Lock()
        self._n_failures = 0
        self._away_until = 0.0

    @property
    def is_away(self) -> bool:
        """True while it is left alone."""
        return time.monotonic() < self._away_until

    def begin(self, request: Callable[[SharedPlace], T]) -> Future[T]:
        """Ask in a thread; the future raises AwayError where the place does not answer."""
        if self.is_away:
            future: Future[T] = Future()
            future.set_exception(AwayError(self.trouble))
            return future
        try:
            return self._pool.submit(self._answer, request)
        except RuntimeError as error:  # closed meanwhile
            raise AwayError("the store is closed") from error

    def ask(self, request: Callable[[SharedPlace], T], wait_s: float) -> T:
        """Ask and wait.

        Raises:
            AwayError: the place does not answer, or not within ``wait_s``.
        """
        future = self.begin(request)
        try:
            answer = future.result(wait_s)
        except TimeoutError:
            future.cancel()
            raise self._failed(f"no answer within {wait_s:g} s") from None
        if self._n_failures:  # only an answer in time ends it: a slow place is as bad as none
            self._is_back()
        return answer

    def close(self) -> None:
        """End the threads; what is being asked is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, request: Callable[[SharedPlace], T]) -> T:
        if self.is_away:
            raise AwayError(self.trouble)
        try:
            return request(self.place)
        except PlaceError as error:
            raise self._failed(str(error)) from None

    def _failed(self, why: str) -> AwayError:
        with self._lock:
            is_first = not self._n_failures
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._n_failures, 10))
            self._n_failures += 1
            self._away_until = time.monotonic() + pause_s
            self.trouble = why
        if is_first:
            self._events.add(
                EventKind.SHARED_AWAY,
                self.place.title,
                f"{self.verb} does not work: {why}; everything goes on with what is here, and it "
                f"is tried again by and by",
            )
        return AwayError(why)

    def _is_back(self) -> None:
        with self._lock:
            was, self._n_failures, self.trouble = self._n_failures, 0, ""
        if was:
            self._events.add(EventKind.SHARED_BACK, self.place.title, f"{self.verb} works again")
