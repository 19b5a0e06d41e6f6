"""Proof that a model exports: a small twin of it is traced, its graph held to it, and lowered.

The graph is run as torch runs it, on the caches and texts of the check of models, so one that was
traced wrong is found. What XNNPACK makes of an operator is for the tests of whole programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvcellar.backends.executorch.exporting import (
    check_exports,
    memory_plan,
    quietly,
    telling,
    trace,
)
from kvcellar.backends.executorch.rewriting import rewrite
from kvcellar.backends.torch.bind.positions import Positions
from kvcellar.backends.torch.learn.checking import Pair, subject_of, twins
from kvcellar.errors import ModelError
from kvcellar.models.check import TOLERANCE, compare
from kvcellar.models.runner import BoundRunner, FloatArray, Runner
from kvcellar.registry import CacheSession, use_cache
from kvcellar.types import IntArray

MAX_TOKENS = 128
"""Tokens of a forward at most, as a twin's graph is traced."""


def why_not_exported(raw: Mapping[str, Any]) -> str | None:
    """Return why a model cannot be one program of ExecuTorch; None: its twin can.

    Args:
        raw: its ``config.json``.
    """
    try:
        with quietly(), telling(str(raw.get("model_type"))):
            from kvcellar.backends.executorch.lowering import lower  # it warns

            pair = twins(raw)
            check_exports(pair.facts, pair.facts.family)
            rewrite(pair.ours)
            graph = trace(pair.ours, MAX_TOKENS)
            _check_graph(pair, graph)
            lower(graph, "forward", {}).to_executorch(memory_plan())
    except ModelError as error:
        return " ".join(str(error).split())
    return None


def _check_graph(pair: Pair, graph: torch.export.ExportedProgram) -> None:
    """Hold a graph to the model's own code.

    Raises:
        ModelError: a logit differs by more than a check allows.
    """
    run = graph.module()
    subject = subject_of(pair)
    vocab_size = pair.facts.vocab_size

    def bind(session: CacheSession[Any]) -> Runner:
        return _GraphRunner(session, pair.facts.params, vocab_size, run)

    subject.bind = bind
    worst = max(gap for parts in compare(subject).values() for gap in parts.values())
    if not worst <= TOLERANCE:
        raise ModelError(
            f"the graph of {pair.facts.family!r} is not the model: logits differ by {worst:.1e}, "
            f"and at most {TOLERANCE:.0e} is allowed; run the checkpoint with the backend torch"
        )


class _GraphRunner(BoundRunner):
    """A traced graph bound to one session; a :class:`~kvcellar.models.runner.Runner`."""

    def __init__(self, session: CacheSession[Any], params: Any, vocab_size: int, run: Any) -> None:
        """Bind what ``ExportedProgram.module`` returns."""
        super().__init__(session, params, vocab_size, 0)
        self._graph = run

    def _run(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        positions = torch.from_numpy(at)[None]
        wanted = torch.arange(len(ids)) if rows is None else torch.from_numpy(rows)
        with use_cache(cache), torch.inference_mode(), Positions(positions):
            (logits,) = self._graph(torch.from_numpy(ids)[None], positions, wanted)
        found: FloatArray = logits[0].float().numpy()
        return found, torch.empty(len(ids), 0).numpy()
