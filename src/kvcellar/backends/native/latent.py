"""Attention over latents of a planned model, by calls of the CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.native.weights import WeightHolder
from kvcellar.kernel import attend, layers
from kvcellar.models.plans.plan import HALVES, PAIRS, LatentPlan
from kvcellar.types import IntArray

Array = NDArray[Any]


class LatentAttention:
    """Attention over latents, between the linear layers before it and the one behind."""

    def __init__(self, plan: LatentPlan, scale: float, holder: WeightHolder) -> None:
        """Hold what is multiplied between those layers.

        Args:
            plan: of the attention.
            scale: factor on its logits.
            holder: of the model's weights.

        Raises:
            ModelError: a tensor is not there, or in a type that is not read.
        """
        self._plan, self._scale, self._dtype = plan, scale, holder.dtype
        self.n_in = plan.n_in
        """Numbers of a token that the linear layers before say."""
        self._q = None if plan.q is None else holder.linear(plan.q, (_queries(plan),))
        self._norms = [
            (one, holder.norm_weight(one)) for one in (plan.norm, plan.q_norm) if one is not None
        ]
        self._to_latents, self._from_latents = holder.expansion(plan)
        half = np.arange(plan.shape.rotary_dim).reshape(2, -1)
        self._stored = half.T.reshape(-1) if plan.turned == PAIRS else slice(None)
        """Which of the numbers that have been turned, as halves, each one of a row is."""

    def run(self, step: tuple[Any, ...], rows: Array, turns: tuple[int, int]) -> Array:
        """Store latents and rotary rows of a batch's tokens, and attend.

        Args:
            step: what the cache has compiled for the layer.
            rows: ``[T, n_in]``: queries, short or of all heads, latents, and rotary numbers; these
                are turned in place.
            turns: addresses of cosines and sines ``[T, rotary_dim]``.

        Returns:
            ``[T, n_heads * v_dim]``, for the linear layer behind.
        """
        plan, pool, to_exact, exact, softcap = step
        shape, n, n_first = self._plan.shape, len(rows), self.n_in
        n_heads, latent, rotary = shape.n_kv_heads, shape.latent_dim, shape.rotary_dim
        n_plain, n_first = n_heads * shape.plain_dim, self.n_in - latent - rotary
        queries = self._queries(rows[:, :n_first])
        heads, shared = queries[:, n_plain:], rows[:, n_first + latent :]
        self._turn(heads, n_heads, turns)
        self._turn(shared, 1, turns)

        q = np.empty((n, n_heads, latent + rotary), rows.dtype)
        plain = np.ascontiguousarray(queries[:, :n_plain])
        q[..., :latent] = self._by_head(self._to_latents, plain, n, latent)
        q[..., latent:] = heads.reshape(n, n_heads, rotary)[..., self._stored]
        kv = np.empty((n, latent + rotary), rows.dtype)
        kv[:, :latent] = self._normed(rows[:, n_first : n_first + latent], 0)
        kv[:, latent:] = shared[:, self._stored]

        width = latent + rotary
        one, each = (width, width), (width, n_heads * width)
        types = self._dtype, self._dtype
        layout = attend.Layout(n_heads, *types, each, one, one, (latent, n_heads * latent))
        attended = np.empty((n, n_heads, latent), rows.dtype)
        at_q, at_kv, out = q.ctypes.data, kv.ctypes.data, attended.ctypes.data
        if to_exact is not None:
            to_exact.write(exact, layout, at_kv, at_kv)
        plan.step(pool, layout, at_q, at_kv, at_kv, out, self._scale, softcap, 0)
        return self._by_head(self._from_latents, attended, n, shape.v_dim).reshape(n, -1)

    def _queries(self, rows: Array) -> Array:
        """Return queries of all heads ``[T, n_heads * key_dim]``, plain numbers of all first."""
        if self._q is None:
            return rows
        shape = self._plan.shape
        short = self._normed(rows, 1) if len(self._norms) > 1 else np.ascontiguousarray(rows)
        found = np.empty((len(rows), shape.n_kv_heads * self._plan.key_dim), rows.dtype)
        self._q.linear(short.ctypes.data, len(rows), self._dtype, found.ctypes.data)
        return found

    def _normed(self, rows: Array, which: int) -> Array:
        """Norm rows ``[T, numbers]``, which may lie apart."""
        plan, weight = self._norms[which]
        out, stride = np.empty(rows.shape, rows.dtype), rows.strides[0] // rows.itemsize
        of_rows = len(rows), 1, rows.shape[1], stride, self._dtype
        layers.norm(rows.ctypes.data, *of_rows, weight.ctypes.data, plan.eps, out.ctypes.data)
        return out

    def _turn(self, rows: Array, n_heads: int, turns: tuple[int, int]) -> None:
        """Turn rows ``[T, n_heads * rotary_dim]`` in place, the halves of each head."""
        stride = rows.strides[0] // rows.itemsize
        sizes = len(rows), n_heads, self._plan.shape.rotary_dim, stride
        layers.rotate(rows.ctypes.data, *sizes, self._dtype, *turns)

    def _by_head(self, matrices: Any, rows: Array, n: int, n_out: int) -> Array:
        """Multiply each head's row of n tokens by the head's matrix: ``[n, n_heads, n_out]``."""
        n_heads = self._plan.shape.n_kv_heads
        heads = np.tile(np.arange(n_heads, dtype=np.int64), n)
        out = np.empty((n, n_heads, n_out), rows.dtype)
        at = rows.ctypes.data, n * n_heads, heads.ctypes.data
        matrices.linear(*at, 1, self._dtype, out.ctypes.data)
        return out


def orders_of_latents(plan: LatentPlan) -> Sequence[IntArray | None]:
    """Return which rows of a layer's first matrices come, in their order; None: all as they are.

    Rotary numbers come as halves, whatever they lie like in files, and behind the plain numbers of
    all heads.
    """
    shape = plan.shape
    behind = shape.latent_dim + _halves(plan)
    latents = np.concatenate((np.arange(shape.latent_dim), behind))
    return None if plan.q is not None else _queries(plan), latents


def _queries(plan: LatentPlan) -> IntArray:
    """Return the order of the rows of queries' matrix."""
    shape = plan.shape
    rows = np.arange(shape.n_kv_heads * plan.key_dim).reshape(shape.n_kv_heads, -1)
    turned = rows[:, shape.plain_dim + _halves(plan)]
    return np.concatenate((rows[:, : shape.plain_dim].reshape(-1), turned.reshape(-1)))


def _halves(plan: LatentPlan) -> IntArray:
    """Return the order that makes halves of a row's rotary numbers."""
    numbers = np.arange(plan.shape.rotary_dim)
    return numbers if plan.turned == HALVES else numbers.reshape(-1, 2).T.reshape(-1)
