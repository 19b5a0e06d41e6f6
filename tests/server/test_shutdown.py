"""`kvcellar serve` is stopped while it answers: everybody is told why, and nothing said is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcellar.store import Store
from tests.server.live import PATIENCE_S

LONG = "Tell me a very long story about a cellar, and do not stop."
MESSAGES = [{"role": "user", "content": LONG}]
ENDLESS = {"temperature": 0, "stream": True}  # with which the bundled model does not end
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "demo",
        "messages": MESSAGES,
        "max_tokens": 7000,
        "ignore_eos": True,
    },
    "/v1/completions": {"model": "demo", "prompt": LONG, "max_tokens": 7000, "ignore_eos": True},
    "/v1/responses": {"model": "demo", "input": LONG, "max_output_tokens": 7000},
    "/v1/messages": {"model": "demo", "messages": MESSAGES, "max_tokens": 7000},
    "/v1/agents/named/generate": {"text": LONG, "max_tokens": 7000, "ignore_eos": True},
}
WHY = "the server is being stopped"


@contextlib.contextmanager
def process(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    started = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvcellar", "serve", "--port", "0"),
            *("--store", str(folder / "store"), *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "KVCELLAR_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    try:
        assert started.stdout is not None and started.stderr is not None
        said = started.stdout.readline()
        assert said.startswith("demo at http://127.0.0.1:"), started.stderr.read()
        yield started, said.split()[-1]
    finally:
        started.kill()
        _, errors = started.communicate()
    for line in errors.splitlines():
        assert "traceback" not in json.loads(line), line


class Listener(threading.Thread):
    """One client and all that it is told."""

    def __init__(self, url: str, path: str) -> None:
        super().__init__(name=path, daemon=True)
        self.url, self.path = url, path
        self.lines: list[str] = []
        self.has_begun = threading.Event()
        self.trouble: Exception | None = None
        self.start()

    def run(self) -> None:
        body = {**ENDLESS, **ASKS[self.path]}
        try:
            with (
                httpx.Client(base_url=self.url, timeout=PATIENCE_S) as client,
                client.stream("POST", self.path, json=body) as answer,
            ):
                for line in answer.iter_lines():
                    self.lines.append(line)
                    if len(self.lines) > 20 or answer.status_code != 200:
                        self.has_begun.set()
        except Exception as error:
            self.trouble = error
        self.has_begun.set()

    def last_event(self) -> tuple[str | None, Any]:
        """Name and data of the last event that is more than a mark of the end."""
        found: list[tuple[str | None, str]] = []
        name = None
        for line in self.lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, line.removeprefix("data: ")))
        name, data = found[-1]
        return name, json.loads(data)


def all_were_told_why(listeners: list[Listener]) -> None:
    for listener in listeners:
        listener.join(PATIENCE_S)
        assert listener.lines[0].startswith(("data: ", "event: ")), listener.lines[0]
        assert listener.trouble is None, f"{listener.path} was cut off: {listener.trouble}"
        name, data = listener.last_event()
        if listener.path == "/v1/responses":
            assert name == "response.failed"
            assert WHY in data["response"]["error"]["message"]
        else:
            assert WHY in data["error"]["message"], data
        if listener.path == "/v1/messages":
            assert (name, data["type"]) == ("error", "error")


def the_history_was_saved(folder: Path, listener: Listener) -> None:
    n_told = sum(line.startswith("data: ") for line in listener.lines)
    with Store(folder / "store") as store:
        names = [row.name for row in store.references() if row.name.startswith("named@")]
        (name,) = names
        assert len(store.get(name).tokens) >= n_told > 10  # an event has a token at least


def until_stopping(url: str) -> None:
    """Wait until a server that was signalled takes no more requests."""
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(httpx.TransportError):
        while httpx.get(f"{url}/ready", timeout=PATIENCE_S).is_success:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("how", ["after its time", "by a second signal"])
@pytest.mark.slow
def test_streams_of_a_server_that_is_stopped_end_with_an_error_that_says_why(how, tmp_path):
    is_hurried = how == "by a second signal"
    with process(tmp_path, "--shutdown", "600" if is_hurried else "0.2") as (server, url):
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            client.post("/v1/agents", json={"id": "named"}).raise_for_status()
        listeners = [Listener(url, path) for path in ASKS]
        for listener in listeners:
            assert listener.has_begun.wait(PATIENCE_S)
        server.send_signal(signal.SIGTERM)
        if is_hurried:
            until_stopping(url)
            assert server.poll() is None, "answers have their time after the first signal"
            server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
        all_were_told_why(listeners)
    the_history_was_saved(tmp_path, listeners[-1])


@pytest.mark.slow
def test_an_answer_in_one_piece_is_refused_with_the_reason(tmp_path):
    with process(tmp_path, "--shutdown", "0.2") as (server, url):
        found: list[httpx.Response] = []
        body = {**ENDLESS, **ASKS["/v1/chat/completions"], "stream": False}

        def ask() -> None:
            found.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S))

        asking = threading.Thread(target=ask)
        asking.start()
        deadline = time.monotonic() + PATIENCE_S
        while not httpx.get(f"{url}/health", timeout=PATIENCE_S).json()["active"]:
            assert time.monotonic() < deadline
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0
        asking.join(PATIENCE_S)
    assert found[0].status_code == 503 and WHY in found[0].json()["error"]["message"]
