"""A causal model of transformers as one call of the CPU kernel, for forwards of a few tokens.

What a model does around its layers, and Python between them, is small beside the weights; but each
step finds that code gone from the caches, which the weights went through. Of a step of a 1B model
with 8-bit weights it was 1.7 ms of 27.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvcellar.backends.torch.bind.positions import RopeLength
from kvcellar.backends.torch.cache.forward import can_run, compiled_steps, pools_of
from kvcellar.backends.torch.cache.kernel import address_of
from kvcellar.backends.torch.cpu.find.finding import PartFinder
from kvcellar.backends.torch.cpu.find.trial import IDS, LinearStandIn, ModuleCall, Trial
from kvcellar.backends.torch.cpu.modules.blocks import BlockLinear
from kvcellar.backends.torch.cpu.modules.layers import KernelEmbedding, KernelLayer, KernelNorm
from kvcellar.backends.torch.cpu.modules.linears import KernelLinear
from kvcellar.backends.torch.cpu.modules.parts import AttentionPart, LayerPart, NormPart, Parts
from kvcellar.backends.torch.cpu.modules.rotations import Rotations
from kvcellar.kernel import layers as native
from kvcellar.types import IntArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Whole:
    """A network that is an embedding, decoder layers one behind the other, a norm and a head.

    All are names of modules; ``rotary`` makes the rotations of all layers.
    """

    embedding: str
    layers: tuple[str, ...]
    norm: str
    head: str
    rotary: str


def find_whole(finder: PartFinder) -> Whole | None:
    """Find out whether a network is nothing but what it gives from one known part to the next."""
    trial, parts = finder.exact, finder.parts
    calls = {name: found[0] for name, found in trial.calls.items() if len(found) == 1}
    layers = tuple(name for name in calls if isinstance(parts.get(name), LayerPart))
    within = [one for name in layers for one in trial.within(name)]
    if not layers or within != trial.attended or not all(_is_turned(parts, n) for n in layers):
        return None
    state: Any = calls[layers[0]].first()
    embedding = _whose_result(trial, calls, lambda module: isinstance(module, nn.Embedding), state)
    for name in layers:
        if not _is_one(calls[name].first(), state):
            return None
        state = calls[name].result
    norm = _who_takes(calls, [n for n in calls if isinstance(parts.get(n), NormPart)], state)
    if norm is None or embedding is None or not _is_ids(calls[embedding].first()):
        return None
    heads = [name for name in calls if isinstance(trial.module(name), LinearStandIn)]
    head = _who_takes(calls, heads, calls[norm].result)
    rotary = _find_rotary(finder.own, layers)
    if head is None or rotary is None or not _is_one(calls[head].result, trial.result):
        return None
    return Whole(embedding, layers, norm, head, rotary)


def _is_turned(parts: Parts, name: str) -> bool:
    """Return true if a layer turns q and k as the kernel does."""
    layer = parts[name]
    attention = parts[f"{name}.{layer.attention}"] if isinstance(layer, LayerPart) else None
    return isinstance(attention, AttentionPart) and attention.rotation.is_whole


def _is_ids(x: Tensor | None) -> bool:
    return x is not None and x.flatten().tolist() == list(IDS)


def _is_one(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)


def _who_takes(calls: Mapping[str, ModuleCall], names: Sequence[str], x: Any) -> str | None:
    """Return which of some modules was given x."""
    return next((name for name in names if _is_one(calls[name].first(), x)), None)


def _whose_result(
    trial: Trial, calls: Mapping[str, ModuleCall], is_kind: Callable[[nn.Module], bool], x: Any
) -> str | None:
    """Return which module of a kind said x."""
    names = (name for name in calls if is_kind(trial.module(name)))
    return next((name for name in names if _is_one(calls[name].result, x)), None)


def _find_rotary(trial: Trial, layers: Sequence[str]) -> str | None:
    """Return the module that makes the rotations of all layers, in the type that they read."""
    given = [trial.calls[name][0].kwargs.get("position_embeddings") for name in layers]
    if not all(trial.alike(sides, given[0]) for sides in given) or given[0] is None:
        return None
    for name, found in trial.calls.items():
        is_it = type(found[0].result) is tuple and trial.alike(found[0].result, given[0])
        module = trial.module(name)
        if is_it and not any(module.parameters()):
            try:
                sides = Rotations(module, trial.dtype).of(np.array(trial.positions))
            except Exception:  # it takes something else than a type and positions
                continue
            if sides.dtype == trial.dtype and torch.equal(sides, torch.cat(given[0])):
                return name
    return None


class KernelDecoder:
    """A model whose layers are the kernel's, from ids to logits."""

    def __init__(self, model: Any, whole: Whole) -> None:
        """Wrap a model whose parts are the kernel's by now; it stays where it is."""
        layers: list[KernelLayer] = [model.get_submodule(name) for name in whole.layers]
        head: KernelLinear | BlockLinear = model.get_submodule(whole.head)
        norm: KernelNorm = model.get_submodule(whole.norm)
        self.few = min(head.few, *(layer.few for layer in layers))
        """Tokens up to which a forward is one call."""
        self._held = model
        self._dtype = norm.weight.dtype
        self._hidden, self._n_vocab = head.in_features, head.out_features
        self._rotations = Rotations(model.get_submodule(whole.rotary), self._dtype)
        self._embedding = model.get_submodule(whole.embedding)
        self._parts = (
            [layer.native() for layer in layers],
            native.Norm(address_of(norm.weight), norm.eps),
            head.for_kernel(),
        )
        at = _address(self._embedding, head, self._dtype)
        self._native = None if at is None else self._compiled(at)
        self._rows = threading.local()

    def _compiled(self, embedding: int) -> native.Decoder:
        layers, norm, head = self._parts
        return native.Decoder(layers, embedding, norm, head)

    def _looked_up(self, ids: IntArray) -> tuple[native.Decoder, IntArray]:
        """Return what reads rows that were looked up before, and which ones: its own thread's."""
        if not vars(self._rows):
            self._rows.rows = torch.empty(self.few, self._hidden, dtype=self._dtype)
            self._rows.native = self._compiled(address_of(self._rows.rows))
        with torch.inference_mode():
            self._rows.rows[: len(ids)] = self._embedding(torch.from_numpy(ids)[None])[0]
        found: native.Decoder = self._rows.native
        return found, np.arange(len(ids), dtype=np.int64)

    def forward(
        self,
        cache: object,
        ids: IntArray,
        positions: IntArray,
        rows: IntArray,
        feature_layers: Sequence[int] = (),
        rope_length: RopeLength = 0,
        turned: IntArray | None = None,
    ) -> tuple[FloatArray, FloatArray] | None:
        """Run the tokens; the step is complete afterwards.

        Args:
            cache: what the op would use.
            ids: int64 ``[T]``, in the vocabulary.
            positions: ``[T]``.
            rows: int64 ``[R]``: tokens whose logits are wanted.
            feature_layers: whose inputs are wanted too; behind the last layer, its result.
            rope_length: the length of text whose RoPE factors turn the positions.
            turned: ``[T]`` numbers by which tokens are turned; None: their positions.

        Returns:
            Logits ``[R, n_vocab]`` and features ``[T, n_features * hidden]``; None where this is
            not for the kernel: nothing has happened then.

        Raises:
            StepError, PositionError, CacheFullError: as ``plan``; nothing was written.
        """
        n_tokens, n_rows, n_features = len(ids), len(rows), len(feature_layers)
        if n_tokens > self.few or not can_run(cache, n_tokens, self._dtype):
            return None
        steps = compiled_steps(cache, n_tokens, positions)
        caps = [group.softcap or 0.0 for group in cache.pools.groups]
        calls = []
        for layer, (pool, exact) in enumerate(pools_of(cache)):
            index = cache.steps.group_of(layer)
            plan, to_exact = steps[index]
            calls.append((plan, pool, to_exact, exact, caps[index]))
        cos, sin = self._rotations.of(positions if turned is None else turned, rope_length)
        logits = np.empty((n_rows, self._n_vocab), np.float32)
        features = np.empty((n_tokens, n_features * self._hidden), np.float32)
        compiled = self._native
        if compiled is None:
            compiled, ids = self._looked_up(ids)
        compiled.run(
            calls,
            ids.ctypes.data,
            n_tokens,
            [(address_of(cos), address_of(sin))],
            rows.ctypes.data,
            n_rows,
            logits.ctypes.data,
            feature_layers,
            features.ctypes.data,
        )
        cache.steps.wrote_all()
        return logits, features


def _address(embedding: Any, head: KernelLinear | BlockLinear, dtype: torch.dtype) -> int | None:
    """Return the address of rows that the kernel can read; 0: they are the head's; None: it can't.

    It cannot where they are scaled, or written in few bits that are not the head's.
    """
    if isinstance(embedding, KernelEmbedding):
        is_head = embedding.held is head and embedding.dtype == dtype
        return 0 if is_head and embedding.embed_scale is None else None
    weight: Tensor = embedding.weight
    is_plain = type(embedding).forward is nn.Embedding.forward
    is_read = is_plain and weight.dtype == dtype and weight.is_contiguous()
    return address_of(weight) if is_read else None
