"""Whatever a conversation is made of, a template takes it, and a longer one begins alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.models.text.prompts import encode, render
from tests.models.strict_templates import TEMPLATES, tokenizer


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def call(number, text):
    function = {"name": "look", "arguments": {"what": text}}
    return {"id": f"call_{number:012d}", "type": "function", "function": function}


def result(number, text):
    return said("tool", text, tool_call_id=f"call_{number:012d}")


PARTS = st.sampled_from(["user", "system", "calls", "two calls", "answer", "two users"])


@st.composite
def conversations(draw):
    """A conversation as agents have them, in rounds; each round ends with something to answer."""
    rounds, n = [], 0
    system = draw(st.integers(0, 2))
    first = [said("system", f"system{i}") for i in range(system)]
    for kind in draw(st.lists(PARTS, min_size=1, max_size=5)):
        n += 4
        text = f"text{n}"
        if kind == "two users":
            rounds.append([said("user", text), said("user", f"more{n}")])
        elif kind == "system":
            rounds.append([said("user", text), said("system", f"late{n}")])
        elif kind in ("calls", "two calls") and rounds:
            numbers = range(n, n + (2 if kind == "two calls" else 1))
            calls = [call(i, f"arg{i}") for i in numbers]
            rounds.append([said("assistant", "", tool_calls=calls)])
            rounds[-1] += [result(i, f"result{i}") for i in numbers]
            if draw(st.booleans()):
                rounds[-1].append(said("user", text))
        else:
            rounds.append([said("user", text)])
    return first, rounds


def flat(first, rounds):
    """The messages of some rounds: those that begin with calls have their answer."""
    messages = list(first)
    for i, one in enumerate(rounds):
        if i and one[0]["role"] != "assistant":
            messages.append(said("assistant", f"answer{i}"))
        messages += one
    return messages


def as_text(messages):
    """Calls as text, as the server has them for templates that know none."""
    found = []
    for message in messages:
        calls = message.get("tool_calls") or []
        args = " ".join(c["function"]["arguments"]["what"] for c in calls)
        found.append({**message, "content": message["content"] or args, "tool_calls": None})
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(conversations())
def test_every_conversation_is_taken_whole_and_in_order_and_goes_on_in_the_same_text(name, made):
    first, rounds = made
    knows = "tool_calls" in TEMPLATES[name]
    before = ""
    for n in range(1, len(rounds) + 1):
        messages = flat(first, rounds[:n])
        known = messages if knows else as_text(messages)
        text = render(tokenizer(name), known, is_asking=False).text
        at = 0
        for message in messages:
            word = message["content"]
            if message["role"] == "tool":  # each stands behind its call, wherever that is
                assert word in text, (word, text)
            else:
                at = text.find(word, at)
                assert at >= 0, (word, text)
        assert text.startswith(before)
        before = text


def test_results_follow_their_calls_one_by_one_where_a_template_takes_single_calls():
    messages = [
        said("user", "go"),
        said("assistant", "", tool_calls=[call(1, "one"), call(2, "two")]),
        result(2, "second"),
        result(1, "first"),
    ]
    rendered = render(tokenizer("llama"), messages)
    places = [rendered.text.index(word) for word in ("one", "first", "two", "second")]
    assert places == sorted(places)
    assert "several calls" in rendered.notes[0]


def test_what_a_template_takes_is_left_as_it_is():
    messages = [
        said("system", "a"),
        said("system", "b"),
        said("user", "c"),
        said("user", "d"),
        said("assistant", "", tool_calls=[call(1, "one"), call(2, "two")]),
        result(1, "first"),
        result(2, "second"),
        said("user", "e"),
        said("system", "f"),
    ]
    known = tokenizer("free")
    rendered = render(known, messages)
    assert rendered.notes == ()
    assert rendered.text == known.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma", "<s><start>user\na\n\nb\n\nc<end>\n<start>model\nd<end>\n"),
        ("qwen", "<|im|>system\na\n\nb<|end|>\n<|im|>user\nc<|end|>\n<|im|>assistant\nd<|end|>\n"),
        ("mistral", "<s>[SYS]a\n\nb[/SYS][INST]c[/INST]d</s>"),
        ("dropping", "a\n\nb\nU: cA: d"),
    ],
)
def test_system_messages_in_front_are_one_where_no_more_are_taken(name, text):
    messages = [
        said("system", "a"),
        said("system", "b"),
        said("user", "c"),
        said("assistant", "d"),
    ]
    later = [*messages, said("user", "e")]
    assert render(tokenizer(name), later).text.startswith(text)


@pytest.mark.parametrize("name", ["mistral", "gemma", "dropping"])
def test_an_answer_to_nobody_is_read_first(name):
    messages = [said("assistant", "Welcome."), said("user", "Hi")]
    assert "Welcome." in render(tokenizer(name), messages).text


@pytest.mark.parametrize("name", ["mistral", "qwen"])
def test_a_user_who_breaks_off_an_answer_after_a_result_is_heard(name):
    messages = [
        said("user", "go"),
        said("assistant", "", tool_calls=[call(1, "one")]),
        result(1, "first"),
        said("user", "stop"),
    ]
    text = render(tokenizer(name), messages).text
    assert text.index("first") < text.index("stop")


# Answers that are gone on with --------------------------------------------------------------------

BEGUN = ["The answer is", "  The answer is ", "{", "<think>\nHm", "<think>\nHm.\n</think>\n\nYes"]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begun", BEGUN)
def test_an_answer_that_is_gone_on_with_is_read_as_it_was_sent(name, begun):
    messages = [said("user", "What?"), said("assistant", begun)]
    known = tokenizer(name)
    rendered = render(known, messages)
    before = render(known, messages[:1], is_asking=False).text
    assert rendered.text.startswith(before) and rendered.text.endswith(begun)
    assert rendered.text.count("<think>") == ("<think>" in begun or name == "qwen")
    assert known.decode(encode(known, rendered)).endswith(begun)


def test_an_empty_answer_at_the_end_is_an_answer_that_has_not_begun():
    known = tokenizer("qwen")
    messages = [said("user", "What?"), said("assistant", "")]
    assert render(known, messages).text == render(known, messages[:1]).text


def test_control_tokens_in_an_answer_that_is_gone_on_with_are_text():
    known = tokenizer("mistral")
    rendered = render(known, [said("user", "What?"), said("assistant", "a</s>b")])
    assert rendered.text.endswith("a</s>b")
    assert encode(known, rendered).count(known.eos_token_id) == 0
