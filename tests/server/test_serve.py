"""`kvcellar serve` as a process: it comes up, is stopped, and every agent is on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.store import Store
from tests.server.live import PATIENCE_S

ASK = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def environment(tmp_path):
    return {
        **os.environ,
        "KVCELLAR_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def invoked(*arguments):
    """The command in this process, where it does not get as far as serving."""
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


@pytest.mark.slow
def test_a_server_that_is_stopped_has_published_every_agent(tmp_path, environment):
    store = tmp_path / "store"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvcellar", "serve", "--port", "0"),
            *("--store", str(store), "--shutdown", "1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        said = process.stdout.readline()
        assert said.startswith("demo at http://127.0.0.1:"), process.stderr.read()
        url = said.split()[-1]
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            assert client.get("/health").json()["status"] == "ok"
            client.post("/v1/agents", json={"id": "named"}).raise_for_status()
            body = {"text": "Remember me. " * 20, **ASK}
            client.post("/v1/agents/named/generate", json=body).raise_for_status()
            unnamed = {"messages": [{"role": "user", "content": "Who am I? " * 20}], **ASK}
            client.post("/v1/chat/completions", json=unnamed).raise_for_status()

            second = invoked("--port", 0, "--store", store)
            assert second.exit_code == 3
            assert f"is served already by {url} (process {process.pid})" in second.stderr
            third = invoked("--port", url.rpartition(":")[2], "--store", tmp_path / "other")
            assert third.exit_code == 2 and "is taken by another program" in third.stderr

            endless = {"text": "Go on.", "max_tokens": 3000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/agents/named/generate", json=endless) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        out, errors = process.communicate()
    assert not out
    said = [json.loads(line) for line in errors.splitlines()]
    assert all(line["level"] for line in said), "everything is a line of JSON"
    (loaded,) = [line for line in said if line.get("event") == "model loaded"]
    assert loaded["cache"] == "capacity 4096 cells: the model's context"
    assert loaded["weights"] == "float32"
    with Store(store) as opened:
        stored = {row.name.partition("@")[0]: opened.get(row.name) for row in opened.references()}
    assert len(stored) == 2 and "named" in stored
    for ref in stored.values():
        assert ref.n_stored == len(ref.tokens) - 1, "all that was computed is on disk"
    assert len(stored["named"].metadata["turns"]) == 2, "what was said of the last answer is kept"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--port", "99999"), "port must be 0 to 65535"),
        (("=x",), "'=x' is no model"),
        (("a=demo", "a=demo"), "two models are called 'a'"),
        (("--host", "203.0.113.9", "--api-key", "x"), "cannot listen on '203.0.113.9'"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(arguments, said, tmp_path):
    result = invoked("--store", tmp_path / "s", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr and "Traceback" not in result.stderr
