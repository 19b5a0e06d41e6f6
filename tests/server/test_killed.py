"""What a client was given an id of can be gone on from, also after the server was killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import PATIENCE_S
from tests.server.test_shutdown import process

SHORT = {"temperature": 0, "ignore_eos": True}
CHAT = {"model": "demo", "max_tokens": 6, **SHORT}
RESPONSE = {"model": "demo", "max_output_tokens": 6, "temperature": 0}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def posted(client: httpx.Client, path: str, body: Any, **headers: str) -> Any:
    response = client.post(path, json=body, headers=headers)
    assert response.is_success, response.text
    return {"agent": response.headers.get("x-agent-id"), **response.json()}


Go = Callable[[httpx.Client], Any]
"""Goes on from a first turn with an id, or with the history, that the client has."""


def chat(client: httpx.Client) -> tuple[str, Go]:
    first = posted(client, "/v1/chat/completions", {**CHAT, "messages": [user("By history.")]})
    talk = [user("By history."), first["choices"][0]["message"], user("And?")]
    return first["agent"], lambda c: posted(c, "/v1/chat/completions", {**CHAT, "messages": talk})


def chat_by_id(client: httpx.Client) -> tuple[str, Go]:
    first = posted(client, "/v1/chat/completions", {**CHAT, "messages": [user("By its id.")]})
    body = {**CHAT, "messages": [user("And?")]}
    name = first["agent"]
    return name, lambda c: posted(c, "/v1/chat/completions", body, **{"X-Agent-Id": name})


def streamed(client: httpx.Client) -> tuple[str, Go]:
    body = {**CHAT, "messages": [user("Streamed.")], "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                break
    name = answer.headers["x-agent-id"]
    body = {**CHAT, "messages": [user("And?")]}
    return name, lambda c: posted(c, "/v1/chat/completions", body, **{"X-Agent-Id": name})


def anthropic(client: httpx.Client) -> tuple[str, Go]:
    body = {"model": "demo", "max_tokens": 6, "temperature": 0}
    first = posted(client, "/v1/messages", {**body, "messages": [user("Anthropic's.")]})
    talk = [user("Anthropic's."), {"role": "assistant", "content": first["content"]}, user("And?")]
    return first["agent"], lambda c: posted(c, "/v1/messages", {**body, "messages": talk})


def ollama(client: httpx.Client) -> tuple[str, Go]:
    body = {"model": "demo", "stream": False, "options": {"num_predict": 6, "temperature": 0}}
    first = posted(client, "/api/chat", {**body, "messages": [user("Ollama's.")]})
    talk = [user("Ollama's."), first["message"], user("And?")]
    return first["agent"], lambda c: posted(c, "/api/chat", {**body, "messages": talk})


def response(client: httpx.Client) -> tuple[str, Go]:
    first = posted(client, "/v1/responses", {**RESPONSE, "input": "A response."})
    body = {**RESPONSE, "input": "And?", "previous_response_id": first["id"]}
    return first["agent"], lambda c: posted(c, "/v1/responses", body)


def conversation(client: httpx.Client) -> tuple[str, Go]:
    made = posted(client, "/v1/conversations", {})
    body = {**RESPONSE, "conversation": made["id"]}
    first = posted(client, "/v1/responses", {**body, "input": "In a conversation."})
    return first["agent"], lambda c: posted(c, "/v1/responses", {**body, "input": "And?"})


def fork(client: httpx.Client) -> tuple[str, Go]:
    first = posted(client, "/v1/chat/completions", {**CHAT, "messages": [user("To fork.")]})
    made = posted(client, f"/v1/agents/{first['agent']}/fork", {})
    body = {"text": "And?", "max_tokens": 6, **SHORT}
    return made["id"], lambda c: posted(c, f"/v1/agents/{made['id']}/generate", body)


FIRST_TURNS = (chat, chat_by_id, streamed, anthropic, ollama, response, conversation, fork)


@pytest.mark.slow
def test_every_id_that_a_client_was_given_can_be_gone_on_from_after_a_kill(tmp_path: Path) -> None:
    with process(tmp_path) as (server, url):
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            begun = {turn.__name__: turn(client) for turn in FIRST_TURNS}
            server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE_S)
    with (
        process(tmp_path) as (_, url),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        for name, (agent, go_on) in begun.items():
            known = client.get(f"/v1/agents/{agent}")
            assert known.is_success, (name, known.text)
            before = known.json()["messages"]
            assert [m["role"] for m in before] == ["user", "assistant"], name
            after = go_on(client)
            if name != "response":  # which is an agent of its own
                assert after["agent"] == agent, name
            now = client.get(f"/v1/agents/{after['agent']}").json()["messages"]
            assert now[:2] == before and [m["role"] for m in now[2:]] == ["user", "assistant"], name
