"""Forwards of one cache on a GPU: its plans on the device, and what each layer launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.backends.torch.exact import LayerPool, PoolBeside
from kvcellar.backends.torch.gpu import launch
from kvcellar.backends.torch.gpu.launch import DevicePlan, PoolArguments
from kvcellar.backends.torch.gpu.plans import Tiling
from kvcellar.types import LayerGroup, StepPlan


class GroupPlan(NamedTuple):
    """Plan of the layers of a group in one forward, on the device."""

    plan: DevicePlan
    tiling: Tiling


class GpuSteps:
    """Things that a cache keeps on a GPU from one forward to the next.

    Each layer group, and those of its layers that write nothing, has a buffer for its plan.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._plans: dict[int, DevicePlan] = {}
        self._pools: dict[int, tuple[tuple[int, ...], PoolArguments]] = {}

    def prepare(
        self, slot: int, plan: StepPlan, group: LayerGroup, pool: LayerPool, q: Tensor
    ) -> GroupPlan:
        """Put a plan on the device; the one before of the same slot is gone.

        Args:
            slot: whose plan it is.
            plan: without writes for layers that write nothing.
            group: of the layers.
            pool: of one of them.
            q: ``[1, n_heads, T, q_dim]``, in the type that comes to ``run``.
        """
        if slot not in self._plans:
            with torch.inference_mode(False):  # it outlives any inference_mode block
                self._plans[slot] = DevicePlan(q.device)
        tiling = launch.tiling_of(q.shape[1], self._arguments(-1, pool), q.dtype, q.device)
        self._plans[slot].update(launch.compiled(plan, group.sight, tiling))
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
        places = self._arguments(layer, pool)
        launch.write(prepared.plan, places, k, v)
        return launch.attend(
            prepared.plan, places, prepared.tiling, q, scale, out_dtype, softcap, sinks
        )

    def _arguments(self, layer: int, pool: LayerPool) -> PoolArguments:
        """Return how the kernels are told a layer's pool, made anew where it has grown."""
        assert not isinstance(pool, PoolBeside), "those are not Triton's"
        placed = pool.placed()
        where = tuple(part.data_ptr() for part in (*placed.k, *placed.v))
        known = self._pools.get(layer)
        if known is None or known[0] != where:
            known = self._pools[layer] = where, launch.pool_arguments(placed)
        return known[1]
