"""Measures on text the quality that a storage type of K and V, or a format of weights, costs.

The same text is read several times side by side, and what is expected next is compared at every
token. The base of comparisons is a cache that stores K and V in float32, or the model in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.cache_config import make_config
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES, parse_kv_dtype
from kvcellar.models import LoadedModel
from kvcellar.models.kv_quality import CANDIDATES, KvQuality, WeightsQuality
from kvcellar.models.runner import FloatArray, Runner
from kvcellar.registry import CacheSession, make_decode_session

BASE = "float32"
"""What every other storage type is compared with."""

PROSE = Path(__file__).with_name("northanger_abbey.txt")
"""English to read: the first six chapters of Jane Austen's novel of 1817, in the public domain, by
Project Gutenberg's text as Debian's r-cran-janeaustenr has it, one line per paragraph."""

_CHUNK = 32
"""Tokens that are read in one forward: what recent tokens in float32 are worth shows in steps that
are shorter than these tokens are many."""

_MOST_LOGITS = 1 << 24
"""Logits (float32) that one chunk of text may make."""


def measure_kv_quality(
    model: LoadedModel,
    token_ids: Sequence[int],
    kv_dtypes: Sequence[str] = CANDIDATES,
    *,
    context: int = 1024,
    progress: Callable[[float], None] | None = None,
) -> list[KvQuality]:
    """Read a text through caches of each storage type and compare what comes out.

    Args:
        model: a loaded model.
        token_ids: the text; it is read in pieces of ``context`` tokens, each from an empty cache.
        kv_dtypes: the storage types; float32 comes first in any case, and the model's own follows:
            it says what the model's rounding does, which the others' verdicts are measured by.
        context: tokens of a piece. Later tokens of a piece attend more stored ones.
        progress: told the share that is done.

    Returns:
        One result per storage type, float32 first.

    Raises:
        ConfigError: a storage type that is unknown, or a text of fewer than two tokens.
    """
    own = [model.dtype] if model.dtype in FLOAT_KV_DTYPES else []
    names = [BASE, *dict.fromkeys(name for name in [*own, *kv_dtypes] if name != BASE)]
    configs = [make_config(model.params, context, name) for name in names]
    with ExitStack() as stack:
        sessions = [stack.enter_context(make_decode_session(model.backend, c)) for c in configs]
        readers = [(session, model.bind(session)) for session in sessions]
        means, n_tokens = _read_side_by_side(
            readers, token_ids, model.vocab_size, context, progress
        )
    ratios = np.exp(means[:, 0] - means[0, 0])
    at = names.index(model.dtype) if own else 0  # what the model's own rounding does
    return [
        KvQuality(
            name,
            perplexity=float(np.exp(nll)),
            ppl_ratio=float(ratio),
            kl=float(kl),
            same_top1=float(same),
            n_tokens=n_tokens,
            bytes_per_token=sum(g.cell_bytes(parse_kv_dtype(name)) for g in model.params.groups),
            own_ppl_ratio=float(ratios[at]),
            own_same_top1=float(means[at, 2]),
        )
        for name, ratio, (nll, kl, same) in zip(names, ratios, means, strict=True)
    ]


def measure_weights_quality(
    base: LoadedModel,
    load: Callable[[str], LoadedModel],
    token_ids: Sequence[int],
    formats: Sequence[str],
    *,
    context: int = 1024,
    progress: Callable[[float], None] | None = None,
) -> list[WeightsQuality]:
    """Read a text with a model in float32 and with its weights in each format, and compare.

    K and V are in float32 throughout. Two models are in memory at a time.

    Args:
        base: the model in float32.
        load: from a format to the model that holds its weights so.
        token_ids: the text; it is read in pieces of ``context`` tokens.
        formats: what ``load`` takes.
        context: tokens of a piece.
        progress: told the share that is done.

    Returns:
        One result per format, after that of float32.

    Raises:
        ConfigError: a text of fewer than two tokens.
        BackendError, ConfigError: from ``load``.
    """
    results: list[WeightsQuality] = []
    config = make_config(base.params, context, BASE)
    for index, name in enumerate(formats):
        model = load(name)

        def report(part: float, before: int = index) -> None:
            if progress is not None:
                progress((before + part) / len(formats))

        with ExitStack() as stack:
            readers = []
            for each in (base, model):
                session = stack.enter_context(make_decode_session(each.backend, config))
                readers.append((session, each.bind(session)))
            means, n_tokens = _read_side_by_side(
                readers, token_ids, base.vocab_size, context, report
            )
        both = zip((BASE, name), (base, model), means, strict=True)
        found = [
            WeightsQuality(
                called,
                perplexity=float(np.exp(nll)),
                ppl_ratio=float(np.exp(nll - means[0, 0])),
                kl=float(kl),
                same_top1=float(same),
                n_tokens=n_tokens,
                size_bytes=each.touch_weights(),
            )
            for called, each, (nll, kl, same) in both
        ]
        results += found[1:] if results else found
    return results


def _read_side_by_side(
    readers: Sequence[tuple[CacheSession[Any], Runner]],
    token_ids: Sequence[int],
    vocab_size: int,
    context: int,
    progress: Callable[[float], None] | None,
) -> tuple[NDArray[np.float64], int]:
    """Return means over a text's predictions, ``[readers, 3]``, and the number of predictions.

    Negative log-likelihood, divergence from the first reader, the same likeliest token.

    Raises:
        ConfigError: a text, or pieces, of fewer than two tokens.
    """
    if len(token_ids) < 2 or context < 2:
        raise ConfigError(
            f"quality is measured on predictions of a next token: give at least 2 tokens of text "
            f"and of context; got {len(token_ids)} and {context}"
        )
    chunk = max(1, min(_CHUNK, _MOST_LOGITS // vocab_size))
    sums = np.zeros((len(readers), 3))
    n_tokens = 0
    pieces = [token_ids[at : at + context] for at in range(0, len(token_ids), context)]
    for index, piece in enumerate(pieces):
        for session, _ in readers:
            session.cache.clear()
        for at in range(0, len(piece), chunk):
            tokens = piece[at : at + chunk]
            targets = np.asarray(piece[at + 1 : at + chunk + 1], dtype=np.int64)
            rows, positions = range(len(tokens)), range(at, at + len(tokens))
            base: FloatArray | None = None
            for sum_of, (_, runner) in zip(sums, readers, strict=True):
                logprobs = _log_softmax(runner.forward(tokens, positions, rows))
                logprobs = logprobs[: len(targets)]
                base = logprobs if base is None else base
                sum_of += _compared(logprobs, base, targets)
            n_tokens += len(targets)
            if progress is not None:
                progress((index + (at + len(tokens)) / len(piece)) / len(pieces))
    return sums / n_tokens, n_tokens


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    out: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out


def _compared(
    logprobs: FloatArray, base: FloatArray, targets: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> tuple[float, float, float]:
    """Return sums: negative log-likelihood, divergence from ``base``, same likeliest token."""
    rows = np.arange(len(targets))
    nll = -logprobs[rows, targets].sum(dtype=np.float64)
    kl = (np.exp(base) * (base - logprobs)).sum(dtype=np.float64)
    same = (logprobs.argmax(axis=-1) == base.argmax(axis=-1)).sum()
    return float(nll), float(kl), float(same)
