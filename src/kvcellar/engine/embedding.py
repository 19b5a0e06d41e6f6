"""Embeddings of texts: one vector of each, pooled from a language model's hidden states."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvcellar.engine.engine import Engine
from kvcellar.engine.service import EngineService
from kvcellar.errors import CacheFullError, ConfigError, EngineClosedError
from kvcellar.models.files.pooling import Pooling
from kvcellar.models.runner import FloatArray, HiddenRunner, in_spaces, rope_border_of, step_limit
from kvcellar.space import LONG, Space
from kvcellar.types import IntArray

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
    """Makes vectors of token lists with an engine's model, between the engine's steps.

    Texts are sequences of its cache for as long as they are read: what was kept for later gives way
    to them as to any prompt, and nothing of them stays. For several threads.
    """

    def __init__(self, service: EngineService, size: int, adapter: str = "") -> None:
        """Create an embedder.

        Args:
            service: the engine's.
            size: numbers of a vector.
            adapter: of the model, that computes hidden states; empty: none.
        """
        self._service = service
        self.size, self._adapter = size, adapter

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
            CacheFullError: running answers hold the cells that a text needs.
            EngineClosedError: the engine has stopped.
        """
        most, n_together = self._service.run(_most_tokens).result()
        found = np.zeros((len(texts), self.size), np.float32)
        for numbers in _packed([len(text) for text in texts], n_together):
            found[numbers] = self._pooled([texts[i] for i in numbers], pooling, most, on_step)
        return found

    def _pooled(
        self,
        texts: Sequence[Tokens],
        pooling: Pooling,
        most: int,
        on_step: Callable[[], None],
    ) -> FloatArray:
        """Read some texts, each a sequence of its own, and let go of them; return their vectors."""
        ids = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
        owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        sums = np.zeros((len(texts), self.size))
        seq_ids = self._service.run(lambda engine: _begin(engine, len(texts))).result()
        border = self._service.run(lambda engine: rope_border_of(engine.runner)).result()
        ropes = [LONG if 0 < border < len(text) else "" for text in texts]
        spaces = [Space(self._adapter, rope=rope) for rope in ropes]
        try:
            for at in range(0, len(ids), most):
                on_step()
                mine = slice(at, at + most)
                runs = [(i, len([*same])) for i, same in itertools.groupby(owners[mine].tolist())]
                step = partial(
                    _read,
                    [(spaces[i], n) for i, n in runs],
                    ids[mine],
                    [(int(seq_ids[i]), n) for i, n in runs],
                )
                states, positions = self._service.run(step).result()
                _add(sums, owners[mine], states, positions, pooling)
        finally:
            with contextlib.suppress(EngineClosedError):
                self._service.run(lambda engine: _end(engine, seq_ids)).result()
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        vectors: FloatArray = (sums / np.maximum(lengths, 1e-12)).astype(np.float32)
        return vectors


def _most_tokens(engine: Engine) -> tuple[int, int]:
    """Return the most tokens of a forward, and of texts in one together; 1: they go one by one.

    Raises:
        ConfigError: the engine's model tells no hidden states.
    """
    if not isinstance(engine.runner, HiddenRunner):
        raise ConfigError(
            f"{type(engine.runner).__name__} tells no hidden states, so this model makes no "
            f"embeddings; load it with torch or mlx, or an embedding model beside it"
        )
    most = step_limit(engine.runner, STEP_TOKENS)
    return most, most if engine.cache.config.params.state is None else 1


def _begin(engine: Engine, n: int) -> IntArray:
    """Take ids for sequences that hold nothing yet."""
    return np.array([engine.scheduler.residency.take_seq_id() for _ in range(n)], dtype=np.int64)


def _end(engine: Engine, seq_ids: IntArray) -> None:
    """Let go of sequences and their ids."""
    for seq_id in seq_ids.tolist():
        if engine.cache.has_seq(seq_id):
            engine.cache.seq_rm(seq_id)
        engine.scheduler.residency.give_seq_id(seq_id)


def _read(
    spaces: Sequence[tuple[Space, int]],
    token_ids: IntArray,
    stretches: Sequence[tuple[int, int]],
    engine: Engine,
) -> tuple[FloatArray, IntArray]:
    """Run some tokens, as one step; return their hidden states and positions.

    Raises:
        CacheFullError: running answers hold the cells; nothing was changed.
    """
    runner = engine.runner
    assert isinstance(runner, HiddenRunner), "looked at before"
    if not engine.scheduler.residency.make_room_for(stretches):
        raise CacheFullError(
            f"{len(token_ids)} tokens of a text need cells, and answers that run hold all but "
            f"{engine.n_available} of {engine.cache.capacity}; wait for one of them"
        )
    positions = engine.cache.begin_step(stretches)
    with in_spaces(runner, spaces):
        states = runner.forward_hidden(token_ids, positions)
    engine.cache.end_step()
    return states, np.asarray(positions)


def _add(
    sums: Any, owners: IntArray, states: FloatArray, positions: IntArray, pooling: Pooling
) -> None:
    """Take some tokens' hidden states into the sums ``[n_texts, size]`` of their texts."""
    if pooling == "mean":
        np.add.at(sums, owners, states.astype(np.float64))
    elif pooling == "last":
        sums[owners] = states  # of several of one text the last one stays
    else:
        sums[owners[positions == 0]] = states[positions == 0]


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
