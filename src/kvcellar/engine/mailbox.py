"""A queue with one reader, on one event loop: an ``asyncio.Queue`` does more than a token needs.

A running server passes every token of every answer through two of them, while the engine waits for
the interpreter.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in the order in which they were put. For callers on the reader's event loop."""

    __slots__ = ("_items", "_reader", "_writer")

    def __init__(self) -> None:
        """Create an empty mailbox."""
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        _wake(self._reader)

    async def get(self) -> T:
        """Take the oldest item, as soon as there is one."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item = self._items.popleft()
        _wake(self._writer)
        return item

    async def shrunk(self, size: int) -> None:
        """Wait until fewer than ``size`` items wait. For one caller at a time."""
        while len(self._items) >= size:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
