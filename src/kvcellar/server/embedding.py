"""Embeddings of texts: one vector of each, whatever the protocol."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.agents import ModelHost
from kvcellar.agents.lengths import refuse_bytes, refuse_text, size_of
from kvcellar.engine.embedding import Pooling
from kvcellar.server.errors import ApiError
from kvcellar.server.service import Service

MOST_TEXTS = 2048


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors of some texts.

    Attributes:
        vectors: ``[n_texts, size]``, each of length 1.
        n_tokens: of all texts.
    """

    vectors: NDArray[np.float32]
    n_tokens: int


async def embed(
    service: Service,
    path: str,
    given: Any,
    *,
    dimensions: int | None = None,
    pooling: Pooling | None = None,
    is_cut: bool = False,
) -> Embedded:
    """Return the vectors of a text, of tokens, or of several of them.

    Args:
        service: whose model it is.
        path: of the model.
        given: a text, tokens, or a list of these.
        dimensions: the first numbers of each vector alone; made of length 1 again.
        pooling: None: as the model was trained.
        is_cut: texts that are longer than the context are cut, and not refused.

    Raises:
        ApiError: 400, there is no text, a text is empty, or the vectors have fewer numbers.
        ContextExceeded: a text is longer than the context.
    """
    async with service.models.registry.use(path) as host:
        texts = await _tokens_of(service, host, given, is_cut=is_cut)
        embedder = host.embedder
        if embedder is None:
            name = service.models.public(path)
            raise ApiError(400, f"model {name!r} makes no embeddings", "unsupported_model")
        size = embedder.size
        if dimensions is not None and dimensions > size:
            raise ApiError(
                400,
                f"dimensions {dimensions} is more than the model's vectors have, {size}",
                "invalid_value",
                param="dimensions",
            )
        gone = threading.Event()

        def on_step() -> None:
            if gone.is_set():
                raise InterruptedError("nobody waits for these vectors any more")

        with service.admitted():
            try:
                kind = pooling or host.pooling
                vectors = await asyncio.to_thread(embedder.embed, texts, kind, on_step)
            finally:
                gone.set()
    if dimensions is not None:
        vectors = vectors[:, :dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return Embedded(vectors, sum(map(len, texts)))


async def _tokens_of(
    service: Service, host: ModelHost, given: Any, *, is_cut: bool
) -> list[Sequence[int]]:
    """Return the tokens of each text."""
    is_one = isinstance(given, str) or bool(given and isinstance(given[0], int))
    listed: list[Any] = [given] if is_one else list(given)
    if not listed or len(listed) > MOST_TEXTS:
        message = f"input has {len(listed)} texts; give 1 to {MOST_TEXTS}"
        raise ApiError(400, message, "invalid_value", param="input")
    tokenizer, context = host.tokenizer, host.context
    said = [one for one in listed if isinstance(one, str)]
    if said and tokenizer is None:
        message = f"model {host.name!r} has no tokenizer; give tokens"
        raise ApiError(400, message, "invalid_value", param="input")
    for text in () if is_cut else said:
        refuse_bytes(tokenizer, size_of(text).n_bytes, context)

    def encode(one: Any) -> Sequence[int]:
        if not isinstance(one, str):
            return list(one)
        assert tokenizer is not None
        if not is_cut:
            refuse_text(tokenizer, one, context)
        return list(tokenizer.encode(one))

    texts = await service.agents.work.run(size_of(said).cost, lambda: list(map(encode, listed)))
    if is_cut:
        texts = [text[:context] for text in texts]
    n_known = host.engine.runner.vocab_size
    for number, tokens in enumerate(texts):
        service.check_fits(host, tokens)
        if not tokens or not all(0 <= token < n_known for token in tokens):
            what = "holds what is no token of the model" if tokens else "is empty"
            message = f"text {number} of the input {what}"
            raise ApiError(400, message, "invalid_value", param="input")
    return texts
