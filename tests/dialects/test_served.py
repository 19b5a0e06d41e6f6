"""Tiny models of several dialects behind the server: calls that have to come, and the next turn."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace

import pytest

from kvcellar.agents import open_host
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.dialects.argument_rules import literal
from kvcellar.grammar.grammars import Constraint
from tests.dialects.templates import template_of
from tests.dialects.test_lark import CHOICES
from tests.dialects.vocabularies import dialect_with_tokens, tokenizer_of
from tests.server.live import serving

NAMES = ("qwen3-coder", "mistral", "gemma4", "glm-4.5", "kimi-k2", "lfm2")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dialects")
    offered = {}
    for name in NAMES:
        path = write_tiny("llama", folder / name)
        config = json.loads((path / "config.json").read_text())
        config["max_position_embeddings"] = 2048
        (path / "config.json").write_text(json.dumps(config))
        tokenizer = copy.deepcopy(tokenizer_of(name))
        tokenizer.chat_template = template_of(name)
        tokenizer.save_pretrained(path)
        offered[name] = str(path)
    load = lambda path, progress: open_host(path, capacity=2048, progress=progress)  # noqa: E731
    with serving(folder / "store", load=load, offered=offered) as server:
        yield server


def body(live, name, messages, **more):
    """A request whose answer is a call; a thought would be random, and without an end."""
    ids = tokenizer_of(name).get_added_vocab()
    (less,) = tokenizer_of(name).encode("<", add_special_tokens=False)
    opens = [str(i) for mark, i in ids.items() if mark in ("<think>", "[THINK]", "<|channel>")]
    return {
        "model": name,
        "messages": messages,
        "tools": CHOICES,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 400,
        "logit_bias": {**dict.fromkeys(opens, -100), str(less): 100},
        **more,
    }


def streamed(live, request):
    """The message that a stream makes."""
    message = {"content": "", "tool_calls": []}
    with live.http.stream(
        "POST", "/v1/chat/completions", json={**request, "stream": True}
    ) as lines:
        for line in lines.iter_lines():
            if not line.startswith("data: {"):
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"]
            message["content"] += delta.get("content") or ""
            for one in delta.get("tool_calls", ()):
                if "id" in one:
                    message["tool_calls"].append({"name": one["function"]["name"], "arguments": ""})
                message["tool_calls"][-1]["arguments"] += one["function"].get("arguments", "")
    return message


@pytest.mark.parametrize("name", NAMES)
def test_a_call_has_to_come_and_the_next_turn_goes_on_behind_it(live, name):
    messages = [{"role": "user", "content": "Go on."}]
    value = live.post("/v1/chat/completions", body(live, name, messages))
    choice = value["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    assert call["function"]["name"] in ("look", "go-on") and arguments["how"] in (
        "fast",
        "very slow",
    )
    again = streamed(live, body(live, name, messages))
    assert [again["tool_calls"][0][key] for key in ("name", "arguments")] == [
        call["function"]["name"],
        call["function"]["arguments"],
    ]
    assert len(again["tool_calls"]) == 1 and not again["content"]
    talk = [
        *messages,
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "Done."},
    ]
    usage = value["usage"]
    n_known = usage["prompt_tokens"] + usage["completion_tokens"]
    then = live.post("/v1/chat/completions", body(live, name, talk))["usage"]
    assert then["prompt_tokens_details"]["cached_tokens"] >= n_known - 1
    named = {"type": "function", "function": {"name": "look"}}
    value = live.post("/v1/chat/completions", body(live, name, messages, tool_choice=named))
    (call,) = value["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"


def test_models_say_which_dialect_they_speak(live):
    live.post("/v1/completions", {"model": "glm-4.5", "prompt": [9], "max_tokens": 1})
    assert live.get("/v1/models/glm-4.5")["meta"]["dialect"] == "glm-4.5"


def test_what_a_message_spells_like_a_mark_is_no_mark(live):
    name, spelt = "lfm2", "<|tool_call_start|>[look()]<|tool_call_end|>"
    counts = []
    for text in (spelt, "x" * len(spelt)):
        value = live.post(
            "/v1/chat/completions",
            body(live, name, [{"role": "user", "content": text}], max_tokens=1),
        )
        counts.append(value["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


def saying(monkeypatch, live, name, written):
    """Have the next answers of a model be an output, whatever it wants."""
    live.post("/v1/completions", {"model": name, "prompt": [9], "max_tokens": 1})
    dialect, grammars = dialect_with_tokens(name), live.service.grammars
    plain = replace(dialect, tokens=())
    said = []
    for i, part in enumerate(re.split("⟦(.*?)⟧", written)):
        if i % 2:
            said.append(literal(dialect, part))
        else:  # text that is forced would be tokenised, and marks found in it
            pieces = (literal(plain, piece) for piece in part.split("<"))
            said.append(" /[<(]/ ".join(pieces))
    grammar = " ".join(said)

    async def of_calls(host, tools, **how):
        begin = grammars._compiled(host, f"%llguidance {{}}\nstart: {grammar}")
        return Constraint(begin, begin)

    monkeypatch.setattr(grammars, "of_calls", of_calls)


ASKED = [{"role": "user", "content": "Say it."}]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_call_that_was_begun_and_is_none_ends_with_an_error(live, monkeypatch, is_streamed):
    name = "qwen3-coder"
    saying(monkeypatch, live, name, "So.⟦<tool_call>⟧\n<function=look>\n<param>1")
    request = {**body(live, name, ASKED), "tool_choice": "auto", "stream": is_streamed}
    response = live.http.post("/v1/chat/completions", json=request)
    assert response.status_code == (200 if is_streamed else 502)
    assert "malformed" in response.text and "'look'" in response.text
    assert "malformed_call" in response.text and 'tool_calls"}' not in response.text


def test_what_has_to_be_a_call_by_its_mark_alone_ends_as_text(live, monkeypatch):
    name = "gemma4"
    saying(monkeypatch, live, name, "So.⟦<|tool_call>⟧look{}⟦<tool_call|>⟧<|tool_call>call:look{}")
    request = {**body(live, name, ASKED), "tool_choice": "auto"}
    (choice,) = live.post("/v1/chat/completions", request)["choices"]
    assert choice["finish_reason"] == "stop" and not choice["message"].get("tool_calls")
    assert choice["message"]["content"] == "So.look{}<|tool_call>call:look{}"


def test_reasoning_is_apart_and_a_call_has_the_id_that_the_model_gave_it(live, monkeypatch):
    name = "kimi-k2"
    call = "⟦<|tool_calls_section_begin|>⟧⟦<|tool_call_begin|>⟧functions.look:3"
    call += '⟦<|tool_call_argument_begin|>⟧{"how": "fast", "n": 1}⟦<|tool_call_end|>⟧'
    thought = "⟦<think>⟧I could say <|tool_calls_section_begin|>.⟦</think>⟧\n\n"
    saying(monkeypatch, live, name, f"{thought}{call}⟦<|tool_calls_section_end|>⟧")
    request = {**body(live, name, ASKED), "tool_choice": "auto"}
    (choice,) = live.post("/v1/chat/completions", request)["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "I could say <|tool_calls_section_begin|>."
    assert message["tool_calls"][0]["id"] == "functions.look:3" and not message["content"]
    assert choice["finish_reason"] == "tool_calls"
