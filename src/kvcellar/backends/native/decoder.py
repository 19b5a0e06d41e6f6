"""A planned model as one call of the CPU kernel, from ids to logits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.native.caches import NativeCache
from kvcellar.backends.native.latent import orders_of_latents
from kvcellar.backends.native.own_rows import OwnRows
from kvcellar.backends.native.recurrent import orders_by_key_heads
from kvcellar.backends.native.weights import WeightHolder, floats, typed
from kvcellar.backends.reference.pools import to_bfloat16_bits
from kvcellar.kernel import attend, experts, layers
from kvcellar.models.plans.plan import LayerPlan, LinearPlan, ModelPlan, RopePlan
from kvcellar.types import IntArray

Array = NDArray[Any]
FloatArray = NDArray[np.float32]

_FEW = 64
"""Tokens for whose rows there is memory at first."""

_STRETCH = 256
"""Positions whose rotations are worked out together."""


class Rotations:
    """Cosines and sines of positions, kept by stretches of positions."""

    def __init__(self, plan: RopePlan, dtype: attend.Dtype) -> None:
        """Keep rotations for q and k of a type."""
        self._plan, self._is_bf16 = plan, dtype == attend.Dtype.bfloat16
        self._frequencies = np.array(plan.frequencies, np.float32)
        self._stretches: dict[int, NDArray[np.generic]] = {}

    def of(self, positions: IntArray) -> NDArray[np.generic]:
        """Return cosines and sines ``[2, T, numbers that turn]``, contiguous, in q's type."""
        stretches, at = np.divmod(positions, _STRETCH)
        parts = [self._stretch(int(one)) for one in np.unique(stretches)]
        if len(parts) == 1:
            return np.ascontiguousarray(parts[0][:, at])
        places = np.searchsorted(np.unique(stretches), stretches) * _STRETCH + at
        return np.ascontiguousarray(np.concatenate(parts, axis=1)[:, places])

    def _stretch(self, number: int) -> NDArray[np.generic]:
        found = self._stretches.get(number)
        if found is None:
            positions = np.arange(number * _STRETCH, (number + 1) * _STRETCH, dtype=np.float32)
            angles = (positions[:, None] * self._frequencies).astype(np.float64)
            both = np.concatenate((angles, angles), axis=1)
            sides = np.stack((np.cos(both), np.sin(both))) * self._plan.scale
            found = to_bfloat16_bits(sides) if self._is_bf16 else sides.astype(np.float32)
            self._stretches[number] = found
        return found


def _layer(one: LayerPlan, plan: ModelPlan, holder: WeightHolder) -> layers.DecoderLayer:
    """Hold the weights of a layer, and describe it to the kernel."""
    rope = None if one.rope is None else plan.ropes[one.rope]
    n_turned = 0 if rope is None else 2 * len(rope.frequencies)
    mixture = one.mixture
    share = None if mixture is None else mixture.share
    return layers.DecoderLayer(
        holder.linear(*_ordered(one, n_turned)),
        holder.linear(one.o),
        None if one.gate_up is None else holder.linear(one.gate_up),
        None if one.down is None else holder.linear(one.down),
        holder.norm(one.before),
        holder.norm(one.between),
        holder.norm(one.q_norm),
        holder.norm(one.k_norm),
        *one.heads,
        holder.dtype,
        one.scale,
        None if mixture is None else holder.mixture(mixture, one.gate),
        attended=holder.norm(one.attended),
        mixed=holder.norm(one.mixed),
        norms_together=one.norms_together,
        n_turned=n_turned,
        rope=one.rope or 0,
        residual=one.residual,
        gate=experts.Gate(*one.gate),
        sinks=0 if one.sinks is None else holder.floats(one.sinks).ctypes.data,
        share=None if share is None else holder.unchanged(share),
        v=None if one.v_eps is None else holder.norm_of_ones(one.heads[2], one.v_eps),
        apart=None if mixture is None or mixture.apart is None else holder.apart(mixture.apart),
        own=None if one.own is None else holder.own(one.own),
        result=1.0 if one.result is None else float(holder.small(one.result)[0]),
    )


def _halves(n_heads: int, dim: int, n_turned: int) -> IntArray:
    """Return which numbers of heads, neighbours of which turn, come as halves that do."""
    first = np.arange(n_turned).reshape(-1, 2).T.reshape(-1)
    of_head = np.concatenate((first, np.arange(n_turned, dim)))
    return (dim * np.arange(n_heads)[:, None] + of_head).reshape(-1)


def _ordered(one: LayerPlan, n_turned: int) -> tuple[LinearPlan, Sequence[IntArray | None]]:
    """Return a layer's first matrices, and which of their rows the kernel has; None: all."""
    if one.recurrent is not None:
        return one.qkv, orders_by_key_heads(one.recurrent, len(one.qkv.weights))
    if one.latent is not None:
        return one.qkv, orders_of_latents(one.latent)
    n_heads, n_kv_heads, dim = one.heads
    if one.turns_pairs:
        return one.qkv, (*(_halves(n, dim, n_turned) for n in (n_heads, n_kv_heads)), None)
    if not one.is_gated:
        return one.qkv, ()
    q, gates = np.arange(2 * n_heads * dim).reshape(n_heads, 2, dim).swapaxes(0, 1)
    (first, *more), (bias, *biases) = one.qkv.weights, one.qkv.biases
    both = LinearPlan((first, *more, first), (bias, *biases, bias))
    return both, (q.reshape(-1), *(None for _ in more), gates.reshape(-1))


class NativeDecoder:
    """A model's weights, and the kernel's call that runs a forward of it."""

    def __init__(self, plan: ModelPlan, holder: WeightHolder) -> None:
        """Hold the weights of a planned model.

        Raises:
            ModelError: a tensor is missing, or is in a type that is not multiplied so.
        """
        self.holder = holder
        self.hidden_size, self.vocab_size = plan.facts.hidden_size, plan.facts.vocab_size
        self._rotations = [Rotations(one, holder.dtype) for one in plan.ropes]
        made = [_layer(one, plan, holder) for one in plan.layers]
        self._embedding = holder.embedding(plan.embedding)
        is_tied = plan.head.weights == (plan.embedding,) and not any(plan.head.biases)
        head = self._embedding.layer() if is_tied else holder.linear(plan.head, is_most_exact=True)
        self._last_norm = plan.norm, holder.norm_weight(plan.norm)
        self._parts = made, holder.described(*self._last_norm), head
        scale = plan.embedding_scale
        self._factors = {
            "embedding_scale": holder.rounded(scale) if plan.rounds_scale else scale,
            "logit_scale": plan.logit_scale,
            "logit_cap": plan.logit_cap or 0.0,
        }
        own, n_layers = plan.own_rows, len(plan.layers)
        self._own_rows = None if own is None else OwnRows(own, holder, n_layers)
        self._local = threading.local()
        self._row_type = np.uint16 if holder.dtype == attend.Dtype.bfloat16 else np.float32

    def _scaled(self, x: Array) -> Array:
        """Return rows of the embedding with its factor."""
        scale = self._factors["embedding_scale"]
        return x if scale == 1.0 else typed(floats(x) * np.float32(scale), self._row_type)

    def _embedded(self, ids: IntArray) -> tuple[layers.Decoder, Array]:
        """Look tokens up; return this thread's decoder, which reads their rows, and the rows."""
        rows = getattr(self._local, "rows", None)
        if rows is None or len(rows) < len(ids):
            made, norm, head = self._parts
            n_rows = max(len(ids), _FEW)
            rows = self._local.rows = np.empty((n_rows, self.hidden_size), self._row_type)
            at = rows.ctypes.data
            self._local.decoder = layers.Decoder(made, at, norm, head, **self._factors)
        self._embedding.look_up(ids, rows)
        found: layers.Decoder = self._local.decoder
        return found, rows[: len(ids)]

    def forward(
        self,
        cache: NativeCache,
        ids: IntArray,
        positions: IntArray,
        rows: IntArray,
        feature_layers: Sequence[int] = (),
    ) -> tuple[FloatArray, FloatArray]:
        """Run the tokens; the step is complete afterwards.

        Args:
            cache: of this backend, whose K is not stored rotated.
            ids: int64 ``[T]``, in the vocabulary.
            positions: ``[T]``.
            rows: int64 ``[R]``: tokens whose logits are wanted.
            feature_layers: whose inputs are wanted too; behind the last layer, its result.

        Returns:
            Logits ``[R, vocab_size]`` and features ``[T, n_features * hidden_size]``.

        Raises:
            StepError, PositionError, CacheFullError: as ``plan``; nothing was written.
        """
        n_tokens = len(ids)
        steps = cache.compiled_steps(n_tokens, positions)
        decoder, x = self._embedded(ids)
        own = None if self._own_rows is None else self._own_rows.of(ids, self._scaled(x))
        sides = [one.of(positions) for one in self._rotations]
        logits = np.empty((len(rows), self.vocab_size), np.float32)
        features = np.empty((n_tokens, len(feature_layers) * self.hidden_size), np.float32)
        numbers = np.arange(n_tokens, dtype=np.int64)
        decoder.run(
            steps,
            numbers.ctypes.data,
            n_tokens,
            [(cos.ctypes.data, sin.ctypes.data) for cos, sin in sides],
            rows.ctypes.data,
            len(rows),
            logits.ctypes.data,
            list(feature_layers),
            features.ctypes.data,
            0 if own is None else own.ctypes.data,
        )
        cache.steps.wrote_all()
        return logits, features

    def hidden(self, cache: NativeCache, ids: IntArray, positions: IntArray) -> FloatArray:
        """Run the tokens without logits; the step is complete afterwards.

        Arguments and errors as of ``forward``.

        Returns:
            The states ``[T, hidden_size]`` that logits are made of, behind the last norm.
        """
        made, _, _ = self._parts
        _, states = self.forward(cache, ids, positions, np.empty(0, np.int64), (len(made),))
        return self._normed(states)

    def _normed(self, states: FloatArray) -> FloatArray:
        """Norm rows ``[R, hidden_size]`` of the last layer, and round them to the model's type."""
        norm, weight = self._last_norm
        is_bf16 = self.holder.dtype == attend.Dtype.bfloat16
        in_floats = norm.in_floats or not is_bf16
        x: Any = states if in_floats else to_bfloat16_bits(states)
        layers.norm(
            x.ctypes.data,
            len(x),
            1,
            self.hidden_size,
            self.hidden_size,
            attend.Dtype.float32 if in_floats else attend.Dtype.bfloat16,
            weight.ctypes.data,
            norm.eps,
            x.ctypes.data,
        )
        if not is_bf16:
            return states
        return floats(to_bfloat16_bits(states) if in_floats else x)
