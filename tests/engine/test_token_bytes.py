"""Bytes of tokens, joined, are the text's UTF-8, whatever the tokens cut in two."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kvcellar.engine.loop.token_bytes import TokenBytes, token_bytes
from tests.engine.fakes import ByteTokenizer

WORDS = ["▁", "▁the", "▁cat", "s", "▁sat", ",", "é", "t", "h", "e"]
CHARACTERS = st.characters(codec="utf-8", exclude_characters="▁")
TEXT = st.text(st.one_of(CHARACTERS, st.sampled_from("aé€😀👩‍👩‍👧 \n")))


def byte_level() -> Any:
    """A tokenizer like GPT-2's: every byte is a character of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | {"Ġt": 256, "Ã©": 257}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("Ã", "©")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return with_specials(made)


def byte_fallback() -> Any:
    """A tokenizer like Llama 2's: words with ▁ for spaces, a token for each byte of all else."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(WORDS)} | {"<unk>": 300}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return with_specials(made)


def with_specials(made: Any) -> Any:
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    found.add_tokens(["<plain>"])
    return found


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXT)
def test_bytes_joined_are_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    names = token_bytes(tokenizer)
    assert b"".join(names.of(i) for i in ids).decode() == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_part_of_a_character_has_its_byte_and_a_replacement_for_its_name(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    names = TokenBytes(tokenizer)
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert [names.of(i) for i in ids] == [b"\xe2", b"\x82", b"\xac"]
    assert names.name(ids[0]) == "\ufffd"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_special_token_adds_nothing_to_a_text_and_has_a_name(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    names = TokenBytes(tokenizer)
    assert (names.of(tokenizer.eos_token_id), names.name(tokenizer.eos_token_id)) == (b"", "<end>")
    plain = tokenizer.convert_tokens_to_ids("<plain>")
    assert (names.of(plain), names.name(plain)) == (b"<plain>", "<plain>")


def test_a_tokenizer_of_another_kind_is_asked_for_the_text() -> None:
    names = TokenBytes(ByteTokenizer())
    assert names.of(ord("a")) == b"a" and names.of(ByteTokenizer.END) == b""


def test_a_metaspace_is_a_space() -> None:
    made = tokenizers.Tokenizer(models.BPE(vocab={"▁the": 0, "s": 1, "<unk>": 2}, merges=[]))
    made.decoder = decoders.Metaspace()
    names = TokenBytes(with_specials(made))
    assert [names.of(i) for i in (0, 1)] == [b" the", b"s"]
