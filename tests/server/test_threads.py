"""Threads of Anthropic's messages: clients send what is new, and the model reads all of it."""

from __future__ import annotations

import json

import anthropic
import pytest
from anthropic import beta_tool

from tests.server.live import PATIENCE_S, serving
from tests.server.test_anthropic import LONG, TOOL, prompt_tokens, said

CREATE = {"type": "create"}


def behind(message_id):
    return {"type": "continue", "previous_message_id": message_id}


def client_of(live):
    return anthropic.Anthropic(base_url=live.url, api_key="none", timeout=PATIENCE_S, max_retries=0)


@pytest.fixture
def client(live):
    with client_of(live) as found:
        yield found


def body_of(messages, thread, **more):
    return {"max_tokens": 8, "temperature": 0, "messages": messages, "thread": thread, **more}


def ask(live, messages, thread, **more):
    """The answer, whole or put together of its events."""
    body = body_of(messages, thread, **more)
    if not body.get("stream"):
        return live.post("/v1/messages", body)
    text = live.http.post("/v1/messages", json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    answer = events[0]["message"]
    texts = [e["delta"]["text"] for e in events if e.get("delta", {}).get("type") == "text_delta"]
    (end,) = (event for event in events if event["type"] == "message_delta")
    assert events[-1]["type"] == "message_stop", events
    answer |= {
        "content": [{"type": "text", "text": "".join(texts), "citations": None}],
        "usage": end["usage"],
    }
    return answer


def n_read(answer):
    usage = answer["usage"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[name] for name in names)


def refusal(live, body, path="/v1/messages"):
    response = live.http.post(path, json=body)
    error = response.json()["error"]
    return response.status_code, error["type"], error.get("details", {}).get("error_code"), error


# What is read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_thread_reads_what_the_whole_conversation_would(live, is_streamed):
    more = {"system": LONG, "tools": [TOOL], "tool_choice": {"type": "none"}}
    new = {"tool_choice": {"type": "none"}, "stream": is_streamed}
    one = [said("Say a line about rain.")]
    first = ask(live, one, CREATE, **more, stream=is_streamed)
    two = [said("And one about snow.")]
    second = ask(live, two, behind(first["id"]), **new)
    three = [said("And one about hail.")]
    third = ask(live, three, behind(second["id"]), **new)
    whole = [*one, answered(first), *two, answered(second), *three]
    counted = live.post("/v1/messages/count_tokens", {"messages": whole, **more})
    assert n_read(third) == counted["input_tokens"]
    plain = live.post(
        "/v1/messages", {"max_tokens": 8, "temperature": 0, "messages": whole, **more}
    )
    assert plain["content"] == third["content"]
    assert third["usage"]["cache_read_input_tokens"] > n_read(second)  # warm, answer and all


def answered(answer):
    return {"role": "assistant", "content": answer["content"]}


def test_any_earlier_answer_is_gone_on_from_as_a_fork(live):
    first = ask(live, [said("A line about rain.")], CREATE)
    second = ask(live, [said("Another.")], behind(first["id"]))
    forks = [ask(live, [said("Snow, please.")], behind(first["id"])) for _ in range(2)]
    later = ask(live, [said("Snow, please.")], behind(second["id"]))
    assert forks[0]["content"] == forks[1]["content"]
    assert n_read(forks[0]) == n_read(forks[1]) < n_read(later)
    assert forks[0]["usage"]["cache_read_input_tokens"] >= n_read(first)


def test_tokens_of_a_thread_are_counted_with_its_history(live):
    more = {"system": LONG, "tools": [TOOL]}
    first = ask(live, [said("A line about rain.")], CREATE, **more, tool_choice={"type": "none"})
    new = [said("Another.")]
    body = {"messages": new, "thread": behind(first["id"])}
    counted = live.post("/v1/messages/count_tokens", body)
    second = ask(live, new, behind(first["id"]), tool_choice={"type": "none"})
    assert counted["input_tokens"] == n_read(second)


def test_an_answer_that_was_cut_is_gone_on_with_by_no_new_message(live):
    first = ask(live, [said("import os\nimport re")], CREATE, max_tokens=3)
    assert first["stop_reason"] == "max_tokens"
    rest = ask(live, [], behind(first["id"]), max_tokens=3)
    third = ask(live, [said("Go on.")], behind(rest["id"]))
    text = first["content"][0]["text"] + rest["content"][0]["text"]
    whole = [said("import os\nimport re"), said(text, "assistant"), said("Go on.")]
    counted = live.post("/v1/messages/count_tokens", {"messages": whole})
    assert n_read(third) == counted["input_tokens"]


def test_a_thread_goes_on_after_a_restart(tmp_path):
    one, two = [said("A line about rain.")], [said("Another.")]
    with serving(tmp_path) as live:
        first = ask(live, one, CREATE, system=LONG)
        streamed = ask(live, one, CREATE, system=LONG, stream=True)
        before = ask(live, two, behind(first["id"]))
    with serving(tmp_path) as live:
        again = ask(live, two, behind(first["id"]))
        also = ask(live, two, behind(streamed["id"]))
        assert again["content"] == also["content"] == before["content"]
        assert n_read(again) == n_read(also) == n_read(before)
        assert again["usage"]["cache_read_input_tokens"] > 0


def test_a_thread_of_a_named_agent_has_the_agents_history(tmp_path):
    with serving(tmp_path) as live:
        live.post("/v1/agents", {"id": "poet", "system": LONG})
        named = {"agent_id": "poet"}
        ask(live, [said("A line about rain.")], None, **named)
        second = ask(live, [said("Another.")], CREATE, **named)
        third = ask(live, [said("And a third.")], behind(second["id"]))
        fourth = ask(live, [said("And a third.")], behind(second["id"]), **named)
        assert n_read(third) == n_read(fourth) > n_read(second)
        assert third["kvcellar"]["agent_id"] != "poet" == fourth["kvcellar"]["agent_id"]
        assert "notice" not in fourth["kvcellar"]


def test_strangers_do_not_go_on_with_a_thread(live):
    first = ask(live, [said("A secret.")], CREATE, cache_salt="mine")
    body = body_of([said("Tell it.")], behind(first["id"]))
    assert refusal(live, body)[2] == "thread_not_found"
    assert refusal(live, {**body, "cache_salt": "yours"})[2] == "thread_not_found"
    live.post("/v1/messages", {**body, "cache_salt": "mine"})


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_thread_that_is_not_here_is_not_found(live, path):
    outside = live.post("/v1/messages", {"max_tokens": 2, "messages": [said("x")]})["id"]
    response = live.post("/v1/responses", {"input": "x", "max_output_tokens": 2})["id"]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "42"}
    for unknown in (outside, response, "msg_" + 32 * "0", "msg_01XFDUDYJgAACzvnptvVoYEL"):
        body = body_of([said([result])], behind(unknown))
        status, kind, code, error = refusal(live, body, path)
        assert (status, kind, code) == (404, "not_found_error", "thread_not_found")
        assert unknown in error["message"] and "create" in error["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "thread",
    [
        {"type": "fork"},
        {"type": "continue"},
        {"type": "create", "previous_message_id": "msg_1"},
        {"type": "create", "ttl": "1h"},
    ],
)
def test_what_a_thread_cannot_do_is_refused_by_its_name(live, path, thread):
    status, kind, code, error = refusal(live, body_of([said("x")], thread), path)
    assert (status, kind) == (400, "invalid_request_error"), error
    assert code == "thread_unsupported_request"
    assert "without thread" in error["message"]


def test_tools_of_a_thread_are_not_changed_by_its_messages(live):
    change = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "read_file"}}
    messages = [said("x"), said([change], "system")]
    assert refusal(live, body_of(messages, CREATE, tools=[TOOL]))[2] == "thread_unsupported_request"


def test_what_a_thread_began_with_holds_for_all_of_it(live):
    marked = {**TOOL, "cache_control": {"type": "ephemeral"}}
    none = {"tool_choice": {"type": "none"}}
    first = ask(live, [said("x")], CREATE, system=LONG, tools=[TOOL], **none)
    new = body_of([said("y")], behind(first["id"]), **none)
    live.post("/v1/messages", {**new, "system": LONG, "tools": [marked]})
    for other in ({"system": "Be brief."}, {"tools": [{**TOOL, "name": "other"}]}):
        status, _, code, error = refusal(live, {**new, **other})
        assert (status, code) == (400, "thread_fingerprint_mismatch")
        assert next(iter(other)) in error["message"]


def test_a_conversation_has_a_message_unless_a_thread_has_it(live):
    for thread in (None, CREATE):
        status, _, _, error = refusal(live, body_of([], thread))
        assert status == 400 and "messages" in error["message"]


# Anthropic's own client --------------------------------------------------------------------------


def sent_of(client, monkeypatch):
    """The bodies that a client sends from now on."""
    bodies, send = [], client._client.send

    def noted(request, **more):
        bodies.append(json.loads(request.content))
        return send(request, **more)

    monkeypatch.setattr(client._client, "send", noted)
    return bodies


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropics_thread_sends_what_is_new_and_the_model_reads_all(
    client, monkeypatch, is_streamed
):
    bodies = sent_of(client, monkeypatch)
    thread = client.beta.messages.thread(
        model="demo", max_tokens=8, system=LONG, extra_body={"temperature": 0}
    )

    def turn(text):
        if not is_streamed:
            return thread.send(said(text))
        with thread.stream(said(text)) as stream:
            return stream.get_final_message()

    answers = [turn(text) for text in ("A line about rain.", "Another.", "A third.")]
    assert [len(body["messages"]) for body in bodies] == [1, 1, 1]
    assert [body["thread"]["type"] for body in bodies] == ["create", "continue", "continue"]
    read = [prompt_tokens(answer.usage) for answer in answers]
    counted = client.messages.count_tokens(
        model="demo", system=LONG, messages=list(thread.messages)[:-1]
    )
    assert read[0] < read[1] < read[2] == counted.input_tokens
    assert answers[2].usage.cache_read_input_tokens >= read[1]
    other = thread.fork()
    assert prompt_tokens(other.send(said("A fourth.")).usage) > read[2]


def test_anthropics_thread_is_replayed_where_the_server_has_lost_it(tmp_path, monkeypatch):
    with serving(tmp_path / "one") as live, client_of(live) as client:
        thread = client.beta.messages.thread(
            model="demo", max_tokens=8, extra_body={"temperature": 0}
        )
        first = thread.send(said("A line about rain."))
        live.run(live.service.responses.delete(first.id))
        bodies = sent_of(client, monkeypatch)
        second = thread.send(said("Another."))
        assert [len(body["messages"]) for body in bodies] == [1, 3]
        assert prompt_tokens(second.usage) > prompt_tokens(first.usage) + first.usage.output_tokens


def test_anthropics_tool_runner_is_answered_behind_all_that_was_said(client, monkeypatch):
    """The model is bundled and small, so it is made to call; what it reads is what matters."""
    bodies = sent_of(client, monkeypatch)

    @beta_tool
    def read_file(path: str) -> str:
        """Read a file.

        Args:
            path: of it.
        """
        return "import re"

    runner = client.beta.messages.tool_runner(
        model="demo",
        max_tokens=60,
        max_iterations=3,
        system=LONG,
        messages=[said("Look at a.py, please.")],
        tools=[read_file],
        tool_choice={"type": "tool", "name": "read_file"},
        extra_body={"temperature": 0},
    )
    read = [prompt_tokens(message.usage) for message in runner]
    assert len(read) == 3 and read[0] < read[1] < read[2]
    assert [body["thread"]["type"] for body in bodies] == ["create", "continue", "continue"]
    assert all(len(body["messages"]) == 1 for body in bodies)
    assert bodies[1]["messages"][0]["content"][0]["type"] == "tool_result"
