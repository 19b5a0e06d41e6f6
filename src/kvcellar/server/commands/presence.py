"""A server's presence in its store's folder, by which commands find it.

The server of a store holds a lock, and has written in the locked file where it listens and a token
that is good for as long as it lives. Whoever can read that file, which is for the folder's owner
alone, may do with the store whatever it likes anyway: so the token makes its bearer the owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvcellar.errors import StoreError
from kvcellar.home import SERVER_LOCK, open_own, owner_in, write_owner
from kvcellar.version import __version__

_TRIES, _TRY_S = 20, 0.05
"""How often, and how far apart, a server asks for the lock: a command that looks holds it a moment.
"""


@dataclass(frozen=True, slots=True)
class Presence:
    """A server as it describes itself to commands of the same machine and version.

    Attributes:
        url: where it listens.
        pid: its process.
        node: name of its machine; the folder may be seen by several.
        version: of kvcellar.
        token: by which a request is the folder's owner's; empty: it takes none.
    """

    url: str
    pid: int
    node: str
    version: str
    token: str = field(default="", repr=False)

    @property
    def reached_at(self) -> str:
        """Address for this machine: its own where the server listens at all of them."""
        return self.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


@contextmanager
def held_store(folder: Path, url: str, token: str = "") -> Iterator[None]:
    """Be the one server of a store, for as long as the block lasts. Commands may use it besides.

    Args:
        folder: the store's.
        url: where the server listens.
        token: as ``Presence`` has it.

    Raises:
        StoreError: another server has it, which the message names; or it cannot be written to.
    """
    path = folder / SERVER_LOCK
    try:
        fd = open_own(path, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror})") from error
    try:
        _take(fd, path)
        if hasattr(os, "fchmod"):
            os.fchmod(fd, 0o600)
        presence = Presence(url, os.getpid(), platform.node(), __version__, token)
        try:
            write_owner(fd, json.dumps(asdict(presence)))
        except OSError as error:
            said = f"{path} cannot be written ({error.strerror}); free some room, or give another"
            raise StoreError(f"{said} --store") from error
        try:
            yield
        finally:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _take(fd: int, path: Path) -> None:
    """Take the lock of a store's server.

    Raises:
        StoreError: a server has it.
    """
    import psutil
    from filelock import lock_descriptor

    for _ in range(_TRIES):
        if lock_descriptor(fd, blocking=False):
            return
        other = _read(path)
        if other is not None and psutil.pid_exists(other.pid):
            raise StoreError(
                f"the store {path.parent} is served already by {other.url} (process {other.pid}); "
                f"use that server, stop it, or give another --store"
            )
        time.sleep(_TRY_S)
    raise StoreError(
        f"the store {path.parent} is served already; use that server, stop it, or give another "
        f"--store"
    )


def find_server(folder: Path) -> Presence | None:
    """Return the server of a store's folder; None where no server of this machine lives.

    It lives where its lock is held, and by the process that the file names: what a server has left
    behind that was killed is found out by both, before anybody is sent the token.
    """
    path = folder / SERVER_LOCK
    found = _read(path)
    if found is None or not found.token or found.node != platform.node():
        return None
    import psutil
    from filelock import lock_descriptor

    if not psutil.pid_exists(found.pid):
        return None
    with contextlib.suppress(OSError):
        fd = open_own(path, os.O_RDWR)
        try:
            if not lock_descriptor(fd, blocking=False):
                return found
        finally:
            os.close(fd)
    return None


def _read(path: Path) -> Presence | None:
    """Return what a server has written; None where that is nothing, or nothing of this form."""
    try:
        value = json.loads(owner_in(path) or "null")
        return None if value is None else Presence(**value)
    except (ValueError, TypeError):
        return None
