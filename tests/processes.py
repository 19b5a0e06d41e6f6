"""Processes that end with the test that started them, whatever has failed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

_PORTS = itertools.count(os.getpid() * 37)


def free_port() -> int:
    """Return a port for a server to start at.

    It lies below those that the system gives to connections, so that none has it meanwhile, and
    whoever tries to connect before the server is there does not meet itself.
    """
    for n in itertools.islice(_PORTS, 1000):
        port = 10_000 + n % 20_000
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port of 1000 is free")


@contextlib.contextmanager
def started(module: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A module that runs with these arguments; it and its children are killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
