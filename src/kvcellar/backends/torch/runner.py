"""A transformers model and a session: the runner of the torch backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvcellar.backends.torch.fast.decoder import KernelDecoder
from kvcellar.backends.torch.gpu import choice
from kvcellar.backends.torch.gpu.logits import DeviceLogits
from kvcellar.backends.torch.positions import Positions
from kvcellar.models.runner import BoundRunner, FloatArray
from kvcellar.registry import CacheSession, use_cache
from kvcellar.types import IntArray, ModelCacheParams

if TYPE_CHECKING:
    from kvcellar.backends.torch.gpu.graphs import StepGraphs


class TorchRunner(BoundRunner):
    """One model bound to one session; a :class:`~kvcellar.models.runner.Runner`."""

    def __init__(
        self,
        model: Any,
        decoder: KernelDecoder | None,
        params: ModelCacheParams,
        vocab_size: int,
        session: CacheSession[Any],
        feature_layers: Sequence[int] = (),
        rope_length: int = 0,
    ) -> None:
        """Bind a model, and what runs a few tokens of it at once where there is such a thing.

        Args:
            model: the network.
            decoder: of it, or None.
            params: of its cache.
            vocab_size: of the model.
            session: open.
            feature_layers: whose inputs are wanted.
            rope_length: the length of text whose RoPE factors the session has.
        """
        n_features = len(feature_layers) * int(model.config.hidden_size)
        super().__init__(session, params, vocab_size, n_features)
        self._network = model
        self._feature_layers = tuple(feature_layers)
        self._feature_modules = modules_given(model, feature_layers)
        self._decoder = decoder
        self._rope_length = rope_length
        self._device: torch.device = model.device
        self.graphs = _graphs_of(model)
        """Small forwards on a card as graphs; None: all are the modules' own."""

    def _run(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        if self._decoder is not None:
            last = np.array([len(ids) - 1], np.int64) if rows is None else rows
            layers = self._feature_layers if has_features else ()
            whole = self._decoder.forward(cache, ids, at, last, layers, self._rope_length)
            if whole is not None:
                return whole
        logits, features = self._by_modules(cache, ids, at, rows, has_features=has_features)
        return logits.float().cpu().numpy(), features

    def _by_modules(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[torch.Tensor, FloatArray]:
        """Run the tokens as transformers does, or by a graph; the logits stay on the device."""
        modules = self._feature_modules if has_features else []
        with use_cache(cache), torch.inference_mode():
            if self.graphs is not None and not has_features:
                logits = self.graphs.run(cache, ids, at, rows, self._rope_length)
                if logits is not None:
                    return logits, np.empty((len(ids), 0), np.float32)
            return self._by_network(ids, at, rows, modules)

    def _by_network(
        self,
        ids: IntArray,
        positions: IntArray,
        rows: IntArray | None,
        modules: Sequence[Any],
    ) -> tuple[torch.Tensor, FloatArray]:
        """Run the tokens as transformers does; features are what these modules are given."""
        # By index: told how many, Gemma 4 leaves tokens out of the layers that share K and V.
        keep = self._tensor(np.array([len(ids) - 1], np.int64) if rows is None else rows)
        at = self._tensor(positions[None])
        with inputs_of(modules) as seen, Positions(at, self._rope_length):
            logits = self._network(
                input_ids=self._tensor(ids[None]),
                position_ids=at,
                use_cache=False,
                logits_to_keep=keep,
            ).logits[0]
            features = [hidden[0].float().cpu() for hidden in seen]
        joined = torch.cat(features, dim=-1) if features else torch.empty(len(ids), 0)
        return logits, joined.numpy()

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


class SamplingTorchRunner(TorchRunner):
    """Runner on a GPU: a :class:`~kvcellar.models.kept_logits.SamplingRunner` too."""

    def forward_kept(
        self,
        token_ids: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        rows: Sequence[int] | IntArray | None = None,
        *,
        has_features: bool = False,
    ) -> tuple[DeviceLogits, FloatArray]:
        """See :meth:`kvcellar.models.kept_logits.SamplingRunner.forward_kept`."""
        run = self._by_modules
        logits, features = self._forward(run, token_ids, positions, rows, has_features=has_features)
        return DeviceLogits(logits), features


def _graphs_of(model: Any) -> StepGraphs | None:
    if not choice.has_graphs(model.device):
        return None
    from kvcellar.backends.torch.gpu.graphs import graphs_for  # it imports Triton

    return graphs_for(model)


def modules_given(model: Any, layers: Sequence[int]) -> list[Any]:
    """Return, for each layer, the module of a transformers model that is given its input.

    Behind the last layer that is the last norm.
    """
    if not layers:
        return []
    modules = [*model.model.layers, model.model.norm]
    return [modules[layer] for layer in layers]


@contextmanager
def inputs_of(modules: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets the first argument of each module's next call, in their order.

    Calls of this thread alone: others may run the same modules at the same time. Nothing stays
    behind.
    """
    mine = threading.get_ident()
    seen: list[torch.Tensor] = []

    def see(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        if threading.get_ident() == mine:
            seen.append(given[0])

    hooks = [module.register_forward_pre_hook(see) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
