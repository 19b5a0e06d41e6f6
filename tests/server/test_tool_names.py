"""A tool may be called whatever its client likes: the model has a name for it that it can write."""

from __future__ import annotations

import json

import pytest

from kvcellar.server.answer.tools import plain_name

ODD = ["mcp server/read file", "読む", "a" * 300, "files…open?", '"quoted"\n</tool_call>', "x{y}"]
SCHEMA = {
    "type": "object",
    "properties": {"path": {"enum": ["a.py", "b.py"]}},
    "required": ["path"],
    "additionalProperties": False,
}
ASKED = "Look at a.py, please."
MORE = {"max_tokens": 250, "temperature": 0}


def chat(live, name, is_streamed):
    function = {"name": name, "parameters": SCHEMA}
    messages = [{"role": "user", "content": ASKED}]
    body = {
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": name}},
        **MORE,
    }
    if is_streamed:
        deltas = [one["choices"][0]["delta"] for one in events(live, "/v1/chat/completions", body)]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        function = calls[0]["function"] | {
            "arguments": "".join(call["function"].get("arguments", "") for call in calls)
        }
        call = {**calls[0], "function": function}
    else:
        (call,) = live.post("/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": "import re"}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    again = live.post(
        "/v1/chat/completions",
        {**body, "messages": [*messages, said, result], "tool_choice": "none"},
    )
    return call["function"]["name"], json.loads(call["function"]["arguments"]), again


def messages(live, name, is_streamed):
    body = {
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [{"name": name, "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": name},
        **MORE,
    }
    if not is_streamed:
        (block,) = live.post("/v1/messages", body)["content"]
        return block["name"], block["input"], None
    said = events(live, "/v1/messages", body)
    (block,) = [one["content_block"] for one in said if one["type"] == "content_block_start"]
    pieces = [one["delta"]["partial_json"] for one in said if one["type"] == "content_block_delta"]
    return block["name"], json.loads("".join(pieces)), None


def responses(live, name, is_streamed):
    body = {
        "input": ASKED,
        "tools": [{"type": "function", "name": name, "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": name},
        "max_output_tokens": 250,
        "temperature": 0,
    }
    answer = live.post("/v1/responses", body) if not is_streamed else None
    if is_streamed:
        said = events(live, "/v1/responses", body)
        answer = said[-1]["response"]
        done = [one["item"] for one in said if one["type"] == "response.output_item.done"]
        assert done == answer["output"]
    (item,) = answer["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "import re"}
    again = {"input": [result], "previous_response_id": answer["id"], "max_output_tokens": 2}
    return item["name"], json.loads(item["arguments"]), live.post("/v1/responses", again)


def ollamas(live, name, is_streamed):
    function = {"name": name, "description": "Read.", "parameters": SCHEMA}
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [{"type": "function", "function": function}],
        "stream": is_streamed,
        "options": {"num_predict": 2},
    }
    response = live.http.post("/api/chat", json=body)
    assert response.status_code == 200, response.text
    return name, {"path": "a.py"}, None


def events(live, route, body):
    text = live.http.post(route, json={**body, "stream": True}).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [one for one in map(json.loads, lines) if "choices" not in one or one["choices"]]


@pytest.mark.parametrize("ask", [chat, messages, responses, ollamas])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_an_odd_name_of_a_tool_comes_back_as_it_was_sent(live, ask, is_streamed, name):
    called, arguments, again = ask(live, name, is_streamed)
    assert called == name and arguments["path"] in ("a.py", "b.py")
    details = [one for one in (again or {}).get("usage", {}).items() if "details" in one[0]]
    if ask is chat:  # the call is read again as it was written
        assert dict(details)["prompt_tokens_details"]["cached_tokens"] > 20


def test_a_name_that_every_dialect_can_write_is_left_as_it_is():
    assert plain_name("mcp__server__read.file:v2") == "mcp__server__read.file:v2"
    assert plain_name("a b") != plain_name("a_b") and plain_name("a b") != plain_name("a/b")
    assert all(len(plain_name(name)) <= 128 for name in ODD)
