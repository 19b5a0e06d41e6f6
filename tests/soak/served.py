"""A server as a process, which can be killed and started again on the same store."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import httpx

from tests.processes import ROOT

PATIENCE_S = 120.0
"""For whatever has to come at some time."""

OWNER, GUEST = "owner", "guest"
"""Keys that a server takes."""

OWNERS, GUESTS = ({"Authorization": f"Bearer {key}"} for key in (OWNER, GUEST))


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
    """`kvcellar serve` with a store in a folder, and faults that it is told; its log is there, too.

    Args:
        folder: where the store, the log and all else of it are.
        options: what it is started with.
        struck: is told each fault that strikes.
    """

    def __init__(self, folder: Path, *options: str, struck: Callable[[str], None] = id) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.store = folder / "store"
        self._options = options
        self._struck = struck
        self._log = folder / "log"
        self._keys = folder / "keys"
        self._keys.write_text(f"{OWNER}\n{GUEST}\n")
        self._keys.chmod(0o600)
        self._process: subprocess.Popen[str] | None = None
        self._is_told = threading.Semaphore(0)
        self.http = httpx.Client()

    def _env(self) -> dict[str, str]:
        return os.environ | {
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
        command = [sys.executable, "-W", "ignore", "-m", "tests.soak.faulty", "serve"]
        more = ["--port", "0", "--store", str(self.store), "--api-key-file", str(self._keys)]
        self._process = subprocess.Popen(
            [*command, *self._options, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # a file could not be written while none may grow
            text=True,
            env=self._env(),
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        threading.Thread(target=self._note, args=(self._process.stderr,), daemon=True).start()
        said = self._process.stdout.readline()
        if "http://" not in said:
            time.sleep(1)  # until all that it said has been noted
            raise BrokenError(f"the server did not start: {self._log.read_text()[-2000:]}")
        threading.Thread(target=self._hear, args=(self._process.stdout,), daemon=True).start()
        self.http.close()
        self.http = httpx.Client(
            base_url=said.split()[-1],
            headers=OWNERS,
            timeout=PATIENCE_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=4),
        )

    def _note(self, stream: IO[str]) -> None:
        """Write what the process logs into its log."""
        with self._log.open("a") as log:
            for line in stream:
                log.write(line)
                log.flush()

    def _hear(self, stream: IO[str]) -> None:
        """Take note of faults that strike."""
        for line in stream:
            if line.startswith("struck "):
                self._struck(line.removeprefix("struck ").strip())
            elif line == "told\n":
                self._is_told.release()

    def tell(self, fault: str) -> None:
        """Have a fault from now on; ``tests/soak/faulty.py`` says which there are."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{fault}\n")
        self._process.stdin.flush()
        if not self._is_told.acquire(timeout=PATIENCE_S):
            raise BrokenError(f"the process does not take {fault!r}")

    @property
    def is_running(self) -> bool:
        """True between a start and the end."""
        return self._process is not None

    def kill(self) -> None:
        """End the process as a power cut would, and close the connections to it."""
        self.http.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def stop(self) -> None:
        """End the process as its user does.

        Raises:
            BrokenError: it ended with an error.
        """
        assert self._process is not None
        self.http.close()
        self._process.terminate()
        self._process.wait(PATIENCE_S)
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
            if line.startswith("{") and "injected" not in json.loads(line).get(
                "traceback", "injected"
            ):
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
