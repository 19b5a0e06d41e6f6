"""A causal model of transformers as one call of the CPU kernel, for forwards of a few tokens.

What a model does around its layers, and Python between them, is small beside the weights; but each
step finds that code gone from the caches, which the weights went through. Of a step of a 1B model
with 8-bit weights it was 1.7 ms of 27.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvcellar.backends.torch.fast.layers import KernelEmbedding, KernelLayer, KernelNorm
from kvcellar.backends.torch.fast.linears import KernelLinear
from kvcellar.backends.torch.forward import can_run, finish_forward, plan_forward, pools_of
from kvcellar.kernel import layers as native
from kvcellar.types import IntArray

MODELS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"}) | {
    "Qwen3ForCausalLM"
}
"""Classes of transformers: an embedding, decoder layers one behind the other, a norm, logits."""

STRETCH = 256
"""Positions whose rotations are worked out together."""

FloatArray = NDArray[np.float32]


class Rotations:
    """Cosines and sines of positions as the model's own module computes them, and kept."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        """Keep rotations of a rotary embedding, for this type of q and k."""
        self._module = module
        self._like = torch.empty(0, dtype=dtype)
        kind = module.rope_type
        self._is_fixed = "dynamic" not in kind and kind != "longrope"
        self._stretches: dict[int, Tensor] = {}

    def of(self, positions: IntArray) -> Tensor:
        """Return cosines and sines ``[2, T, head_dim]``."""
        if not self._is_fixed:  # they depend on the longest position of the forward
            return self._computed(torch.from_numpy(positions))
        if len(positions) == 1:
            stretch, at = divmod(int(positions[0]), STRETCH)
            return self._stretch(stretch)[:, at : at + 1]
        places = [divmod(position, STRETCH) for position in positions.tolist()]
        return torch.stack([self._stretch(stretch)[:, at] for stretch, at in places], 1)

    def _stretch(self, stretch: int) -> Tensor:
        found = self._stretches.get(stretch)
        if found is None:
            positions = torch.arange(stretch * STRETCH, (stretch + 1) * STRETCH)
            found = self._stretches[stretch] = self._computed(positions)
        return found

    def _computed(self, positions: Tensor) -> Tensor:
        with torch.inference_mode():
            sides: tuple[Tensor, Tensor] = self._module(self._like, positions[None])
            return torch.cat(sides).contiguous()


class KernelDecoder:
    """A model whose layers are the kernel's, from ids to logits."""

    def __init__(self, model: Any) -> None:
        """Wrap a model that :func:`make_decoder` found to be such a one; it stays where it is."""
        inner = model.model
        layers: list[KernelLayer] = list(inner.layers)
        head: KernelLinear = model.lm_head
        self.few = min(head.few, *(layer.few for layer in layers))
        """Tokens up to which a forward is one call."""
        self._held = model
        self._dtype: torch.dtype = inner.norm.weight.dtype
        self._hidden, self._n_vocab = head.in_features, head.out_features
        self._rotations = Rotations(inner.rotary_emb, self._dtype)
        self._native = native.Decoder(
            [layer.native() for layer in layers],
            _embedding_at(model),
            native.Norm(inner.norm.weight.data_ptr(), inner.norm.variance_epsilon),
            head.for_kernel(),
        )

    def forward(
        self,
        cache: object,
        ids: IntArray,
        positions: IntArray,
        rows: IntArray,
        feature_layers: Sequence[int] = (),
    ) -> tuple[FloatArray, FloatArray] | None:
        """Run the tokens; the step is complete afterwards.

        Args:
            cache: what the op would use.
            ids: int64 ``[T]``, in the vocabulary.
            positions: ``[T]``.
            rows: int64 ``[R]``: tokens whose logits are wanted.
            feature_layers: whose inputs are wanted too; behind the last layer, its result.

        Returns:
            Logits ``[R, n_vocab]`` and features ``[T, n_features * hidden]``; None where this is
            not for the kernel: nothing has happened then.

        Raises:
            StepError, PositionError, CacheFullError: as ``plan``; nothing was written.
        """
        n_tokens, n_rows, n_features = len(ids), len(rows), len(feature_layers)
        if n_tokens > self.few or not can_run(cache, n_tokens, self._dtype):
            return None
        steps = plan_forward(cache, n_tokens, positions)
        caps = [group.softcap or 0.0 for group in cache.pools.groups]
        calls = []
        for layer, (pool, exact) in enumerate(pools_of(cache)):
            index = cache.steps.group_of(layer)
            plan, to_exact = steps[index]
            calls.append((plan, pool, to_exact, exact, caps[index]))
        cos, sin = self._rotations.of(positions)
        logits = np.empty((n_rows, self._n_vocab), np.float32)
        features = np.empty((n_tokens, n_features * self._hidden), np.float32)
        self._native.run(
            calls,
            ids.ctypes.data,
            n_tokens,
            cos.data_ptr(),
            sin.data_ptr(),
            rows.ctypes.data,
            n_rows,
            logits.ctypes.data,
            feature_layers,
            features.ctypes.data,
        )
        finish_forward(cache)
        return logits, features


def make_decoder(model: Any) -> KernelDecoder | None:
    """Make a model one call; None for one whose parts are not all the kernel's."""
    if type(model).__name__ not in MODELS:
        return None
    inner, head = model.model, model.lm_head
    is_whole = (
        not isinstance(head, nn.Linear)
        and isinstance(inner.norm, KernelNorm)
        and all(isinstance(layer, KernelLayer) for layer in inner.layers)
        and _is_read(inner.embed_tokens, inner.norm.weight.dtype)
    )
    return KernelDecoder(model) if is_whole else None


def _is_read(embedding: Any, dtype: torch.dtype) -> bool:
    """Return true if the kernel can read rows of this type from it."""
    if isinstance(embedding, KernelEmbedding):
        return embedding.dtype == dtype and embedding.embed_scale is None
    weight: Tensor = embedding.weight
    return weight.dtype == dtype and weight.is_contiguous()


def _embedding_at(model: Any) -> int:
    """Return the address of the embedding's weights; 0: they are the last layer's."""
    embedding = model.model.embed_tokens
    return 0 if isinstance(embedding, KernelEmbedding) else int(embedding.weight.data_ptr())
