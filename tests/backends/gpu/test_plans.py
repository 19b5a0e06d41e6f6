"""Plans as the device has them: what queries see, what is shared, and what a step transfers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch")

from kvcellar.backends.torch.gpu.attend.lists import ALL, BAND, CAUSAL, CellList, lists_of
from kvcellar.backends.torch.gpu.attend.plans import SECTIONS, PackedPlan, Tiling, pack
from kvcellar.bookkeeping.cells.spans import Span
from kvcellar.bookkeeping.layouts.reads import causal_reads
from kvcellar.sight import Sight
from kvcellar.types import AttendKind, AttendSpec, Run, StepPlan, Write, cells_of
from tests.backends.gpu.plans import random_plan, seen_cells

ALL_OF_IT = Sight(None, None)
TILING = Tiling(4, 8, 64, 128, 64, 3, 528)


def decode_plan(*histories: tuple[Run, ...]) -> StepPlan:
    """One token of each sequence, in the last cell of its history."""
    reads = [AttendSpec(i, 1, runs, AttendKind.NONE) for i, runs in enumerate(histories)]
    writes = [Write(i, Run(runs[-1].stop - 1, 1)) for i, runs in enumerate(histories)]
    n_cells = max(run.stop for runs in histories for run in runs)
    return StepPlan(len(histories), tuple(writes), tuple(reads), n_cells)


def seen_in(lists: list[CellList], query: int) -> Counter[int]:
    """Cells that a query sees, and how often."""
    found: Counter[int] = Counter()
    for one in lists:
        cells, t = cells_of(one.runs), -1
        for first, n in one.tokens:
            if first <= query < first + n:
                t = query - first
        if t < 0:
            continue
        at = np.arange(len(cells))
        see = at < one.n_free
        if one.kind in (CAUSAL, BAND):
            see = at <= one.n_free + t
        if one.kind == BAND:
            see &= at > one.n_free + t - one.window
        if one.mask is not None:
            see[one.n_free :] = one.mask[t]
        found.update(cells[see].tolist())
    return found


@pytest.mark.parametrize("sight", [ALL_OF_IT, Sight(6, None)])
@pytest.mark.parametrize("seed", range(6))
def test_lists_show_each_query_the_cells_of_its_read_once(
    sight: Sight, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcellar.backends.torch.gpu.attend.lists.LEAST_SHARED", 5)
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, 160, (3, 1, 4, 1), sight, 20 * (seed % 3))
    lists = lists_of(plan, sight)
    assert any(len(one.tokens) > 1 for one in lists) == bool(seed % 3)
    for read in plan.reads:
        for i, cells in enumerate(seen_cells(read)):
            assert seen_in(lists, read.q_start + i) == Counter(cells)


def test_a_trunk_is_one_list_with_the_queries_of_all_branches() -> None:
    trunk = Run(0, 4096)
    plan = decode_plan(*((trunk, Run(5000 + 100 * i, 3)) for i in range(8)))
    shared, *own = lists_of(plan, ALL_OF_IT)
    assert shared.runs == (trunk,) and shared.n_tokens == 8 and shared.kind == ALL
    assert [one.n_cells for one in own] == [3] * 8


def test_cells_that_too_few_share_are_read_by_each() -> None:
    plan = decode_plan((Run(0, 40), Run(100, 2)), (Run(0, 40), Run(200, 2)))
    assert [one.n_cells for one in lists_of(plan, ALL_OF_IT)] == [42, 42]


def test_a_window_over_a_prompt_needs_no_mask() -> None:
    sight = Sight(16, None)
    reads = causal_reads(0, 30, 20, sight, lambda p0, p1: [Span(p0, p0, p1 - p0)])
    plan = StepPlan(20, (), tuple(reads), 50)
    (one,) = lists_of(plan, sight)
    assert (one.kind, one.window, one.n_free) == (BAND, 16, 15)
    assert not pack(plan, [one], TILING).form.has_masks


def test_the_next_tokens_plan_has_the_same_form_and_is_a_small_transfer() -> None:
    steps = [decode_plan((Run(0, 2000), Run(2100, 5 + i))) for i in range(3)]
    steps.append(decode_plan((Run(0, 2000), Run(2100, 20), Run(9000, 10))))
    packed = [pack(plan, lists_of(plan, ALL_OF_IT), TILING) for plan in steps]
    assert len({one.form for one in packed}) == 1
    assert packed[0].numbers.nbytes <= 800
    assert splits_of(packed[0]) == {0: 16}
    eight = decode_plan(*((Run(3000 * i, 2000),) for i in range(8)))
    assert pack(eight, lists_of(eight, ALL_OF_IT), TILING).numbers.nbytes <= 3072


def test_a_trunk_is_split_as_for_one_and_what_is_each_branch_s_own_is_not() -> None:
    trunk, own = Run(0, 16_384), [Run(20_000 + 100 * i, 5) for i in range(8)]
    plan = decode_plan(*((trunk, run) for run in own))
    branches = splits_of(pack(plan, lists_of(plan, ALL_OF_IT), TILING))
    assert branches == {0: 63, **dict.fromkeys(range(1, 9), 1)}
    plan = decode_plan((trunk, own[0]))
    assert splits_of(pack(plan, lists_of(plan, ALL_OF_IT), TILING)) == {0: 64}
    eight = decode_plan(*((Run(5000 * i, 4096),) for i in range(8)))
    assert set(splits_of(pack(eight, lists_of(eight, ALL_OF_IT), TILING)).values()) == {9}


def splits_of(packed: PackedPlan) -> dict[int, int]:
    """Into how many parts the cells of each list are split: one tile has its queries."""
    n = packed.form.sections[0]
    tiles = packed.numbers[: n - n % 3].reshape(-1, 3)
    return dict(Counter(tiles[tiles[:, 0] >= 0, 0].tolist()))


def test_short_runs_behind_each_other_are_read_by_index() -> None:
    short = tuple(Run(2 * i, 1) for i in range(30))
    plan = decode_plan((Run(500, 100), *short, Run(700, 50)))
    packed = pack(plan, lists_of(plan, ALL_OF_IT), TILING)
    parts = np.split(packed.numbers, np.cumsum(packed.form.sections)[:-1])
    sections = dict(zip(SECTIONS, parts, strict=True))
    assert sections["runs"][:9].tolist() == [500, 0, 100, -1, 100, 130, 700, 130, 180]
    assert sections["index"][:30].tolist() == [2 * i for i in range(30)]


def test_many_queries_are_not_split_and_leave_no_parts() -> None:
    read = AttendSpec(0, 200, (Run(0, 4000),), AttendKind.CAUSAL)
    plan = StepPlan(200, (Write(0, Run(3800, 200)),), (read,), 4000)
    form = pack(plan, lists_of(plan, ALL_OF_IT), TILING).form
    sizes = dict(zip(SECTIONS, form.sections, strict=True))
    assert form.n_slots == 0 and not sizes["merged"] and not sizes["few"]
