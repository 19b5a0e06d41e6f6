"""The shelf: pictures that are at hand, by name, whoever sent them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import blake2b
from weakref import WeakValueDictionary

from kvcellar.errors import PictureLostError
from kvcellar.pictures.picture import Picture

MOST_NAMES = 1 << 14
"""Files of which is remembered what picture they are."""

SHELF_BYTES = 32 << 20
"""Bytes of files that are kept in memory where nobody holds them; more where models read them."""


class PictureShelf:
    """Pictures by name. For several threads.

    A picture that somebody holds is always at hand; of others as many as fit, the ones that were
    asked for last. What has gone is looked for where it was saved.

    Attributes:
        most_bytes: of files that nobody holds.
    """

    def __init__(
        self,
        find: Callable[[str], bytes | None] = lambda name: None,
        most_bytes: int = SHELF_BYTES,
    ) -> None:
        """Create an empty shelf.

        Args:
            find: returns the file of a picture that was saved, by its name; None: there is none.
            most_bytes: of files that nobody holds.
        """
        self._find, self.most_bytes = find, most_bytes
        self._held: WeakValueDictionary[str, Picture] = WeakValueDictionary()
        self._kept: OrderedDict[str, Picture] = OrderedDict()
        self._names: dict[bytes, str] = {}
        """Names by a digest of their file."""
        self._n_bytes = 0
        self._lock = threading.Lock()

    def saved_by(self, find: Callable[[str], bytes | None]) -> None:
        """Look elsewhere for what has gone from now on; see the constructor's ``find``."""
        self._find = find

    def read(self, data: bytes, salt: str = "") -> Picture:
        """Read a picture's file and put it on the shelf; one that is there is not decoded again.

        Clients send the same pictures with every turn of a conversation.

        Args:
            data: the file.
            salt: of whoever sent it: how long it takes tells nothing of what others have sent.

        Raises:
            PictureError: as ``Picture.read``.
        """
        own = blake2b(salt.encode(), digest_size=32).digest()
        file = blake2b(data, digest_size=16, key=own).digest()
        with self._lock:
            known = self._held.get(self._names.get(file, ""))
        if known is not None:
            return self.add(known)
        picture = self.add(Picture.read(data))
        with self._lock:
            if len(self._names) > MOST_NAMES:
                self._names.clear()
            self._names[file] = picture.name
        return picture

    def add(self, picture: Picture) -> Picture:
        """Put a picture on the shelf; return it, or the one of the same name that is there."""
        with self._lock:
            found = self._held.setdefault(picture.name, picture)
            self._touch(found)
            return found

    def held(self, names: Iterable[str]) -> tuple[Picture, ...]:
        """Return those of some pictures that are in memory, where they are for as long as these."""
        with self._lock:
            found = (self._held.get(name) for name in names)
            return tuple(one for one in found if one is not None)

    def get(self, name: str) -> Picture:
        """Return a picture.

        Raises:
            PictureLostError: it is neither on the shelf nor saved.
        """
        with self._lock:
            found = self._held.get(name)
            if found is not None:
                self._touch(found)
                return found
        data = self._find(name)
        if data is None:
            raise PictureLostError(name)
        return self.add(replace(Picture.read(data), name=name))  # whoever saved it knows its name

    def _touch(self, picture: Picture) -> None:
        """Make a picture the last one to go."""
        if self._kept.pop(picture.name, None) is None:
            self._n_bytes += len(picture.data)
        self._kept[picture.name] = picture
        while self._n_bytes > self.most_bytes and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self._n_bytes -= len(gone.data)
