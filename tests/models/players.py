"""Two ways to run a model over tokens: transformers alone, and ours behind a session."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import transformers

import kvcellar as kv
from kvcellar.models import LoadedModel
from tests.stretches import stretches

TOLERANCE = 2e-4
"""Of logits. gpt-oss needs it: its random experts amplify rounding, and transformers' own float32
is up to 4e-5 away from its float64. The other families stay within 2e-5."""

MAKE_SESSION = {
    "contiguous": kv.make_decode_session,
    "seq": kv.make_seq_session,
    "tree": kv.make_tree_session,
}


class Oracle:
    """transformers' own way: eager attention, masks and its own cache, float32."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.logits = functools.cache(self._logits)
        self.greedy = functools.cache(self._greedy)

    def _logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        """``[len(tokens), vocab]`` after each token of one history."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens]), use_cache=True).logits[0].numpy()

    def hidden(self, tokens: tuple[int, ...]) -> np.ndarray:
        """``[len(tokens), hidden_size]`` that logits are made of, behind the last norm."""
        with torch.no_grad():
            return self.model.model(torch.tensor([tokens])).last_hidden_state[0].numpy()

    def _greedy(self, prompt: tuple[int, ...], n_tokens: int) -> tuple[list[int], np.ndarray]:
        """The greedy continuation, one token at a time, and the logits that chose each."""
        tokens: list[int] = []
        rows = []
        cache = transformers.DynamicCache(config=self.model.config)
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(n_tokens):
                row = self.model(ids, past_key_values=cache, use_cache=True).logits[0, -1].numpy()
                rows.append(row)
                tokens.append(int(row.argmax()))
                ids = torch.tensor([tokens[-1:]])
        return tokens, np.stack(rows)


class Player:
    """A session of one of the three caches and a model bound to it, fed token by token."""

    def __init__(
        self,
        model: LoadedModel,
        kind: str,
        capacity: int = 256,
        *,
        min_chunk: int = 32,
        **policy: Any,
    ) -> None:
        self.kind = kind
        config = kv.make_config(model.params, capacity, min_chunk=min_chunk, **policy)
        self.session: Any = MAKE_SESSION[kind](model.backend, config)
        self._model = model

    def __enter__(self) -> Player:
        self.session.__enter__()
        self.runner = self._model.bind(self.session)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.__exit__(kind, error, trace)

    @property
    def cache(self) -> Any:
        return self.session.cache

    def feed(self, tokens: Sequence[int], seq_id: int = 0, *, rows: Any = None) -> np.ndarray:
        """The next tokens of one sequence."""
        return self.batch([(seq_id, token) for token in tokens], rows=rows)

    def batch(self, tokens: Sequence[tuple[int, int]], *, rows: Any = None) -> np.ndarray:
        """A flat batch of (sequence, token); ``rows="all"`` asks for every token's logits."""
        if self.kind == "contiguous":
            start = self.cache.length
            positions = list(range(start, start + len(tokens)))
        else:
            positions = self.cache.begin_step(stretches(seq_id for seq_id, _ in tokens))
        if isinstance(rows, str):
            rows = range(len(tokens))
        return self.runner.forward([token for _, token in tokens], positions, rows)

    def greedy(self, logits: np.ndarray, n_tokens: int, seq_id: int = 0) -> tuple[list[int], Any]:
        """Go on from the last row of ``logits``: the tokens and the logits that chose each."""
        tokens: list[int] = []
        rows = []
        row = logits[-1]
        for i in range(n_tokens):
            rows.append(row)
            tokens.append(int(row.argmax()))
            if i < n_tokens - 1:
                row = self.feed(tokens[-1:], seq_id)[0]
        return tokens, np.stack(rows)

    def cut(self, length: int, seq_id: int = 0) -> None:
        """Go back to the first ``length`` tokens."""
        one = self.kind == "contiguous"
        at = self.cache.rewind(length) if one else self.cache.seq_rm(seq_id, length)
        assert at == length


def text(n_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Random bytes as tokens, the same each time."""
    return tuple(np.random.default_rng(seed).integers(0, 256, n_tokens).tolist())


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    """Logits equal up to float32 arithmetic in another order."""
    assert got.shape == want.shape
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
