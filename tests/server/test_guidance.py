"""Tags that a vocabulary has tokens for and that are text may come in text and in schemas."""

from __future__ import annotations

import copy

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from kvcellar.grammar.guidance import guidance_tokenizer, tags_of_text
from tests.dialects.vocabularies import tokenizer_of

TAGS = ("<h1>", "</h1>", "<td>", "<tool_call>", "<think>", "<unused7>", "<|user|>")
TEXT = "%llguidance {}\nstart: TEXT\nTEXT: /(.|\\n)*/"
JSON = '%llguidance {}\nstart: %json {"type": "string"}'


@pytest.fixture(scope="module")
def tokenizer():
    made = copy.deepcopy(tokenizer_of("gemma3"))
    made.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    made.chat_template = "{{ messages[0].content }}<think>"
    return made


def test_tags_are_text_where_no_template_has_them(tokenizer):
    assert tags_of_text(tokenizer) == {"<h1>", "</h1>", "<td>"}
    assert tags_of_text(None) == set()


@pytest.mark.parametrize(("grammar", "quote"), [(TEXT, ""), (JSON, '"')])
def test_a_tag_may_come_as_its_token_and_spelt_and_a_mark_may_not(tokenizer, grammar, quote):
    made = guidance_tokenizer(tokenizer, len(tokenizer) + 3, [tokenizer.eos_token_id])
    for text, is_text in (("<h1>a</h1><td>", True), ("<think>", False), ("<|user|>", False)):
        ids = tokenizer.encode(f"{quote}{text}{quote}", add_special_tokens=False)
        assert len(ids) < len(text) + 2 * len(quote)
        matcher = LLMatcher(made, grammar, log_level=0)
        assert (matcher.validate_tokens(ids) == len(ids)) is is_text
    assert made.eos_token == tokenizer.eos_token_id
    spelt = [i for char in f"{quote}<h1>{quote}" for i in tokenizer.encode(char)]
    assert LLMatcher(made, grammar, log_level=0).validate_tokens(spelt) == len(spelt)
    assert made.is_special_token(tokenizer.convert_tokens_to_ids("<tool_call>"))


def test_a_tokenizer_without_such_tags_is_taken_as_it_is():
    plain, marks = tokenizer_of("hermes"), ("<think>", "</think>")
    assert tags_of_text(plain) and not tags_of_text(plain, marks)
    made = guidance_tokenizer(plain, len(plain), None, marks)
    assert made.vocab_size == len(plain)
    assert made.is_special_token(plain.convert_tokens_to_ids("<think>"))
