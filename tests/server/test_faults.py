"""Faults where a user meets them: who is concerned is told, nobody else is, and /health knows."""

from __future__ import annotations

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.errors import DeviceMemoryError
from kvcellar.server.state import models
from kvcellar.store import writer
from kvcellar.store.values import blocks
from tests.server.live import Live, serving
from tests.server.test_full_disk import BODIES

FAULTS: dict[str, tuple[Exception | None, int, str]] = {
    "raises": (RuntimeError("torn in /home/somebody"), 500, "internal_error"),
    "has no memory": (DeviceMemoryError("no memory for a forward"), 503, "out_of_memory"),
    "gives NaN": (None, 500, "model_failed"),
}


class Forwards:
    """The forwards of a server's engine; the next ``n_failures`` raise a fault, or give NaN."""

    def __init__(self, live: Live, patch: pytest.MonkeyPatch) -> None:
        self.runner = live.host().engine.runner
        self.compute = self.runner.forward
        self.fault: Exception | None = None
        self.n_failures = 0
        patch.setattr(self.runner, "forward", self.forward)

    def forward(self, token_ids: Any, positions: Any, rows: Any = None) -> np.ndarray:
        if not self.n_failures:
            return self.compute(token_ids, positions, rows)
        self.n_failures -= 1
        if self.fault is not None:
            raise self.fault
        return np.full_like(self.compute(token_ids, positions, rows), np.nan)


@pytest.fixture
def forwards(live: Live, monkeypatch: pytest.MonkeyPatch) -> Forwards:
    return Forwards(live, monkeypatch)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_forward_that_fails_ends_its_answer_in_words_and_the_next_one_is_right(
    kind: str, path: str, is_stream: bool, live: Live, forwards: Forwards
) -> None:
    body = {**BODIES[path], "stream": is_stream}
    agent = f"met-{kind.replace(' ', '-')}-{is_stream}"
    if "agents" in path:
        live.post("/v1/agents", {"id": agent})
        path = path.replace("unkept", agent)
    error, status, code = FAULTS[kind]
    forwards.fault, forwards.n_failures = error, 1
    answer = live.http.post(path, json=body)
    assert answer.status_code == status and "/home/somebody" not in answer.text, answer.text
    said = answer.json()["error"]
    assert said if isinstance(said, str) else said["message"], "it is said what happened"
    if isinstance(said, dict) and "code" in said:
        assert said["code"] == code
    assert ("retry-after" in answer.headers) == (status == 503)
    assert live.get("/health")["status"] == "ok" and live.http.get("/ready").status_code == 200
    live.until(live.is_still, "an engine that holds nothing of it")
    answer = live.http.post(path, json=body)
    assert answer.status_code == 200 and "failed with" not in answer.text, answer.text
    if "agents" in path:
        assert live.get(f"/v1/agents/{agent}")["n_turns"] == 1, "the one that failed left nothing"
        live.http.delete(f"/v1/agents/{agent}")


def test_logits_that_are_no_numbers_end_one_answer_of_those_that_are_computed_together(
    live: Live, forwards: Forwards
) -> None:
    tokenizer = live.host().tokenizer
    (marker,) = tokenizer.encode(")", add_special_tokens=False)[-1:]
    body = {"prompt": "def add(a, b", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    wanted = live.post("/v1/completions", body)["choices"][0]["text"]
    is_begun = threading.Event()

    def streamed() -> str:
        text = ""
        with live.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                is_begun.set()
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text

    compute = forwards.compute

    def poisoned(token_ids: Any, positions: Any, rows: Any = None) -> np.ndarray:
        logits = compute(token_ids, positions, rows)
        for i, row in enumerate(rows):
            if (
                token_ids[row] == marker and len(token_ids) > 3
            ):  # a prompt, beside the other's token
                logits[i] = np.nan
                forwards.n_failures += 1
        return logits

    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(streamed)
        assert is_begun.wait(180)
        forwards.runner.forward = poisoned
        prompt = {"prompt": "what is asked beside it ends so)", "max_tokens": 4}
        answer = live.http.post("/v1/completions", json=prompt)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_failed")
        assert forwards.n_failures == 1
        assert stream.result(180) == wanted
    forwards.runner.forward = compute


def test_an_engine_whose_thread_dies_ends_its_answers_and_health_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as live:
        host = live.host()

        def dies() -> None:
            raise SystemExit("killed from inside")

        host.engine.step = dies
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = live.http.post(path, json=BODIES[path])
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "engine_failed"
        health = live.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert live.http.get("/ready").status_code == 503


def test_health_says_for_how_long_a_step_has_not_ended(
    live: Live, forwards: Forwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card may hang, or who guesses."""
    monkeypatch.setattr(models, "LONG_STEP_S", 0.1)
    gate, compute = threading.Event(), forwards.compute

    def hangs(*step: Any) -> np.ndarray:
        assert gate.wait(180)
        logits: np.ndarray = compute(*step)
        return logits

    def detail() -> str:
        (model,) = live.get("/health")["models"]
        assert model["state"] == "ready"
        return str(model["detail"])

    forwards.compute = hangs
    with ThreadPoolExecutor(1) as pool:
        try:
            answer = pool.submit(live.post, "/v1/completions", BODIES["/v1/completions"])
            live.until(lambda: "one step for" in detail(), "a step that does not end")
        finally:
            gate.set()
        assert answer.result(180)["choices"]
    live.until(lambda: not detail(), "the end of the step")


def test_a_disk_that_never_answers_stops_what_waits_for_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as live:
        live.post("/v1/agents", {"id": "poet"})
        live.post("/v1/agents/poet/generate", {"text": "hi", "max_tokens": 3})
        gate = threading.Event()
        monkeypatch.setattr(writer, "STUCK_S", 0.3)
        live.service.store._writer.offer(gate.wait, 0)  # type: ignore[arg-type]
        try:
            answer = live.post("/v1/agents/poet/generate", {"text": "on", "max_tokens": 3})
            assert not answer["usage"]["notes"], "the journal has it"
            for verb, body in (("pause", None), ("rewind", {}), ("fork", {"id": "twin"})):
                refused = live.http.post(f"/v1/agents/poet/{verb}", json=body)
                assert refused.status_code == 507, refused.text
                assert "see whether its disk answers" in refused.text
            assert live.get("/health")["store"] == "failing"
            answer = live.post("/v1/agents/poet/generate", {"text": "and", "max_tokens": 3})
            assert answer["finish_reason"]
        finally:
            gate.set()
        monkeypatch.undo()
        live.post("/v1/agents/poet/pause")
        assert live.get("/health")["store"] == "ok"
        n_turns = live.get("/v1/agents/poet")["n_turns"]
    with serving(tmp_path) as again:
        assert again.get("/v1/agents/poet")["n_turns"] == n_turns == 3


@pytest.mark.parametrize("is_read", [True, False])
def test_blocks_that_a_disk_does_not_give_are_computed_again(
    is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(live: Live, agent: str) -> Any:
        body = {"text": "Go on. " * 20, "max_tokens": 5, "temperature": 0}
        return live.http.post(f"/v1/agents/{agent}/generate", json=body)

    with serving(tmp_path, warm_bytes=0) as live:
        for agent in ("well", "met"):
            live.post("/v1/agents", {"id": agent})
            turn(live, agent)
            live.post(f"/v1/agents/{agent}/pause")
        wanted = turn(live, "well").json()["text"]

    def unreadable(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with serving(tmp_path, warm_bytes=0) as live:
        if not is_read:
            monkeypatch.setattr(blocks, "read_file", unreadable)
        answer = turn(live, "met").json()
        assert answer["text"] == wanted
        assert (answer["usage"]["restored_tokens"] > 0) == is_read
        assert live.get("/health")["status"] == "ok"
