"""A conversation is counted, and summed up into an input that it goes on from."""

from __future__ import annotations

import openai
import pytest

from tests.server.live import PATIENCE_S, serving

LONG = "You are a careful assistant that reads Python. " * 6
TOOL = {
    "type": "function",
    "name": "read_file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}


@pytest.fixture
def client(live):
    with openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
    ) as found:
        yield found


def respond(client, **more):
    return client.responses.create(model="demo", max_output_tokens=8, temperature=0, **more)


def test_tokens_are_counted_as_the_response_reads_them(client):
    more = {"instructions": LONG, "tools": [TOOL]}
    first = respond(client, input="import os", **more)
    counted = client.responses.input_tokens.count(model="demo", input="import os", **more)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == first.usage.input_tokens
    more["previous_response_id"] = first.id
    second = respond(client, input="import re", **more)
    counted = client.responses.input_tokens.count(model="demo", input="import re", **more)
    assert counted.input_tokens == second.usage.input_tokens > first.usage.input_tokens


def test_tokens_of_a_conversation_are_counted_and_nothing_is_added_to_it(client):
    made = client.conversations.create(items=[{"role": "user", "content": "import os"}])
    counted = client.responses.input_tokens.count(
        model="demo", input="import re", conversation=made.id
    )
    client.post("/responses/compact", body={"input": "x", "conversation": made.id}, cast_to=object)
    items = client.conversations.items.list(made.id)
    assert len(items.data) == 1
    answer = respond(client, input="import re", conversation=made.id)
    assert answer.usage.input_tokens == counted.input_tokens


def test_a_conversation_is_summed_up_and_goes_on_from_the_summary(tmp_path):
    short = {"max_output_tokens": 8, "temperature": 0}
    user = {"role": "user", "content": "Go on."}
    with serving(tmp_path, max_tokens=12) as live:
        asked = {"input": "def add(a, b):", "instructions": LONG}
        first = live.post("/v1/responses", {**asked, **short})
        more = {"input": "And now?", "instructions": LONG, "previous_response_id": first["id"]}
        said = live.post("/v1/responses/compact", {"model": "demo", **more})
        assert said["object"] == "response.compaction" and said["usage"]["output_tokens"] > 0
        cached = said["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["input_tokens"]
        *kept, summary = said["output"]
        texts = [item["content"][0]["text"] for item in kept]
        assert texts == ["def add(a, b):", "And now?"]
        assert summary["type"] == "compaction" and summary["encrypted_content"]
        text = live.service.signer.opened(summary["encrypted_content"])
        assert "summed up" in text and len(text) > 40
        plain = {"role": "user", "content": text}
        n_read = [
            live.post("/v1/responses/input_tokens", {"input": [*kept, one, user]})["input_tokens"]
            for one in (summary, plain)
        ]
        later = {"input": [*said["output"], user], **short}
        assert live.post("/v1/responses", later)["usage"]["input_tokens"] == n_read[0] == n_read[1]
    with serving(tmp_path, max_tokens=12) as live:  # who has sealed it is known after a restart
        assert live.post("/v1/responses", later)["usage"]["input_tokens"] == n_read[0]


def test_openais_client_reads_a_summary(client):
    said = client.responses.compact(model="demo", input="x")
    assert said.object == "response.compaction" and said.output[-1].type == "compaction"


@pytest.mark.parametrize("route", ["/v1/responses/input_tokens", "/v1/responses/compact"])
def test_what_goes_on_from_nothing_here_is_refused(live, route):
    for body, status in (
        ({}, 400),
        ({"input": "x", "stream": True}, 400),
        ({"input": "x", "previous_response_id": "resp_1"}, 404),
        ({"input": "x", "conversation": "conv_1"}, 404),
    ):
        assert live.http.post(route, json=body).status_code == status, body


def test_an_agents_history_is_not_summed_up_behind_its_back(live):
    made = live.post("/v1/agents", {"system": "x"})["id"]
    body = {"input": "x", "agent_id": made}
    assert live.http.post("/v1/responses/compact", json=body).status_code == 400


def test_lm_studios_lists_say_what_is_loaded_and_how_long_it_may_be(tmp_path):
    with serving(tmp_path, offered={"demo": "demo", "other": "demo"}) as live:
        (model, other) = live.get("/api/v0/models")["data"]
        assert model["id"] == "demo" and model["object"] == "model" and model["type"] == "llm"
        assert model["max_context_length"] is None or model["max_context_length"] > 0
        live.post("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1})
        loaded = live.get("/api/v0/models/demo")
        assert loaded["state"] == "loaded"
        assert loaded["loaded_context_length"] == loaded["max_context_length"] == 4096
        assert loaded["arch"] and loaded["compatibility_type"] == "safetensors"
        assert other["id"] == "other"
        assert live.http.get("/api/v0/models/absent").status_code == 404
