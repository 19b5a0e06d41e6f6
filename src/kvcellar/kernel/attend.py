"""Attention over runs of cells.

What a call costs in Python is kept low by three objects that outlive it:

- a :class:`Pool` says where one layer's K and V lie; made anew when the pool (re)allocates;
- a :class:`Layout` says how a forward's q, k, v and result lie; made once per shape;
- a :class:`Plan` is a ``StepPlan`` flattened, with the work already split; made once per forward
  and layer group.

Then ``plan.step(pool, layout, q, k, v, out, scale, softcap, sinks)`` is one layer, all rows as
addresses. Whoever makes these objects keeps the memory alive and the pool large enough: a plan that
reaches past ``n_cells`` is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.kernel import levels

if TYPE_CHECKING or levels.is_available():
    from kvcellar.kernel._native import (
        STEP_VERSION,
        Dtype,
        Layout,
        Plan,
        Pool,
        Side,
        step_address,
    )

__all__ = ["STEP_VERSION", "Dtype", "Layout", "Plan", "Pool", "Side", "step_address"]
