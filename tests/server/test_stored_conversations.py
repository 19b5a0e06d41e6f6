"""OpenAI's client and its conversations: each one is an agent that responses go on."""

from __future__ import annotations

import openai
import pytest

from tests.server.live import PATIENCE_S, serving

SHORT = {"model": "demo", "temperature": 0, "max_output_tokens": 8}


def client_of(live):
    return openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
    )


@pytest.fixture
def client(live):
    with client_of(live) as found:
        yield found


def texts_of(client, conversation_id):
    listed = client.conversations.items.list(conversation_id, order="asc")
    return [item.content[0].text for item in listed]


def test_responses_add_to_a_conversation_and_go_on_from_it(client, live):
    made = client.conversations.create(metadata={"topic": "sums"})
    first = client.responses.create(conversation=made.id, input="hello", **SHORT)
    assert first.conversation.id == made.id and first.kvcellar["agent_id"] == made.id
    second = client.responses.create(conversation={"id": made.id}, input="and now?", **SHORT)
    assert texts_of(client, made.id) == ["hello", first.output_text, "and now?", second.output_text]
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert second.kvcellar["agent_id"] == made.id and "notice" not in second.kvcellar
    same = [{"role": "user", "content": "hello"}, *first.output]
    whole = [one.to_dict() if not isinstance(one, dict) else one for one in same]
    alone = client.responses.create(
        input=[*whole, {"role": "user", "content": "and now?"}], store=False, **SHORT
    )
    assert alone.output_text == second.output_text
    assert alone.usage.input_tokens == second.usage.input_tokens


def test_a_streamed_response_adds_to_it_too(client):
    made = client.conversations.create()
    with client.responses.stream(conversation=made.id, input="hello", **SHORT) as events:
        answer = events.get_final_response()
    assert texts_of(client, made.id) == ["hello", answer.output_text]


def test_a_conversation_is_there_after_a_restart(tmp_path):
    with serving(tmp_path) as live, client_of(live) as client:
        made = client.conversations.create(items=[{"role": "user", "content": "hello"}])
        first = client.responses.create(conversation=made.id, input="you there?", **SHORT)
    with serving(tmp_path) as live, client_of(live) as client:
        assert client.conversations.retrieve(made.id).created_at == made.created_at
        assert texts_of(client, made.id) == ["hello", "you there?", first.output_text]
        second = client.responses.create(conversation=made.id, input="still?", **SHORT)
        assert second.usage.input_tokens_details.cached_tokens > 0
        assert second.kvcellar["agent_id"] == made.id


def test_items_come_and_go(client, live):
    made = client.conversations.create()
    added = client.conversations.items.create(
        made.id,
        items=[
            {"role": "user", "content": "the word is zebra"},
            {"role": "assistant", "content": "ok"},
        ],
    )
    first, second = added.data
    got = client.conversations.items.retrieve(first.id, conversation_id=made.id)
    assert got.content[0].text == "the word is zebra"
    client.responses.create(conversation=made.id, input="say it", **SHORT)
    for one in (first, second):
        client.conversations.items.delete(one.id, conversation_id=made.id)
    assert "the word is zebra" not in texts_of(client, made.id)
    body = {"conversation": made.id, "input": "again", "model": "demo", "max_output_tokens": 1}
    usage = live.post("/v1/responses", body)["usage"]
    sent = [{"role": "user", "content": "say it"}]
    listed = client.conversations.items.list(made.id, order="asc").data
    sent.append({"role": "assistant", "content": listed[1].content[0].text})
    sent.append({"role": "user", "content": "again"})
    assert usage["input_tokens"] == live.post("/tokenize", {"messages": sent})["count"]


def test_metadata_is_changed_and_a_conversation_deleted(client, live):
    made = client.conversations.create()
    client.responses.create(conversation=made.id, input="hello", **SHORT)
    changed = client.conversations.update(made.id, metadata={"a": "b"})
    assert client.conversations.retrieve(made.id).metadata == changed.metadata == {"a": "b"}
    assert client.conversations.delete(made.id).deleted
    assert live.http.get(f"/v1/agents/{made.id}").status_code == 404
    for ask in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.responses.create(conversation=made.id, input="hello", **SHORT),
    ):
        with pytest.raises(openai.NotFoundError, match="not stored here"):
            ask()


def test_what_has_changed_meanwhile_is_not_mixed(client, live, monkeypatch):
    made = client.conversations.create()
    conversations = live.service.stored_conversations
    append = conversations.append

    async def late(conversation_id, after, new):
        stored = await conversations.get(conversation_id)
        stored.items.append({"id": "msg_x", "type": "message", "role": "user", "content": "me too"})
        await conversations.keep(stored)
        return await append(conversation_id, after, new)

    monkeypatch.setattr(conversations, "append", late)
    said = client.responses.create(conversation=made.id, input="hello", **SHORT)
    assert any("changed meanwhile" in note for note in said.kvcellar["notes"])
    assert len(client.conversations.items.list(made.id).data) == 1


@pytest.mark.parametrize(
    ("more", "status"),
    [({"previous_response_id": "resp_x"}, 400), ({"agent_id": "poet"}, 400), ({}, 404)],
)
def test_one_thing_is_gone_on_from(live, more, status):
    body = {"input": "x", "conversation": "conv_none", **more}
    response = live.http.post("/v1/responses", json=body)
    assert response.status_code == status and response.json()["error"]["param"] == "conversation"
