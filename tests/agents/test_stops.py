"""Stop texts count in the text of an answer alone, in every dialect, however it is cut."""

from __future__ import annotations

import random

import pytest

from kvcellar.agents.text.stops import TextStops
from kvcellar.dialects import DIALECTS, AnswerParser, TextPart
from kvcellar.engine.loop.text import StopMatcher
from tests.dialects.corpus import FORMATS, TOOLS, outputs
from tests.dialects.test_corpus import cut, spelt
from tests.dialects.vocabularies import dialect_with_tokens

STOPS = [
    ("a",),
    ("{",),
    ("The",),
    ("e", "path"),
    ("\n",),
    ("\n\n",),
    (" the ", "so", "I l"),
    ("q",),
]


def texts_of(dialect, written):
    """The pieces of an answer's text between its thoughts and calls, and all of its parts."""
    parser = AnswerParser(dialect, "c", tools=TOOLS)
    found, is_next = [], False
    for part in [one for char in written for one in parser.push(char)] + parser.flush():
        if not isinstance(part, TextPart):
            is_next = False
        elif is_next:
            found[-1] += part.text
        else:
            found, is_next = [*found, part.text], True
    return parser, found


@pytest.mark.parametrize("name", FORMATS)
def test_the_first_stop_text_in_the_text_ends_an_answer_and_none_in_thoughts_or_calls(name):
    chance = random.Random(name)
    for dialect in (DIALECTS[name], dialect_with_tokens(name)):
        for output in outputs():
            if output.dialect != name or output.is_broken or (output.forges and not dialect.tokens):
                continue
            written = spelt(dialect, output.written)
            whole, texts = texts_of(dialect, written)
            for stops in STOPS:
                plain = [StopMatcher(stops) for _ in texts]
                pairs = zip(plain, texts, strict=True)
                kept = [one.push(text) + one.flush() for one, text in pairs]
                at = next((i for i, one in enumerate(plain) if one.matched), None)
                for pieces in ([written], list(written), cut(chance, written)):
                    finder = TextStops(AnswerParser(dialect, "c", tools=TOOLS), stops)
                    given = "".join(map(finder.push, pieces)) + finder.flush()
                    if at is None:
                        assert finder.matched is None and given == written, (output, stops)
                        continue
                    assert finder.matched == plain[at].matched, (output, stops)
                    assert written.startswith(given)
                    again, said = texts_of(dialect, given)
                    expected = "".join([*texts[:at], kept[at]])
                    if output.text == "?":  # a stop text may begin in a mark
                        assert expected.startswith("".join(said))
                    else:
                        assert "".join(said) == expected, (output, stops)
                    assert again.calls == whole.calls[: len(again.calls)]


def test_what_cannot_be_a_part_of_a_stop_text_is_let_through_at_once():
    finder = TextStops(AnswerParser(DIALECTS["hermes"], "c", tools=TOOLS), ["END"])
    for piece in ("<think>", "END", "</think>", "An E", "ND"):
        given = finder.push(piece)
        assert given == {"An E": "An ", "ND": ""}.get(piece, piece)
    assert finder.matched == "END" and not finder.flush()


def test_a_stop_text_that_a_call_interrupts_is_none():
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    finder = TextStops(AnswerParser(DIALECTS["hermes"], "c", tools=TOOLS), ["END"])
    given = "".join(map(finder.push, f"E{call}ND and END")) + finder.flush()
    assert given == f"E{call}ND and " and finder.matched == "END"
