"""Ollama's API by its own client: models, chats, prompts and calls, streamed and not."""

from __future__ import annotations

import functools
import json

import ollama
import pytest

import kvcellar
from kvcellar.server.answer.dialogue import Question
from kvcellar.server.answer.tools import ToolChoice
from kvcellar.server.routes.ollama import parsing
from tests.server.live import serving
from tests.server.scripted import scripted_host

OPTIONS = {"temperature": 0, "num_predict": 8, "num_ctx": 2048}
HELLO = [{"role": "user", "content": "def add(a, b):"}]

PARAMETERS = {"type": "object", "properties": {"at": {"enum": ["a"]}}, "required": ["at"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}


@pytest.fixture
def client(live):
    made = ollama.Client(live.url)
    yield made
    made._client.close()


def test_models_are_listed_and_described(client, live):
    client.generate("demo")  # it is in memory
    (listed,) = client.list().models
    assert listed.model == "demo" and listed.size > 0 and len(listed.digest) == 64
    shown = client.show("demo:latest")
    assert "completion" in shown.capabilities and "tools" in shown.capabilities
    arch = shown.modelinfo["general.architecture"]
    (context,) = {m["context_length"] for m in live.get("/v1/models")["data"]}
    assert shown.modelinfo[f"{arch}.context_length"] == context
    assert shown.modelinfo["general.parameter_count"] > 0
    (running,) = client.ps().models
    assert running.model == "demo" and running.context_length == context
    assert live.get("/api/version")["kvcellar"] == kvcellar.__version__


def test_a_model_is_described_the_same_before_it_is_loaded(tmp_path):
    context_of = {"context_of": lambda path: (4096, 4096)}
    with serving(tmp_path, models=context_of) as live:
        before = live.post("/api/show", {"model": "demo"})
        assert live.service.models.hosts() == []
        live.post("/api/generate", {"model": "demo", "stream": False})
        after = live.post("/api/show", {"model": "demo"})
    assert {**before, "parameters": after["parameters"]} == after


def test_a_chat_is_the_same_streamed_and_not(client, live):
    whole = client.chat("demo", HELLO, options=OPTIONS)
    pieces = list(client.chat("demo", HELLO, options=OPTIONS, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content != ""
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert whole.done_reason == pieces[-1].done_reason == "stop"
    assert whole.eval_count == pieces[-1].eval_count > 0
    chat = live.post("/v1/chat/completions", {"messages": HELLO, "temperature": 0, "max_tokens": 8})
    assert chat["choices"][0]["message"]["content"] == whole.message.content
    assert chat["usage"]["prompt_tokens"] == whole.prompt_eval_count


def test_an_answer_that_comes_back_continues_the_same_conversation(client, live):
    first = client.chat("demo", HELLO, options=OPTIONS)
    said = [*HELLO, first.message.model_dump(exclude_none=True)]
    said.append({"role": "user", "content": "go on"})
    body = {"model": "demo", "messages": said, "options": OPTIONS, "stream": False}
    second = live.post("/api/chat", body)["kvcellar"]
    assert second["cached_tokens"] >= first.prompt_eval_count and second["miss"] is None


def test_a_prompt_is_answered_through_the_template(client):
    asked = {"prompt": "def add(a, b):", "options": OPTIONS}
    whole = client.generate("demo", **asked)
    pieces = list(client.generate("demo", **asked, stream=True))
    chat = client.chat("demo", HELLO, options=OPTIONS)
    assert "".join(piece.response for piece in pieces) == whole.response == chat.message.content
    assert pieces[-1].done and pieces[-1].prompt_eval_count == whole.prompt_eval_count


def test_an_answer_may_be_held_to_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["n"],
        "additionalProperties": False,
    }
    said = client.chat("demo", HELLO, format=schema, options={**OPTIONS, "num_predict": 64})
    assert set(json.loads(said.message.content)) == {"n"}


def test_calls_have_objects_as_arguments_and_come_whole(client, live, monkeypatch):
    forced = functools.partial(Question, choice=ToolChoice("required"), is_parallel=False)
    monkeypatch.setattr(parsing, "Question", forced)
    asked = {"tools": [TOOL], "options": {**OPTIONS, "num_predict": 64}}
    whole = client.chat("demo", HELLO, **asked)
    pieces = list(client.chat("demo", HELLO, **asked, stream=True))
    (call,) = whole.message.tool_calls
    (streamed,) = [piece.message.tool_calls for piece in pieces if piece.message.tool_calls]
    assert call.function.name == "look" and call.function.arguments == {"at": "a"}
    assert streamed == [call] and whole.done_reason == pieces[-1].done_reason == "stop"


def test_a_body_is_json_whatever_its_type_is_called_as_curls_is(live):
    body = json.dumps({"model": "demo", "messages": HELLO, "stream": False, "options": OPTIONS})
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        response = live.http.post("/api/chat", content=body, headers={"content-type": kind})
        assert response.status_code == 200, response.text
    assert live.http.post("/api/chat", content=body).status_code == 200
    foreign = {"content-type": "text/plain", "origin": "http://elsewhere.example"}
    assert live.http.post("/api/chat", content=body, headers=foreign).status_code == 403
    assert live.http.post("/api/show", content="{").status_code == 400


def test_an_option_that_nobody_knows_is_said_to_be_ignored(live):
    options = {**OPTIONS, "quantum_mode": 1, "repeat_penalty": 1.1, "repeat_last_n": 64}
    body = {"model": "demo", "messages": HELLO, "options": options, "stream": False}
    response = live.http.post("/api/chat", json=body)
    assert response.headers["x-kvcellar-ignored"] == "quantum_mode"
    told = response.json()["kvcellar"]
    assert told["ignored"] == ["quantum_mode"] and "for the last 64" in told["notes"][0]


def test_calls_have_the_same_numbers_streamed_and_not(tmp_path):
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
    with serving(tmp_path, load=lambda *_: scripted_host(lambda _: f"{call}\n{call}")) as live:
        body = {"model": "demo", "messages": HELLO, "tools": [TOOL]}
        lines = live.http.post("/api/chat", json=body).text.splitlines()
        pieces = [json.loads(line)["message"].get("tool_calls", ()) for line in lines]
        whole = live.post("/api/chat", {**body, "stream": False})["message"]["tool_calls"]
    told = [one["function"] for calls in pieces for one in calls]
    assert told == [one["function"] for one in whole]
    assert [one["index"] for one in told] == [0, 1]


def test_a_call_that_comes_back_without_its_id_continues_the_same_conversation(live, monkeypatch):
    forced = functools.partial(Question, choice=ToolChoice("required"), is_parallel=False)
    monkeypatch.setattr(parsing, "Question", forced)
    asked = {"model": "demo", "tools": [TOOL], "options": {**OPTIONS, "num_predict": 64}}
    first = live.post("/api/chat", {**asked, "messages": HELLO, "stream": False})
    (call,) = first["message"]["tool_calls"]
    assert call.pop("id")
    said = [*HELLO, first["message"], {"role": "tool", "tool_name": "look", "content": "nothing"}]
    second = live.post("/api/chat", {**asked, "messages": said, "stream": False})
    assert second["kvcellar"]["cached_tokens"] >= first["prompt_eval_count"]
    assert second["kvcellar"]["agent_id"] == first["kvcellar"]["agent_id"]


def test_log_probabilities_are_those_of_a_chat(client):
    said = client.chat("demo", HELLO, options=OPTIONS, logprobs=True, top_logprobs=2)
    streamed = client.chat("demo", HELLO, options=OPTIONS, logprobs=True, stream=True)
    found = [one for piece in streamed for one in piece.logprobs or ()]
    assert [one.token for one in said.logprobs] == [one.token for one in found]
    assert said.logprobs and all(len(one.top_logprobs) == 2 for one in said.logprobs)


def test_nothing_to_answer_loads_a_model(client):
    assert client.generate("demo").done_reason == "load"
    assert client.chat("demo").done_reason == "load"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"model": "other"}, "other"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(live, body, word):
    response = live.http.post("/api/generate", json={"model": "demo", "prompt": "x", **body})
    assert response.status_code in (400, 404) and word in response.json()["error"]


def test_the_models_of_a_server_are_not_changed_by_clients(client):
    assert client.pull("demo").status == "success"
    for refused in (
        lambda: client.pull("other"),
        lambda: client.delete("demo"),
        lambda: client.copy("demo", "mine"),
    ):
        with pytest.raises(ollama.ResponseError, match="served"):
            refused()


def test_settings_of_ollamas_own_process_are_let_pass_and_unknown_ones_are_named(live):
    options = {**OPTIONS, "num_gpu": 99, "brand_new": 1}
    body = {"model": "demo", "messages": HELLO, "options": options, "keep_alive": "5m"}
    response = live.http.post("/api/chat", json={**body, "stream": False})
    assert response.is_success and response.headers["x-kvcellar-ignored"] == "brand_new"


def test_reasoning_is_apart_from_the_answer(client, live, monkeypatch):
    host = live.host()
    template = f"{host.tokenizer.chat_template}<think>"
    monkeypatch.setattr(host.tokenizer, "chat_template", template)
    assert "thinking" in client.show("demo").capabilities
    whole = client.chat("demo", HELLO, options=OPTIONS).message
    pieces = [one.message for one in client.chat("demo", HELLO, options=OPTIONS, stream=True)]
    assert whole.thinking and "".join(one.thinking or "" for one in pieces) == whole.thinking
    assert "".join(one.content or "" for one in pieces) == whole.content
