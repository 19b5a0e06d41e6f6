"""A planned model layer by layer: recurrent, with a gate behind attention, or over latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.native.caches import NativeCache
from kvcellar.backends.native.decoder import FloatArray, NativeDecoder
from kvcellar.backends.native.latent import LatentAttention
from kvcellar.backends.native.recurrent import Recurrent
from kvcellar.backends.native.weights import WeightHolder, floats, typed
from kvcellar.kernel import attend, recurrent
from kvcellar.models.plans.plan import LayerPlan, ModelPlan
from kvcellar.types import IntArray

Array = NDArray[Any]


class Attention:
    """Attention of a layer, between the linear layers before it and the one behind."""

    def __init__(self, plan: LayerPlan, holder: WeightHolder, n_turned: int) -> None:
        """Describe a layer's attention, in whose heads so many numbers turn."""
        n_heads, n_kv_heads, dim = plan.heads
        inner, n_kv = n_heads * dim, n_kv_heads * dim
        self._plan, self._dtype, self._inner = plan, holder.dtype, inner
        self._paired = n_turned if plan.turns_pairs else 0
        self._starts = 0, inner, inner + n_kv, inner + 2 * n_kv
        self.n_in = inner + 2 * n_kv + inner * plan.is_gated
        """Numbers of a token that the linear layers before say."""
        self._sinks = 0 if plan.sinks is None else holder.floats(plan.sinks).ctypes.data
        self._gate = recurrent.GatedNorm(
            inner, 1, 0, 0, eps=0.0, gates_first=False, is_sigmoid=True, rounds=False
        )

    def run(self, step: tuple[Any, ...], rows: Array, growth: FloatArray | None = None) -> Array:
        """Store K and V of a batch's tokens, and attend.

        Args:
            step: what the cache has compiled for the layer.
            rows: ``[T, n_in]``: q and k, turned, v, and gates where there are some; changed.
            growth: ``[T, 1]``, by which queries are multiplied; None: by nothing.

        Returns:
            ``[T, n_heads * head_dim]``, for the linear layer behind.
        """
        if self._paired:
            self._pair(rows)
        if growth is not None:
            queries = rows[:, : self._inner]
            queries[:] = typed(floats(queries) * growth, queries.dtype)
        plan, pool, to_exact, exact, softcap = step
        (n, stride), one, dim = rows.shape, self._plan, self._plan.heads[2]
        given = dim, stride
        types = self._dtype, self._dtype
        layout = attend.Layout(one.heads[0], *types, given, given, given, (dim, self._inner))
        q, k, v, gates = (rows.ctypes.data + rows.itemsize * at for at in self._starts)
        said = np.empty((n, self._inner), rows.dtype)
        out = said.ctypes.data
        if to_exact is not None:
            to_exact.write(exact, layout, k, v)
        plan.step(pool, layout, q, k, v, out, one.scale, softcap, self._sinks)
        if one.is_gated:
            self._gate.run(n, self._dtype, out, gates, stride, out)
        return said

    def _pair(self, rows: Array) -> None:
        """Put numbers of heads that turned as halves where they lie as neighbours."""
        n_heads, n_kv_heads, dim = self._plan.heads
        heads = rows[:, : self._starts[2]].reshape(len(rows), n_heads + n_kv_heads, dim)
        turned = heads[..., : self._paired]
        pairs = turned.reshape(*turned.shape[:-1], 2, -1).swapaxes(-1, -2)
        turned[:] = pairs.reshape(turned.shape)


def _between(
    one: LayerPlan, holder: WeightHolder, n_turned: int
) -> Attention | LatentAttention | Recurrent:
    """Make what a layer has between the linear layers before and the one behind."""
    if one.recurrent is not None:
        return Recurrent(one.recurrent, holder, holder.order_of_inputs(one.o))
    if one.latent is not None:
        return LatentAttention(one.latent, one.scale, holder)
    return Attention(one, holder, n_turned)


class HybridDecoder(NativeDecoder):
    """A model's weights, and the kernel's calls that run a forward of it: some for each layer."""

    def __init__(self, plan: ModelPlan, holder: WeightHolder) -> None:
        """Hold the weights of a planned model; errors as of :class:`NativeDecoder`."""
        super().__init__(plan, holder)
        self._plan = plan
        n_turned = {None: 0} | {n: 2 * len(one.frequencies) for n, one in enumerate(plan.ropes)}
        self._between = [_between(one, holder, n_turned[one.rope]) for one in plan.layers]

    def forward(
        self,
        cache: NativeCache,
        ids: IntArray,
        positions: IntArray,
        rows: IntArray,
        feature_layers: Sequence[int] = (),
    ) -> tuple[FloatArray, FloatArray]:
        """Run the tokens; see :meth:`NativeDecoder.forward`."""
        growth = self._growth(positions)
        if growth is None and not self._plan.is_hybrid:
            return super().forward(cache, ids, positions, rows, feature_layers)
        n_tokens = len(ids)
        steps = iter(cache.compiled_steps(n_tokens, positions))
        has_states = any(isinstance(one, Recurrent) for one in self._between)
        batch, of_layers = cache.compiled_states(self.holder.dtype) if has_states else (None, ())
        states = iter(of_layers)
        sides = [one.of(positions) for one in self._rotations]
        addresses = [(cos.ctypes.data, sin.ctypes.data) for cos, sin in sides]
        x = self._looked_up(ids)
        at, inputs = x.ctypes.data, [x.copy()] if 0 in feature_layers else [x[:0]]
        for number, (one, between) in enumerate(zip(self._plan.layers, self._between, strict=True)):
            layer = self._parts[0][number]
            cos, sin = (0, 0) if one.rope is None else addresses[one.rope]
            joined = np.empty((n_tokens, between.n_in), x.dtype)
            layer.before(at, n_tokens, cos, sin, joined.ctypes.data)
            if isinstance(between, Recurrent):
                assert batch is not None, "a recurrent layer has states"
                said = between.run(batch, next(states), joined)
            elif isinstance(between, LatentAttention):
                said = between.run(next(steps), joined, (cos, sin))
            else:
                said = between.run(next(steps), joined, growth)
            layer.after(at, said.ctypes.data, n_tokens, at)
            inputs.append(x.copy() if number + 1 in feature_layers else x[:0])
        logits = self._logits(x[rows])
        features = [floats(inputs[number]) for number in feature_layers]
        cache.steps.wrote_all()
        none = np.empty((n_tokens, 0), np.float32)
        return logits, np.concatenate([none, *features], axis=1)

    def _growth(self, positions: IntArray) -> FloatArray | None:
        """Return by what queries at positions are multiplied, ``[T, 1]``; None: by nothing."""
        if self._plan.query_growth is None:
            return None
        times, stretch = self._plan.query_growth
        if positions.max(initial=0) < stretch:
            return None
        found = (1 + times * np.log1p(positions // stretch)).astype(np.float32)[:, None]
        return floats(typed(found, self._row_type))

    def _looked_up(self, ids: IntArray) -> Array:
        """Return rows of tokens ``[T, hidden_size]`` in the model's type."""
        x = np.empty((len(ids), self.hidden_size), self._row_type)
        self._embedding.look_up(ids, x)
        return self._scaled(x)

    def _logits(self, x: Array) -> FloatArray:
        """Return logits ``[R, vocab_size]`` of rows that the last layer has said."""
        logits = np.empty((len(x), self.vocab_size), self._row_type)
        if len(x):
            normed = typed(self._normed(floats(x)), self._row_type)
            head = self._parts[2]
            head.linear(normed.ctypes.data, len(x), self.holder.dtype, logits.ctypes.data)
        scale, cap = self._factors["logit_scale"], self._factors["logit_cap"]
        found = floats(logits) * np.float32(scale)
        return np.tanh(found / np.float32(cap)) * np.float32(cap) if cap else found
