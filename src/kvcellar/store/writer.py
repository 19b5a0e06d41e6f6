"""A thread that writes in the background, behind a queue that never makes its caller wait."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvcellar.errors import StoreError

T = TypeVar("T")
Job = Callable[[], None]

log = logging.getLogger("kvcellar.store")

NICENESS = 10
"""Of the thread, where a thread can have its own: those that compute go first, and the writer still
gets a tenth of a processor that they keep busy."""

STUCK_S = 120.0
"""How long a job may get no further before nobody waits: the disk does not answer."""

_LOOK_S = 1.0


class Writer:
    """Jobs in the order in which they came, one at a time.

    What was taken is run, also when the interpreter ends without ``close``.
    """

    def __init__(self, limit_bytes: int, on_error: Callable[[BaseException], None]) -> None:
        """Start the thread; the jobs that wait or run hold at most ``limit_bytes``.

        ``on_error`` is told, in the thread, what a job did not catch itself.
        """
        self.limit_bytes = limit_bytes
        self._on_error = on_error
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Job, int] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._since_s: float | None = None
        """Since when the job that runs got no further, by ``time.monotonic``; None: none runs."""
        self._thread = threading.Thread(target=self._work, name="kvcellar-store", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _end, self._jobs, self._thread)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the jobs that wait or run."""
        return self._queued_bytes

    @property
    def n_free_bytes(self) -> int:
        """Bytes that would be taken now."""
        return max(0, self.limit_bytes - self._queued_bytes)

    @property
    def is_closed(self) -> bool:
        """True if no more is taken."""
        return self._is_closed

    @property
    def is_stuck(self) -> bool:
        """True while a job has been running for ``STUCK_S`` in which it got no further."""
        since_s = self._since_s
        return since_s is not None and time.monotonic() - since_s >= STUCK_S

    def goes_on(self) -> None:
        """Note that the job that runs has got further, as it does with each file of many."""
        if self._since_s is not None:
            self._since_s = time.monotonic()

    def wait_for(self, over: threading.Event) -> None:
        """Wait for the end of something that was queued.

        Raises:
            StoreError: the writer is stuck; what was queued may still happen.
        """
        while not over.wait(min(_LOOK_S, STUCK_S)):
            if self.is_stuck:
                raise StoreError(
                    f"the store has been writing one file for {STUCK_S:g} s, so nothing is waited "
                    f"for that comes after it; see whether its disk answers"
                )

    @property
    def is_here(self) -> bool:
        """True in the writer's own thread."""
        return threading.current_thread() is self._thread

    def offer(self, job: Job, size_bytes: int) -> bool:
        """Queue a job; false, at once, where there is no room for its bytes."""
        with self._lock:
            if self._is_closed or self._queued_bytes + size_bytes > self.limit_bytes:
                return False
            self._queued_bytes += size_bytes
            self._jobs.put((job, size_bytes))
            return True

    def call(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run something behind all that is queued, and wait for what it returns or raises.

        Raises:
            StoreError: the store is closed, or it took longer, or the writer is stuck; it may
                still happen.
        """
        if self.is_here:
            return work()
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._is_closed:
                raise StoreError("the store is closed; open it again")
            self._jobs.put((job, 0))
        if timeout_s is None:
            over = threading.Event()
            future.add_done_callback(lambda _: over.set())
            self.wait_for(over)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():
                raise
            raise StoreError(
                f"the store was still writing after {timeout_s:g} s; wait longer, or see whether "
                f"its disk answers"
            ) from error

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more, run what is queued, end. False where that took longer."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._finalizer.detach()
        return True

    def _work(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # a sandbox may forbid it: then nobody goes first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (item := self._jobs.get()) is not None:
            job, size_bytes = item
            self._since_s = time.monotonic()
            try:
                job()
            except BaseException as error:
                self._tell(error)
            finally:
                self._since_s = None
                with self._lock:
                    self._queued_bytes -= size_bytes
            del item, job  # the bytes go now, not with the next job

    def _tell(self, error: BaseException) -> None:
        """Say what a job has raised; the thread goes on whatever becomes of that."""
        try:
            self._on_error(error)
        except Exception:
            log.exception("nobody could be told that a write has failed: %r", error)


def _end(jobs: queue.SimpleQueue[tuple[Job, int] | None], thread: threading.Thread) -> None:
    jobs.put(None)
    thread.join()
