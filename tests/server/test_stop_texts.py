"""Stop texts in all protocols: what a model thinks and calls has none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcellar.agents import Turn
from kvcellar.engine import SamplingParams
from tests.server.live import Live, serving
from tests.server.scripted import scripted_host
from tests.server.test_reasoning import TOOL, events

THOUGHT = "<think>\nEND is near.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "END.py"}}\n</tool_call>'
USER = {"role": "user", "content": "Well?"}
STOP = ["END", "\n\n"]


@pytest.fixture(scope="module", params=["a call", "text"])
def live(request, tmp_path_factory):
    said = CALL if request.param == "a call" else "I see the END of it."
    script = f"{THOUGHT}I look.\n{said}"
    folder = tmp_path_factory.mktemp("stops")
    with serving(folder, load=lambda *_: scripted_host(lambda _: script)) as server:
        server.calls = request.param == "a call"  # type: ignore[attr-defined]
        yield server


def chat(live: Live, is_streamed: bool) -> tuple[str, str, Any, str]:
    body = {"messages": [USER], "tools": [TOOL], "stop": STOP}
    if not is_streamed:
        (choice,) = live.post("/v1/chat/completions", body)["choices"]
        said = choice["message"]
        calls = [one["function"]["arguments"] for one in said.get("tool_calls", ())]
        return said["content"], said["reasoning_content"], calls, choice["finish_reason"]
    found = [one["choices"][0] for one in events(live, "/v1/chat/completions", body)]
    deltas = [one["delta"] for one in found]
    pieces = [one["function"]["arguments"] for d in deltas for one in d.get("tool_calls", ())]
    text, thought = (
        "".join(delta.get(key) or "" for delta in deltas)
        for key in ("content", "reasoning_content")
    )
    return text, thought, ["".join(pieces)] if pieces else [], found[-1]["finish_reason"]


def messages(live: Live, is_streamed: bool) -> tuple[str, str, Any, str]:
    tool = {"name": "read", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
    body = {"messages": [USER], "tools": [tool], "stop_sequences": STOP, "max_tokens": 200}
    if not is_streamed:
        answer = live.post("/v1/messages", body)
        blocks, reason = answer["content"], answer["stop_reason"]
        text = "".join(one.get("text", "") for one in blocks)
        thought = "".join(one.get("thinking", "") for one in blocks)
        calls = [json.dumps(one["input"]) for one in blocks if one["type"] == "tool_use"]
        return text, thought, calls, reason
    found = events(live, "/v1/messages", body)
    deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
    text, thought, pieces = (
        "".join(delta.get(key, "") for delta in deltas)
        for key in ("text", "thinking", "partial_json")
    )
    reasons = [one["delta"]["stop_reason"] for one in found if one["type"] == "message_delta"]
    return text, thought, [pieces] if pieces else [], reasons[-1]


def agents(live: Live, is_streamed: bool) -> tuple[str, str, Any, str]:
    made = live.post("/v1/agents", {"tools": [TOOL]})["id"]
    path, body = f"/v1/agents/{made}/generate", {"text": "Well?", "stop": STOP}
    end = events(live, path, body)[-1] if is_streamed else live.post(path, body)
    calls = [one["function"]["arguments"] for one in end.get("tool_calls", ())]
    return end["text"], end["reasoning_content"], calls, end["finish_reason"]


def ollama(live: Live, is_streamed: bool) -> tuple[str, str, Any, str]:
    body = {"messages": [USER], "tools": [TOOL], "options": {"stop": STOP}, "model": "scripted"}
    body = {**body, "model": live.get("/v1/models")["data"][0]["id"], "stream": is_streamed}
    lines = live.http.post("/api/chat", json=body).text.splitlines()
    said = [json.loads(line) for line in lines]
    parts = [one["message"] for one in said]
    text = "".join(one.get("content") or "" for one in parts)
    thought = "".join(one.get("thinking") or "" for one in parts)
    calls = [one["function"]["arguments"] for part in parts for one in part.get("tool_calls", ())]
    return text, thought, [json.dumps(one) for one in calls], said[-1]["done_reason"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("ask", [chat, messages, agents, ollama])
def test_a_stop_text_counts_in_the_text_and_in_no_thought_and_no_call(live, ask, is_streamed):
    text, thought, calls, reason = ask(live, is_streamed)
    assert thought == "END is near."
    if live.calls:
        assert text == "I look." and [json.loads(one) for one in calls] == [{"path": "END.py"}]
        assert reason in ("tool_calls", "tool_use", "stop") and reason != "stop_sequence"
    else:
        assert (text, calls) == ("I look.\nI see the ", [])
        assert reason in ("stop", "stop_sequence")


def test_a_turn_that_nobody_reads_apart_ends_at_no_stop_text_of_a_thought_or_a_call(live):
    made = live.post("/v1/agents", {"tools": [TOOL]})["id"]
    params = SamplingParams(max_tokens=200, stop=("END",))

    async def take() -> None:
        async for _ in live.service.agents.turns.generate(Turn(made, "Well?", params=params)):
            pass

    live.run(take())
    said = live.service.agents.directory.conversation(made)[-1]["content"]
    assert said == f"{THOUGHT}I look.\n{CALL if live.calls else 'I see the '}"


def test_where_no_tools_are_given_all_but_the_thought_is_text(live):
    body = {"messages": [USER], "stop": "END"}
    said = live.post("/v1/chat/completions", body)["choices"][0]["message"]
    assert said["content"].startswith("I look.\n") and "END" not in said["content"]
    assert "tool_calls" not in said and said["reasoning_content"] == "END is near."
