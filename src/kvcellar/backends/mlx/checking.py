"""Checks of models of mlx-lm: as they were loaded, beside mlx-lm's own code with its own caches."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvcellar.backends.mlx.learn.learning import Learnt
from kvcellar.backends.mlx.runner import MlxRunner
from kvcellar.errors import KVCellarError, ModelError
from kvcellar.models.check import TOLERANCE, VERSION, CheckVerdict, Subject, compare, kinds_of
from kvcellar.models.runner import FloatArray, Runner
from kvcellar.registry import CacheSession
from kvcellar.types import IntArray
from kvcellar.version import __version__

_COLUMNS = 512
"""Logits of each token that are compared: all of a large vocabulary would be large."""

_SLACK = 4.0
"""How many times mlx-lm's own difference from itself is allowed: rounding, in other shapes."""

_ROUNDING = 0.1
"""Most that mlx-lm's own logits may differ from themselves, beside the largest one."""

_PIECES = (1, 7, 24, 1, 40)
"""Tokens of mlx-lm's own forwards, beside which it is compared with itself."""


def versions(dtype: str) -> dict[str, str]:
    """Return the versions that a verdict on a model depends on, and the type it computes in."""
    mlx = importlib.metadata.version("mlx")
    return {
        "kvcellar": __version__,
        "check": str(VERSION),
        "mlx": mlx,
        "mlx-lm": mlx_lm.__version__,
        "dtype": dtype,
    }


def check_network(
    network: Any, learnt: Learnt, family: str, device: mx.Device | None = None
) -> CheckVerdict:
    """Compare a model behind our caches with itself behind mlx-lm's.

    Rounding is that of its weights' type and of its device, so how far mlx-lm's own chunks are from
    its whole texts says how much may differ.

    Args:
        network: of mlx-lm, bound.
        learnt: what was learnt of it.
        family: ``model_type``, for the verdict.
        device: where it runs; None: MLX's default.
    """
    start = time.perf_counter()
    differences: dict[str, dict[str, float]] = {}
    own, reason = 0.0, None

    def oracle(texts: IntArray) -> FloatArray:
        return np.stack([_whole(network, text) for text in texts])

    def bind(session: CacheSession[Any]) -> Runner:
        return _FewColumns(network, learnt, session, device)

    try:
        with mx.stream(device or mx.default_device()):
            own = _own_gap(network, learnt.vocab_size)
            subject = Subject(learnt.params, learnt.vocab_size, oracle, bind, "mlx")
            differences = compare(subject)
    except Exception as error:  # whatever mlx-lm's own code does not like
        said = (str(error).strip().splitlines() or [""])[0]
        reason = said if isinstance(error, KVCellarError) else f"{type(error).__name__}: {said}"
    return CheckVerdict(
        family=family,
        layers=kinds_of(learnt.params),
        subject="the model itself, beside mlx-lm",
        differences=differences,
        own=own,
        reason=reason,
        versions=versions(str(learnt.dtype)),
        seconds=round(time.perf_counter() - start, 2),
        tolerance=max(TOLERANCE, _SLACK * own),
    )


class _FewColumns(MlxRunner):
    """A runner that tells the first logits of each token alone."""

    def forward(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
    ) -> FloatArray:
        """Run the tokens; see :class:`MlxRunner`."""
        return super().forward(token_ids, positions, rows)[:, :_COLUMNS]


def _whole(network: Any, text: IntArray) -> FloatArray:
    """Return mlx-lm's logits ``[T, columns]`` of a text, all of it in one forward."""
    return _logits(network, text, make_prompt_cache(network))


def _logits(network: Any, tokens: IntArray, cache: list[Any]) -> FloatArray:
    logits = network(mx.array(tokens[None]), cache=cache)[0, :, :_COLUMNS]
    found: FloatArray = np.array(logits.astype(mx.float32))
    return found


def _own_gap(network: Any, vocab_size: int) -> float:
    """Return how far mlx-lm's logits of a text in pieces are from those of all of it at once.

    Raises:
        ModelError: so far that this is no rounding.
    """
    text = np.random.default_rng(1).integers(0, min(vocab_size, 250), sum(_PIECES))
    want, cache = _whole(network, text), make_prompt_cache(network)
    pieces = np.split(text, np.cumsum(_PIECES)[:-1])
    got = np.concatenate([_logits(network, piece, cache) for piece in pieces])
    gap, largest = float(np.abs(got - want).max()), float(np.abs(want).max())
    if not gap <= _ROUNDING * largest:
        raise ModelError(
            f"mlx-lm's own logits of a text in pieces differ by {gap:.1e} from those of all of it "
            f"at once, and the largest is {largest:.1e}"
        )
    return gap
