"""A vocabulary for each dialect: bytes, and tokens for its marks, as published ones have them."""

from __future__ import annotations

import re
from functools import cache

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvcellar.dialects import DIALECTS, Dialect

MARK = re.compile(
    r"<\|[^<>|]*\|?>|<[^<>|]*\|>|<｜[^<>]*｜>|｜DSML｜|\[/?[A-Z_]+\]|</?[\w:]+>|<\|\"\|>"
)
"""What vocabularies have a token for: a tag without attributes, and a word in brackets."""

NO_TOKENS = ("gemma3",)
PLAIN_TAGS = (
    "<parameter",
    "</parameter",
    "</function",
    "</invoke",
    "<tool_calls>",
    "</tool_calls>",
)
"""Tags that published vocabularies spell out."""


def marks_of(dialect: Dialect) -> list[str]:
    """Return the marks of a dialect that models have tokens for."""
    found = [mark for text in dialect.literals() for mark in MARK.findall(text)]
    return sorted({mark for mark in found if not mark.startswith(PLAIN_TAGS)})


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes and the marks of a dialect."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    known.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known.decoder = decoders.ByteLevel()
    known.add_special_tokens([AddedToken("<|eos|>", special=True)])
    for mark in marks_of(DIALECTS[name]):
        is_special = mark.startswith(("<|", "[", "<｜")) or mark.endswith("|>")
        (known.add_special_tokens if is_special else known.add_tokens)(
            [AddedToken(mark, special=is_special)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=known, eos_token="<|eos|>")


@cache
def dialect_with_tokens(name: str) -> Dialect:
    """Return a dialect as a model speaks it that has tokens for its marks."""
    added = tokenizer_of(name).added_tokens_decoder
    return DIALECTS[name].of_vocabulary(
        {token.content: (i, token.special) for i, token in added.items()}
    )


@cache
def guidance_of(name: str) -> LLTokenizer:
    """Return the tokenizer as the grammar's library has it."""
    tokenizer = tokenizer_of(name)
    return from_tokenizer(tokenizer, n_vocab=len(tokenizer))
