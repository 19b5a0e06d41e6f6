"""A streamed answer is the message that the whole answer is, in every dialect and protocol."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvcellar.dialects import AnswerParser, Dialect, dialect_for
from kvcellar.grammar.grammars import Constraint
from tests.dialects.corpus import FORMATS, TOOLS
from tests.dialects.test_corpus import CORPUS, fragments
from tests.server.live import serving
from tests.server.scripted import scripted_host

ASKED = [{"role": "user", "content": "Go on."}]
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
ODD = ["é", "你好", "👍🏽", "\u2028", "\x85", "\0", "\\u0041", '"', "{", "}"]
Said = dict[str, Any]


@pytest.fixture(scope="module", params=FORMATS)
def speaking(request, tmp_path_factory):
    """A server whose model says a text byte by byte, and whose dialect is one of all."""
    said = [""]
    with serving(
        tmp_path_factory.mktemp("speaking"),
        load=lambda *_: scripted_host(lambda n: said[0], has_tags=False),
        dialect=request.param,
    ) as live:

        async def of_calls(host, tools, **how):
            return Constraint(None, None)  # it says what it wants

        live.service.grammars.of_calls = of_calls
        live.host()
        yield live, request.param, said


def texts(name: str) -> st.SearchStrategy[str]:
    """Outputs of a dialect, their pieces, and what is between them and in them."""
    parts = fragments(name)
    wholes = [output.written for output in CORPUS if output.dialect == name]
    piece = st.one_of(st.sampled_from(wholes), st.sampled_from([*parts, *ODD]), st.text(max_size=4))
    cut = st.tuples(st.sampled_from(wholes), st.integers(0, 200)).map(lambda one: one[0][: one[1]])
    return st.lists(st.one_of(piece, cut), max_size=4).map(
        lambda found: re.sub("[⟦⟧]", "", "".join(found))
    )


def meant(dialect: Dialect, text: str) -> Said | None:
    """What the parser makes of all of it at once; None: a call of it was begun, and is none."""
    parser = AnswerParser(dialect, "c", tools=TOOLS)
    parser.push(text)
    parser.flush()
    calls = [(call.name, call.arguments) for call in parser.calls]
    if parser.trouble or not all(_is_object(arguments) for _, arguments in calls):
        return None
    return {"text": parser.text, "thought": parser.reasoning, "calls": calls}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def events(live, path: str, body: Any) -> list[Any]:
    """What a stream tells: every object in it."""
    response = live.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def in_chat(live) -> list[Said | None]:
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 3000}
    whole = live.http.post("/v1/chat/completions", json=body)
    messages = [whole.json()["choices"][0]["message"] if whole.status_code == 200 else None]
    streamed: dict[str, Any] | None = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events(live, "/v1/chat/completions", body):
        if "error" in event:
            streamed = None
            break
        for choice in event["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                streamed[key] += delta.get(key) or ""
            for one in delta.get("tool_calls") or ():
                if one["index"] == len(streamed["tool_calls"]):
                    streamed["tool_calls"].append({"function": {**one["function"]}})
                else:
                    at = streamed["tool_calls"][one["index"]]["function"]
                    at["arguments"] += one["function"]["arguments"]
    return [
        one
        and {
            "text": one.get("content") or "",
            "thought": one.get("reasoning_content") or "",
            "calls": [
                (call["function"]["name"], call["function"]["arguments"])
                for call in one.get("tool_calls") or ()
            ],
        }
        for one in (*messages, streamed)
    ]


def in_messages(live) -> list[Said | None]:
    tools = [
        {"name": one["function"]["name"], "input_schema": one["function"]["parameters"]}
        for one in TOOLS
    ]
    body = {"messages": ASKED, "tools": tools, "max_tokens": 3000}
    whole = live.http.post("/v1/messages", json=body)
    blocks = whole.json()["content"] if whole.status_code == 200 else None
    streamed: list[Any] | None = []
    for event in events(live, "/v1/messages", body):
        if event["type"] == "error":
            streamed = None
            break
        if event["type"] == "content_block_start":
            assert event["index"] == len(streamed)
            streamed.append({**event["content_block"], "input": ""})
        if event["type"] == "content_block_delta":
            delta, block = event["delta"], streamed[event["index"]]
            for key in ("text", "thinking", "input"):
                told = delta.get("partial_json" if key == "input" else key, "")
                block[key] = block.get(key, "") + told
    for block in streamed or ():
        block["input"] = json.loads(block["input"] or "{}")
    return [
        one
        if one is None
        else {
            "text": "".join(block["text"] for block in one if block["type"] == "text"),
            "thought": "".join(b["thinking"] for b in one if b["type"] == "thinking"),
            "calls": [(b["name"], b["input"]) for b in one if b["type"] == "tool_use"],
        }
        for one in (blocks, streamed)
    ]


def in_responses(live) -> list[Said | None]:
    tools = [{"type": "function", **one["function"]} for one in TOOLS]
    body = {"input": ASKED, "tools": tools, "max_output_tokens": 3000}
    whole = live.http.post("/v1/responses", json=body)
    outputs = [whole.json()["output"] if whole.status_code == 200 else None]
    deltas = {"text": "", "thought": "", "arguments": ""}
    kinds = {
        "response.output_text.delta": "text",
        "response.reasoning_text.delta": "thought",
        "response.function_call_arguments.delta": "arguments",
    }
    last: Any = {}
    for last in events(live, "/v1/responses", body):
        if last["type"] in kinds:
            deltas[kinds[last["type"]]] += last["delta"]
    is_whole = last["type"] in ("response.completed", "response.incomplete")
    outputs.append(last["response"]["output"] if is_whole else None)
    found: list[Said | None] = []
    for output in outputs:
        said: Said = {"text": "", "thought": "", "calls": []}
        for item in output or ():
            if item["type"] == "function_call":
                said["calls"].append((item["name"], item["arguments"]))
            else:
                key = "thought" if item["type"] == "reasoning" else "text"
                said[key] += "".join(part["text"] for part in item["content"])
        found.append(None if output is None else said)
    if is_whole:
        said = found[-1] or {}
        assert deltas == {
            "text": said["text"],
            "thought": said["thought"],
            "arguments": "".join(arguments for _, arguments in said["calls"]),
        }
    return found


def in_ollama(live) -> list[Said | None]:
    body = {"model": "demo", "messages": ASKED, "tools": TOOLS, "options": {"num_predict": 3000}}
    whole = live.http.post("/api/chat", json={**body, "stream": False})
    messages = [[whole.json()["message"]] if whole.status_code == 200 else None]
    told = events(live, "/api/chat", body)
    messages.append(None if "error" in told[-1] else [one["message"] for one in told])
    return [
        some
        if some is None
        else {
            "text": "".join(one.get("content") or "" for one in some),
            "thought": "".join(one.get("thinking") or "" for one in some),
            "calls": [
                (call["function"]["name"], call["function"]["arguments"])
                for one in some
                for call in one.get("tool_calls") or ()
            ],
        }
        for some in messages
    ]


@settings(deadline=None, max_examples=max(4, settings().max_examples // 10))
@given(st.data(), st.sampled_from([in_chat, in_messages, in_responses, in_ollama]))
def test_a_stream_says_what_the_whole_says_and_what_the_text_means(speaking, data, protocol):
    live, name, said = speaking
    text = data.draw(texts(name))
    assume(len(text.encode()) < 2500 and not any(mark in text for mark in SPECIAL))
    said[0] = text
    whole, streamed = protocol(live)
    assert streamed == whole, text
    want = meant(dialect_for(live.host().tokenizer, name), text)
    if want is not None and protocol in (in_messages, in_ollama):
        want["calls"] = [(one, json.loads(arguments)) for one, arguments in want["calls"]]
    assert whole == want, text
