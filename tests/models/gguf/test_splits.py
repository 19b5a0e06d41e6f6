"""Texts are cut before they are encoded as llama.cpp cuts them, under each name of the format.

``expected/splits.json`` has llama.cpp's own tokens. The vocabulary is every short piece of the
texts, so that two tokens stand where a text is cut and one where it is not. Left out are texts
in which llama.cpp's rules only come near the models' own: marks of Indian scripts, and capitals
with accents or within words, under ``gpt-4o``, ``tekken`` and ``kimi-k2``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from kvcellar.models.gguf.reader import GgufFile, GgufTensor
from kvcellar.models.gguf.splits import SPLITS
from kvcellar.models.gguf.tokens import tokenizer_of

EXPECTED = json.loads((Path(__file__).parent / "expected" / "splits.json").read_text())
TEXTS = EXPECTED["texts"]
LONGEST = 7


def vocabulary() -> tuple[list[str], list[str]]:
    """Every piece of a text of up to ``LONGEST`` bytes, shortest first, and how it is merged."""
    spelling = bytes_to_unicode()
    spelled = ["".join(spelling[byte] for byte in text.encode()) for text in TEXTS]
    tokens = dict.fromkeys(spelling.values())
    merges = []
    for size in range(2, LONGEST + 1):
        for text in spelled:
            for at in range(len(text) - size + 1):
                piece = text[at : at + size]
                if piece not in tokens:
                    tokens[piece] = None
                    merges.append(f"{piece[:-1]} {piece[-1]}")
    return [*tokens, "<s>"], merges


def file_of(cut: str) -> GgufFile:
    tokens, merges = vocabulary()
    said = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cut,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    path = Path("tiny.gguf")
    embedding = GgufTensor(path, (len(tokens), 32), 0, 0, len(tokens) * 128)
    return GgufFile(path, (path,), said, {"token_embd.weight": embedding})


@pytest.mark.parametrize("names", EXPECTED["names"], ids=lambda names: names[0])
def test_texts_are_cut_as_llama_cpp_cuts_them(names):
    want = EXPECTED["tokens"][EXPECTED["names"].index(names)]
    for name in names:
        tokenizer = tokenizer_of(file_of(name))
        got = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
        assert got == want, name


def test_every_rule_is_held_against_llama_cpp():
    known = {name for names in EXPECTED["names"] for name in names}
    assert SPLITS.keys() | GGUF_PRE_TOKENIZER_SPLITS.keys() <= known | set(EXPECTED["unknown"])
