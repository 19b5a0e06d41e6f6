"""The cache as it changes, for pages that look at it: one snapshot for all of them, on change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator

from kvcellar.server.look.snapshot import take_snapshot
from kvcellar.server.state.service import Service
from kvcellar.server.stream.replies import Frames, frame

PERIOD_S = 0.4
"""Between two looks."""


class Watch:
    """Looks at the cache for as long as somebody watches."""

    def __init__(self, service: Service) -> None:
        """Look for nobody yet."""
        self._service = service
        self._latest: str | None = None
        self._looked_s = 0.0
        self._lock = asyncio.Lock()

    async def snapshots(self) -> AsyncGenerator[str, None]:
        """Tell a snapshot at once, then whenever something has changed, until the server stops."""
        service = self._service
        service.metrics.streams.inc()
        said = None
        try:
            while not service.is_closing:
                now = await self._look()
                if now != said:
                    said = now
                    yield now
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await service.closing.wait()
        finally:
            service.metrics.streams.dec()

    async def _look(self) -> str:
        async with self._lock:
            now = time.monotonic()
            if self._latest is None or now - self._looked_s > PERIOD_S / 2:
                snapshot = await take_snapshot(self._service)
                self._latest = await asyncio.to_thread(json.dumps, snapshot)
                self._looked_s = time.monotonic()
            return self._latest


class SnapshotFrames(Frames[str]):
    """Snapshots as events, and a last one when the server is stopped."""

    async def of(self, number: int, item: str) -> bytes:
        """Write a snapshot."""
        return frame(item, "snapshot")

    def end(self) -> bytes:
        """Say that the server is being stopped."""
        return frame("{}", "closing")
