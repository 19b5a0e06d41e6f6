"""Oracles of a soak: compute each answer alone, from an empty cache."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcellar.cache_config import make_config
from kvcellar.engine import GeneratedToken, SamplingParams, generate
from kvcellar.history import History
from kvcellar.models import load_model
from kvcellar.registry import make_decode_session

CONTEXT = 1024
"""Tokens for which the oracles, and most of the servers, have cells."""

CLEAR = 1e-3
"""How much likelier than the next one, in logarithms, a token is of which two computations that add
up in another order surely agree: float32 rounds a hundred times less away."""

Message = dict[str, Any]


def digest(tokens: Sequence[int]) -> str:
    """Return the digest that a server tells of these tokens."""
    return History(tokens).digest()


class Oracle:
    """Reads prompts and answers them greedily; nothing that it computed is used twice."""

    def __init__(
        self,
        model: str | Path = "demo",
        adapters: Mapping[str, Path] | None = None,
        adapter: str = "",
    ) -> None:
        """Load a model.

        Args:
            model: what to load.
            adapters: folders of LoRA adapters beside it.
            adapter: which of them answers; empty: the model alone.
        """
        self._model = load_model(
            model, backend="torch", dtype="float32", adapters=dict(adapters or {})
        )
        self._adapter = adapter
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
        """Return the tokens that follow a prompt, up to the first that is not clearly the best."""
        model = self._model
        config = make_config(model.params, CONTEXT, "float32")
        answer = []
        with self._lock, make_decode_session("torch", config) as session:
            for event in generate(
                model.bind(session, adapter=self._adapter),
                session.cache,
                model.tokenizer,
                prompt,
                SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2),
                eos_token_ids=model.eos_token_ids,
            ):
                if isinstance(event, GeneratedToken):
                    best, other = event.top_logprobs
                    if best.logprob - other.logprob < CLEAR:
                        break
                    answer.append(event.token_id)
        return answer
