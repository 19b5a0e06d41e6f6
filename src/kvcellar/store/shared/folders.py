"""A place in a folder, such as a file share's: nothing in it is followed out of it, or waited for.

What lies there is for its owner alone, as the local store is; for the folder's group as well where
the folder itself may be written by its group.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from kvcellar.errors import ConfigError
from kvcellar.home import open_own
from kvcellar.store.shared.places import Entry, ForeignError, PlaceError
from kvcellar.store.shared.registers import NumberedRegisters
from kvcellar.store.shared.urls import shown_url

T = TypeVar("T")

_DEPTH = 4
"""Parts of the longest names that are written here: ``agents/X/Y/number``."""

_NONE = (errno.ENOENT, errno.ENOTDIR)
_NOT_OURS = (errno.ELOOP, errno.EINVAL, errno.ENXIO)


class FolderPlace(NumberedRegisters):
    """Files below one folder, which is made where there is none.

    Attributes:
        title: URL of the place.
    """

    def __init__(self, url: str) -> None:
        """Open a folder by its path, or a ``file:///`` URL of it.

        Raises:
            ConfigError: the path is not whole, or the folder cannot be made.
        """
        self.title = shown_url(url)
        parts = urlsplit(url)
        self._root = Path(unquote(parts.path) if parts.scheme else url).expanduser()
        if not self._root.is_absolute():
            raise ConfigError(
                f"{self.title} cannot be opened: a folder needs its whole path, such as "
                f"file:///mnt/share/kvcellar"
            )
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.title} cannot be opened: {_said(error)}") from None

    def read(self, key: str, most_bytes: int) -> bytes | None:
        """Return what a name holds; None where there is none."""
        return self._ask(lambda: self._read(key, most_bytes))

    def size(self, key: str) -> int | None:
        """Return the bytes that a name holds; None where there is none."""
        return self._ask(lambda: self._size(key))

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Give a name its bytes, in place of those before."""
        self._ask(lambda: self._put(key, data, is_new=False))

    def create(self, key: str, data: bytes, ttl_s: float) -> bool:
        """Give a new name its bytes; false where it is there. It stays until it is dropped."""
        return self._ask(lambda: self._put(key, data, is_new=True))

    def drop(self, keys: Iterable[str]) -> None:
        """Forget names; those that are not there are none's trouble."""
        for key in keys:
            self._ask(lambda key=key: self._drop(key))  # type: ignore[misc]

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield all names of whole files that begin so, registers' included."""
        yield from self._ask(lambda: self._entries(prefix.strip("/")))

    def close(self) -> None:
        """Let go of nothing: files are closed when they have been read."""

    def _read(self, key: str, most_bytes: int) -> bytes | None:
        path = self._path(key)
        try:
            fd = None if path is None else open_own(path, os.O_RDONLY)
        except OSError as error:
            if error.errno in _NONE:
                return None
            raise
        if fd is None:
            return None
        with os.fdopen(fd, "rb", buffering=0) as file:
            size = os.fstat(fd).st_size
            if size > most_bytes:
                raise ForeignError(f"{self.title}: {key} has {size} bytes")
            data = bytearray(size)
            view, at = memoryview(data), 0
            while at < size and (n := file.readinto(view[at:])):
                at += n
            return bytes(view[:at])

    def _size(self, key: str) -> int | None:
        path = self._path(key)
        found = None if path is None else _status(path)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def _put(self, key: str, data: bytes | memoryview, *, is_new: bool) -> bool:
        """Write a file beside the one that the name is to have, and give it the name."""
        *folders, name = _parts(key)
        folder = self._folder(folders, is_made=True)
        assert folder is not None
        staged = folder / f".{name}.{secrets.token_hex(8)}"
        try:
            with os.fdopen(open_own(staged, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._share(staged, 0o600)
            if not is_new:
                staged.replace(folder / name)
                return True
            with contextlib.suppress(FileExistsError):
                os.link(staged, folder / name)
                return True
            return False
        finally:
            staged.unlink(missing_ok=True)

    def _drop(self, key: str) -> None:
        path = self._path(key)
        found = None if path is None else _status(path)
        if path is not None and found is not None and not stat.S_ISDIR(found.st_mode):
            path.unlink(missing_ok=True)  # of a link: the link

    def _entries(self, prefix: str) -> list[Entry]:
        parts = _parts(prefix) if prefix else []
        top = self._folder(parts)
        return [] if top is None else list(_files(top, prefix, _DEPTH - len(parts)))

    def _path(self, key: str) -> Path | None:
        """Return the file of a name; None where its folder is not there."""
        *folders, name = _parts(key)
        folder = self._folder(folders)
        return None if folder is None else folder / name

    def _folder(self, parts: list[str], is_made: bool = False) -> Path | None:
        """Return a folder below the root; None where there is none and none is to be made.

        Raises:
            ForeignError: a link or a file is in its place.
        """
        path = self._root
        for part in parts:
            path = path / part
            found = _status(path)
            if found is None and is_made:
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
                    self._share(path, 0o700)
                found = _status(path)
            if found is None:
                return None
            if not stat.S_ISDIR(found.st_mode):
                raise ForeignError(f"{self.title}: {'/'.join(parts)} is no folder of ours")
        return path

    def _share(self, path: Path, mode: int) -> None:
        """Let the root's group have what it may write in the root itself."""
        of_root = self._root.stat().st_mode
        if of_root & stat.S_IWGRP:
            inherited = path.stat().st_mode & stat.S_ISGID
            path.chmod(mode | mode >> 3 | inherited)

    def _ask(self, request: Callable[[], T]) -> T:
        """Return an answer.

        Raises:
            ForeignError: what has the name is none of ours.
            PlaceError: everything else that goes wrong.
        """
        try:
            return request()
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise ForeignError(f"{self.title}: {_said(error)}") from None
            raise PlaceError(f"{self.title}: {_said(error)}") from None


def _parts(key: str) -> list[str]:
    """Return the parts of a name.

    Raises:
        PlaceError: one of them leads elsewhere.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise PlaceError(f"{key!r} is no name")
    return parts


def _files(folder: Path, name: str, depth: int) -> Iterator[Entry]:
    """Yield the files below a folder, no deeper than names are written; hidden ones are not."""
    try:
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in found:
        key = f"{name}/{entry.name}".lstrip("/")
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False) and depth > 1:
            yield from _files(folder / entry.name, key, depth - 1)
        elif entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield Entry(key, status.st_size, status.st_mtime)


def _status(path: Path) -> os.stat_result | None:
    """Return what a path is, links not followed; None where there is nothing."""
    try:
        return path.lstat()
    except OSError as error:
        if error.errno in _NONE:
            return None
        raise


def _said(error: OSError) -> str:
    return f"{error.strerror or type(error).__name__}: {error.filename or ''}".rstrip(": ")
