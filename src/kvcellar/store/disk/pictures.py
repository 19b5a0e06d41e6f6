"""Pictures of histories on disk: each once, by name, as the file that was sent.

A file is called by its picture's name, a digest of its pixels, and by a digest of its bytes, by
which damage is found without decoding it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from kvcellar.errors import StoreError
from kvcellar.home import open_own
from kvcellar.pictures.picture import MOST_BYTES
from kvcellar.pictures.tokens import NAME_DIGITS
from kvcellar.store.disk.folder import Folder
from kvcellar.store.values.reports import EventKind, EventLog

_DIGEST_BYTES = 8
_FILE = re.compile(rf"([0-9a-f]{{{NAME_DIGITS}}})-([0-9a-f]{{{2 * _DIGEST_BYTES}}})")
_NAME = re.compile(rf"[0-9a-f]{{{NAME_DIGITS}}}")
NAMES = re.compile(rf"(?<![0-9a-f])[0-9a-f]{{{NAME_DIGITS}}}(?![0-9a-f])".encode())
"""Finds what may be names of pictures in bytes of any kind."""


class PictureFiles:
    """Files of pictures in a store's folder. For any thread; several processes may write."""

    def __init__(self, folder: Folder, events: EventLog) -> None:
        """Look at nothing yet."""
        self._folder, self._events = folder, events
        self._known: dict[str, Path] = {}

    def put(self, name: str, data: bytes) -> None:
        """Make a picture durable; a no-op where it is there.

        Raises:
            StoreError: it could not be written; nothing was changed.
        """
        if not _NAME.fullmatch(name):
            raise StoreError(f"{name!r} is no name of a picture")
        if self.keep(name):
            return
        try:
            folder = self._folder
            file = folder.pictures / f"{name}-{_digest(data)}"
            folder.pictures.mkdir(mode=0o700, exist_ok=True)
            folder.publish(folder.write_bytes(data), file)
            self._known[name] = file
            folder.settle([folder.path, folder.pictures])
        except OSError as error:
            raise StoreError(
                f"the picture {name} could not be written ({error.strerror or error}); make room "
                f"on the disk"
            ) from error

    def keep(self, name: str) -> bool:
        """Note that somebody needs a picture, for ``remove``; false where it is not there."""
        path = self._find(name)
        try:
            if path is not None:
                os.utime(path)
        except FileNotFoundError:  # removed just now
            return False
        except OSError:  # a disk that takes nothing: it is there all the same
            pass
        return path is not None

    def get(self, name: str) -> bytes | None:
        """Return the file of a picture; None where there is none that is whole."""
        path = self._find(name)
        if path is None:
            return None
        try:
            fd = open_own(path, os.O_RDONLY)
            with os.fdopen(fd, "rb") as file:
                data = file.read(MOST_BYTES + 1)
        except OSError:
            return None
        found = _FILE.fullmatch(path.name)
        if len(data) > MOST_BYTES or found is None or _digest(data) != found[2]:
            self._folder.put_away(path)
            self._events.add(EventKind.DAMAGED, name, "a picture is damaged; moved to quarantine")
            return None
        return data

    def verify(self) -> list[str]:
        """Read every picture; return the names of those that were damaged and are put away."""
        damaged = []
        for name, _ in list(self._files()):
            n_damaged = self._events.count(EventKind.DAMAGED)
            if self.get(name) is None and self._events.count(EventKind.DAMAGED) > n_damaged:
                damaged.append(name)
        return damaged

    def size(self) -> tuple[int, int]:
        """Return the number of pictures and their bytes."""
        sizes = [_stat(path)[0] for _, path in self._files()]
        return len(sizes), sum(sizes)

    def remove(self, but: set[str], grace_s: float) -> tuple[int, int]:
        """Remove pictures that nobody names and that were not put lately: how many, and bytes."""
        n = freed = 0
        latest = time.time() - grace_s
        for name, path in list(self._files()):
            size, modified_s = _stat(path)
            if name not in but and modified_s <= latest:
                with contextlib.suppress(OSError):
                    path.unlink()
                    n, freed = n + 1, freed + size
        return n, freed

    def _find(self, name: str) -> Path | None:
        path = self._known.get(name)
        if path is None or not path.is_file():
            self._known = dict(self._files())
            path = self._known.get(name)
        return path

    def _files(self) -> Iterator[tuple[str, Path]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder.pictures) as entries:
            for entry in entries:
                found = _FILE.fullmatch(entry.name)
                if found is not None and entry.is_file(follow_symlinks=False):
                    yield found[1], Path(entry.path)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _stat(path: Path) -> tuple[int, float]:
    with contextlib.suppress(OSError):
        stat = path.stat()
        return stat.st_size, stat.st_mtime
    return 0, time.time()
