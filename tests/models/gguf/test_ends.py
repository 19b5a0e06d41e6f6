"""Tokens that end an answer: those that a file names, and those that are known by their text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvcellar.models.gguf.reader import GgufFile
from kvcellar.models.gguf.tokens import ends_of

CONTROL = 3


@pytest.mark.parametrize(
    ("tokens", "named", "ends"),
    [
        (["a", "<|start|>", "<|end|>", "<|return|>", "<|call|>"], {"eos": 3}, {3, 4}),
        (["a", "<|end|>", "<|flush|>", "<|calls|>", "b"], {"eos": 4}, {2, 3, 4}),
        (["<|user|>", "<|end|>", "<|endoftext|>"], {"eos": 2, "eot": 1}, {1, 2}),
        (["<eos>", "<turn|>", "<|tool_response>", "<bos>"], {"eos": 0}, {0, 1, 2}),
        (["[BOS]", "[EOS]", "[EOT]", "[e~["], {}, {1, 2, 3}),
        (
            ["<|endoftext|>", "<|user|>", "<|observation|>"],
            {"eos": 0, "eot": 1, "eom": 2},
            {0, 1, 2},
        ),
    ],
    ids=["gpt-oss", "solar", "phi", "gemma4", "kimi and minimax", "glm"],
)
def test_a_message_that_goes_on_is_no_end(tokens, named, ends):
    said = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.full(len(tokens), CONTROL, np.int32),
        **{f"tokenizer.ggml.{key}_token_id": at for key, at in named.items()},
    }
    path = Path("tiny.gguf")
    assert ends_of(GgufFile(path, (path,), said, {})) == ends


def test_texts_that_are_no_control_tokens_end_nothing():
    said = {
        "tokenizer.ggml.tokens": ["<|im_end|>", "x"],
        "tokenizer.ggml.token_type": np.array([1, 1], np.int32),
        "tokenizer.ggml.eos_token_id": 1,
    }
    path = Path("tiny.gguf")
    assert ends_of(GgufFile(path, (path,), said, {})) == {1}
