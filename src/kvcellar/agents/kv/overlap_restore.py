"""A restore's parallel parts: blocks are read ahead while the beginning is computed."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable

from kvcellar.engine import FinishEvent, HeldPrefix, Request, SamplingParams
from kvcellar.errors import EngineClosedError
from kvcellar.history import History
from kvcellar.hosting.costs import Costs
from kvcellar.hosting.host import ModelHost
from kvcellar.store import Loaded, Match, Store
from kvcellar.types import IntArray


class Front:
    """The beginning of a history, computed by the engine while its end is loaded."""

    def __init__(self, host: ModelHost, tokens: IntArray) -> None:
        self._host = host
        self._is_over = threading.Event()
        self._held: HeldPrefix | None = None
        self._error: Exception | None = None

        def on_finish(_: FinishEvent) -> None:
            """Protect what was computed, in the engine's thread: it is still in the cache."""
            self._error = host.engine.failure
            try:
                if self._error is None:
                    self._held = host.engine.hold(tokens, host.space)
            except Exception as error:  # who waits has to hear of it
                self._error = error
            finally:
                self._is_over.set()

        settings = SamplingParams(max_tokens=1, ignore_eos=True)
        request = Request(History(tokens), settings, space=host.space)
        self._request_id = host.service.submit_quietly(request, on_finish).result()

    def wait(self, is_cancelled: Callable[[], bool]) -> HeldPrefix:
        """Return what was computed, protected; whoever calls has it from then on.

        Raises:
            EngineFailedError: the engine has stopped meanwhile.
            Exception: what looking for it raised.
        """
        while not self._is_over.wait(0.05):
            if is_cancelled():
                self._cancel()
        held, self._held = self._held, None
        if self._error is not None:
            raise self._error
        assert held is not None
        return held

    def stop(self) -> None:
        """End it where it was not waited for, and let go of what was computed."""
        with contextlib.suppress(EngineClosedError):
            self._cancel()
        self._is_over.wait()
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(EngineClosedError):
                self._host.service.run(lambda _: held.release()).result()

    def _cancel(self) -> None:
        self._host.service.run(lambda engine: engine.cancel(self._request_id)).result()


class ReadAhead:
    """The blocks of a match, loaded by a thread of their own that may be left waiting for a disk.

    A block that comes too late is dropped; what it took is learnt, for the next time.
    """

    def __init__(self, store: Store, match: Match, first: int, stop: int, costs: Costs) -> None:
        self.is_over = False
        """Whether the last block was given, or the store has no more."""
        self._blocks: queue.Queue[tuple[Loaded, float] | BaseException | None] = queue.Queue(2)
        self._is_stopped = threading.Event()
        work = functools.partial(self._load, store, match, first, stop, costs)
        threading.Thread(target=work, name="kvcellar-restore", daemon=True).start()

    def next(self, patience_s: float | None) -> tuple[Loaded, float] | None:
        """Return the next block and its seconds; None at the end, or where it is late."""
        try:
            got = self._blocks.get(timeout=None if patience_s is None else max(0.0, patience_s))
        except queue.Empty:
            return None
        if got is None or isinstance(got, BaseException):
            self.is_over = True
        if isinstance(got, BaseException):
            raise got
        return got

    def stop(self) -> None:
        """End it; what comes later is dropped."""
        self._is_stopped.set()
        with contextlib.suppress(queue.Empty):  # let the thread put down what it holds
            while True:
                self._blocks.get_nowait()

    def _load(self, store: Store, match: Match, first: int, stop: int, costs: Costs) -> None:
        last: BaseException | None = None
        began = time.perf_counter()
        try:
            for loaded in store.load(match, first, stop):
                load_s = time.perf_counter() - began
                if self._is_stopped.is_set():
                    costs.learn_load(loaded.tier, loaded.rows_bytes, load_s)
                    return
                self._blocks.put((loaded, load_s))
                began = time.perf_counter()
        except BaseException as error:
            last = error
        if not self._is_stopped.is_set():
            self._blocks.put(last)
