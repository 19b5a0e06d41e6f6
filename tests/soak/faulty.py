"""`kvcellar` with faults in it: ``python -m tests.soak.faulty serve demo``.

Each line of standard input tells one, and is answered with ``told``; what strikes is printed, once
for each time that it was told: ``struck disk eio``.

- ``clock SECONDS``: the wall clock jumps by so much.
- ``disk eio | slow | full | torn BYTES | well``: until the next of these nothing can be written;
  everything takes a moment longer; no file may grow; none may grow beyond so many bytes, where what
  is being written is cut; all is well. The last two are the system's own refusals.
- ``forward raise | memory | nan``: so does the next forward of an engine, and no other.
"""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SLOW_S = 0.03

shift_s = 0.0
disk = "well"
forward: str | None = None
is_told = False


def say(line: str) -> None:
    """Print a line at once, whatever becomes of the process."""
    real_write(1, f"{line}\n".encode())


def struck(what: str) -> None:
    """Print that a fault struck, if it is the first time since it was told."""
    global is_told
    if is_told:
        is_told = False
        say(f"struck {what}")


def take(line: str) -> None:
    """Have a fault from now on."""
    global shift_s, disk, forward, is_told
    kind, what, *numbers = line.split()
    if kind == "clock":
        shift_s += float(what)
        return
    if kind == "forward":
        forward = what
        return
    most = {"full": 0, "torn": int(numbers[0]) if numbers else 0}.get(what, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    disk, is_told = what, what != "well"


def listen() -> None:
    """Take what is told until nothing more is."""
    for line in sys.stdin:
        take(line)
        say("told")


# Clocks are taken by whoever is imported later, so they are first.
real_time, real_time_ns, real_write, real_fsync = time.time, time.time_ns, os.write, os.fsync
time.time = lambda: real_time() + shift_s
time.time_ns = lambda: real_time_ns() + int(shift_s * 1e9)


def refuse_or_wait() -> None:
    """Do to an access what the disk does to all.

    Raises:
        OSError: EIO.
    """
    if disk == "eio":
        struck("disk eio")
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if disk == "slow":
        struck("disk slow")
        time.sleep(SLOW_S)


def write(fd: int, data: Any) -> int:
    """Write as ``os.write`` does, or as the disk does."""
    refuse_or_wait()
    try:
        return real_write(fd, data)
    except OSError:
        struck(f"disk {disk}")
        raise


def fsync(fd: int) -> None:
    """Write out as ``os.fsync`` does, or as the disk does."""
    refuse_or_wait()
    real_fsync(fd)


def inject() -> None:
    """Put the faults where they strike."""
    from kvcellar.engine.engine import Engine
    from kvcellar.store.disk.catalogue import Catalogue
    from kvcellar.store.disk.journal import Journal

    os.write, os.fsync = write, fsync

    def failing(name: str, owner: Any) -> None:
        changing = getattr(owner, name)

        @contextmanager
        def faulty(self: Any) -> Iterator[Any]:
            try:
                if getattr(self, "path", "") is not None:  # a catalogue may be in memory alone
                    refuse_or_wait()
            except OSError as error:
                refused = sqlite3.OperationalError("disk I/O error")
                refused.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise refused from error
            try:
                with changing(self) as db:
                    yield db
            except sqlite3.Error:
                struck(f"disk {disk}")
                raise

        setattr(owner, name, faulty)

    failing("_changing", Journal)
    failing("_writing", Catalogue)
    compute = Engine._forward

    def faulty_forward(self: Engine, batch: Any, positions: list[int]) -> Any:
        global forward
        kind, forward = forward, None
        if kind is not None:
            say(f"struck forward {kind}")
        if kind in ("raise", "memory"):
            error = RuntimeError if kind == "raise" else MemoryError
            raise error("injected")
        logits, features = compute(self, batch, positions)
        if kind == "nan":
            logits[0] = float("nan")
        return logits, features

    Engine._forward = faulty_forward  # type: ignore[method-assign]


if __name__ == "__main__":
    inject()
    threading.Thread(target=listen, daemon=True).start()
    from kvcellar.cli import main

    sys.argv[0] = "kvcellar"
    main()
