"""OpenAI's client and its responses: each one is a place to go on from."""

from __future__ import annotations

import json
import shutil
import threading
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from kvcellar.errors import StoreError
from kvcellar.store import Store
from kvcellar.store.disk import journal
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


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_response_under_changed_instructions_says_what_it_lost(client, is_stored, goes_on):
    if goes_on and not is_stored:
        pytest.skip("what is not stored cannot be gone on from")
    told = f"Monday {is_stored} {goes_on}.\n" + "Mind your spelling and your manners. " * 10
    first = ask(client, "Hello?", instructions=told, store=is_stored)
    same = ask(client, "Hello!", instructions=told, store=is_stored)
    assert same.model_extra["kvcellar"]["miss"] is None
    more = {"previous_response_id": first.id} if goes_on else {}
    told = told.replace("Monday", "Sunday")
    other = ask(client, "And?", instructions=told, store=is_stored, **more)
    miss, usage = other.model_extra["kvcellar"]["miss"], other.usage
    assert miss["cause"] == "system" and "Monday" in miss["was"] and "Sunday" in miss["became"]
    n_read = usage.input_tokens - usage.input_tokens_details.cached_tokens
    assert 100 < miss["tokens_lost"] <= n_read


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


@pytest.mark.slow
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


def items_of(live, response_id, **query):
    query = {"order": "asc", "limit": 100, **query}
    response = live.http.get(f"/v1/responses/{response_id}/input_items", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def said_in(items):
    return [
        (item.get("role") or item["type"], "".join(p["text"] for p in item.get("content", ())))
        for item in items
    ]


def talk_with_tools(live):
    """Three responses: a question with a system message, a call's result, and what follows."""
    more = {"tools": [TOOL], "max_output_tokens": 60, "temperature": 0, "model": "demo"}
    question = [
        {"role": "developer", "content": "You add."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]},
    ]
    named = {"type": "function", "name": "add"}
    first = live.post(
        "/v1/responses",
        {"input": question, "instructions": "Be brief.", "tool_choice": named, **more},
    )
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    second = live.post(
        "/v1/responses",
        {"input": [result], "previous_response_id": first["id"], "tool_choice": "none", **more},
    )
    third = live.post(
        "/v1/responses",
        {"input": "Thanks.", "previous_response_id": second["id"], "tool_choice": "none", **more},
    )
    return first, second, third


@pytest.mark.slow
def test_what_is_stored_is_there_whole_after_a_restart(tmp_path):
    with serving(tmp_path) as live:
        responses = talk_with_tools(live)
        items = [items_of(live, response["id"]) for response in responses]
        streamed = live.http.post(
            "/v1/responses", json={"input": "Stream.", "stream": True, "max_output_tokens": 4}
        ).text
        done = json.loads(streamed.split("data: ")[-1])["response"]
    with serving(tmp_path) as live:
        for response, listed in zip(responses, items, strict=True):
            assert live.get(f"/v1/responses/{response['id']}") == response
            assert items_of(live, response["id"]) == listed
        assert live.get(f"/v1/responses/{done['id']}") == done
        last = items[-1]["data"]
        (call,) = responses[0]["output"]
        assert [item["type"] for item in last] == [
            "message", "message", "function_call", "function_call_output", "message", "message",
        ]  # fmt: skip
        assert last[2] == call
        assert (last[3]["call_id"], last[3]["output"]) == (call["call_id"], "2")
        answer = responses[1]["output"][0]["content"][0]["text"]
        assert said_in(last) == [
            ("developer", "You add."),
            ("user", "Add."),
            ("function_call", ""),
            ("function_call_output", ""),
            ("assistant", answer),
            ("user", "Thanks."),
        ]
        first = items[0]["data"]
        assert said_in(first)[0] == ("system", "Be brief."), "its own instructions, no preamble"
        assert said_in(first)[1:] == [("developer", "You add."), ("user", "Add.")]
        assert len({item["id"] for item in last}) == len(last)


@pytest.mark.slow
def test_a_response_is_durable_before_it_is_answered(tmp_path):
    """Nothing that is queued gets written, as if the process had been killed."""
    with serving(tmp_path) as live:
        first = live.post("/v1/responses", {"input": "One.", "max_output_tokens": 4})
        go, is_here = threading.Event(), threading.Event()

        def hold() -> None:
            is_here.set()
            go.wait(PATIENCE_S)

        live.service.store._writer.offer(hold, 0)
        assert is_here.wait(PATIENCE_S)
        body = {"previous_response_id": first["id"], "max_output_tokens": 4}
        second = live.post("/v1/responses", {"input": "Two.", **body})
        kept = tmp_path / "kept"
        kept.mkdir()
        for path in (tmp_path / "format", *tmp_path.glob("journal.sqlite*")):
            shutil.copy(path, kept)
        go.set()
    with serving(kept) as live:  # with neither an agent nor a block of it
        assert live.get(f"/v1/responses/{second['id']}") == second
        body["previous_response_id"] = second["id"]
        third = live.post("/v1/responses", {"input": "Three.", **body})
        assert third["usage"]["input_tokens"] > second["usage"]["total_tokens"]
        assert [text for _, text in said_in(items_of(live, third["id"])["data"])][::2] == [
            "One.",
            "Two.",
            "Three.",
        ]


@pytest.mark.slow
def test_a_named_agents_response_is_stored_too_and_can_be_gone_on_from(tmp_path):
    with serving(tmp_path) as live:
        live.post("/v1/agents", {"id": "poet"})
        headers = {"x-agent-id": "poet"}
        ask = {"max_output_tokens": 4, "temperature": 0}
        first = live.post("/v1/responses", {"input": "One. " * 20, **ask}, headers=headers)
    with serving(tmp_path) as live:
        assert live.get(f"/v1/responses/{first['id']}") == first
        second = live.post(
            "/v1/responses", {"input": "Two.", "previous_response_id": first["id"], **ask}
        )
        reused = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert reused >= first["usage"]["total_tokens"] - 1
        assert second["kvcellar"]["agent_id"] != "poet"
        assert live.get("/v1/agents/poet")["n_turns"] == 1


@pytest.mark.slow
def test_a_named_agents_messages_are_what_was_sent(tmp_path):
    with serving(tmp_path) as live:
        live.post("/v1/agents", {"id": "adder"})
        asked = [{"role": "system", "content": "You add."}, {"role": "user", "content": "Add."}]
        function = {"name": "add", "parameters": TOOL["parameters"]}
        body = {
            "messages": asked,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "none",
            "max_tokens": 4,
        }
        live.post("/v1/chat/completions", body, headers={"x-agent-id": "adder"})
    with serving(tmp_path) as live:
        assert live.get("/v1/agents/adder")["messages"][:-1] == asked


@pytest.mark.slow
def test_a_deleted_response_stays_deleted_and_what_went_on_from_it_stays(tmp_path):
    with serving(tmp_path) as live:
        first, second, third = talk_with_tools(live)
        assert live.http.delete(f"/v1/responses/{second['id']}").json()["deleted"] is True
        before = items_of(live, third["id"])
    with serving(tmp_path) as live:
        gone = live.http.get(f"/v1/responses/{second['id']}")
        assert gone.status_code == 404
        assert live.http.get(f"/v1/responses/{second['id']}/input_items").status_code == 404
        assert live.http.delete(f"/v1/responses/{second['id']}").status_code == 404
        assert live.get(f"/v1/responses/{first['id']}") == first
        assert items_of(live, third["id"]) == before
        body = {"input": "More?", "previous_response_id": third["id"], "max_output_tokens": 4}
        assert live.post("/v1/responses", body)["status"] in ("completed", "incomplete")


def test_items_come_in_pages(live):
    items = [{"role": "user", "content": f"No. {i}"} for i in range(7)]
    response = live.post("/v1/responses", {"input": items, "max_output_tokens": 2})
    whole = items_of(live, response["id"])["data"]
    assert [text for _, text in said_in(whole)] == [f"No. {i}" for i in range(7)]
    found, after = [], {}
    while True:
        page = items_of(live, response["id"], limit=3, order="desc", **after)
        found += page["data"]
        after = {"after": page["last_id"]}
        if not page["has_more"]:
            break
    assert found == whole[::-1]
    path = f"/v1/responses/{response['id']}/input_items"
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nothing"}):
        assert live.http.get(path, params=query).status_code == 400


def test_what_has_ended_cannot_be_cancelled_or_streamed_again(live):
    response = live.post("/v1/responses", {"input": "One.", "max_output_tokens": 2})
    refused = live.http.post(f"/v1/responses/{response['id']}/cancel")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_in_background")
    assert live.http.post("/v1/responses/resp_none/cancel").status_code == 404
    streamed = live.http.get(f"/v1/responses/{response['id']}", params={"stream": "true"})
    assert streamed.status_code == 400


@pytest.mark.slow
def test_a_response_that_cannot_be_stored_does_not_say_that_it_is(tmp_path, monkeypatch):
    with serving(tmp_path) as live:

        def full(*_):
            raise StoreError("the disk is full")

        monkeypatch.setattr(live.service.store, "put_document", full)
        response = live.post("/v1/responses", {"input": "One.", "max_output_tokens": 2})
        assert response["store"] is False
        assert any("the disk is full" in note for note in response["kvcellar"]["notes"])
        assert live.http.get(f"/v1/responses/{response['id']}").status_code == 404


def test_the_oldest_documents_go_where_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST_DOCUMENTS", 5)
    monkeypatch.setattr(journal, "MOST_DOCUMENT_BYTES", 1000)
    with Store(tmp_path) as store:
        for i in range(8):
            store.put_document(f"d{i}", bytes(10))
        assert [i for i in range(8) if store.document(f"d{i}") is not None] == [3, 4, 5, 6, 7]
        store.put_document("large", bytes(975))
        assert [i for i in range(8) if store.document(f"d{i}") is not None] == [6, 7]
        assert store.delete_document("d6") and not store.delete_document("d6")
