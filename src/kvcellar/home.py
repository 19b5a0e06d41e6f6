"""The folder in which kvcellar keeps what is its user's, and files in it that are safe to open."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SAFE = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
"""Flags of files that are opened, each where the system has it; without O_NONBLOCK a pipe in a
file's place would be waited for."""

_MOST_OWNER_BYTES = 1000

SERVER_LOCK = "server.lock"
"""A file in a store's folder, which the one server of the store holds and describes itself in."""


def default_home() -> Path:
    """Return the folder of all that kvcellar keeps for its user.

    ``KVCELLAR_HOME`` where it is set; else ``kvcellar`` in ``XDG_DATA_HOME`` where that is set;
    else in the platform's folder for user data (``~/.local/share``, on macOS
    ``~/Library/Application Support``, on Windows ``%LOCALAPPDATA%``).
    """
    own = os.environ.get("KVCELLAR_HOME")
    if own:
        return Path(own).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    if data and Path(data).is_absolute():
        return Path(data) / "kvcellar"
    folder = _platform_folder()
    return (Path.home() / ".local" / "share" if folder is None else folder) / "kvcellar"


def _platform_folder() -> Path | None:
    """Return where this system keeps all that is its user's; None: data and settings apart."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return None


def default_store() -> Path:
    """Return the folder of the store when nobody says: ``store`` in :func:`default_home`."""
    return default_home() / "store"


def default_models() -> Path:
    """Return the folder of kvcellar's own models: ``models`` in :func:`default_home`."""
    return default_home() / "models"


def default_config() -> Path:
    """Return the file of the user's own defaults for commands.

    ``KVCELLAR_CONFIG`` where it is set; else ``config.toml`` in ``KVCELLAR_HOME`` where that is
    set; else ``kvcellar/config.toml`` in ``XDG_CONFIG_HOME`` or the platform's folder for settings
    (``~/.config``, on macOS and Windows as :func:`default_home`).
    """
    named = os.environ.get("KVCELLAR_CONFIG")
    if named:
        return Path(named).expanduser()
    if os.environ.get("KVCELLAR_HOME"):
        return default_home() / "config.toml"
    folder = os.environ.get("XDG_CONFIG_HOME")
    if folder and Path(folder).is_absolute():
        return Path(folder) / "kvcellar" / "config.toml"
    if _platform_folder() is not None:
        return default_home() / "config.toml"
    return Path.home() / ".config" / "kvcellar" / "config.toml"


def open_own(path: Path, flags: int) -> int:
    """Open a file in a folder of our own, and never what a link in its place points to.

    Args:
        path: the file; links in the folder's own path are followed.
        flags: as ``os.open`` takes them; a file that is created is for its owner alone.

    Returns:
        A file descriptor, the caller's to close.

    Raises:
        OSError: it cannot be opened, is a link, or is no regular file.
    """
    for name in _SAFE:
        flags |= getattr(os, name, 0)
    try:
        if path.is_symlink():  # not every system has O_NOFOLLOW
            raise OSError(errno.ELOOP, "a link", path)
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, and none is followed here", path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return fd


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process or thread holds this file's lock, and hold it meanwhile.

    The lock ends with its process, however that ends; the file stays.

    Raises:
        OSError: the file cannot be made.
    """
    from filelock import lock_descriptor  # most commands lock nothing

    fd = open_own(path, os.O_CREAT | os.O_RDWR)
    try:
        lock_descriptor(fd)
        yield
    finally:
        os.close(fd)


def write_owner(fd: int, owner: str) -> None:
    """Say in a locked file who holds it: behind the first byte, which is the lock's.

    A locked byte cannot be read on every system.
    """
    os.ftruncate(fd, 0)
    os.write(fd, b"\n" + owner.encode()[:_MOST_OWNER_BYTES])


def owner_in(path: Path) -> str:
    """Return who holds a locked file, as far as it says that by now; else an empty text."""
    with contextlib.suppress(OSError):
        fd = open_own(path, os.O_RDONLY)
        try:
            os.lseek(fd, 1, os.SEEK_SET)
            return os.read(fd, _MOST_OWNER_BYTES).decode("utf-8", "replace").strip()
        finally:
            os.close(fd)
    return ""
