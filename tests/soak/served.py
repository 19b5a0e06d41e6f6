"""A server as a process, which can be killed and started again on the same store."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.processes import ROOT

PATIENCE_S = 120.0
"""For whatever has to come at some time."""


class BrokenError(AssertionError):
    """An invariant does not hold."""


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for a state.

    Raises:
        BrokenError: it did not come.
    """
    ends_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > ends_s:
            raise BrokenError(f"{what}: not so within {PATIENCE_S:g} s")
        time.sleep(0.05)


class Served:
    """`kvcellar serve demo` with a store in a folder; its log is beside the store."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.store = folder / "store"
        self._options = options
        self._log = folder / "log"
        self._home = folder / "home"
        self._process: subprocess.Popen[str] | None = None
        self.http = httpx.Client()

    def _env(self) -> dict[str, str]:
        return os.environ | {
            "KVCELLAR_HOME": str(self._home),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        }

    @property
    def pid(self) -> int:
        """Id of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process and wait until it listens."""
        command = [sys.executable, "-W", "ignore", "-m", "kvcellar", "serve", "--port", "0"]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, "--store", str(self.store), *self._options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._env(),
            )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if "http://" not in said:
            raise BrokenError(f"the server did not start: {self._log.read_text()[-2000:]}")
        self.http.close()
        self.http = httpx.Client(
            base_url=said.split()[-1],
            timeout=PATIENCE_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=4),
        )

    def kill(self) -> None:
        """End the process as a power cut would, and close the connections to it."""
        self.http.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def stop(self) -> None:
        """End the process as its user does.

        Raises:
            BrokenError: it ended with an error.
        """
        assert self._process is not None
        self.http.close()
        self._process.terminate()
        self._process.communicate(timeout=PATIENCE_S)
        code, self._process = self._process.returncode, None
        if code:
            raise BrokenError(f"the server ended with {code}")

    def resident_bytes(self) -> int:
        """Return what the process has in memory, as the kernel counts it."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def n_threads(self) -> int:
        """Return how many threads the process has."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def n_files(self) -> int:
        """Return how many files and connections the process has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def get(self, path: str) -> Any:
        """Return what a route says.

        Raises:
            BrokenError: it is an error.
        """
        answer = self.http.get(path)
        if not answer.is_success:
            raise BrokenError(f"GET {path}: {answer.status_code} {answer.text}")
        return answer.json()

    def gauges(self) -> dict[str, float]:
        """Return what /metrics counts, without labels; of several the last."""
        found = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                with contextlib.suppress(ValueError):
                    found[name.split("{")[0]] = float(value)
        return found

    def check_log(self) -> None:
        """Look for errors that nobody expected.

        Raises:
            BrokenError: a line of the log has a traceback.
        """
        for line in self._log.read_text().splitlines():
            if line.startswith("{") and "traceback" in json.loads(line):
                raise BrokenError(f"the log has a traceback: {line[:2000]}")

    def verify(self) -> None:
        """Have `kvcellar store verify` read all of the store.

        Raises:
            BrokenError: something in it is damaged.
        """
        if not self.store.exists():
            return
        command = [sys.executable, "-W", "ignore", "-m", "kvcellar", "store", "verify"]
        done = subprocess.run(
            [*command, "--store", str(self.store)],
            capture_output=True,
            text=True,
            env=self._env(),
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode:
            raise BrokenError(f"store verify: {done.returncode} {done.stdout}{done.stderr}")
