"""Forwards of one cache on a GPU: its plans on the device, and what each layer launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.backends.torch.cache.exact import LayerPool, PoolBeside
from kvcellar.backends.torch.cache.pools import Placed
from kvcellar.backends.torch.gpu.attend import launch
from kvcellar.backends.torch.gpu.attend.following import Following
from kvcellar.backends.torch.gpu.attend.launch import DevicePlan, PlanOnDevice, PoolArguments
from kvcellar.backends.torch.gpu.attend.plans import Tiling
from kvcellar.types import LayerGroup, StepPlan, Write


def placed_of(pool: LayerPool) -> tuple[Placed, Placed | None]:
    """Return where a pool's bytes lie, and those of the pool beside it."""
    if not isinstance(pool, PoolBeside):
        return pool.placed(), None
    assert not isinstance(pool.cells, PoolBeside), "there is one pool beside a pool"
    return pool.cells.placed(), pool.beside.placed()


class GroupPlan(NamedTuple):
    """Plan of the layers of a group in one forward, on the device."""

    plan: PlanOnDevice
    tiling: Tiling


class GpuSteps:
    """Things that a cache keeps on a GPU from one forward to the next.

    Each layer group, and those of its layers that write nothing, has a buffer for its plan.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._plans: dict[int, DevicePlan] = {}
        self._pools: dict[int, tuple[int, PoolArguments]] = {}
        self._following: dict[int, Following] = {}
        self.tilings: dict[int, Tiling] = {}
        """Sizes of the last launches, by slot: what the queries of a model ask for."""

    def prepare(
        self,
        layer: int,
        slot: int,
        plan: StepPlan,
        group: LayerGroup,
        pool: LayerPool,
        q: Tensor,
        exact: Sequence[Write] = (),
    ) -> GroupPlan:
        """Put a plan on the device; the one before of the same slot is gone.

        Args:
            layer: one of those that have the plan.
            slot: whose plan it is.
            plan: without writes for layers that write nothing.
            group: of the layers.
            pool: of the layer.
            q: ``[1, n_heads, T, q_dim]``, in the type that comes to ``run``.
            exact: writes to exact cells, counted from 0.
        """
        if slot not in self._plans:
            with torch.inference_mode(False):  # it outlives any inference_mode block
                self._plans[slot] = DevicePlan(q.device)
            self._following[slot] = Following()
        tiling = launch.tiling_of(q.shape[1], self.arguments(layer, pool), q.dtype, q.device)
        self.tilings[slot] = tiling
        packed = self._following[slot].packed(plan, group.sight, tiling, exact=exact)
        self._plans[slot].update(packed)
        return GroupPlan(self._plans[slot], tiling)

    def run(
        self,
        layer: int,
        prepared: GroupPlan,
        pool: LayerPool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out_dtype: torch.dtype,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Write a layer's K and V and attend; arguments as of ``update_and_attend``."""
        places = self.arguments(layer, pool)
        launch.write(prepared.plan, places, k, v)
        return launch.attend(
            prepared.plan, places, prepared.tiling, q, scale, out_dtype, softcap, sinks
        )

    def arguments(self, layer: int, pool: LayerPool) -> PoolArguments:
        """Return how the kernels are told a layer's pool, made anew where it has grown."""
        known = self._pools.get(layer)
        if known is None or known[0] != pool.n_cells:
            own, beside = placed_of(pool)
            made = launch.pool_arguments(own)
            if beside is not None:
                made = made._replace(beside=launch.pool_arguments(beside))
            known = self._pools[layer] = pool.n_cells, made
        return known[1]
