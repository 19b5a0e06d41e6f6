"""A turn that comes back as a message is written in the tokens in which the model wrote it."""

from __future__ import annotations

import copy

import pytest

from kvcellar.dialects import DIALECTS, AnswerParser, choose_dialect
from kvcellar.dialects.messages import as_message, say_calls
from kvcellar.engine import TextStream
from kvcellar.models.text.prompts import encode, render
from tests.dialects.corpus import BLANK, CODE, FORMATS, MANY, NESTED, PATH, QUOTES, TOOLS
from tests.dialects.templates import NO_REASONING, SAID_AS_TEXT, template_of
from tests.dialects.test_lark import tokens_of
from tests.dialects.vocabularies import marks_of, tokenizer_of

NUMBERS = ("run", {"n": 3, "is_deep": True, "nothing": None})
ASKED = [{"role": "user", "content": "Go."}]


def model(name):
    """A tokenizer with a dialect's template and tokens, and the dialect that is found for it."""
    tokenizer = copy.deepcopy(tokenizer_of(name))
    tokenizer.chat_template = template_of(name)
    added = {t.content: (i, t.special) for i, t in tokenizer.added_tokens_decoder.items()}
    return tokenizer, choose_dialect(tokenizer.chat_template, added)


def answers(name):
    how = FORMATS[name]
    several = ([PATH], [MANY, PATH], [NESTED], [QUOTES], [CODE, BLANK])
    for calls in several if name not in SAID_AS_TEXT else ([NUMBERS], [NUMBERS, NUMBERS]):
        calls = calls[:1] if name == "harmony" else calls
        yield how.write(calls), calls
        if name not in NO_REASONING:
            space = "" if name in ("harmony", "gemma4", "mistral", "mistral-v11") else "\n"
            yield (
                f"{how.think[0]}{space}Hm.{space}{how.think[1]}{2 * space}{how.write(calls)}",
                calls,
            )


@pytest.mark.parametrize("name", FORMATS)
def test_the_dialect_is_found_by_the_template(name):
    tokenizer, dialect = model(name)
    assert dialect.name == name
    assert {token.content for token in dialect.tokens} >= set(marks_of(DIALECTS[name])) - {
        "[CALL_ID]"
    }
    assert dialect.thinks is (name not in NO_REASONING)
    named = choose_dialect(tokenizer.chat_template, name="hermes")
    assert named.name == "hermes"


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_with_calls_comes_back_in_the_tokens_in_which_it_was_said(name):
    tokenizer, dialect = model(name)
    prompt = encode(tokenizer, render(tokenizer, ASKED))
    for written, calls in answers(name):
        said = tokens_of(name, dialect, written)
        parser = AnswerParser(dialect, "c", tools=TOOLS)
        parser.push(_text(name, dialect, said))
        parser.flush()
        assert [call.name for call in parser.calls] == [one for one, _ in calls]
        message = as_message(parser.text, parser.calls, parser.reasoning)
        if name in SAID_AS_TEXT:
            message = say_calls(message, dialect)
        talk = [*ASKED, message, {"role": "tool", "content": "Done."}]
        again = encode(tokenizer, render(tokenizer, talk))
        assert again[: len(prompt) + len(said)] == [*prompt, *said], tokenizer.decode(again)


def _text(name, dialect, tokens):
    """The text of tokens with what stands for marks, as the engine makes it."""
    stream = TextStream(tokenizer_of(name), marks=dialect.marks())
    return "".join(map(stream.push, tokens)) + stream.flush()
