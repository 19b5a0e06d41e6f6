"""The desk at which pictures of requests are read, and fetched where they have an address."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from kvcellar.errors import PictureError
from kvcellar.pictures.given import decode_picture
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.shelf import PictureShelf
from kvcellar.server.state.fetching import Fetcher

T = TypeVar("T")

_MOST_KNOWN = 4096
_FETCHED_S = 3600.0
"""Seconds in which what was fetched from an address stands for what is there."""


def is_address(source: str) -> bool:
    """Return true if a picture is to be fetched from where its request says."""
    return re.match(r"https?:", source[:6].lower()) is not None


class PictureDesk:
    """Reads the pictures of requests, one at a time, and remembers what it has fetched.

    Conversations come back whole at every turn, and so do the addresses in them. Who shares no salt
    shares none of what is remembered.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        """Know nothing yet."""
        self.fetcher = fetcher
        self._fetched: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()
        self._turn = asyncio.Semaphore(1)

    async def read(self, source: str, salt: str, shelf: PictureShelf) -> Picture:
        """Return a picture that was sent, which is on the shelf now.

        Raises:
            PictureError: it cannot be read.
            ApiError: 400, it cannot be fetched; 429, too many others are being fetched.
        """
        if is_address(source):
            return await self._fetch(source, salt, shelf)
        return await self.alone(lambda: shelf.read(decode_picture(source), salt))

    async def find(self, name: str, shelf: PictureShelf) -> Picture:
        """Return a picture that is on the shelf, or was saved.

        Raises:
            PictureError: it is neither.
        """
        held = shelf.held([name])
        return held[0] if held else await self.alone(lambda: shelf.get(name))

    async def alone(self, work: Callable[[], T]) -> T:
        """Decode or write a picture in a thread, one at a time, which takes memory.

        A thread cannot be stopped: who leaves meanwhile has the next one wait for it all the same.
        """
        await self._turn.acquire()
        done = asyncio.create_task(asyncio.to_thread(work))
        done.add_done_callback(self._next)
        await asyncio.wait({done})
        return done.result()

    def _next(self, done: asyncio.Task[T]) -> None:
        self._turn.release()
        if not done.cancelled():
            done.exception()  # nobody may be there to take it

    async def _fetch(self, url: str, salt: str, shelf: PictureShelf) -> Picture:
        until_s, name = self._fetched.get((salt, url), (0.0, ""))
        if time.monotonic() < until_s:
            try:
                return await self.find(name, shelf)
            except PictureError:  # it has gone; so it is fetched again
                self._fetched.pop((salt, url), None)  # or somebody else has done it
        data = await self.fetcher.fetch(url)
        picture = await self.alone(lambda: shelf.read(data, salt))
        self._fetched[salt, url] = time.monotonic() + _FETCHED_S, picture.name
        self._fetched.move_to_end((salt, url))
        if len(self._fetched) > _MOST_KNOWN:
            self._fetched.popitem(last=False)
        return picture
