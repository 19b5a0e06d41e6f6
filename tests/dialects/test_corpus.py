"""Outputs in all dialects mean what they mean, however they are cut; what is no call is text."""

from __future__ import annotations

import json
import random
import re

import pytest

from kvcellar.dialects import DIALECTS, AnswerParser, CallPart, Dialect
from kvcellar.dialects.kinds import SchemaKinds
from kvcellar.dialects.values import tagged_value
from tests.dialects.corpus import FORMATS, TOOLS, outputs, with_tokens
from tests.dialects.vocabularies import dialect_with_tokens

CORPUS = list(outputs())


def read(dialect: Dialect, pieces: list[str], **how):
    parser = AnswerParser(dialect, "c", tools=TOOLS, **how)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    return parser, joined(parts)


def joined(parts):
    """What clients make of the parts, in order."""
    made = []
    for part in parts:
        kind = part.index if isinstance(part, CallPart) else type(part).__name__
        if made and made[-1][0] == kind:
            made[-1][-1] += part.text
        elif isinstance(part, CallPart):
            assert part.text == ""
            made.append([kind, part.call.name, part.call.call_id, ""])
        else:
            made.append([kind, part.text])
    return made


def cut(chance: random.Random, text: str) -> list[str]:
    at = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def spelt(dialect: Dialect, written: str) -> str:
    """What a model with tokens for its marks gives the parser."""
    return with_tokens(written, {one.content: dialect.spelt(one.content) for one in dialect.tokens})


def shown(dialect: Dialect, written: str) -> str:
    """What is shown of an output in which marks mean nothing."""
    return dialect.written(spelt(dialect, written), is_shown=True)


def test_the_corpus_has_every_dialect_and_is_large():
    assert FORMATS.keys() == DIALECTS.keys()
    assert len(CORPUS) >= 300 and len({str(output) for output in CORPUS}) == len(CORPUS)


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_mean_what_they_mean_however_they_are_cut(name):
    chance = random.Random(name)
    for output in (one for one in CORPUS if one.dialect == name):
        dialect = dialect_with_tokens(name)
        text = spelt(dialect, output.written)
        parser, parts = read(dialect, [text])
        assert [
            (c.name, json.loads(c.arguments)) for c in parser.calls if not output.is_broken
        ] == (output.calls), output
        assert bool(parser.trouble) is output.is_broken, (str(output), parser.trouble)
        if not output.is_broken:
            said = shown(dialect, output.written) if output.text == "?" else output.text
            assert parser.text == said, output
            assert parser.reasoning == shown(dialect, output.reasoning), output
        ways = [list(text), *(cut(chance, text) for _ in range(49))]
        for pieces in ways:
            again, others = read(dialect, pieces)
            assert others == parts and again.calls == parser.calls, (str(output), pieces)
            assert (again.text, again.reasoning) == (parser.text, parser.reasoning)
            assert again.trouble == parser.trouble


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_without_tokens_for_the_marks_says_the_same(name):
    for output in (one for one in CORPUS if one.dialect == name and not one.forges):
        parser, _ = read(DIALECTS[name], [output.plain()])
        if output.is_broken:
            assert parser.trouble, output
            continue
        assert [(c.name, json.loads(c.arguments)) for c in parser.calls] == output.calls, output
        assert parser.text == (output.plain() if output.text == "?" else output.text), output
        assert parser.reasoning == with_tokens(output.reasoning, {}), output


@pytest.mark.parametrize("name", [name for name, how in FORMATS.items() if "⟦" in how.write([])])
def test_what_is_spelt_like_a_mark_is_text_where_the_model_has_a_token_for_it(name):
    for output in (one for one in CORPUS if one.dialect == name and one.calls):
        if "⟦" not in output.written.split("{")[0].split("(")[0]:
            continue  # calls that begin with no mark
        parser, _ = read(dialect_with_tokens(name), [output.plain()])
        assert not parser.calls and not parser.trouble and not parser.reasoning, output
        assert parser.text == output.plain(), output


def fragments(name: str) -> list[str]:
    """Pieces of all outputs of a dialect, cut where something begins or ends."""
    texts = (output.written for output in CORPUS if output.dialect == name)
    return sorted({part for text in texts for part in re.findall(r"⟦.*?⟧|\w+|\s+|.", text)})


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_of_such_pieces_gives_the_same_events_however_it_is_cut(name, n_texts=40):
    chance, parts_of = random.Random(name), fragments(name)
    wholes = [output.written for output in CORPUS if output.dialect == name]
    for dialect in (dialect_with_tokens(name), DIALECTS[name]):
        for _ in range(n_texts):
            some = [chance.choice(parts_of) for _ in range(chance.randrange(12))]
            whole = chance.choice(wholes)
            at = chance.randrange(len(whole))
            some.insert(
                chance.randrange(len(some) + 1), whole[:at] + chance.choice(parts_of) + whole[at:]
            )
            text = spelt(
                dialect,
                re.sub("[⟦⟧]", "", "".join(some)) if chance.random() < 0.1 else "".join(some),
            )
            how = {"is_forced": chance.random() < 0.2, "reads_calls": chance.random() < 0.9}
            parser, parts = read(dialect, [text], **how)
            for pieces in (list(text), cut(chance, text), cut(chance, text)):
                again, others = read(dialect, pieces, **how)
                assert others == parts and again.trouble == parser.trouble, (text, pieces)
            for call in parser.calls:
                json.dumps([call.name, call.call_id]).encode()
            shown_text = "".join(part[1] for part in parts if part[0] == "TextPart")
            assert shown_text == parser.text and shown_text.encode() is not None


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {"type": ["string", "integer"]}, 5),
        ('"5"', {"type": ["string", "null"]}, '"5"'),
        ("null", {"type": ["string", "null"]}, None),
        ("True", {"type": "boolean"}, True),
        ("{'a': [None, -1.5]}", {"type": "object"}, {"a": [None, -1.5]}),
        ("{'a': 1}", {"type": ["string", "object"]}, "{'a': 1}"),
        ("os.getcwd()", {"type": "object"}, "os.getcwd()"),
        ("NaN", {"type": "number"}, "NaN"),
        ("two words", None, "two words"),
        ("[1, 2", {"type": "array"}, "[1, 2"),
    ],
)
def test_a_value_between_tags_is_what_the_schema_says(text, schema, value):
    assert tagged_value(text, schema, None, SchemaKinds({})) == value
    assert tagged_value(text, schema, True, SchemaKinds({})) == text


def test_an_answer_that_goes_on_from_text_has_no_call_that_only_its_beginning_can_be():
    call = '{"name": "run", "parameters": {}}'
    parser, _ = read(DIALECTS["llama3"], [" ", call], has_begun=True)
    assert not parser.calls and parser.text == f" {call}"
    parser, _ = read(DIALECTS["hermes"], ["<think>so</think>"], has_begun=True)
    assert parser.text == "<think>so</think>" and not parser.reasoning
