"""Half an emoji, as clients send it that cut texts by UTF-16: in any text of any request."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvcellar.agents import Turn
from kvcellar.engine import SamplingParams, encode_chat

BAD = r"a \ud83d b"
"""In JSON; no UTF-8 can hold it."""

TOOL = {
    "type": "object",
    "properties": {BAD: {"description": BAD, "enum": [BAD, "x"]}},
    "description": BAD,
}
CALL = {"id": BAD, "type": "function", "function": {"name": "f", "arguments": {BAD: [BAD]}}}
CHAT = {
    "messages": [
        {"role": "system", "content": BAD},
        {"role": "user", "content": [{"type": "text", "text": BAD}], "name": BAD},
        {"role": "assistant", "content": BAD, "tool_calls": [CALL]},
        {"role": "tool", "content": BAD, "tool_call_id": BAD},
        {"role": "user", "content": BAD},
    ],
    "max_tokens": 3,
    "stop": [BAD],
    "user": BAD,
    "metadata": {BAD: BAD},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL}}],
}
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": BAD}]},
        {"type": "function_call", "call_id": BAD, "name": "f", "arguments": json.dumps({"x": 1})},
        {"type": "function_call_output", "call_id": BAD, "output": BAD},
        {"role": "user", "content": BAD},
    ],
    "instructions": BAD,
    "metadata": {BAD: BAD},
    "max_output_tokens": 3,
    "tools": [{"type": "function", "name": "f", "description": BAD, "parameters": TOOL}],
}
ANTHROPIC = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": BAD}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": BAD, "name": "f", "input": {BAD: BAD}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": BAD, "content": BAD}],
        },
    ],
    "system": [{"type": "text", "text": BAD}],
    "tools": [{"name": "f", "description": BAD, "input_schema": TOOL}],
}
REQUESTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": [BAD, BAD], "max_tokens": 3, "echo": True},
    "/v1/responses": RESPONSE,
    "/v1/messages": {**ANTHROPIC, "max_tokens": 3, "stop_sequences": [BAD]},
    "/v1/messages/count_tokens": ANTHROPIC,
    "/v1/agents": {"system": BAD, "tools": CHAT["tools"]},
}


def as_sent(body: object) -> str:
    return json.dumps(body).replace(r"\\ud83d", r"\ud83d")


def post(live, path, body):
    return live.http.post(path, content=as_sent(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", REQUESTS)
def test_half_a_pair_anywhere_in_a_request_is_read_as_a_replacement_character(live, path):
    response = post(live, path, REQUESTS[path])
    assert response.is_success, response.text
    assert r"\ud83d" not in response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_it_is_the_same_in_a_stream(live, path):
    response = post(live, path, {**REQUESTS[path], "stream": True})
    assert response.is_success and '"error":{' not in response.text, response.text


def test_an_echo_and_a_stored_history_have_the_replacement_character(live):
    echoed = post(live, "/v1/completions", REQUESTS["/v1/completions"]).json()
    assert echoed["choices"][0]["text"].startswith("a \ufffd b")
    made = post(live, "/v1/agents", {"system": BAD}).json()
    said = post(live, f"/v1/agents/{made['id']}/generate", {"text": BAD, "max_tokens": 2})
    assert said.is_success, said.text
    messages = live.get(f"/v1/agents/{made['id']}")["messages"]
    assert [m["content"] for m in messages[:2]] == ["a \ufffd b", "a \ufffd b"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": BAD, "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/chat/completions", {"agent_id": BAD, "messages": CHAT["messages"][:1]}),
        ("/v1/responses", {"input": "x", "previous_response_id": BAD}),
        ("/v1/messages", {"model": BAD, "messages": ANTHROPIC["messages"], "max_tokens": 1}),
        ("/v1/agents", {"id": BAD}),
        ("/v1/agents/somebody/fork", {"id": BAD}),
    ],
)
def test_a_name_that_no_unicode_has_is_refused_in_words(live, path, body):
    response = post(live, path, body)
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"]["message"]


def test_the_library_reads_half_a_pair_as_the_server_does(live):
    host = live.host()
    half = "a \ud83d b"
    tokens = encode_chat(host.tokenizer, [{"role": "user", "content": half}])
    assert tokens == encode_chat(host.tokenizer, [{"role": "user", "content": "a \ufffd b"}])

    async def turn():
        made = await live.service.agents.lifecycle.create(system=half)
        params = SamplingParams(max_tokens=2)
        async for _ in live.service.agents.turns.generate(Turn(made.agent_id, half, params=params)):
            pass
        return live.service.agents.directory.conversation(made.agent_id)

    messages = live.run(asyncio.wait_for(turn(), 180))
    assert [m["content"] for m in messages[:2]] == ["a \ufffd b", "a \ufffd b"]
