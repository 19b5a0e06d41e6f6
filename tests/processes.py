"""Processes that end with the test that started them, whatever has failed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
