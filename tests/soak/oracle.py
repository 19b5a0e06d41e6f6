"""Oracle of a soak: computes each answer alone, from an empty cache, with the bundled model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvcellar.cache_config import make_config
from kvcellar.engine import SamplingParams, generate, last
from kvcellar.history import History
from kvcellar.models import load_model
from kvcellar.registry import make_decode_session

CONTEXT = 1024
"""Tokens for which the oracle and the servers have cells."""

Message = dict[str, Any]


def digest(tokens: Sequence[int]) -> str:
    """Return the digest that a server tells of these tokens."""
    return History(tokens).digest()


class Oracle:
    """Reads prompts and answers them greedily; nothing that it computed is used twice."""

    def __init__(self) -> None:
        self._model = load_model("demo", backend="torch", dtype="float32")
        self._lock = threading.Lock()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, by the model's template."""
        with self._lock:
            tokenizer = self._model.tokenizer
            text = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
            return list(tokenizer.encode(text, add_special_tokens=False))

    def text(self, tokens: Sequence[int]) -> str:
        """Return what tokens say."""
        with self._lock:
            return self._model.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return the tokens that follow a prompt."""
        model = self._model
        config = make_config(model.params, CONTEXT, "float32")
        with self._lock, make_decode_session("torch", config) as session:
            events = generate(
                model.bind(session),
                session.cache,
                model.tokenizer,
                prompt,
                SamplingParams(temperature=0, max_tokens=max_tokens),
                eos_token_ids=model.eos_token_ids,
            )
            return list(last(events).token_ids)
