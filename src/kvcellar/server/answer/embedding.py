"""Embeddings of texts: one vector of each, whatever the protocol."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.engine.embedding import Embedder, TextEmbedder
from kvcellar.hosting.text_limits import refuse_bytes, refuse_text, size_of
from kvcellar.models.files.pooling import Pooling
from kvcellar.server.errors import ApiError, ContextExceeded
from kvcellar.server.state.service import Service

MOST_TEXTS = 2048


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors of some texts.

    Attributes:
        model: who made them, as clients call it.
        vectors: ``[n_texts, size]``, each of length 1.
        n_tokens: of all texts.
    """

    model: str
    vectors: NDArray[np.float32]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class _Source:
    """A model that makes vectors: one beside the others, or one that answers, too."""

    name: str
    tokenizer: Any
    context: int
    vocab_size: int
    embedder: Embedder | TextEmbedder
    pooling: Pooling
    make_room: Callable[[int], None]


@asynccontextmanager
async def _source(service: Service, name: str | None) -> AsyncIterator[_Source]:
    """Lend the model that is meant: where none is named, the one that was made for it."""
    beside, models = service.models.embedding_models, service.models
    if name is None:
        name = next(iter(beside), None)
    if name in beside:
        one = beside[name]
        yield _Source(
            name, one.tokenizer, one.context, one.vocab_size, one, one.pooling, lambda _: None
        )
        return
    async with models.registry.use(models.resolve(name)) as host:
        known, embedder = models.public(host.name), host.embedder
        if embedder is None:
            message = (
                f"model {known!r} makes no embeddings; serve --embeddings MODEL has one that does"
            )
            raise ApiError(400, message, "unsupported_model", param="model")
        n_known = host.engine.runner.vocab_size
        make_room = partial(service.pins.make_room, host)  # what is pinned gives way to a text, too
        yield _Source(
            known, host.tokenizer, host.context, n_known, embedder, host.pooling, make_room
        )


async def embed(
    service: Service,
    name: str | None,
    given: Any,
    *,
    dimensions: int | None = None,
    pooling: Pooling | None = None,
    is_cut: bool = False,
) -> Embedded:
    """Return the vectors of a text, of tokens, or of several of them.

    Args:
        service: whose models there are.
        name: of the model.
        given: a text, tokens, or a list of these.
        dimensions: the first numbers of each vector alone; made of length 1 again.
        pooling: None: as the model was trained.
        is_cut: texts that are longer than the context are cut, and not refused.

    Raises:
        ApiError: 404, there is no such model; 400, there is no text, a text is empty, or the
            vectors have fewer numbers.
        ContextExceeded: a text is longer than the context.
    """
    async with _source(service, name) as source:
        if dimensions is not None and dimensions > source.embedder.size:
            raise ApiError(
                400,
                f"dimensions {dimensions} is more than the model's vectors have, "
                f"{source.embedder.size}",
                "invalid_value",
                param="dimensions",
            )
        texts = await _tokens_of(service, source, given, is_cut=is_cut)
        gone = threading.Event()

        def on_step() -> None:
            if gone.is_set():
                raise InterruptedError("nobody waits for these vectors any more")

        with service.admitted():
            try:
                source.make_room(max(map(len, texts), default=0))
                work, kind = source.embedder.embed, pooling or source.pooling
                vectors = await asyncio.to_thread(work, texts, kind, on_step)
            finally:
                gone.set()
    if dimensions is not None:
        vectors = vectors[:, :dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return Embedded(source.name, vectors, sum(map(len, texts)))


async def _tokens_of(
    service: Service, source: _Source, given: Any, *, is_cut: bool
) -> list[Sequence[int]]:
    """Return the tokens of each text."""
    is_one = isinstance(given, str) or bool(given and isinstance(given[0], int))
    listed: list[Any] = [given] if is_one else list(given)
    if not listed or len(listed) > MOST_TEXTS:
        message = f"input has {len(listed)} texts; give 1 to {MOST_TEXTS}"
        raise ApiError(400, message, "invalid_value", param="input")
    tokenizer, context = source.tokenizer, source.context
    said = [one for one in listed if isinstance(one, str)]
    if said and tokenizer is None:
        message = f"model {source.name!r} has no tokenizer; give tokens"
        raise ApiError(400, message, "invalid_value", param="input")
    for text in () if is_cut else said:
        refuse_bytes(tokenizer, size_of(text).n_bytes, context)

    def encode(one: Any) -> Sequence[int]:
        if not isinstance(one, str):
            return list(one)
        if not is_cut:
            refuse_text(tokenizer, one, context)
        return list(tokenizer.encode(one))

    texts = await service.agents.work.run(size_of(said).cost, lambda: list(map(encode, listed)))
    if is_cut:
        texts = [text[:context] for text in texts]
    for number, tokens in enumerate(texts):
        if len(tokens) > context:
            raise ContextExceeded(len(tokens), context)
        if not tokens or not all(0 <= token < source.vocab_size for token in tokens):
            what = "holds what is no token of the model" if tokens else "is empty"
            message = f"text {number} of the input {what}"
            raise ApiError(400, message, "invalid_value", param="input")
    return texts
