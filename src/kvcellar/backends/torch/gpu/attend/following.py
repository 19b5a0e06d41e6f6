"""Plan of a decode step that follows another: the same integers, but for a few that move by one.

Where each sequence has got one cell more behind its own, or its window has moved by one, nothing is
packed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcellar.backends.torch.gpu.attend import launch
from kvcellar.backends.torch.gpu.attend.plans import PackedPlan, Tiling
from kvcellar.sight import Sight
from kvcellar.types import AttendKind, StepPlan, Write


class Following:
    """Packs the plans of one layer group, step after step."""

    def __init__(self) -> None:
        """Pack nothing yet."""
        self._last: _Packed | None = None

    def packed(
        self,
        plan: StepPlan,
        sight: Sight,
        tiling: Tiling,
        n_tokens: int | None = None,
        exact: Sequence[Write] = (),
        *,
        stores: bool = True,
    ) -> PackedPlan:
        """Return what the kernels do for a plan, made of the last one where that can be.

        Args:
            plan: of a step.
            sight: of the layers; always the same.
            tiling: sizes of the launches.
            n_tokens: of the batch with those that pad it; None: nothing pads it.
            exact: writes to exact cells, counted from 0.
            stores: false for layers that write nothing.
        """
        found, last = None, self._last
        if last is not None and not exact and last.tiling == tiling and last.n_tokens == n_tokens:
            found = _advanced(last, plan)
        if found is None:
            found = launch.compiled(plan, sight, tiling, n_tokens, exact, stores=stores)
        self._last = None if exact else _Packed(plan, tiling, n_tokens, found)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A plan that was packed, and how."""

    plan: StepPlan
    tiling: Tiling
    n_tokens: int | None
    packed: PackedPlan


def _advanced(last: _Packed, plan: StepPlan) -> PackedPlan | None:
    """Return the last plan with what has moved by one; None: more than that is another."""
    moving, before = last.packed.moving, last.plan
    if moving is None or not len(before.reads) == len(plan.reads) == len(plan.writes):
        return None
    is_grown = is_slid = True
    for old, new, (q_start, (cell, n)) in zip(before.reads, plan.reads, plan.writes, strict=True):
        (start, length), (old_start, old_length) = new.runs[-1], old.runs[-1]
        if (
            not old.q_start == new.q_start == q_start
            or not new.q_len == n == 1
            or new.kind is AttendKind.EXPLICIT
            or not cell == start + length - 1 == old_start + old_length
            or len(new.runs) != len(old.runs)
        ):
            return None
        is_grown &= start == old_start and new.runs[:-1] == old.runs[:-1]
        is_slid &= start == old_start + 1 and len(new.runs) == 1
    n_left = moving.n_left - is_grown
    at = moving.grown if is_grown else moving.slid if is_slid else None
    if at is None or n_left < 0:
        return None
    numbers = last.packed.numbers.copy()
    numbers[at] += 1
    return PackedPlan(last.packed.form, numbers, moving._replace(n_left=n_left))
