"""Calls inside text, however the text is cut; and grammars on tokens, with the real tokenizer."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.dialects import (
    DIALECTS,
    AnswerParser,
    CallPart,
    ReasoningPart,
    TextPart,
    choose_dialect,
)
from kvcellar.dialects.messages import as_message, say_calls, say_tools, without_tools
from kvcellar.engine import SamplingParams, SamplingState, sample
from kvcellar.errors import GrammarError
from kvcellar.grammar.grammars import Grammars
from tests.dialects.writing import CALL_BEGIN, CALL_END, call_head

JSON = st.recursive(
    st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.sampled_from("abc"), st.dictionaries(st.text(max_size=4), JSON)))
WORDS = st.text("<tool_cal>/ \n{}", max_size=12).filter(
    lambda text: CALL_BEGIN not in text and not text.endswith("<")
)


def written(calls, **how):
    values = [(call_head(name), json.dumps(value, **how)) for name, value in calls]
    return "\n".join(f"{head}{value}}}{CALL_END}" for head, value in values)


def read(pieces, is_in_thought=False):
    parser = AnswerParser(DIALECTS["hermes"], "c", is_in_thought)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    return parser, parts


@given(st.data(), WORDS, CALLS)
def test_a_text_means_the_same_however_it_is_cut(data, before, calls):
    text = before + written(calls)
    parser, parts = read(cut(data.draw, text))
    assert [(c.name, json.loads(c.arguments)) for c in parser.calls] == calls
    assert [c.call_id for c in parser.calls] == [f"c{i}" for i in range(len(calls))]
    shown = before
    if calls:
        shown = before.removesuffix("\n") if before.strip() else ""
    assert "".join(p.text for p in parts if isinstance(p, TextPart)) == parser.text == shown
    for i, (_, value) in enumerate(calls):
        mine = [p.text for p in parts if isinstance(p, CallPart) and p.index == i]
        assert mine[0] == "" and json.loads("".join(mine)) == value


PIECES = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "<think>",
                "</think>",
                "<",
                "</",
                "<tool",
                "</tool_call",
            ),
            *(" ", "\n", "\n\n", "    ", "a", "b}", "}", "{", "[1]", '"', "\\", "\\ud83d"),
            *('{"name": "f", "arguments": {"x": "}"}}', '{"parameters": {}, "name": "g"}'),
            *('\n{"name": "h", "arguments": {"y": [1, {}]', '{"name": "\\q", "arguments": {}}'),
            *('{"name": "</tool_call>", "arguments": {}}', '{"name": "\\ud800", "arguments": {}}'),
            '<tool_call>{"name": "</tool_call>", "arguments": {}}',
            '<tool_call>{"name": "\\ud800", "arguments": {}}}',
            f'{call_head("k")}{{"z": "<tool_call>"}}}}{CALL_END}',
        ]
    ),
    max_size=12,
).map("".join)


def cut(draw, text):
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def joined(parts):
    """What clients make of the parts, in order: texts, and calls with their arguments."""
    made = []
    for part in parts:
        kind = part.index if isinstance(part, CallPart) else type(part)
        if made and made[-1][0] == kind:
            made[-1][-1] += part.text
        elif not isinstance(part, CallPart):
            made.append([kind, part.text])
        else:
            assert part.text == ""
            made.append([kind, part.call.name, ""])
    return made


@settings(max_examples=200)
@given(st.data(), PIECES, st.booleans())
def test_any_cutting_of_any_text_gives_the_same_events(data, text, is_in_thought):
    parser, parts = read([text], is_in_thought)
    again, others = read(cut(data.draw, text), is_in_thought)
    slowly, single = read(list(text), is_in_thought)
    assert joined(parts) == joined(others) == joined(single)
    assert parser.calls == again.calls == slowly.calls
    assert parser.text == again.text == slowly.text
    assert parser.text == "".join(part.text for part in parts if isinstance(part, TextPart))
    thought = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    assert thought == parser.reasoning == again.reasoning == slowly.reasoning == thought.strip()
    json.dumps([call.name for call in parser.calls]).encode()


def test_spaces_behind_a_call_are_kept_where_text_follows():
    call = f"{call_head('f')}{{}}}}{CALL_END}"
    for pieces in (["a", call, "\n\n", "    ", "b"], ["a", call, "\n\n    b"]):
        parser, parts = read(pieces)
        assert parser.text == "a\n\n    b" and len(parser.calls) == 1
        assert "".join(p.text for p in parts if isinstance(p, TextPart)) == parser.text
    for text in (f"{call}\n{call}\n", f"\n{call}", f"{call}  "):
        parser, parts = read([text])
        assert parser.calls and not parser.text
        assert all(isinstance(part, CallPart) for part in parts)
    parser, _ = read(["Look:\n", "\n", call])  # one line end is the template's
    assert parser.text == "Look:\n"
    parser, parts = read([" ", "\n"])
    assert parser.text == "".join(part.text for part in parts) == " \n"


def test_reasoning_is_apart_and_a_call_inside_is_no_call():
    call = f"{call_head('f')}{{}}}}{CALL_END}"
    parser, parts = read(list(f"\n<think>\nI could say {call}.\n</think>\n\nSo{call}"))
    assert len(parser.calls) == 1 and parser.text == "So"
    assert parser.reasoning == f"I could say {call}."
    assert isinstance(parts[0], ReasoningPart)
    parser, _ = read(list(f" I could say {call}.</think>Or not."), is_in_thought=True)
    assert not parser.calls and (parser.text, parser.reasoning) == (
        "Or not.",
        f"I could say {call}.",
    )
    parser, _ = read(list(f"<think>never ends {call}"))
    assert not parser.calls and parser.reasoning == f"never ends {call}"
    parser, _ = read(["<think>\n\n</think>\n\n", call])
    assert (parser.text, parser.reasoning, len(parser.calls)) == ("", "", 1)
    parser, _ = read(["A tag <think>is text</think> here"])
    assert (parser.text, parser.reasoning) == ("A tag <think>is text</think> here", "")


def test_a_model_without_reasoning_has_no_marks_of_it():
    parser = AnswerParser(choose_dialect("{{ m.content }}"), "c")
    parser.push("<think>a</think>b")
    parser.flush()
    assert (parser.text, parser.reasoning) == ("<think>a</think>b", "")
    assert choose_dialect("{{ m.reasoning_content }}").reasoning_key == "reasoning_content"


def test_what_stands_between_a_call_that_never_closes_and_the_next_is_not_lost():
    head = call_head("f")
    parser, _ = read(list(f'{head}{{"x": 1}}}}\nso {head}{{"x": 2}}}}{CALL_END} and on'))
    assert [call.arguments for call in parser.calls] == ['{"x": 1}', '{"x": 2}']
    assert parser.text == "\nso  and on"
    parser, _ = read(list(f"{head}{{}}}}\nThat was it."))
    assert len(parser.calls) == 1 and parser.text == "\nThat was it."
    parser, _ = read(['<tool_call>{"parameters": {"x": 1}, "name": "f"}'])
    assert [call.name for call in parser.calls] == ["f"] and not parser.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a <tool_call>\nnot json</tool_call> b", "a <tool_call>\nnot json</tool_call> b"),
        ('cut <tool_call>\n{"name": ', 'cut <tool_call>\n{"name": '),
        ("almost <tool_cal", "almost <tool_cal"),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>"),
    ],
)
def test_what_is_no_call_stays_text(text, shown):
    parser, parts = read(list(text))
    assert not parser.calls and parser.text == shown
    assert "".join(part.text for part in parts) == shown


def test_a_call_with_its_keys_in_another_order_is_one():
    parser, _ = read(['<tool_call>{"parameters": {"x": 1}, "name": "f"}</tool_call>'])
    (call,) = parser.calls
    assert call.name == "f" and json.loads(call.arguments) == {"x": 1}


def test_a_call_that_was_cut_short_keeps_what_there_is():
    parser, _ = read([call_head("f"), '{"x": [1, '])
    (call,) = parser.calls
    assert call.arguments == '{"x": [1, '


@pytest.mark.parametrize("begun", ["<tool", "<tool_call>", '<tool_call>\n{"na'])
def test_a_call_that_has_to_come_and_was_cut_before_its_name_is_no_text(begun):
    hermes = DIALECTS["hermes"]
    forced, free = AnswerParser(hermes, "c", is_forced=True), AnswerParser(hermes, "c")
    for parser in (forced, free):
        parser.push(begun)
        parser.flush()
    assert (forced.text, forced.calls) == ("", [])
    assert free.text == begun


@given(WORDS, CALLS)
def test_what_a_template_makes_of_text_and_calls_is_what_the_model_said(before, calls):
    before = f"So {before}\n" if calls else before
    said = before + written(calls, ensure_ascii=False)
    parser, _ = read([said])
    assert say_calls(as_message(parser.text, parser.calls))["content"] == said


def test_calls_become_text_one_way_for_templates_without_them():
    parser, _ = read([f'{call_head("f")}{{"b":1,  "a" : 2}}}}{CALL_END}'])
    ours = say_calls(as_message(parser.text, parser.calls))
    theirs = {"name": "f", "arguments": {"b": 1, "a": 2}}
    call = {"id": "other", "type": "function", "function": theirs}
    assert say_calls({"role": "assistant", "content": "", "tool_calls": [call]}) == ours


def test_tools_are_said_once_however_often_they_come():
    tools = [{"type": "function", "function": {"name": "f"}}]
    once = say_tools([{"role": "user", "content": "x"}], tools)
    assert say_tools(once, tools) == once and once[0]["role"] == "system"
    with_system = say_tools([{"role": "system", "content": "Be."}], tools)
    assert with_system[0]["content"].startswith("Be.\n\n")
    assert say_tools(with_system, tools) == with_system
    assert without_tools(once) == [{"role": "user", "content": "x"}]
    assert without_tools(with_system) == [{"role": "system", "content": "Be."}]


@pytest.mark.parametrize("text", ["Be.", "", "You can call these functions:\nnone", "a\n\nb"])
def test_a_conversation_without_tools_is_as_it_was(text):
    talk = [{"role": "system", "content": text}, {"role": "user", "content": "x"}]
    assert without_tools(talk) == talk
    assert without_tools(talk[1:]) == talk[1:]
    assert without_tools([]) == []


# Grammars ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(served):
    served.post("/v1/completions", {"prompt": [9], "max_tokens": 1})
    found = served.host()
    return found


def walk(host, make, choose, limit=400):
    """Sample with a guide until it is complete; the text."""
    vocab = host.engine.runner.vocab_size
    state = SamplingState(SamplingParams(guide=make), vocab)
    tokens = []
    while not state.is_complete and len(tokens) < limit:
        (choice,) = sample(choose(len(tokens), vocab), [state])
        if choice.token_id in host.eos_token_ids:
            break
        state.record(choice.token_id)
        tokens.append(choice.token_id)
    return host.tokenizer.decode(tokens)


def noise(seed):
    chance = np.random.default_rng(seed)
    return lambda _, vocab: chance.normal(size=(1, vocab)).astype(np.float32)


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["x", "yy"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "size", "tags"],
    "additionalProperties": False,
}


def test_whatever_the_model_wants_the_answer_is_of_its_schema(host):
    make = asyncio.run(Grammars().of_schema(host, SCHEMA)).begin
    for seed in range(20):
        value = json.loads(walk(host, make, noise(seed)))
        assert value["kind"] in ("x", "yy") and 0 <= value["size"] <= 99
        assert len(value["tags"]) <= 2 and all(len(tag) <= 3 for tag in value["tags"])


def test_forced_calls_are_calls_and_nothing_else(host):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "ab"
    ]
    make = asyncio.run(Grammars().of_calls(host, tools, is_forced=True, most=2)).begin
    for seed in range(10):
        parser, _ = read([walk(host, make, noise(seed), limit=800)])
        assert 1 <= len(parser.calls) <= 2 and not parser.text.strip()
        for call in parser.calls:
            assert call.name in "ab" and set(json.loads(call.arguments)) == set(SCHEMA["required"])


def test_free_text_may_call_and_then_has_to_call_rightly(host):
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    make = asyncio.run(Grammars().of_calls(host, tools, is_forced=False)).begin
    begin = host.tokenizer.encode(f"Well. {CALL_BEGIN}", add_special_tokens=False)
    random = noise(3)

    def choose(n, vocab):
        logits = random(n, vocab)
        if n < len(begin):
            logits[0, begin[n]] = 1e6
        return logits

    text = walk(host, make, choose, limit=len(begin) + 60)
    assert text.startswith(f"Well. {call_head('f')}")


def test_a_copy_of_a_guide_goes_its_own_way(host):
    make = asyncio.run(Grammars().of_schema(host, {"enum": ["aa", "ab"]})).begin
    vocab = host.engine.runner.vocab_size
    state = SamplingState(SamplingParams(guide=make), vocab)
    other = state.fork()
    quote, a = (host.tokenizer.encode(t, add_special_tokens=False)[0] for t in ('"', "a"))
    state.record(quote)
    logits = np.zeros((1, vocab), dtype=np.float32)
    logits[0, a] = 9
    assert sample(logits, [state])[0].token_id == a
    assert host.tokenizer.decode([sample(logits, [other])[0].token_id]).startswith('"')


def test_what_is_no_schema_is_refused(host):
    with pytest.raises(GrammarError, match="no grammar can be made of response_format"):
        asyncio.run(Grammars().of_schema(host, {"type": "frob"}))
