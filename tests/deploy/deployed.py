"""A deployment of two replicas as a process of its own, and what can happen to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

PATIENCE_S = 240.0

STRANGER = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, 30)
    print("let in")
except AuthenticationError:
    print("refused")
"""
"""A program that asks a Ray cluster for its keys, without its token or with a wrong one."""

TITLE = "ray::ServeReplica:kvcellar:replicas"


class Deployed:
    """A deployment that answers, for tests."""

    def __init__(self, process: subprocess.Popen[str], url: str, sessions: Path) -> None:
        self.process = process
        self._sessions = sessions
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def turn(self, agent: str, text: str) -> tuple[str, str]:
        """Return which replica has answered an agent's next turn, and what; ask again after 503."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        named = {"X-Agent-Id": agent, "X-Agent-Create": "true"}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            got = self.http.post("/v1/chat/completions", json=body, headers=named)
            if got.status_code != 503 or time.monotonic() > deadline:
                break
            time.sleep(float(got.headers["retry-after"]))
        assert got.status_code == 200, got.text
        assert got.headers["x-agent-id"] == agent
        return got.headers["x-replica"], got.json()["choices"][0]["message"]["content"]

    def met_by_stranger(self, **token: str) -> str:
        """Return if Ray's own port lets a process in that has another token, or none."""
        (port,) = (self._sessions / "session_latest").glob("gcs_server_port_*")
        command = [sys.executable, "-W", "ignore", "-c", STRANGER, f"127.0.0.1:{port.read_text()}"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        done = subprocess.run(
            command,
            env=env | token,
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        return done.stdout.strip()

    def pids(self) -> list[int]:
        """Return the processes of its replicas."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        replicas = [pid for pid in pids if _title(pid).startswith(TITLE)]
        return [pid for pid in replicas if self.process.pid in _ancestors(pid)]


@contextmanager
def deployed(folder: Path, *options: str) -> Iterator[Deployed]:
    """Run ``kvcellar deploy`` until the block ends; it has to end in order."""
    command = [sys.executable, "-m", "kvcellar", "deploy", "demo", "--port", "0", *options]
    command += ["--cpus", "0.5"]  # on a machine with one core, too
    with ExitStack() as stack:
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp"))
        env = os.environ | {"KVCELLAR_HOME": str(folder / "home"), "RAY_TMPDIR": short}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdout is not None
        said = next((line for line in process.stdout if " at http" in line), None)
        assert said is not None, "it ended before it answered"
        server = Deployed(process, said.split(" at ")[1].split(",")[0], Path(short) / "ray")
        with server.http:
            yield server
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.add(pid)
    return found
