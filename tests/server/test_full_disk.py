"""A disk that takes no more: the server answers, and says of each answer that it is not kept."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from kvcellar.errors import StoreError
from kvcellar.store.disk.cold import ColdTier
from kvcellar.store.disk.journal import Journal

SAID = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", **SAID},
    "/v1/completions": {"model": "demo", "prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"model": "demo", "input": "hello", "max_output_tokens": 16, "store": False},
    "/v1/messages": {"model": "demo", **SAID},
    "/api/chat": {"model": "demo", "messages": SAID["messages"], "options": {"num_predict": 4}},
    "/api/generate": {"model": "demo", "prompt": "hello", "options": {"num_predict": 4}},
    "/v1/agents/unkept/generate": {"text": "hello", "max_tokens": 4},
}
WRITE = Journal._write
NOTICE = "is not on disk and is lost if the process ends"


@pytest.fixture
def agent(live, monkeypatch):
    """An agent that is on disk, which takes nothing from then on."""

    def no_entry(*_: Any) -> None:
        raise StoreError("the journal of the store cannot be written (database or disk is full)")

    def no_reference(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    live.post("/v1/agents", {"id": "unkept"})
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write", no_entry)
        patch.setattr(ColdTier, "put_reference", no_reference)
        yield "unkept"
    live.http.delete("/v1/agents/unkept")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_is_not_kept_says_so_in_every_protocol(live, agent, path, is_stream):
    body = {"stream": is_stream, **BODIES[path]}
    answer = live.http.post(path, json=body, headers={"X-Agent-Id": agent})
    assert answer.status_code == 200, answer.text
    assert NOTICE in answer.text
    if not is_stream and "agents" not in path:
        assert NOTICE in answer.headers["x-agent-notice"]


def test_health_and_metrics_say_while_turns_are_not_kept(live, agent):
    def speak() -> None:
        live.post("/v1/agents/unkept/generate", BODIES["/v1/agents/unkept/generate"])

    speak()
    health = live.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok"), "answers are given"
    assert health.json()["store"] == "failing"
    assert "kvcellar_store_is_failing 1.0" in live.http.get("/metrics").text
    with pytest.MonkeyPatch.context() as patch:  # there is room again
        patch.setattr(Journal, "_write", WRITE)
        speak()
    assert live.get("/health")["store"] == "ok"
    assert "kvcellar_store_is_failing 0.0" in live.http.get("/metrics").text
    speak()
    assert live.get("/health")["store"] == "failing"
