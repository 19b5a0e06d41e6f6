"""Anthropic's own client against the server."""

from __future__ import annotations

import asyncio
import json

import anthropic
import pytest

from tests.server.live import PATIENCE_S

TOOL = {
    "name": "read_file",
    "description": "Read a file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"enum": ["a.py", "b.py"]}},
        "required": ["path"],
        "additionalProperties": False,
    },
}
LONG = "You are a careful assistant that reads Python. " * 12


@pytest.fixture
def client(live):
    with anthropic.Anthropic(
        base_url=live.url, api_key="none", timeout=PATIENCE_S, max_retries=0
    ) as found:
        yield found


def ask(client, messages, **more):
    more.setdefault("max_tokens", 10)
    more["extra_body"] = {"temperature": 0, **more.get("extra_body", {})}
    return client.messages.create(model="demo", messages=messages, **more)


def said(text, role="user"):
    return {"role": role, "content": text}


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_events_of_a_stream_come_in_their_order(client):
    messages = [said("import re")]
    whole = ask(client, messages)
    with client.messages.stream(
        model="demo", messages=messages, max_tokens=10, extra_body={"temperature": 0}
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in events if event.type not in ("text", "input_json")]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_counted_tokens_are_those_that_are_used(client):
    messages = [said("Count me. " * 9)]
    more = {"system": LONG, "tools": [TOOL]}
    counted = client.messages.count_tokens(model="demo", messages=messages, **more).input_tokens
    answer = ask(client, messages, tool_choice={"type": "none"}, **more)
    assert prompt_tokens(answer.usage) == counted > 100


def test_a_tool_is_used_and_its_result_answered_from_the_cache(client):
    messages = [said("Look at a.py, please.")]
    more = {"system": LONG, "tools": [TOOL], "max_tokens": 60}
    one = {"type": "tool", "name": "read_file"}
    first = ask(client, messages, tool_choice=one, **more)
    assert first.stop_reason == "tool_use"
    (block,) = first.content
    assert block.name == "read_file" and block.input["path"] in ("a.py", "b.py")
    messages.append({"role": "assistant", "content": [b.model_dump() for b in first.content]})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "x = 1"}
    messages.append({"role": "user", "content": [result]})
    second = ask(client, messages, tool_choice={"type": "none"}, **more)
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first.usage)
    assert second.stop_reason in ("end_turn", "max_tokens")


def test_a_tool_streams_its_input(client):
    with client.messages.stream(
        model="demo",
        messages=[said("b.py")],
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=60,
    ) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    (block,) = final.content
    assert json.loads("".join(pieces)) == block.input
    assert final.stop_reason == "tool_use"


def test_a_header_that_changes_costs_nothing(client):
    def system(n):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.{n};"}
        return [header, {"type": "text", "text": LONG}]

    messages = [said("First question about headers?")]
    first = ask(client, messages, system=system(1))
    messages += [said(first.content[0].text, "assistant"), said("Second?")]
    second = ask(client, messages, system=system(2))
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first.usage)


def test_cache_control_keeps_a_prefix_for_its_time(client, live):
    pins = live.service.pins
    live.run(pins.sweep())  # what other tests have pinned may be over by now
    before = len(pins)
    system = [{"type": "text", "text": "Pinned. " * 40, "cache_control": {"type": "ephemeral"}}]
    first = ask(client, [said("A question about pins.")], system=system)
    usage = first.usage
    assert usage.cache_creation_input_tokens > 40 and usage.input_tokens > 0
    assert len(pins) == before + 1
    locked = live.engine().protected_tokens
    assert locked >= usage.cache_creation_input_tokens
    again = ask(client, [said("Another about pins.")], system=system).usage
    assert again.cache_creation_input_tokens == 0
    assert again.cache_read_input_tokens >= usage.cache_creation_input_tokens
    assert len(pins) == before + 1, "the same prefix is one pin"
    system[0]["cache_control"]["ttl"] = "1h"
    ask(client, [said("Third.")], system=system)
    now, pins._clock = pins._clock, lambda: now() + 600
    try:
        live.run(pins.sweep())
        assert len(pins) >= 1, "an hour has not passed"
        pins._clock = lambda: now() + 4000
        live.run(pins.sweep())
    finally:
        pins._clock = now
    assert len(pins) == 0 and live.engine().protected_tokens == 0


def test_a_stop_sequence_is_named(client):
    text = ask(client, [said("import sys")], max_tokens=30).content[0].text
    stop = text[5:8]
    cut = ask(client, [said("import sys")], max_tokens=30, stop_sequences=[stop])
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == stop
    assert cut.content[0].text == text[: text.index(stop)]


def test_an_answer_follows_a_schema(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(client, [said("ok?")], output_config=wanted, max_tokens=40)
    assert list(json.loads(answer.content[0].text)) == ["ok"]


def test_errors_are_those_of_the_protocol(client):
    with pytest.raises(anthropic.NotFoundError, match="is not served") as caught:
        client.messages.create(model="no", max_tokens=1, messages=[said("x")])
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert caught.value.body["request_id"] == caught.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.BadRequestError, match="type 'tool_use'"):
        ask(client, [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}])
    with pytest.raises(anthropic.BadRequestError, match="an input_schema"):
        ask(client, [said("x")], tools=[{"name": "look"}])


def test_the_asynchronous_client_streams(live):
    async def talk():
        async with anthropic.AsyncAnthropic(
            base_url=live.url, api_key="none", timeout=PATIENCE_S, max_retries=0
        ) as client:
            async with client.messages.stream(
                model="demo",
                messages=[said("async def f():")],
                max_tokens=8,
                extra_body={"temperature": 0},
            ) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            whole = await ask(client, [said("async def f():")], max_tokens=8)
            models = await client.models.list()
            return text, whole.content[0].text, [model.id for model in models.data]

    text, whole, models = asyncio.run(talk())
    assert text == whole and models == ["demo"]
