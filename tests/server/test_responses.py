"""OpenAI's client and its responses: each one is a place to go on from."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.live import PATIENCE_S, serving

TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


def client_of(live):
    return openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
    )


@pytest.fixture
def client(live):
    with client_of(live) as found:
        yield found


def ask(client, text, **more):
    more.setdefault("max_output_tokens", 8)
    more.setdefault("temperature", 0)
    return client.responses.create(model="demo", input=text, **more)


def test_a_branch_reads_nothing_again(client):
    trunk = ask(client, "The trunk of a conversation. " * 10)
    n = trunk.usage.input_tokens + trunk.usage.output_tokens
    for text in ("Left?", "Right?", "Straight on?"):
        branch = ask(client, text, previous_response_id=trunk.id)
        cached = branch.usage.input_tokens_details.cached_tokens
        # At least the history: what the template writes next, siblings have computed.
        assert n - 1 <= cached <= n + 8
        assert branch.previous_response_id == trunk.id
    deeper = ask(client, "Further.", previous_response_id=branch.id)
    n = branch.usage.input_tokens + branch.usage.output_tokens
    assert deeper.usage.input_tokens_details.cached_tokens >= n - 1
    assert len(client.responses.input_items.list(deeper.id).data) == 5


def test_a_stream_builds_the_same_response(client):
    more = {"max_output_tokens": 60, "extra_body": {"stop": ["n", "t", "s"]}}
    whole = ask(client, "import json", **more)
    assert whole.status == "completed" and whole.output_text
    with client.responses.stream(
        model="demo", input="import json", temperature=0, **more
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert client.responses.retrieve(final.id).output_text == whole.output_text


def test_a_call_and_its_result_go_on(client):
    more = {"tools": [TOOL], "max_output_tokens": 60}
    named = {"type": "function", "name": "add"}
    first = ask(client, "Add one.", tool_choice=named, **more)
    (call,) = first.output
    assert call.type == "function_call" and json.loads(call.arguments)["a"] in (1, 2)
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
    more["tool_choice"] = "none"
    second = ask(client, result, previous_response_id=first.id, **more)
    n = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens == n - 1
    assert second.output_text


def test_a_call_streams_its_arguments(client):
    with client.responses.stream(
        model="demo",
        input="Add.",
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=60,
    ) as stream:
        pieces = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output[0].arguments


class Verdict(BaseModel):
    verdict: Literal["yes", "no"]


def test_an_answer_follows_a_schema(client):
    found = client.responses.parse(
        model="demo", input="Is it?", text_format=Verdict, max_output_tokens=40
    )
    assert found.output_parsed.verdict in ("yes", "no")


def test_instructions_hold_for_one_response_and_are_kept_where_they_come_again(client):
    more = {"instructions": "Be brief. " * 20}
    first = ask(client, "One?", **more)
    same = ask(client, "Two?", previous_response_id=first.id, **more)
    n = first.usage.input_tokens + first.usage.output_tokens
    assert same.usage.input_tokens_details.cached_tokens == n - 1
    without = ask(client, "Two?", previous_response_id=first.id)
    assert without.usage.input_tokens < n, "the instructions were those of the first alone"


def test_what_is_not_stored_cannot_be_gone_on_from(client):
    loose = ask(client, "Loose.", store=False)
    with pytest.raises(openai.NotFoundError, match="is not stored here"):
        ask(client, "More?", previous_response_id=loose.id)
    kept = ask(client, "Kept.")
    child = ask(client, "Child.", previous_response_id=kept.id)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    assert ask(client, "Grandchild.", previous_response_id=child.id).output_text
    with pytest.raises(openai.NotFoundError):
        ask(client, "x", previous_response_id="../../etc/passwd")


def test_a_response_is_there_after_a_restart(tmp_path):
    with serving(tmp_path) as live, client_of(live) as client:
        first = ask(client, "Before the restart. " * 40, max_output_tokens=20)
        second = ask(client, "And more.", previous_response_id=first.id)
    with serving(tmp_path) as live, client_of(live) as client:
        branch = ask(client, "After it.", previous_response_id=first.id)
        deeper = ask(client, "After it.", previous_response_id=second.id)
        for before, after in ((first, branch), (second, deeper)):
            history = before.usage.input_tokens + before.usage.output_tokens
            shared = after.usage.input_tokens - history
            assert 0 < shared < 40, "the history's own tokens are gone on from"
