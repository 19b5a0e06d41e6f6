"""Embeddings of texts: one vector of each, pooled from a language model's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from kvcellar.budget import MemoryBudget
from kvcellar.errors import ConfigError
from kvcellar.models import LoadedModel, LoadOptions
from kvcellar.models.pooling import Pooling
from kvcellar.models.runner import FloatArray, HiddenRunner, step_limit
from kvcellar.registry import make_seq_session

STEP_TOKENS = 512
"""Tokens of one forward."""

Tokens = Sequence[int]


class TextEmbedder(Protocol):
    """Protocol of a model that was made for embeddings and runs beside the others.

    Attributes:
        tokenizer: of the model.
        pooling: how its vectors are pooled where a request does not say.
        context: the longest text that it takes, in tokens.
        vocab_size: ids from 0 to ``vocab_size - 1`` exist.
        size: numbers of a vector.
        family: ``model_type``.
        size_bytes: of its weights in memory.
    """

    tokenizer: Any
    pooling: Pooling
    context: int
    vocab_size: int
    size: int
    family: str

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights in memory."""
        ...

    def embed(
        self, texts: Sequence[Tokens], pooling: Pooling, on_step: Callable[[], None]
    ) -> FloatArray:
        """Return a vector of each text; see ``Embedder.embed``."""
        ...


class Embedder:
    """Makes vectors of token lists with a model that is in memory, beside its engine.

    Each call has a cache of its own for as long as it lasts, of as many cells as its longest text
    needs; several may run at a time.
    """

    def __init__(
        self, model: LoadedModel, options: LoadOptions, budget: MemoryBudget | None = None
    ) -> None:
        """Create an embedder.

        Args:
            model: in memory.
            options: by which it was loaded.
            budget: whom its caches ask before they grow.
        """
        self._model = model
        self._options = options
        self._budget = budget

    @property
    def size(self) -> int:
        """Numbers of a vector."""
        return int(self._model.config.hidden_size)

    def embed(
        self,
        texts: Sequence[Tokens],
        pooling: Pooling,
        on_step: Callable[[], None] = lambda: None,
    ) -> FloatArray:
        """Return ``[n_texts, size]``: the hidden states of each text, pooled, of length 1.

        Args:
            texts: tokens of each; none is empty.
            pooling: ``mean`` of all tokens, the ``last`` one's, or the first one's, ``cls``.
            on_step: called before each forward; what it raises ends the call.

        Raises:
            ConfigError: the backend tells no hidden states.
            CacheFullError: the budget has no room.
        """
        model, longest = self._model, max(map(len, texts), default=1)
        config = self._options.config_for(
            model.params, model.kv_dtype, max(longest, STEP_TOKENS), self._budget
        )
        found = np.zeros((len(texts), self.size), np.float32)
        with make_seq_session(model.backend, config) as session:
            runner = model.bind(session)
            if not isinstance(runner, HiddenRunner):
                raise ConfigError(
                    f"backend {model.backend!r} tells no hidden states, so {model.name!r} makes no "
                    f"embeddings with it; load it with torch or mlx"
                )
            most = step_limit(runner, STEP_TOKENS)
            has_states = model.params.state is not None
            for numbers in _packed([len(text) for text in texts], 1 if has_states else most):
                pack = [texts[i] for i in numbers]
                found[numbers] = _pooled(session.cache, runner, pack, pooling, most, on_step)
        return found


def _packed(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield numbers of texts that go into one forward together; a long one goes alone."""
    pack: list[int] = []
    n = 0
    for i, length in enumerate(lengths):
        if pack and n + length > most:
            yield pack
            pack, n = [], 0
        pack.append(i)
        n += length
    if pack:
        yield pack


def _pooled(
    cache: Any,
    runner: HiddenRunner,
    texts: Sequence[Tokens],
    pooling: Pooling,
    most: int,
    on_step: Callable[[], None],
) -> FloatArray:
    """Run some texts, each a sequence of its own, and let go of them; return their vectors."""
    ids = [token for text in texts for token in text]
    owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    sums: Any = None
    for at in range(0, len(ids), most):
        on_step()
        mine = owners[at : at + most]
        positions = cache.begin_step(mine.tolist())
        states = runner.forward_hidden(ids[at : at + most], positions).astype(np.float64)
        cache.end_step()
        if sums is None:
            sums = np.zeros((len(texts), states.shape[1]))
        if pooling == "mean":
            np.add.at(sums, mine, states)
        elif pooling == "last":
            sums[mine] = states  # of several of one text the last one stays
        else:
            is_first = np.asarray(positions) == 0
            sums[mine[is_first]] = states[is_first]
    for seq_id in range(len(texts)):
        cache.seq_rm(seq_id)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    vectors: FloatArray = (sums / np.maximum(lengths, 1e-12)).astype(np.float32)
    return vectors
