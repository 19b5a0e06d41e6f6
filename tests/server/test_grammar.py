"""What schemas become grammars, whole or in part; what a tool costs its neighbours; one call."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.dialects import DIALECTS, AnswerParser
from kvcellar.engine import SamplingParams, SamplingState, sample
from kvcellar.errors import GrammarError, PromptError
from kvcellar.grammar.grammars import MOST_KNOWN, Grammars
from kvcellar.grammar.schema_relax import loosened
from kvcellar.server.errors import as_api_error
from tests.dialects.writing import CALL_BEGIN, CALL_END, call_head

NO_GRAMMAR = {
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": {"const": 1}, "then": {"const": 1}, "else": {"const": 2}}, "if"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentReq"),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": False}}, "dependentSch"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"type": "string"}}, "contains"),
    "unevaluated": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    "a lookahead": ({"type": "string", "pattern": "^(?!a).*$"}, "pattern"),
    "a broken pattern": ({"type": "string", "pattern": "("}, "pattern"),
    "an unknown format": ({"type": "string", "format": "frob"}, "format"),
    "a reference to nowhere": ({"$ref": "#/$defs/nowhere"}, "$ref"),
    "a reference outside": ({"$ref": "https://example.org/schema.json"}, "$ref"),
    "an unknown type": ({"type": "any"}, "type"),
    "a wrong enum": ({"enum": "a"}, "enum"),
    "no schema": ("a string", "x"),
    "a wrong value": ({"required": "a"}, "required"),
    "overlapping oneOf": ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
}
"""A schema of the property ``x``, and how the keyword is named for which there is no grammar."""

PART = {"type": "integer", "minimum": 3, "maximum": 4}
"""A schema that has a grammar."""


def tool(name, parameters, **more):
    function = {"name": name, "parameters": parameters, **more}
    return {"type": "function", "function": function}


def with_x(schema):
    return {
        "type": "object",
        "properties": {"n": PART, "x": schema},
        "required": ["n"],
        "additionalProperties": False,
    }


@pytest.fixture(scope="module")
def host(served):
    served.post("/v1/completions", {"prompt": [9], "max_tokens": 1})
    found = served.host()
    return found


def calls_of(host, tools, **more):
    return asyncio.run(Grammars().of_calls(host, tools, **{"is_forced": False, **more}))


def takes(host, begin, text, is_whole=True):
    """True if a grammar lets a text come, and end there."""
    guide = begin()
    for token_id in host.tokenizer.encode(text, add_special_tokens=False):
        if guide.is_complete or not guide.allowed()[token_id]:
            return False
        guide.accept(token_id)
    return not is_whole or bool(
        guide.is_complete or guide.allowed()[list(host.eos_token_ids)].any()
    )


def call(name, **arguments):
    return f"{call_head(name)}{json.dumps(arguments)}}}{CALL_END}"


@pytest.mark.parametrize("what", NO_GRAMMAR)
@pytest.mark.slow
def test_one_keyword_without_a_grammar_costs_nobody_else_a_thing(host, what):
    schema, named = NO_GRAMMAR[what]
    held = calls_of(host, [tool("odd", with_x(schema)), tool("even", with_x({"type": "null"}))])
    (note,) = held.notes
    assert note.startswith("tool odd: ") and named in note and "even" not in note
    assert takes(host, held.begin, call("odd", n=3)) and takes(host, held.begin, call("even", n=3))
    for name in ("odd", "even"):  # what can be held is held
        assert not takes(host, held.begin, call(name, n=5), False)
        assert not takes(host, held.begin, call(name, x=None), False)
        assert not takes(host, held.begin, call(name, n=3, y=1), False)
    assert not takes(host, held.begin, call("other", n=3), False)


def test_a_type_in_upper_case_is_read_as_the_type_that_it_is(host):
    held = calls_of(host, [tool("f", {"type": "OBJECT", "properties": {"n": {"type": "INTEGER"}}})])
    assert not held.notes
    assert takes(host, held.begin, call("f", n=1))
    assert not takes(host, held.begin, call("f", n="1"), False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"type": "object", "unevaluatedProperties": True, "dependentRequired": {}},
        {"type": "object", "$schema": "https://example.org/none"},
        {"oneOf": [{"const": "a"}, {"const": "b"}]},
    ],
)
def test_what_says_nothing_or_can_be_held_needs_no_note(host, schema):
    assert not calls_of(host, [tool("f", with_x(schema))]).notes
    assert not asyncio.run(Grammars().of_schema(host, with_x(schema))).notes


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "string", "pattern": "^(?!a).*$"},
        {"type": "array"},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"type": "object", "properties": {"n": {"minimum": 5, "maximum": 1, "type": "integer"}},
         "required": ["n"]},
        {"$ref": "#"},
        {"properties": []},
        {"type": "any", "anyOf": [{"type": "array", "uniqueItems": True}]},
    ],
)  # fmt: skip
def test_a_tool_whose_schema_has_no_grammar_at_all_takes_any_object(host, parameters):
    held = calls_of(host, [tool("odd", parameters), tool("even", with_x({}))])
    (note,) = held.notes
    assert "odd" in note
    assert takes(host, held.begin, call("odd", whatever=[1, {"a": None}]))
    assert takes(host, held.begin, call("even", n=3))
    assert not takes(host, held.begin, call("even", n=5), False)
    assert not takes(host, held.begin, f"{call_head('odd')}[", False)


@pytest.mark.slow
def test_schemas_without_end_are_answered_all_the_same(host):
    deep = {}
    for _ in range(300):
        deep = {"type": "object", "properties": {"x": deep}, "uniqueItems": True}
    wide = {"type": "object", "properties": {f"p{i}": {"not": {}} for i in range(6000)}}
    held = calls_of(host, [tool("deep", deep), tool("wide", wide), tool("even", with_x({}))])
    assert len(held.notes) == 2 and all(len(note) < 900 for note in held.notes)
    assert takes(host, held.begin, call("even", n=3))
    assert not takes(host, held.begin, call("even", n=5), False)


def test_only_a_call_that_has_to_come_and_to_be_right_is_refused_by_tool_and_keyword(host):
    part = with_x({"type": "array", "uniqueItems": True})
    none = {"type": "integer", "minimum": 5, "maximum": 1}
    assert calls_of(host, [tool("f", part)], is_forced=True).notes
    assert calls_of(host, [tool("f", part)], strict={"f"}).notes
    assert calls_of(host, [tool("f", part), tool("g", none)], is_forced=True, strict={"f"}).notes
    with pytest.raises(GrammarError, match=r"'f'.*properties\.x\.uniqueItems.*strict") as caught:
        calls_of(host, [tool("f", part)], is_forced=True, strict={"f"})
    assert as_api_error(caught.value).status == 400
    with pytest.raises(GrammarError, match="'g'"):
        calls_of(host, [tool("g", none)], is_forced=True)


@pytest.mark.parametrize("what", NO_GRAMMAR)
def test_the_schema_of_an_answer_is_a_promise_unless_the_client_says_it_is_none(host, what):
    schema, named = NO_GRAMMAR[what]
    with pytest.raises(GrammarError) as caught:
        asyncio.run(Grammars().of_schema(host, with_x(schema)))
    refusal = as_api_error(caught.value)
    assert (refusal.status, refusal.param) == (400, "response_format")
    assert f"properties.x.{named}" in str(caught.value) or what == "no schema"
    held = asyncio.run(Grammars().of_schema(host, with_x(schema), is_strict=False))
    assert len(held.notes) == 1 and named in held.notes[0]
    assert takes(host, held.begin, '{"n": 3}') and not takes(host, held.begin, '{"n": 5', False)


HEAVY = {"type": "string", "pattern": "^(a{1000}){1000}$"}
"""There is a grammar of it, which grows without end on the way."""


def test_a_grammar_that_breaks_down_on_the_way_lets_calls_go_and_fails_what_was_promised(
    host, live
):
    text = call("f", n=3, x="a" * 200)
    held = calls_of(host, [tool("f", with_x(HEAVY))])
    guides = []

    def begin():
        guides.append(held.begin())
        return guides[-1]

    assert takes(host, begin, text) and not guides[0].is_complete
    assert "no schema" in guides[0].troubles[0]
    with pytest.raises(PromptError, match="simpler patterns"):
        takes(host, calls_of(host, [tool("f", with_x(HEAVY))], is_forced=True).begin, text)
    with pytest.raises(PromptError, match="held to its schema"):
        takes(
            host,
            asyncio.run(Grammars().of_schema(host, with_x(HEAVY))).begin,
            '{"n": 3, "x": "aaaa',
        )


def test_what_breaks_down_is_said_to_the_client(live):
    (token_id,) = live.host().tokenizer.encode("a", add_special_tokens=False)
    body = {
        "messages": [{"role": "user", "content": "Go."}],
        "max_tokens": 300,
        "temperature": 0,
        "logit_bias": {str(token_id): 100},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {**with_x(HEAVY), "required": ["n", "x"]}},
        },
    }
    response = live.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and "simpler patterns" in response.text
    said = response.json()["error"]["message"]
    assert not set(said) & set("()<>{}[]"), "plain words"
    assert live.get("/health")["status"] == "ok"


KEYWORDS = st.sampled_from([schema for schema, _ in NO_GRAMMAR.values()] + [PART, True, {}])
SCHEMAS = st.recursive(
    KEYWORDS,
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "STRING", "any", ["string", "null"], 5]),
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            "items": inner | st.lists(inner, max_size=2),
            "anyOf": st.lists(inner, max_size=2),
            "oneOf": st.lists(inner, max_size=2),
            "additionalProperties": inner,
            "not": inner,
            "$defs": st.dictionaries(st.sampled_from("abc"), inner, max_size=1),
            "$ref": st.sampled_from(["#/$defs/a", "#/properties/b", "#/items/0", "x"]),
        },
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SCHEMAS.filter(lambda schema: isinstance(schema, dict)), min_size=1, max_size=3))
@pytest.mark.slow
def test_any_schemas_of_tools_give_a_grammar(host, schemas):
    tools = [tool(f"f{i}", schema) for i, schema in enumerate(schemas)]
    held = calls_of(host, [*tools, tool("even", with_x({}))])
    assert takes(host, held.begin, call("even", n=3))
    assert not takes(host, held.begin, call("even", n=5), False)
    assert all("even" not in note for note in held.notes)


def test_loosening_leaves_a_schema_without_trouble_as_it_is():
    schema = with_x({"anyOf": [{"$ref": "#/properties/n"}, {"type": ["string", "null"]}]})
    assert loosened(schema, lambda _: "") == (schema, [])
    assert loosened({"a": 1, "b": 2}, lambda part: "no" if "b" in part else "") == ({"a": 1}, ["b"])


# Text, thoughts and calls -------------------------------------------------------------------------


def test_a_grammar_knows_thoughts_as_the_parser_does(host, monkeypatch):
    monkeypatch.setattr(host.tokenizer, "chat_template", f"{host.tokenizer.chat_template}<think>")
    tools = [tool("f", with_x({}))]
    held = calls_of(host, tools)
    begun = f"<think>{CALL_BEGIN} no call</think> so {call('f', n=3)}\nand so"
    assert takes(host, held.begin, begun)
    assert takes(host, held.begin, f"<think>{CALL_BEGIN} never ends")
    assert not takes(host, held.begin, f"</think>{CALL_BEGIN} no call", False)
    parser = AnswerParser(DIALECTS["hermes"], "c")
    parser.push(begun)
    assert len(parser.calls) == 1


@pytest.mark.parametrize("mark", ["", "<think>"])
def test_an_answer_that_begins_in_a_thought_may_call_behind_it(host, mark, monkeypatch):
    monkeypatch.setattr(host.tokenizer, "chat_template", f"{host.tokenizer.chat_template}{mark}")
    tools = [tool("f", with_x({}))]
    held = calls_of(host, tools)
    inside = f"{CALL_BEGIN} no call</think>\n\n{call('f', n=3)}"
    assert takes(host, held.begin_in_thought, inside) is bool(mark)
    assert takes(host, held.begin, inside) is False
    forced = calls_of(host, tools, is_forced=True)
    assert takes(host, forced.begin_in_thought, f"Hm.</think>\n\n{call('f', n=3)}") is bool(mark)
    assert not takes(host, forced.begin, "Hm.", False)


def test_tools_and_a_schema_make_an_answer_a_call_or_json(host):
    held = calls_of(host, [tool("f", with_x({}))], schema=with_x({}))
    assert takes(host, held.begin, call("f", n=3)) and takes(host, held.begin, '{"n": 4}')
    assert not takes(host, held.begin, "Well", False)
    assert not takes(host, held.begin, '{"n": 5', False)


def test_no_more_calls_than_one_where_one_is_all_that_may_come(host):
    tools = [tool("f", with_x({}))]
    for forced in (True, False):
        begin = calls_of(host, tools, is_forced=forced, most=1).begin
        assert takes(host, begin, call("f", n=3))
        assert not takes(host, begin, f"{call('f', n=3)}\n<", False)
        begin = calls_of(host, tools, is_forced=forced).begin
        assert takes(host, begin, f"{call('f', n=3)}\n{call('f', n=4)}")
    assert takes(host, calls_of(host, tools, most=1).begin, "no call")


def walked(host, begin, wish, temperature=0.0):
    """What a model says that wishes for the tokens of ``wish``, and then for a word."""
    wanted = host.tokenizer.encode(wish, add_special_tokens=False)
    word = host.tokenizer.encode(" word", add_special_tokens=False)[0]
    vocab = host.engine.runner.vocab_size
    state = SamplingState(SamplingParams(guide=begin, temperature=temperature, seed=3), vocab)
    said = []
    while not state.is_complete and len(said) < 300:
        logits = np.zeros((1, vocab), dtype=np.float32)
        mark = host.tokenizer.encode(CALL_BEGIN, add_special_tokens=False)[0]
        logits[0, mark] = 5  # what it likes second best
        logits[0, wanted[len(said)] if len(said) < len(wanted) else word] = 30
        (choice,) = sample(logits, [state])
        if choice.token_id in host.eos_token_ids:
            break
        state.record(choice.token_id)
        said.append(choice.token_id)
    return host.tokenizer.decode(said)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_required_call_is_one_unless_the_model_begins_another(host, temperature):
    held = calls_of(host, [tool("f", with_x({}))], is_forced=True)
    one, other = call("f", n=3), call("f", n=4)
    for behind in ("", " and so on", "\nNow", "{"):
        said = walked(host, held.begin, one + behind, temperature)
        assert said.strip() == one
    two = walked(host, held.begin, f"{one}\n{other}", temperature)
    assert two.strip() == f"{one}\n{other}"


def test_the_grammar_of_the_same_tools_is_made_once(host, monkeypatch):
    grammars, tools = Grammars(), [tool("f", with_x({}))]
    first = asyncio.run(grammars.of_calls(host, tools, is_forced=False))
    assert asyncio.run(grammars.of_calls(host, tools, is_forced=False)) is first
    assert asyncio.run(grammars.of_calls(host, tools, is_forced=True)) is not first
    for i in range(MOST_KNOWN):
        asyncio.run(grammars.of_calls(host, [tool(f"f{i}", {})], is_forced=False))
    assert asyncio.run(grammars.of_calls(host, tools, is_forced=False)) is not first
    monkeypatch.setattr(host.tokenizer, "chat_template", "[TOOL_CALLS][ARGS]")
    other = asyncio.run(grammars.of_calls(host, [tool("f1", {})], is_forced=False))
    assert takes(host, other.begin, "[TOOL_CALLS]f1[ARGS]{}")
