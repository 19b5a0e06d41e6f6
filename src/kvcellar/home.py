"""Where kvcellar keeps what is its user's, when nobody says."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def default_home() -> Path:
    """The folder of all that kvcellar keeps for its user.

    ``KVCELLAR_HOME`` where it is set; else ``kvcellar`` in ``XDG_DATA_HOME`` where that is set;
    else in the platform's folder for user data (``~/.local/share``, on macOS
    ``~/Library/Application Support``).
    """
    own = os.environ.get("KVCELLAR_HOME")
    if own:
        return Path(own).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    if data and Path(data).is_absolute():
        return Path(data) / "kvcellar"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "kvcellar"
    return Path.home() / ".local" / "share" / "kvcellar"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process or thread holds this file's lock, and hold it meanwhile.

    The lock ends with its process, however that ends; the file stays.

    Raises:
        OSError: the file cannot be made.
    """
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
