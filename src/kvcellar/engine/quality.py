"""What a storage type of K and V costs in quality, measured on text.

The model reads the same text through caches of several storage types side by side and says at every
token what it expects next. A cache that stores K and V in float32 is the base of all comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.models import LoadedModel
from kvcellar.models.kv_quality import KvQuality
from kvcellar.models.runner import FloatArray
from kvcellar.registry import make_decode_session
from kvcellar.types import make_config

BASE = "float32"
"""What every other storage type is compared with."""

CANDIDATES = ("bfloat16", "int8", "k8v4", "int4", "int4:rot", "int4:first4:last64")
"""What is measured where nothing is named."""

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
        kv_dtypes: the storage types; float32 comes first in any case.
        context: tokens of a piece. Later tokens of a piece attend more stored ones.
        progress: told the share that is done.

    Returns:
        One result per storage type, float32 first.

    Raises:
        ConfigError: a storage type that is unknown, or a text of fewer than two tokens.
    """
    names = [BASE, *dict.fromkeys(name for name in kv_dtypes if name != BASE)]
    if len(token_ids) < 2 or context < 2:
        raise ConfigError(
            f"quality is measured on predictions of a next token: give at least 2 tokens of text "
            f"and of context; got {len(token_ids)} and {context}"
        )
    configs = [make_config(model.params, context, name) for name in names]
    chunk = max(1, min(_CHUNK, _MOST_LOGITS // model.vocab_size))
    sums = np.zeros((len(names), 3))  # negative log-likelihood, divergence, same top 1
    n_tokens = 0
    pieces = [token_ids[at : at + context] for at in range(0, len(token_ids), context)]
    with ExitStack() as stack:
        sessions = [stack.enter_context(make_decode_session(model.backend, c)) for c in configs]
        runners = [model.bind(session) for session in sessions]
        for index, piece in enumerate(pieces):
            for session in sessions:
                session.cache.clear()
            for at in range(0, len(piece), chunk):
                tokens = piece[at : at + chunk]
                targets = np.asarray(piece[at + 1 : at + chunk + 1], dtype=np.int64)
                rows, positions = range(len(tokens)), range(at, at + len(tokens))
                base: FloatArray | None = None
                for sum_of, runner in zip(sums, runners, strict=True):
                    logprobs = _log_softmax(runner.forward(tokens, positions, rows))
                    logprobs = logprobs[: len(targets)]
                    base = logprobs if base is None else base
                    sum_of += _compared(logprobs, base, targets)
                n_tokens += len(targets)
                if progress is not None:
                    progress((index + (at + len(tokens)) / len(piece)) / len(pieces))
    means = sums / n_tokens
    return [
        KvQuality(
            name,
            perplexity=float(np.exp(nll)),
            ppl_ratio=float(np.exp(nll - means[0, 0])),
            kl=float(kl),
            same_top1=float(same),
            n_tokens=n_tokens,
            bytes_per_token=sum(g.cell_bytes(parse_kv_dtype(name)) for g in model.params.groups),
        )
        for name, (nll, kl, same) in zip(names, means, strict=True)
    ]


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    out: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out


def _compared(
    logprobs: FloatArray, base: FloatArray, targets: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> tuple[float, float, float]:
    """Sums over the rows: negative log-likelihood, divergence from ``base``, same likeliest."""
    rows = np.arange(len(targets))
    nll = -logprobs[rows, targets].sum(dtype=np.float64)
    kl = (np.exp(base) * (base - logprobs)).sum(dtype=np.float64)
    same = (logprobs.argmax(axis=-1) == base.argmax(axis=-1)).sum()
    return float(nll), float(kl), float(same)
