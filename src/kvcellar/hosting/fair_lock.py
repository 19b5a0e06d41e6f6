"""One at a time, in the order of arrival, for callers on any event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future


class Gate:
    """``async with gate``: the next comes in when the one before has left."""

    def __init__(self) -> None:
        """Create an open gate."""
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[Future[None]] = deque()

    @property
    def is_taken(self) -> bool:
        """True while somebody is inside."""
        return self._is_taken

    async def __aenter__(self) -> None:
        """Wait for the turn; a caller that gives up gives its place to the next."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            mine: Future[None] = Future()
            self._waiting.append(mine)
        try:
            await asyncio.wrap_future(mine)
        except asyncio.CancelledError:
            if not mine.cancelled():
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Let the next one in."""
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                following = self._waiting.popleft()
                if following.set_running_or_notify_cancel():
                    following.set_result(None)
                    return
            self._is_taken = False
