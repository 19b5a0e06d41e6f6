"""Grammars of every dialect: what they let come is what the parser reads as calls of the tools."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher

from kvcellar.dialects import DIALECTS, AnswerParser, Dialect
from kvcellar.dialects.held import HeldArguments
from kvcellar.dialects.lark import call_grammars, schema_grammar
from kvcellar.dialects.messages import write_calls
from tests.dialects.corpus import FORMATS, TOOLS, outputs, with_tokens
from tests.dialects.vocabularies import dialect_with_tokens, guidance_of, tokenizer_of

FEW = {
    "type": "object",
    "properties": {
        "how": {"enum": ["fast", "very slow"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_deep": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
        "more": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["how", "n"],
    "additionalProperties": False,
}
ODD = (
    "other spaces",
    "a type before the name",
    "a call and spaces",
    "a call and text",
    "a call inside reasoning",
)
"""Outputs that are read, and that a model which is held writes otherwise."""

CHOICES = [
    {"type": "function", "function": {"name": name, "parameters": FEW}}
    for name in ("look", "go-on")
]


def held(tools) -> list[HeldArguments]:
    return [HeldArguments(tool, dict(tool["function"]["parameters"])) for tool in tools]


def matcher(name: str, dialect: Dialect, tools, at: int = 0, **how) -> LLMatcher:
    found = call_grammars(dialect, held(tools), **{"is_forced": False, "most": 8, **how})[at]
    made = LLMatcher(guidance_of(name if dialect.tokens else "gemma3"), found, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def tokens_of(name: str, dialect: Dialect, written: str) -> list[int]:
    """Tokens of an output: marks are theirs, and text that is spelt alike is bytes."""
    ids = {token.content: token.token_id for token in dialect.tokens}
    plain = tokenizer_of("gemma3")
    found: list[int] = []
    for part in written.replace("⟦", "\0⟦").replace("⟧", "⟧\0").split("\0"):
        if part.startswith("⟦") and part[1:-1] in ids:
            found.append(ids[part[1:-1]])
        else:
            found += plain.encode(with_tokens(part, {}), add_special_tokens=False)
    return found


def takes(made: LLMatcher, tokens: list[int]) -> bool:
    return made.validate_tokens(tokens) == len(tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_answers_that_a_model_writes_may_come(name):
    for output in outputs():
        is_odd = output.what in ODD
        is_odd |= FORMATS[name].kind == "python" and "'" in output.written  # is read all the same
        if output.dialect != name or output.text == "?" or is_odd:
            continue
        dialect = dialect_with_tokens(name)
        made = matcher(name, dialect, TOOLS)
        tokens = tokens_of(name, dialect, output.written.removesuffix("⟦<|call|>⟧"))
        assert takes(made, tokens), output
        made.consume_tokens(tokens)
        assert made.is_accepting() or "⟦<|end|>⟧" in output.written, output


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_no_tool_or_with_other_arguments_cannot_come(name):
    dialect = dialect_with_tokens(name)
    if dialect.has_channels:
        head = "⟦<|channel|>⟧commentary to=functions.{} ⟦<|constrain|>⟧json⟦<|message|>⟧"
        calls = [f'{head.format("look")}{{"how": "slow"', f'{head.format("other")}{{"how": "fast"']
    else:
        write = FORMATS[name].write
        calls = [write([("look", {"how": "slow", "n": 1})]), write([("other", {"how": "fast"})])]
    for call in calls:
        for how in ({"is_forced": True}, {}):
            assert not takes(matcher(name, dialect, CHOICES, **how), tokens_of(name, dialect, call))


@pytest.mark.parametrize("text", ["caf\\u00e9", "\\ud83d\\ude42", "a\\u003cb", "é 🙂"])
def test_any_character_of_a_string_may_be_escaped_and_no_half_of_a_pair(text):
    properties = {"path": {"type": "string"}}
    schema: dict[str, object] = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    dialect = dialect_with_tokens("hermes")
    call = '⟦<tool_call>⟧\n{"name": "look", "arguments": {"path": "%s"}}\n⟦</tool_call>⟧'
    assert takes(matcher("hermes", dialect, [tool]), tokens_of("hermes", dialect, call % text))
    half = tokens_of("hermes", dialect, call % "\\ud83d")
    assert not takes(matcher("hermes", dialect, [tool]), half)
    answer = LLMatcher(guidance_of("hermes"), schema_grammar(dialect, schema), log_level=0)
    assert takes(answer, tokens_of("hermes", dialect, f'{{"path": "{text}"}}'))


def walk(made: LLMatcher, chance: np.random.Generator, most: int = 1500) -> list[int]:
    """Take tokens by chance, and end where that is possible, or a little later."""
    found: list[int] = []
    while len(found) < most:
        if made.is_stopped() or (made.is_accepting() and chance.random() < 0.5):
            return found
        bits = np.frombuffer(made.compute_bitmask(), dtype=np.uint8)
        (allowed,) = np.nonzero(np.unpackbits(bits, bitorder="little"))
        if made.is_accepting():
            allowed = allowed[allowed != 256]  # the end
        found.append(int(chance.choice(allowed)))
        made.consume_token(found[-1])
    raise AssertionError(f"no end: {tokenizer_of('gemma3').decode(found[:200])}")


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_model_wants_forced_calls_are_calls_of_the_tools(name, with_tokens):
    dialect = dialect_with_tokens(name) if with_tokens else DIALECTS[name]
    marks, seen = dialect.marks(), set()
    for seed in range(4):
        how = {"is_forced": True, "most": 1 if seed == 0 else 3}
        tools = CHOICES[:1] if seed == 1 else CHOICES  # one that was named
        made = matcher(name, dialect_without_reasoning(dialect), tools, **how)
        tokens = walk(made, np.random.default_rng(seed))
        parser = AnswerParser(dialect, "c", tools=tools, is_forced=True)
        plain = tokenizer_of("gemma3")
        run: list[int] = []
        for token in [*tokens, -1]:
            if token in marks or token == -1:
                parser.push(plain.decode(run))
                run = []
                parser.push(marks.get(token, ""))
            else:
                run.append(token)
        parser.flush()
        assert not parser.trouble and not parser.text.strip() and parser.calls
        assert len(parser.calls) <= how["most"]
        for call in parser.calls:
            value = json.loads(call.arguments)
            assert call.name in [tool["function"]["name"] for tool in tools]
            assert value["how"] in ("fast", "very slow") and 0 <= value["n"] <= 99
            assert set(value) <= FEW["properties"].keys()
            assert set(value.get("tags", [])) <= {"a", "b"}
            assert isinstance(value.get("is_deep", True), bool)
            assert isinstance(value.get("more", {"x": True})["x"], bool)
            seen.add(call.name)
    assert seen


def dialect_without_reasoning(dialect: Dialect) -> Dialect:
    """A dialect whose forced calls come at once: by chance a thought would not end."""
    return dialect if dialect.has_channels else replace(dialect, reasoning=None)


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].think])
def test_forced_calls_may_come_behind_reasoning_that_has_begun(name):
    dialect, how = dialect_with_tokens(name), FORMATS[name]
    call = how.write([("look", {"how": "fast", "n": 1})]).removesuffix("⟦<|call|>⟧")
    space = "" if dialect.has_channels else "\n\n"
    text = f"Hm, {how.think[1]}{space}{call}"
    made = matcher(name, dialect, CHOICES, 1, is_forced=True)
    assert takes(made, tokens_of(name, dialect, text))
    assert not takes(made, tokens_of(name, dialect, f"Hm, {how.think[1]}Well"))
    whole = matcher(name, dialect, CHOICES, is_forced=True)
    assert takes(whole, tokens_of(name, dialect, f"{how.think[0]}{text}"))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
def test_what_is_written_for_templates_without_calls_is_read_again(name):
    calls = [("read_file", {"path": "a b", "n": 1}), ("run", {"more": {"x": [None, True]}})]
    parser = AnswerParser(DIALECTS[name], "c", tools=TOOLS)
    parser.push(write_calls(DIALECTS[name], calls))
    parser.flush()
    assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == calls
    assert not parser.text


def test_an_answer_in_channels_has_its_schema_in_the_last_message_alone():
    dialect = dialect_with_tokens("harmony")
    made = LLMatcher(guidance_of("harmony"), schema_grammar(dialect, FEW), log_level=0)
    final, thought = "⟦<|channel|>⟧final⟦<|message|>⟧", FORMATS["harmony"].think
    value = '{"how": "fast", "n": 3}'
    assert takes(made, tokens_of("harmony", dialect, f"{thought[0]}Hm.{thought[1]}{final}{value}"))
    assert not takes(made, tokens_of("harmony", dialect, f"{final}Well"))
    assert not takes(made, tokens_of("harmony", dialect, value))
    both = matcher("harmony", dialect, CHOICES, schema=FEW)
    assert takes(both, tokens_of("harmony", dialect, f"{final}{value}"))
    call = "⟦<|channel|>⟧commentary to=functions.look ⟦<|constrain|>⟧json⟦<|message|>⟧"
    assert takes(both, tokens_of("harmony", dialect, f"{call}{value}"))
    plain = LLMatcher(guidance_of("hermes"), schema_grammar(DIALECTS["hermes"], FEW), log_level=0)
    assert takes(plain, tokens_of("hermes", DIALECTS["hermes"], value))
