"""Values that can be a string or something else: one rule in grammars, readers and writers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvcellar.dialects import DIALECTS, AnswerParser, Dialect, choose_dialect
from kvcellar.dialects.dialect import TaggedArguments
from kvcellar.dialects.kinds import ALL_KINDS, SchemaKinds, kind_of
from kvcellar.dialects.messages import as_message, write_calls
from kvcellar.models.text.prompts import render
from tests.dialects.corpus import FORMATS
from tests.dialects.templates import SAID_AS_TEXT, template_of
from tests.dialects.test_lark import matcher, takes, tokens_of
from tests.dialects.vocabularies import tokenizer_of

WORDS = "qwen3-coder with words"
"""Qwen3-Coder's dialect by its own template, which writes ``None`` and ``True``."""

WORDS_TEMPLATE = (
    template_of("qwen3-coder")
    .replace("k, v in", "k, args_value in")
    .replace(
        "(v if v is string else v | tojson)",
        "(args_value | tojson if args_value is mapping or (args_value is sequence "
        "and args_value is not string) else args_value | string)",
    )
)
SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {},
            {"description": "Anything."},
            *({"type": one} for one in ("string", "integer", "number", "boolean", "null")),
            {"type": ["string", "null"]},
            {"type": ["string", "integer", "boolean"]},
            {"type": ["string", "array", "object"]},
            {"type": "array", "items": {"type": "integer"}},
            {"type": "object"},
            {"$ref": "#/$defs/colour"},
            {"$ref": "#/$defs/maybe"},
            {"enum": ["red", "5", None, 5, True]},
            {"enum": ["null", "true", "very slow"]},
            {"enum": ["1", 2]},
            {"const": "5"},
            {"const": 5},
        ]
    ),
    lambda some: (
        st.builds(
            lambda how, parts: {how: parts},
            st.sampled_from(["anyOf", "oneOf"]),
            st.lists(some, min_size=1, max_size=3),
        )
        | st.builds(lambda one: {"allOf": [one]}, some)
    ),
    max_leaves=4,
)
DEFS = {
    "colour": {"enum": ["red", "green"]},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TEXTS = st.sampled_from(
    ["red", "green", "null", "None", "true", "True", "5", "-1", "1.5", "[1]", "{}", '"red"', "a b"]
) | st.text("ab5nul\"'{}[],: ", max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, -1.25]) | TEXTS
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.just("a"), SCALARS)


def dialect_of(name: str) -> tuple[str, Dialect]:
    if name == WORDS:
        return "qwen3-coder", choose_dialect(WORDS_TEMPLATE)
    return name, DIALECTS[name]


def meant(value: Any, dialect: Dialect, is_valid: Callable[[Any], bool]) -> Any:
    """What a value means in a dialect, by the rule: said again, and by other means."""
    form = dialect.calls
    assert form is not None
    if not isinstance(form.arguments, TaggedArguments) or "$string" in form.arguments.opening:
        return value
    if not isinstance(value, str):
        return value
    try:
        other = json.loads(value)
    except ValueError:
        words = {"None": None, "True": True, "False": False}
        if not form.arguments.has_words or value not in words:
            return value
        other = words[value]
    return value if isinstance(other, str) or not is_valid(other) else other


def valid_for(schema: dict[str, Any]) -> Callable[[Any], bool]:
    """Another reader of schemas; of ``oneOf`` any will do, as in grammars."""
    said = json.loads(json.dumps({**schema, "$defs": DEFS}).replace('"oneOf"', '"anyOf"'))
    return lambda value: Draft202012Validator(said).is_valid(value)


def tool_of(schema: dict[str, Any]) -> dict[str, Any]:
    root = {"type": "object", "properties": {"value": schema}, "required": ["value"], "$defs": DEFS}
    return {"type": "function", "function": {"name": "pick", "parameters": root}}


@pytest.mark.parametrize("name", [*(n for n in FORMATS if n != "harmony"), WORDS])
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much], deadline=None)
@given(SCHEMAS, VALUES, st.data())
@example({"type": ["string", "null"]}, "red", None)
@example({"type": ["string", "null"]}, None, None)
@example({"anyOf": [{"type": "string"}, {"type": "null"}]}, "red", None)
@example({"anyOf": [{"type": "string"}, {"type": "null"}]}, None, None)
@example({"type": ["string", "boolean"]}, True, None)
def test_a_value_is_written_held_read_and_written_again_in_one_text(name, schema, value, data):
    name, dialect = dialect_of(name)
    tool = tool_of(schema)
    is_valid = valid_for(schema)
    value = meant(value, dialect, is_valid)
    if not is_valid(value):
        return
    written = write_calls(dialect, [("pick", {"value": value})])
    made = matcher(name, dialect, [tool], is_forced=True, most=1)
    assert takes(made, tokens_of(name, dialect, written)), written
    at = 0 if data is None else data.draw(st.integers(0, len(written)))
    cuts = [written[:at], written[at:]]
    for pieces in (cuts, list(written)):
        parser = AnswerParser(dialect, "c", tools=[tool])
        for piece in pieces:
            parser.push(piece)
        parser.flush()
        (call,) = parser.calls
        read = json.loads(call.arguments)["value"]
        assert read == value and kind_of(read) == kind_of(value), call.arguments
    assert write_calls(dialect, [("pick", {"value": read})]) == written
    if name in SAID_AS_TEXT:
        return
    tokenizer = tokenizer_of(name)
    before, tokenizer.chat_template = (
        tokenizer.chat_template,
        (WORDS_TEMPLATE if dialect == dialect_of(WORDS)[1] else template_of(name)),
    )
    try:
        asked = {"role": "user", "content": "Pick."}
        message = as_message("", parser.calls)
        said = render(tokenizer, [asked, message], is_asking=False, control_tokens_in_text=True)
    finally:
        tokenizer.chat_template = before
    ids = (one["id"] for one in message["tool_calls"])
    assert written.replace("call00000", next(ids)) in said.text or "call00000" in written


@settings(max_examples=300)
@given(SCHEMAS, VALUES)
def test_the_part_of_a_schema_for_some_kinds_takes_what_the_schema_takes_of_them(schema, value):
    root = tool_of(schema)["function"]["parameters"]
    kinds = SchemaKinds(root)
    own = valid_for(schema)
    for wanted in (frozenset((kind_of(value),)), ALL_KINDS - {kind_of(value)}, ALL_KINDS):
        part = kinds.narrowed(schema, wanted)
        has = part is not None and valid_for(part)(value)
        assert has is (own(value) and kind_of(value) in wanted)
    assert kinds.takes(schema, value) or not own(value)


def test_schemas_that_refer_to_themselves_take_anything_behind_so_many_steps():
    loop: dict[str, Any] = {"$ref": "#/$defs/loop"}
    defs = {"loop": {"anyOf": [loop, loop]}, "far": {"$ref": "#/$defs/nowhere"}}
    kinds = SchemaKinds({"$defs": defs})
    assert kinds.takes(loop, 5) and kinds.takes_text(loop) and kinds.texts(loop) is None
    assert kinds.takes({"$ref": "#/$defs/nowhere"}, None) and not kinds.is_text(defs["far"])
