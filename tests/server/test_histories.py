"""No field that says where a conversation's history is, is ever ignored, in any protocol."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import ollama
import pytest
import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.conversations import conversation_create_params
from openai.types.responses import (
    input_token_count_params,
    response_compact_params,
    response_create_params,
)

from kvcellar.server.schemas.histories import HISTORIES, names_history

SAID = {"role": "user", "content": "Say something."}
ROUTES = {
    "/v1/chat/completions": {"messages": [SAID], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": [SAID], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [SAID]},
    "/v1/conversations": {},
    "/v1/embeddings": {"input": "x"},
    "/api/chat": {"model": "demo", "messages": [SAID], "stream": False},
    "/api/generate": {"model": "demo", "prompt": "x", "stream": False},
    "/api/embed": {"model": "demo", "input": "x"},
    "/infill": {"input_prefix": "x"},
    "/tokenize": {"messages": [SAID]},
}
OWN = {
    "/v1/responses": ("conversation", "previous_response_id"),
    "/v1/messages": ("thread",),
    "/v1/messages/count_tokens": ("thread",),
    "/infill": ("prompt",),
    "/tokenize": ("prompt",),
}
ASKS = {
    "previous_response_id": "resp_1",
    "previous_message_id": "msg_1",
    "previousResponseId": "resp_1",
    "parent_message_id": "msg_1",
    "previous_interaction_id": "i_1",
    "previous_input_messages": [SAID],
    "conversation": "conv_1",
    "conversation_id": "conv_1",
    "conversationId": "conv_1",
    "thread": {"type": "continue", "previous_message_id": "msg_1"},
    "thread_id": "thread_1",
    "context": [1, 2, 3],
    "chat_history": [SAID],
    "history": [SAID],
    "session_params": {"id": "s"},
    "system_prompt": "Be brief.",
    "prompt": {"id": "pmpt_1"},
    "cached_content": "cachedContents/1",
    "continuation_id": "c_1",
    "compaction": {"type": "summary"},
}
"""What a client sends that keeps its history at another server."""


@pytest.mark.parametrize("route", ROUTES)
def test_a_history_that_is_named_and_not_here_is_refused_by_its_name(live, route):
    body = ROUTES[route]
    for name, value in ASKS.items():
        if name in (*body, *OWN.get(route, ())):
            continue
        response = live.http.post(route, json={**body, name: value})
        assert response.status_code == 400, (name, response.text)
        assert name in response.text and "honoured" in response.text, response.text


@pytest.mark.parametrize("route", ROUTES)
def test_a_name_without_a_history_is_no_reason_to_refuse(live, route):
    if route == "/infill":
        pytest.skip("the bundled model has no tokens for gaps")
    nothing = {name: None for name in ASKS if name not in ROUTES[route]}
    live.post(route, {**ROUTES[route], **nothing})


def test_an_answer_that_is_the_name_of_a_sound_is_refused(live):
    heard = {"role": "assistant", "audio": {"id": "audio_1"}}
    body = {"messages": [SAID, heard, SAID], "max_tokens": 2}
    response = live.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and "audio_1" in response.text
    body["messages"][1] = {**heard, "content": "As I said."}
    live.post("/v1/chat/completions", body)


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "compaction_trigger"])
def test_a_part_of_a_conversation_that_nobody_here_can_read_is_refused(live, kind):
    sealed = {"type": kind, "encrypted_content": "gAAAAABo"}
    body = {"input": [sealed, SAID], "max_output_tokens": 2}
    response = live.http.post("/v1/responses", json=body)
    assert response.status_code == 400 and kind in response.text
    made = live.post("/v1/conversations", {"items": [sealed]})
    body = {"input": "x", "conversation": made["id"], "max_output_tokens": 2}
    assert live.http.post("/v1/responses", json=body).status_code == 400


def test_reasoning_that_comes_by_its_id_alone_is_what_was_thought(live):
    """A client that leaves storing to the server sends no more of it."""
    first = live.post("/v1/responses", {"input": "x", "max_output_tokens": 2})
    stored = live.run(live.service.responses.get(first["id"]))
    key = first["id"][5:]
    thought = {"type": "reasoning_text", "text": "A thought of some length, as thoughts are."}
    item = {"id": f"rs_{key}9", "type": "reasoning", "summary": [], "content": [thought]}
    stored.response["output"].insert(0, item)
    live.run(live.service.responses.keep(first["id"], stored))
    bare = {"id": item["id"], "type": "reasoning", "summary": []}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
    n_read = [
        live.post("/v1/responses", {"input": [SAID, one, said, SAID], "max_output_tokens": 2})[
            "usage"
        ]["input_tokens"]
        for one in (bare, item)
    ]
    assert n_read[0] == n_read[1]


@pytest.mark.parametrize("path", ["/v1/threads", "/v1/threads/t_1/runs", "/api/v1/chat"])
def test_a_route_that_keeps_histories_otherwise_is_not_there(live, path):
    body = {"model": "demo", "input": "x", "previous_response_id": "resp_1", "store": True}
    assert live.http.post(path, json=body).status_code == 404


# The table, and the clients' own types ------------------------------------------------------------

CLIENTS = {
    "OpenAI's chat": [chat_params.CompletionCreateParamsNonStreaming],
    "OpenAI's completions": [completion_create_params.CompletionCreateParamsNonStreaming],
    "OpenAI's responses": [
        response_create_params.ResponseCreateParamsNonStreaming,
        input_token_count_params.InputTokenCountParams,
        response_compact_params.ResponseCompactParams,
    ],
    "OpenAI's conversations": [conversation_create_params.ConversationCreateParams],
    "Anthropic's messages": [
        message_create_params.MessageCreateParamsNonStreaming,
        message_count_tokens_params.MessageCountTokensParams,
        beta_create_params.MessageCreateParamsNonStreaming,
        beta_count_params.MessageCountTokensParams,
    ],
}
SUSPECT = re.compile(
    "previous|prior|parent|conversation|thread|session|histor|compact|resume|continu|encrypted_con"
    "|(message|response|item|audio|container)_id|^(context|container|audio|prompt|store|truncation)$"
)
OF_A_TOOL = re.compile(r"(input|items)\..*(container|file)|\.tools\.|^tools\.|content\.content\.")
"""What tools of a provider's made, whose results are told as text: no history of a conversation."""
NO_HISTORY = {
    ("OpenAI's chat", "audio"),  # of the answer
    ("OpenAI's completions", "prompt"),  # is all of it
    ("OpenAI's responses", "input.prompt"),  # of a picture that a tool made
    ("OpenAI's conversations", "items.prompt"),
    ("Anthropic's messages", "messages.content.context"),  # of a document, told as text
    ("Ollama", "prompt"),
}


def fields_of(kind, path="", inside=()):
    """The ways to all fields of a TypedDict, however deep."""
    if kind in inside:
        return
    for name, hint in typing_extensions.get_type_hints(kind).items():
        yield f"{path}{name}"
        for inner in dicts_in(hint):
            yield from fields_of(inner, f"{path}{name}.", (*inside, kind))


def dicts_in(hint):
    if typing_extensions.is_typeddict(hint):
        yield hint
    for inner in get_args(hint):
        yield from dicts_in(inner)


def suspects():
    """Fields of the clients' own types that may name a history."""
    found = {(p, way) for p, kinds in CLIENTS.items() for kind in kinds for way in fields_of(kind)}
    for kind in (ollama._types.GenerateRequest, ollama._types.ChatRequest):
        found |= {("Ollama", name) for name in kind.model_fields}
    for protocol, way in found:
        name = way.rpartition(".")[2]
        is_one = SUSPECT.search(name) or names_history(name)
        if is_one and not OF_A_TOOL.search(way) and (protocol, way) not in NO_HISTORY:
            yield protocol, way


def test_every_field_of_the_clients_that_may_name_a_history_is_in_the_table():
    known = {(one.protocol, one.field) for one in HISTORIES}
    found = set(suspects())
    assert ("Anthropic's messages", "thread.previous_message_id") in found
    assert ("OpenAI's responses", "previous_response_id") in found
    assert not sorted(found - known)


def test_what_the_table_says_is_done(live):
    routes = {
        "OpenAI's chat": "/v1/chat/completions",
        "OpenAI's responses": "/v1/responses",
        "Anthropic's messages": "/v1/messages",
        "Ollama": "/api/generate",
    }
    shape = {"container": "c_1", "prompt": {"id": "p_1"}, "context": [1], "n_keep": 4}
    for one in HISTORIES:
        route = routes.get(one.protocol, "/v1/chat/completions")
        if one.done != "refused" or "." in one.field or one.field.startswith("/"):
            continue
        body = {**ROUTES[route], one.field: shape.get(one.field, ASKS.get(one.field, "x_1"))}
        response = live.http.post(route, json=body)
        assert response.status_code == 400 and one.field in response.text, (one, response.text)
    properties = {
        route: live.get("/openapi.json")["components"]["schemas"][name]["properties"]
        for route, name in (
            ("OpenAI's responses", "ResponseRequest"),
            ("Anthropic's messages", "MessagesRequest"),
        )
    }
    for one in HISTORIES:
        if one.done == "supported" and one.protocol in properties:
            assert one.field.partition(".")[0] in properties[one.protocol], one


def test_the_table_is_in_the_docs():
    text = Path(__file__).parents[2].joinpath("docs/http.md").read_text()
    section = text.partition("## Where the history is")[2].partition("\n## ")[0]
    for one in HISTORIES:
        assert f"`{one.field}`" in section, one.field
