"""An answer that ends other than by its own end says so, in every protocol, whole and streamed."""

from __future__ import annotations

import json

import pytest

from kvcellar.errors import ModelError
from tests.server.live import load_demo, serving

SAID = {"role": "user", "content": "The weather?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 60, "maxLength": 90}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
CALLED = {
    "/v1/chat/completions": {
        "messages": [SAID],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
    },
    "/v1/responses": {
        "input": "The weather?",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
    },
    "/v1/messages": {
        "messages": [SAID],
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}
SPOKEN = {
    "/v1/chat/completions": {"messages": [SAID]},
    "/v1/completions": {"prompt": "import"},
    "/v1/responses": {"input": "The weather?"},
    "/v1/messages": {"messages": [SAID]},
}
LIMIT = {"/v1/responses": "max_output_tokens"}


def asked(path, body, n_tokens, **more):
    return {**body, LIMIT.get(path, "max_tokens"): n_tokens, "temperature": 0, **more}


def streamed(live, path, body):
    """The events of a stream, without their pings."""
    text = live.http.post(path, json={**body, "stream": True}).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# In the middle of a call -------------------------------------------------------------------------


def test_a_call_that_is_cut_off_is_incomplete_in_responses(live):
    body = asked("/v1/responses", CALLED["/v1/responses"], 30)
    whole = live.post("/v1/responses", body)
    events = streamed(live, "/v1/responses", body)
    assert events[-1]["type"] == "response.incomplete"
    for response in (whole, events[-1]["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        (item,) = response["output"]
        assert item["status"] == "incomplete" and not is_json(item["arguments"])
    kinds = [event["type"] for event in events]
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" not in kinds
    done = next(e for e in events if e["type"] == "response.output_item.done")
    assert done["item"]["status"] == "incomplete"


def test_a_call_that_is_cut_off_ends_by_length_in_chat(live):
    body = asked("/v1/chat/completions", CALLED["/v1/chat/completions"], 30)
    (choice,) = live.post("/v1/chat/completions", body)["choices"]
    chunks = streamed(live, "/v1/chat/completions", body)
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] and not is_json(call["function"]["arguments"])


def test_a_call_that_is_cut_off_ends_by_max_tokens_in_messages_with_what_came_of_its_input(live):
    body = asked("/v1/messages", CALLED["/v1/messages"], 40)
    whole = live.post("/v1/messages", body)
    events = streamed(live, "/v1/messages", body)
    assert whole["stop_reason"] == "max_tokens"
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    pieces = "".join(
        event["delta"]["partial_json"]
        for event in events
        if event["type"] == "content_block_delta" and "partial_json" in event["delta"]
    )
    assert not is_json(pieces)
    (block,) = whole["content"]
    assert block["input"]["city"] and block["input"]["city"] in json.loads(pieces + '"}')["city"]


def test_a_stop_text_inside_a_call_does_not_end_it(live):
    path, stop = "/v1/chat/completions", '"city"'
    (choice,) = live.post(path, asked(path, CALLED[path], 60, stop=stop))["choices"]
    assert choice["finish_reason"] in ("length", "tool_calls")
    assert stop in choice["message"]["tool_calls"][0]["function"]["arguments"]
    path = "/v1/messages"
    answer = live.post(path, asked(path, CALLED[path], 60, stop_sequences=[stop]))
    assert answer["stop_reason"] in ("max_tokens", "tool_use") and answer["stop_sequence"] is None
    path = "/v1/responses"
    (item,) = live.post(path, asked(path, CALLED[path], 60, stop=stop))["output"]
    assert stop in item["arguments"]


# By room -----------------------------------------------------------------------------------------


def reasons(live, path, body):
    """How an answer and its stream say that they ended."""
    whole, events = live.post(path, body), streamed(live, path, body)
    if path == "/v1/messages":
        return whole["stop_reason"], events[-2]["delta"]["stop_reason"]
    if path == "/v1/responses":
        last = events[-1]["response"]
        assert events[-1]["type"] == f"response.{last['status']}"
        for response in (whole, last):
            assert [item["status"] for item in response["output"]] == [response["status"]]
        return whole["status"], last["status"]
    return whole["choices"][0]["finish_reason"], events[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("path", SPOKEN)
def test_text_that_is_cut_off_says_so(live, path):
    wanted = {"/v1/responses": "incomplete", "/v1/messages": "max_tokens"}.get(path, "length")
    assert reasons(live, path, asked(path, SPOKEN[path], 3)) == (wanted, wanted)


@pytest.fixture(scope="module")
def cramped(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("cramped"), load=load_demo(64)) as live:
        yield live


@pytest.mark.parametrize("path", SPOKEN)
@pytest.mark.slow
def test_an_answer_that_fills_the_context_says_so(cramped, path):
    words = {
        "/v1/responses": "incomplete",
        "/v1/messages": "model_context_window_exceeded",
    }
    wanted = words.get(path, "length")
    endless = {"type": "json_schema", "schema": {"type": "string", "minLength": 400}}
    more = {"output_format": endless} if path == "/v1/messages" else {"ignore_eos": True}
    body = asked(path, SPOKEN[path], 500, **more)
    assert reasons(cramped, path, body) == (wanted, wanted)
    if path != "/v1/completions":
        assert cramped.post(path, body)["kvcellar"]["finish_cause"] == "cache_full"


@pytest.mark.slow
def test_what_was_held_back_for_a_stop_text_comes_where_the_room_ends(cramped):
    path = "/v1/chat/completions"
    body = asked(path, SPOKEN[path], 500, ignore_eos=True)
    text = cramped.post(path, body)["choices"][0]["message"]["content"]
    body["stop"] = text[-8:] + "and this never comes"
    (choice,) = cramped.post(path, body)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "length")
    chunks = streamed(cramped, path, body)
    assert text == "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    body = {"prompt": "import", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
    text = cramped.post("/v1/completions", body)["choices"][0]["text"]
    body["stop"] = text[-8:] + "and this never comes"
    assert cramped.post("/v1/completions", body)["choices"][0]["text"] == text
    chunks = streamed(cramped, "/v1/completions", body)
    assert text == "".join(chunk["choices"][0]["text"] for chunk in chunks)


# By an error -------------------------------------------------------------------------------------


@pytest.fixture
def failing(live, monkeypatch):
    """The model computes nothing any more, some steps into the answer."""
    live.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    host = live.host()
    forward, left = host.engine.runner.forward, [6]

    def fail(*given):
        left[0] -= 1
        if left[0] < 0:
            host.engine.cache.cancel_step()
            raise ModelError("the model has had enough")
        return forward(*given)

    monkeypatch.setattr(host.engine.runner, "forward", fail)
    return live


@pytest.mark.parametrize("path", SPOKEN)
def test_an_error_in_the_middle_of_a_stream_is_its_end(failing, path):
    events = streamed(failing, path, asked(path, SPOKEN[path], 400))
    said = "the model has had enough"
    if path == "/v1/responses":
        *_, item, last = events
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert said in last["response"]["error"]["message"]
        assert item["type"] == "response.output_item.done"
        assert item["item"]["status"] == "incomplete"
    else:
        assert len(events) > 2 and said in events[-1]["error"]["message"]


@pytest.mark.parametrize("path", SPOKEN)
def test_an_error_is_a_status_where_nothing_was_said_yet(failing, path):
    response = failing.http.post(path, json=asked(path, SPOKEN[path], 400))
    assert response.status_code == 400 and "had enough" in response.json()["error"]["message"]
