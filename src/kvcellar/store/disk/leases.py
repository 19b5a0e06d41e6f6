"""Leases: who may extend a history, so that two processes never go on from one state of it.

``Leases`` is what those who extend a history ask; ``LocalLeases`` is for the processes of one
folder, where the system itself ends what a dead process held.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from filelock import lock_descriptor

from kvcellar.errors import LeaseHeldError, LeaseLostError, StoreError
from kvcellar.home import open_own, owner_in, write_owner
from kvcellar.store.disk.folder import Folder
from kvcellar.store.values.references import checked_name, file_stem

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Lease:
    """Right to extend one history, until it is released or has expired.

    Attributes:
        name: of the history.
        owner: who holds it, in words for others' errors.
        token: made up anew whenever it is taken, so that a later holder's is another.
        expires_s: when it ends by itself, by this process's ``time.monotonic``, which no change of
            the clock moves; None: with its process.
    """

    name: str
    owner: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    expires_s: float | None = None

    @property
    def is_expired(self) -> bool:
        """True if it has ended by itself, and others may have taken it."""
        return self.expires_s is not None and time.monotonic() >= self.expires_s


class Leases(Protocol):
    """Answers to who may extend a history, for all processes. For any thread; may wait for disks.

    Whoever holds a lease reads the history's state behind taking it, and has made its own state
    durable before releasing it. A lease says who *should* extend a history: one that has expired
    may be taken while its holder still believes in it, so a store whose leases expire refuses a
    late state by itself.
    """

    def take(self, name: str) -> Lease:
        """Take the lease of a history, at once or not at all.

        Raises:
            LeaseHeldError: another has it; the error says who.
            StoreError: there can be no lease here; nothing was changed.
        """

    def renew(self, lease: Lease) -> Lease:
        """Return the same lease with a later expiry.

        Raises:
            LeaseLostError: it has ended, and another may have it.
            StoreError: nobody could be asked; it is as it was.
        """

    def release(self, lease: Lease) -> None:
        """Let others extend the history; a no-op for a lease that has been lost."""

    def close(self) -> None:
        """Release all that this object has taken."""


def owner_of_process() -> str:
    """Return how this process is called as the owner of leases."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class LocalLeases:
    """Leases among the processes of one folder: locks on files that end with their process.

    A file of ``leases/`` is there while its lease is held, and says who holds it.
    """

    def __init__(self, folder: Folder) -> None:
        """Create leases of which none is taken."""
        self._folder = folder
        self._owner = owner_of_process()
        self._lock = threading.Lock()
        self._files: dict[str, tuple[int, Path] | None] = {}
        """By token the file of each lease that is held here, which is open and locked; None where
        none can be written."""

    def take(self, name: str) -> Lease:
        """See ``Leases``; where nobody can write, nobody else can extend anything either."""
        lease = Lease(name, self._owner)
        path = self._folder.leases / f"{file_stem(checked_name(name))}.lock"
        try:
            self._folder.leases.mkdir(mode=0o700, exist_ok=True)
            fd = _locked_file(path)
            if fd is None:
                raise LeaseHeldError(name, owner_in(path))
            with self._lock:
                self._files[lease.token] = fd, path
            with contextlib.suppress(OSError):  # a full disk: the lock holds, but names nobody
                write_owner(fd, self._owner)
        except OSError as error:
            self.release(lease)
            if error.errno in _READ_ONLY:
                with self._lock:
                    self._files[lease.token] = None
                return lease
            raise StoreError(f"{path} cannot be written ({error.strerror or error})") from error
        return lease

    def renew(self, lease: Lease) -> Lease:
        """See ``Leases``."""
        with self._lock:
            if lease.token not in self._files:
                raise LeaseLostError(lease.name)
        return lease

    def release(self, lease: Lease) -> None:
        """See ``Leases``."""
        with self._lock:
            file = self._files.pop(lease.token, None)
        if file is not None:
            _let_go(*file)

    def close(self) -> None:
        """See ``Leases``."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            if file is not None:
                _let_go(*file)

    def clear(self) -> None:
        """Remove the files of processes that died; what is held stays."""
        for path in self._folder.leases.glob("*.lock"):
            with contextlib.suppress(OSError):
                fd = _locked_file(path)
                if fd is not None:
                    _let_go(fd, path)


def _locked_file(path: Path) -> int | None:
    """Open and lock a file; None where another has locked it.

    Raises:
        OSError: it cannot be opened or locked.
    """
    while True:
        fd = open_own(path, os.O_CREAT | os.O_RDWR)
        try:
            if not lock_descriptor(fd, blocking=False):
                os.close(fd)
                return None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its holder removed it while it was being opened


def _let_go(fd: int, path: Path) -> None:
    """Remove a file that is locked, where that can be, and unlock it."""
    with contextlib.suppress(OSError):  # some systems remove no file that is open
        path.unlink()
    os.close(fd)
