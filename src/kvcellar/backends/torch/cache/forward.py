"""A forward of all layers planned before it runs, for a runtime that runs them without Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch

from kvcellar.backends.torch.cache import kernel
from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.backends.torch.cache.exact import ExactPool
from kvcellar.bookkeeping.cells.exact import ExactCells
from kvcellar.kernel import attend
from kvcellar.types import IntArray, StepPlan

_CPU = torch.device("cpu")


class GroupStep(NamedTuple):
    """Work of the CPU kernel in every layer of one layer group."""

    plan: attend.Plan
    to_exact: attend.Plan | None
    """Tokens that are written to exact cells too."""


def can_plan(cache: object) -> TypeGuard[TorchCache]:
    """Return true if the CPU kernel alone can run this cache's forwards.

    It cannot where K is stored rotated, since queries and keys have to be rotated before, where
    histories begin with a frozen prefix, where rows are latent, where layers share rows, and where
    others are recurrent.
    """
    if not isinstance(cache, TorchCache) or cache.config.prefix is not None:
        return False
    if cache.config.params.shared or cache.config.params.state is not None:
        return False
    if any(group.is_latent for group in cache.config.params.groups):
        return False
    return not cache.config.kv.k.is_rotated and kernel.takes(_CPU, cache.config.kv)


def can_run(cache: object, n_tokens: int, dtype: torch.dtype) -> TypeGuard[TorchCache]:
    """Return true if the CPU kernel is also what this cache's next forward attends with.

    Args:
        cache: any.
        n_tokens: of the forward.
        dtype: of its queries.
    """
    if not can_plan(cache):
        return False
    most = kernel.most_queries(cache.config.kv, dtype)
    if most is None or n_tokens <= most:
        return True
    plans = cache.steps.begun_plans()
    return bool(plans) and not any(kernel.is_long(read, most) for p in plans for read in p.reads)


def compiled_steps(
    cache: TorchCache, n_tokens: int, positions: Sequence[int] | IntArray | None
) -> list[GroupStep]:
    """Compile the plans of all layers, and have their pools hold what is written.

    Args:
        cache: one that ``can_plan``.
        n_tokens: tokens of the flat batch.
        positions: one per token; None where the step was begun with them.

    Returns:
        One per layer group. The step is open: ``steps.wrote_all`` when all layers have written,
        else ``cancel_step``.

    Raises:
        StepError, PositionError, CacheFullError: as ``Steps.plan_all``; nothing was written.
    """
    plans = cache.steps.plan_all(n_tokens, positions)
    for layer, pool in enumerate(cache.pools.of_layer):
        pool.ensure(plans[cache.steps.group_of(layer)].n_cells, _CPU)
    return [_compiled(plan, exact) for plan, exact in zip(plans, cache.pools.exact, strict=True)]


def pools_of(cache: TorchCache) -> list[tuple[attend.Pool, attend.Pool | None]]:
    """Return, for each layer, where the kernel finds its bytes, and exact cells beside them."""
    found = []
    for pool in cache.pools.of_layer:
        exact = pool.exact.for_kernel() if isinstance(pool, ExactPool) else None
        found.append((pool.for_kernel(), exact))
    return found


def _compiled(plan: StepPlan, exact: ExactCells | None) -> GroupStep:
    """Hand a plan to the kernel, with writes to exact cells apart."""
    if exact is None:
        return GroupStep(attend.Plan(plan), None)
    own, writes = exact.rewrite(plan)
    to_exact = kernel.compile_writes(plan.n_tokens, writes, exact.n_cells) if writes else None
    return GroupStep(attend.Plan(own), to_exact)
