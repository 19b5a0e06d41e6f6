"""The desk at which pictures of requests are read, and those known again that were read before."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from kvcellar.errors import PictureError
from kvcellar.pictures.given import decode_picture
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.shelf import PictureShelf
from kvcellar.server.state.fetching import Fetcher

_MOST_KNOWN = 4096
_FETCHED_S = 3600.0
"""Seconds in which what was fetched from an address stands for what is there."""


class PictureDesk:
    """Reads the pictures of requests, one at a time, and knows those again that it has read.

    Conversations come back whole at every turn, and so do their pictures: what has the same bytes
    as before is not decoded again. Who shares no salt shares none of that.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        """Know nothing yet."""
        self.fetcher = fetcher
        self._known: OrderedDict[tuple[str, bytes], Picture] = OrderedDict()
        self._fetched: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()
        self._turn = asyncio.Semaphore(1)

    async def read(self, source: str, salt: str, shelf: PictureShelf) -> Picture:
        """Return a picture that was sent, which is on the shelf now.

        Raises:
            PictureError: it cannot be read.
            ApiError: 400, it cannot be fetched.
        """
        if re.match(r"https?:", source[:6].lower()):
            return await self._fetch(source, salt, shelf)
        async with self._turn:
            data = await asyncio.to_thread(decode_picture, source)
            return await self._read(data, salt, shelf)

    async def _fetch(self, url: str, salt: str, shelf: PictureShelf) -> Picture:
        until_s, name = self._fetched.get((salt, url), (0.0, ""))
        if time.monotonic() < until_s:
            try:
                return await asyncio.to_thread(shelf.get, name)
            except PictureError:  # it has gone; so it is fetched again
                del self._fetched[salt, url]
        data = await self.fetcher.fetch(url)
        async with self._turn:
            picture = await self._read(data, salt, shelf)
        _keep(self._fetched, (salt, url), (time.monotonic() + _FETCHED_S, picture.name))
        return picture

    async def _read(self, data: bytes, salt: str, shelf: PictureShelf) -> Picture:
        key = salt, await asyncio.to_thread(lambda: blake2b(data, digest_size=32).digest())
        known = self._known.get(key)
        if known is None:
            picture = await asyncio.to_thread(Picture.read, data)
        else:
            picture = replace(known, data=data)
        _keep(self._known, key, replace(picture, data=b""))
        return shelf.add(picture)


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Keep something as the last one to go."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > _MOST_KNOWN:
        kept.popitem(last=False)
