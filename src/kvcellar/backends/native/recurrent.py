"""Recurrent modules of a planned model, from slot to slot of a cache's states."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.native.weights import WeightHolder
from kvcellar.kernel import recurrent
from kvcellar.models.gguf.names import stored_name
from kvcellar.models.plans.plan import LayerPlan, LinearPlan, ModelPlan
from kvcellar.models.plans.recurrent import CONVOLUTION, DELTA, RecurrentPlan
from kvcellar.types import IntArray

Array = NDArray[Any]


class Recurrent:
    """A recurrent module, between the linear layers before it and the one behind."""

    def __init__(
        self, plan: RecurrentPlan, holder: WeightHolder, order: IntArray | None = None
    ) -> None:
        """Hold the small tensors of a module as the kernel reads them, in float32.

        Args:
            plan: of the module.
            holder: of the model's weights.
            order: in which the linear layer behind has its inputs; None: in the plan's.

        Raises:
            ModelError: one is not there.
            ConfigError: sizes that the kernel does not have.
        """
        self._plan, self._dtype, self._order = plan, holder.dtype, order
        self.n_in = plan.n_in
        """Numbers of a token that the linear layers before say."""
        n_channels, width = plan.conv_shape
        weight = holder.keep(holder.small(plan.conv).reshape(n_channels, width).T)
        self._convolution = recurrent.Convolution(
            n_channels,
            width,
            weight.ctypes.data,
            _address(plan.conv_bias, holder),
            has_silu=plan.has_silu,
        )
        if plan.kind == CONVOLUTION:
            return
        assert plan.rates is not None and plan.shifts is not None, "a recurrence decays"
        rates = holder.keep(np.exp(holder.small(plan.rates)))
        shifts = holder.keep(holder.small(plan.shifts))
        at = rates.ctypes.data, shifts.ctypes.data
        if plan.kind == DELTA:
            self._delta = recurrent.DeltaRule(
                *plan.heads, *at, n_decays=1, beta_scale=plan.beta_scale
            )
        else:
            self._scan = recurrent.Scan(*plan.heads, *at, _address(plan.skips, holder))
        gates_first, is_sigmoid, rounds = plan.gating
        norm = None if plan.norm is None else holder.keep(holder.small(plan.norm))
        self._norm = recurrent.GatedNorm(
            plan.inner,
            plan.group,
            0 if norm is None else norm.ctypes.data,
            0 if norm is None else norm.size,
            eps=plan.eps,
            gates_first=gates_first,
            is_sigmoid=is_sigmoid,
            rounds=rounds,
        )

    def run(self, batch: recurrent.StateBatch, states: Sequence[Array], rows: Array) -> Array:
        """Take the states of the layer on by the tokens of a batch.

        Args:
            batch: which slots are read and written.
            states: of the layer, each float32 ``[n_slots, *shape]``.
            rows: ``[T, plan.n_in]``, what the linear layers before say.

        Returns:
            ``[T, plan.inner]``, for the linear layer behind.
        """
        plan, (n, stride) = self._plan, rows.shape
        at = [rows.ctypes.data + rows.itemsize * place for place in plan.at]
        mixed = np.empty((n, plan.conv_shape[0]), rows.dtype)
        to, slots = mixed.ctypes.data, (states[0].ctypes.data, len(states[0]))
        if plan.kind == CONVOLUTION:
            self._convolution.run(batch, *slots, at[0], stride, to, at[1], at[2])
            return mixed
        self._convolution.run(batch, *slots, at[0], stride, to)
        core = np.empty((n, plan.inner), rows.dtype)
        self._recur(batch, states[1], mixed, at, stride, core)
        out = core.ctypes.data
        self._norm.run(n, self._dtype, out, at[1], stride, out)
        return core if self._order is None else np.ascontiguousarray(core[:, self._order])

    def _recur(
        self,
        batch: recurrent.StateBatch,
        states: Array,
        mixed: Array,
        at: Sequence[int],
        stride: int,
        core: Array,
    ) -> None:
        """Run the recurrence on what went through the convolution, which says three parts."""
        n_heads, second, third, fourth = self._plan.heads
        first, size, width = mixed.ctypes.data, mixed.itemsize, mixed.shape[1]
        slots, out = (states.ctypes.data, len(states)), core.ctypes.data
        if self._plan.kind == DELTA:
            k, v = (first + n * size * second * third for n in (1, 2))
            self._delta.run(batch, *slots, first, k, v, width, at[2], stride, at[3], stride, out)
        else:
            b = first + size * n_heads * third
            c = b + size * second * fourth
            self._scan.run(batch, *slots, first, b, c, width, at[2], stride, out)


def _address(name: str | None, holder: WeightHolder) -> int:
    """Hold a tensor in float32; return its address, 0: there is none."""
    return 0 if name is None else holder.keep(holder.small(name)).ctypes.data


def in_parts(plan: ModelPlan, there: Collection[str]) -> ModelPlan:
    """Return a plan for a GGUF file that has two matrices where a delta rule's first is one.

    Args:
        plan: of the model; one without such delta rules is returned as it is.
        there: names of the file's tensors.
    """
    return replace(plan, layers=tuple(_layer_in_parts(one, there) for one in plan.layers))


def _layer_in_parts(one: LayerPlan, there: Collection[str]) -> LayerPlan:
    joined, *others = one.qkv.weights
    is_joined = one.recurrent is None or not one.recurrent.by_key_heads
    if is_joined or stored_name(joined, there) in there:
        return one
    parts = [joined.replace(".in_proj_qkvz.", f".in_proj_{part}.") for part in ("qkv", "z")]
    weights = (*parts, *others)
    return replace(one, qkv=LinearPlan(weights, (None,) * len(weights)))


def orders_by_key_heads(plan: RecurrentPlan, n_matrices: int) -> tuple[IntArray | None, ...]:
    """Return which outputs of a module's first matrices the kernel has, and in which order.

    Where they lie by key heads, the first has q, k, v and gates, and the last betas and what decays
    are made of. Of three, the first two have q, k and v, and gates, as the kernel has them.

    Args:
        plan: of the module.
        n_matrices: how many there are.

    Returns:
        Of each matrix its order, None: that of the kernel; nothing where all have that.
    """
    if not plan.by_key_heads:
        return ()
    n_heads, n_keys, k_dim, v_dim = plan.heads
    each = n_heads // n_keys
    found = []
    for sizes in ((k_dim, k_dim, each * v_dim, each * v_dim), (each, each)):
        places = np.arange(n_keys * sum(sizes)).reshape(n_keys, -1)
        parts = np.split(places, np.cumsum(sizes)[:-1], axis=1)
        found.append(np.concatenate([part.reshape(-1) for part in parts]))
    return (None, None, found[1]) if n_matrices == 3 else (found[0], found[1])
