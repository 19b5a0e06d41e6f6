"""The CPU attention kernel against attention in float64, on every instruction set that is here."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.backends.reference.quantise import quantise
from kvcellar.errors import ConfigError
from kvcellar.kernel import attend, levels
from kvcellar.kv_dtype import SideDtype
from kvcellar.types import AttendKind, AttendSpec, Run, StepPlan, Write, cells_of
from tests.kernel.cases import (
    BASE,
    FLOATS,
    N_CELLS,
    READ,
    Case,
    SideBytes,
    cases,
    numbers,
    stored,
    tolerance,
)

pytestmark = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
LEVELS = [found.name for found in levels.levels()] if levels.is_available() else []


@pytest.fixture(params=LEVELS, scope="module")
def level(request):
    """Each instruction set in turn."""
    before = levels.level()
    levels.set_level(levels.Level[request.param])
    yield request.param
    levels.set_level(before)


def agree(case: Case) -> None:
    want = case.expected()
    got = case.run()
    np.testing.assert_allclose(got, want, atol=tolerance(case) * max(1.0, np.abs(want).max()))
    for side, rows in ((case.k, case.k_rows), (case.v, case.v_rows)):
        encoded = side.encode(numbers(case.heads_first(rows)))
        for part, bytes_wanted in zip(side.parts, encoded, strict=True):
            written = side.at(part, case.plan.write_cells)
            assert written.tobytes() == bytes_wanted.tobytes()


@given(case=cases())
def test_a_step_agrees_with_float64_and_its_bytes_with_the_definition(level, case):
    agree(case)


@given(case=cases(), data=st.data())
def test_what_is_not_seen_leaves_no_trace(level, case, data):
    """NaN in every cell that is not read, and in cells that some query of a mask does not see."""
    read = np.unique(np.concatenate([cells_of(spec.runs) for spec in case.plan.reads]))
    unread = np.setdiff1d(np.arange(N_CELLS), read)
    case.spoil(np.concatenate([unread, np.setdiff1d(BASE + np.arange(N_CELLS), read)]))
    # One masked cell is NaN: whoever sees it gets NaN, the others must not notice.
    masked = [spec for spec in case.plan.reads if spec.mask is not None and spec.mask.shape[1] > 1]
    new = set(case.plan.write_cells.tolist())
    spoiled = -1
    if masked:
        spec = data.draw(st.sampled_from(masked))
        column = data.draw(st.integers(1, spec.mask.shape[1]))
        cell = int(cells_of(spec.runs)[-column])
        if cell not in new:
            spoiled = cell
            case.spoil(np.array([cell]))
    got, want = case.run(), case.expected()
    sees = np.zeros(case.plan.n_tokens, bool)
    for spec in case.plan.reads:
        for i in range(spec.q_len):
            cells = cells_of(spec.runs)
            if spec.mask is not None:
                hidden = cells[len(cells) - spec.mask.shape[1] :][~spec.mask[i]]
                cells = np.setdiff1d(cells, hidden)
            sees[spec.q_start + i] = spoiled in cells
    assert np.isnan(got[:, sees]).all()
    top = max(1.0, np.abs(want[:, ~sees]).max(initial=0))
    np.testing.assert_allclose(got[:, ~sees], want[:, ~sees], atol=tolerance(case) * top)


@pytest.mark.parametrize("dtype", READ)
@given(data=st.data())
@settings(max_examples=10)
def test_results_do_not_change_with_the_number_of_threads(level, dtype, data):
    case = data.draw(cases(dtype))
    alone = long_case(case)
    results = []
    for n in (1, 2, 3):
        levels.set_num_threads(n)
        try:
            results.append(alone.run())
        finally:
            levels.set_num_threads(0)
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


def long_case(case: Case) -> Case:
    """The case with a read of everything, long enough to be split over threads."""
    runs: tuple[Run, ...] = (Run(0, N_CELLS),)
    if case.exact:
        runs = (Run(BASE + 7, 4), Run(4, N_CELLS - 36), Run(BASE + 90, 32))
    plan = StepPlan(
        2,
        (Write(0, Run(0, 2)),),
        tuple(AttendSpec(i, 1, runs, AttendKind.NONE) for i in range(2)),
        N_CELLS,
    )
    case.plan = plan
    case.__post_init__()
    return case


def test_a_trunk_that_branches_see_whole_is_read_once():
    def reads(kind):
        return tuple(
            AttendSpec(2 * i, 2, (Run(0, 300), Run(400 + 50 * i, 50)), kind) for i in range(4)
        )

    writes = tuple(Write(2 * i, Run(448 + 50 * i, 2)) for i in range(4))
    for kind in (AttendKind.NONE, AttendKind.CAUSAL):
        plan = attend.Plan(StepPlan(8, writes, reads(kind), N_CELLS))
        assert plan.n_shared_cells == 300
    alone = StepPlan(2, writes[:1], reads(AttendKind.NONE)[:1], N_CELLS)
    assert attend.Plan(alone).n_shared_cells == 0


def branches(dim: int, n: int, group: int, block_size: int = 0, **spoilt: float) -> Case:
    """``n`` branches of one token over a bfloat16 trunk of 300 cells, each with 20 of its own.

    Args:
        spoilt: ``k`` or ``v``: what the first number of a cell is for the first KV head.
    """
    rng = np.random.default_rng(dim + n)
    sides = {}
    for name in "kv":
        values = rng.standard_normal((2, N_CELLS, dim)).astype(np.float32)
        if name in spoilt:
            values[0, 70, 0] = spoilt[name]
        sides[name] = SideBytes(SideDtype("bfloat16"), values, block_size)
    plan = StepPlan(
        n,
        tuple(Write(i, Run(419 + 20 * i, 1)) for i in range(n)),
        tuple(
            AttendSpec(i, 1, (Run(0, 300), Run(400 + 20 * i, 20)), AttendKind.NONE)
            for i in range(n)
        ),
        N_CELLS,
    )
    kinds = ("bfloat16", "bfloat16", 0.0, False, False)
    return Case(plan, sides["k"], sides["v"], 2 * group, *kinds, 2)


def few_cells(n: int, name: str = "bfloat16", first: float | None = None) -> Case:
    """A token that sees ``n`` cells; ``first``: a number of the first one's K."""
    rng = np.random.default_rng(n)
    k, v = (rng.standard_normal((2, N_CELLS, 64)).astype(np.float32) for _ in "kv")
    if first is not None:
        k[:, 30, 0] = first
    runs = (Run(30, n - 1),) * (n > 1) + (Run(50, 1),)
    reads = (AttendSpec(0, 1, runs, AttendKind.NONE),)
    plan = StepPlan(1, (Write(0, Run(50, 1)),), reads, N_CELLS)
    kinds = ("bfloat16", "float32", 0.0, first is None, False)
    side = SideDtype(name)
    return Case(plan, SideBytes(side, k, 0), SideBytes(side, v, 0), 8, *kinds, 7)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_a_few_cells_agree_with_float64(level, n, name):
    agree(few_cells(n, name))


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize(
    "dim, group", [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (256, 64)]
)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_long_run_of_integer_rows_agrees_with_float64(level, name, dim, group, rows):
    """Two whole tiles and more, one behind the other, by the few rows of one token."""
    rng = np.random.default_rng(dim + group)
    side = SideDtype(name, group)
    k, v = (rng.standard_normal((2, N_CELLS, dim)).astype(np.float32) for _ in "kv")
    reads = (AttendSpec(0, 1, (Run(7, 611),), AttendKind.NONE),)
    plan = StepPlan(1, (Write(0, Run(617, 1)),), reads, N_CELLS)
    kinds = ("bfloat16", "float32", 0.0, False, False)
    agree(Case(plan, SideBytes(side, k, 0), SideBytes(side, v, 0), 2 * rows, *kinds, 5))


@pytest.mark.parametrize("n", [2, 4, 5])
def test_a_logit_without_end_is_no_number_among_few_cells_either(level, n):
    case = few_cells(n, first=np.inf)
    with np.errstate(invalid="ignore"):
        want = np.isnan(case.expected())
    assert want.any() and not want.all()
    assert np.array_equal(np.isnan(case.run()), want)


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("n, group", [(4, 4), (3, 5), (9, 1), (5, 4)])
@pytest.mark.parametrize("dim", [64, 128])
def test_branches_agree_to_a_bit_of_their_type(level, dim, n, group, block_size):
    case = branches(dim, n, group, block_size)
    want = case.expected()
    close = 2**-8 * np.abs(want) + 5e-4 * np.abs(want).max()
    if level == "bf16":  # weights too are of the type
        close += 2**-9 * case.expected(of_magnitudes=True)
    np.testing.assert_array_less(np.abs(case.run() - want), close)


@pytest.mark.parametrize("spoilt", [{"k": np.inf}, {"k": np.nan}, {"v": np.nan}, {"v": -np.inf}])
def test_a_number_that_is_not_finite_is_seen_by_all_branches_of_its_head(level, spoilt):
    case = branches(64, 4, 4, **spoilt)
    with np.errstate(invalid="ignore"):
        want = case.expected()
    got = case.run()
    assert np.array_equal(np.isfinite(got), np.isfinite(want))
    assert not np.isfinite(got).all()
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("n, group", [(4, 4), (5, 5)])
@pytest.mark.parametrize("length", [5, 16, 300])
def test_branches_whose_logits_rise(level, n, group, length):
    """Highest logits that rise again and again by what powers of two do not reach, over crumbs with
    gaps and over long runs."""
    case = branches(64, n, group)
    rising = np.linspace(0, 4, N_CELLS, dtype=np.float32)[:, None] ** 3
    rising[300:] = 0.1
    made = SideBytes(case.k.side, case.k.values * rising, 0)
    case.k.parts, case.k.values = made.parts, made.values
    trunk = tuple(Run(at, min(length, 300 - at) - 1) for at in range(0, 300, length))
    reads = tuple(dataclasses.replace(r, runs=trunk + r.runs[1:]) for r in case.plan.reads)
    case.plan = dataclasses.replace(case.plan, reads=reads)
    case.__post_init__()
    want = case.expected()
    close = 2**-8 * np.abs(want) + 2e-3 * np.abs(want).max()
    np.testing.assert_array_less(np.abs(case.run() - want), close)


@pytest.mark.parametrize(
    "levels",
    [
        (-90, -40, -20, -9, -8),
        (-90, -92, -91, -95, -90),
        (60, -60, 20, 61, -1),
        (-40, 30, 80, 0.01, 40),
        (0, -50, 0, -3, 9),
    ],
)
def test_branches_whose_logits_lie_far_from_those_before(level, levels):
    """Each 64 cells of the trunk have other logits, and another size of K: some begin so low
    that no weight would be left, some rise or fall by hundreds. V is as large or as small."""
    case = branches(64, 4, 4)
    factors = np.full((N_CELLS, 1), -99, np.float32)  # a branch's own cells are below all
    factors[:300] = np.repeat(np.array(levels, np.float32), 64)[:300, None]
    made = SideBytes(case.k.side, np.abs(case.k.values) * factors, 0)
    case.k.parts, case.k.values = made.parts, made.values
    made = SideBytes(case.v.side, case.v.values * np.roll(factors, 64, 0), 0)
    case.v.parts, case.v.values = made.parts, made.values
    case.q_rows = stored(np.abs(numbers(case.q_rows)), "bfloat16")
    case.k_rows = stored(-99 * np.abs(numbers(case.k_rows)), "bfloat16")
    want = case.expected()
    top = np.abs(want).max(axis=-1, keepdims=True)
    # Of logits of some hundreds the last of 14 bits is some hundredths.
    np.testing.assert_array_less(np.abs(case.run() - want), 2**-8 * np.abs(want) + 3e-2 * top)


def test_branches_over_numbers_of_every_size(level):
    """Trunks whose numbers are all zero, tiny or huge."""
    for size in (0.0, 1e-38, 1e-20, 1e15):
        case = branches(64, 4, 4)
        for side in (case.k, case.v):
            made = SideBytes(side.side, side.values * np.float32(size), 0)
            side.parts, side.values = made.parts, made.values
        case.k_rows, case.v_rows = (
            stored(numbers(rows) * np.float32(size), "bfloat16")
            for rows in (case.k_rows, case.v_rows)
        )
        want = case.expected()
        top = max(np.abs(want).max(), 1e-30)
        np.testing.assert_allclose(case.run(), want, rtol=2**-8, atol=2e-3 * top)


def main_and_exact(kv_dtype: str, kind: AttendKind, n_new: int = 3) -> Case:
    """Two branches over a trunk whose first 4 and own last 40 cells are exact."""
    rng = np.random.default_rng(1)

    def sides(name: str) -> tuple[SideBytes, SideBytes]:
        shape = (2, N_CELLS, 64)
        made = [
            SideBytes(SideDtype(name), rng.standard_normal(shape).astype(np.float32), 0)
            for _ in "kv"
        ]
        return made[0], made[1]

    reads = []
    for i in range(2):
        runs = (Run(BASE + 3, 4), Run(4, 200), Run(300 + 70 * i, 30), Run(BASE + 80 + 50 * i, 40))
        mask = rng.random((n_new, 60)) < 0.5 if kind is AttendKind.EXPLICIT else None
        reads.append(AttendSpec(i * n_new, n_new, runs, kind, mask))
    writes = tuple(Write(i * n_new, Run(600 + i * n_new, n_new)) for i in range(2))
    plan = StepPlan(2 * n_new, writes, tuple(reads), 600 + 2 * n_new)
    side = sides(kv_dtype)
    return Case(plan, *side, 4, "float32", "float32", 0.0, False, False, 2, exact=sides("float32"))


@pytest.mark.parametrize("kind", AttendKind)
@pytest.mark.parametrize("kv_dtype", READ)
def test_exact_cells_at_both_ends_are_read_in_place_of_main_ones(level, kv_dtype, kind):
    case = main_and_exact(kv_dtype, kind)
    agree(case)
    plan = attend.Plan(case.plan)
    assert plan.n_shared_cells == 204
    assert plan.n_exact_cells == 170


def test_a_row_that_is_exact_makes_the_result_exact(level):
    """All cells exact beside an int4 pool: float32's own error and no more."""
    case = main_and_exact("int4", AttendKind.CAUSAL)
    read = AttendSpec(0, 1, (Run(BASE + 5, 300),), AttendKind.CAUSAL)
    case.plan = StepPlan(1, (Write(0, Run(0, 1)),), (read,), 1)
    case.__post_init__()
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_writes_to_exact_cells_are_a_plan_of_their_own(level, dtype):
    rng = np.random.default_rng(3)
    side = SideBytes(SideDtype("float32"), np.zeros((2, N_CELLS, 33), np.float32), 0)
    pool = attend.Pool(2, N_CELLS, side.layout(), side.layout())
    rows = stored(rng.standard_normal((2, 6, 33)).astype(np.float32), dtype)
    layout = attend.Layout(4, attend.Dtype[dtype], attend.Dtype.float32, *[(6 * 33, 33)] * 4)
    writes = (Write(1, Run(20, 2)), Write(5, Run(7, 1)))  # not all tokens
    plan = attend.Plan(StepPlan(6, writes, (), N_CELLS))
    plan.write(pool, layout, rows.ctypes.data, rows.ctypes.data)
    assert side.parts[0][:, [20, 21, 7]].tobytes() == numbers(rows)[:, [1, 2, 5]].tobytes()
    assert not np.delete(side.parts[0], [20, 21, 7], axis=1).any()


def test_exact_cells_that_are_not_there_are_refused():
    case = main_and_exact("int8", AttendKind.NONE)
    exact, case.exact = case.exact, None
    with pytest.raises(ValueError, match="the pool has none beside it"):
        case.run()
    small = attend.Pool(2, 100, *[side.layout() for side in exact])
    pool = attend.Pool(2, N_CELLS, case.k.layout(), case.v.layout(), 0, small)
    plan = attend.Plan(case.plan)
    out = np.zeros((4, 6, 64), np.float32)
    rows = (case.q_rows, case.k_rows, case.v_rows, out)
    with pytest.raises(ValueError, match=r"exact cells up to 170 .* holds 100"):
        plan.step(pool, case.layout(out), *[row.ctypes.data for row in rows], 1.0, 0.0, 0)
    with pytest.raises(ConfigError, match="as many heads"):
        attend.Pool(1, 8, case.k.layout(), case.v.layout(), 0, small)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("group", [None, 32, 128])
def test_quantised_bytes_are_the_definitions_for_strange_numbers(level, kv_dtype, group):
    side = SideDtype(kv_dtype, group)
    dim = 128 if group else 33
    rows = np.random.default_rng(0).standard_normal((1, 12, dim)).astype(np.float32)
    rows[0, 0] = 0
    rows[0, 1] = 7.25
    rows[0, 2] *= 1e-9
    rows[0, 3] *= 1e6
    rows[0, 4, 3] = np.inf
    rows[0, 5, 3] = -np.inf
    rows[0, 6, 3] = np.nan
    rows[0, 7] = -0.0
    rows[0, 8] += 1000
    rows[0, 9] *= 1e30
    rows[0, 10] = np.exp2(np.arange(dim) % 25 - 24)
    k, v = (SideBytes(side, np.zeros((1, N_CELLS, dim), np.float32), 0) for _ in "kv")
    pool = attend.Pool(1, N_CELLS, k.layout(), v.layout())
    layout = attend.Layout(1, attend.Dtype.float32, attend.Dtype.float32, *[(dim * 12, dim)] * 4)
    cells = np.arange(40, 52)[::-1].copy()
    pool.write_cells(layout, cells, rows.ctypes.data, rows.ctypes.data)
    want = quantise(rows, side.bits, side.group_of(dim))
    for written in (k, v):
        packed, affine = (written.at(part, cells) for part in written.parts)
        assert packed.tobytes() == want.packed.tobytes()
        assert affine[..., 0].tobytes() == want.scales.tobytes()
        assert affine[..., 1].tobytes() == want.biases.tobytes()


@given(case=cases(), data=st.data())
@settings(max_examples=20)
def test_cells_are_moved_as_if_all_were_read_first(case, data):
    src = np.array(data.draw(st.lists(st.integers(0, N_CELLS - 1), max_size=40)), np.int64)
    base = data.draw(st.integers(0, N_CELLS - 40))
    into = np.arange(base, base + len(src))
    others = np.setdiff1d(np.arange(N_CELLS), into)
    sides = (case.k, case.v)
    want = [[side.at(part, src) for part in side.parts] for side in sides]
    left = [[side.at(part, others) for part in side.parts] for side in sides]
    case.pool().move_cells(base, src)
    for side, parts, rest in zip(sides, want, left, strict=True):
        for part, moved, untouched in zip(side.parts, parts, rest, strict=True):
            assert side.at(part, into).tobytes() == moved.tobytes()
            assert side.at(part, others).tobytes() == untouched.tobytes()


def test_a_plan_past_the_pools_end_is_refused_and_says_what_was_there():
    side = SideBytes(SideDtype("float32"), np.zeros((1, N_CELLS, 4), np.float32), 0)
    pool = attend.Pool(1, N_CELLS, side.layout(), side.layout())
    layout = attend.Layout(1, attend.Dtype.float32, attend.Dtype.float32, *[(4, 4)] * 4)
    reads = (AttendSpec(0, 1, (Run(0, 700),), AttendKind.NONE),)
    plan = attend.Plan(StepPlan(1, (Write(0, Run(699, 1)),), reads, 700))
    row = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"cells up to 700 .* holds 640"):
        plan.step(pool, layout, *[row.ctypes.data] * 4, 1.0, 0.0, 0)


def test_what_the_kernel_cannot_read_or_use_is_refused():
    with pytest.raises(ConfigError, match="must divide the row"):
        attend.Side(attend.Dtype.int8, 64, 0, 0, 0, 0, 1, 0, 0, 0, 48)
    with pytest.raises(ConfigError, match="q, k and v are int8; the kernel takes float32"):
        attend.Layout(1, attend.Dtype.int8, attend.Dtype.float32, *[(4, 4)] * 4)
    missing = set(levels.Level.__members__) - set(LEVELS)
    for name in missing:
        with pytest.raises(ConfigError, match=f"set {name} is not here; choose .*scalar"):
            levels.set_level(levels.Level[name])
    assert missing, "no machine has all levels"


def test_another_runtimes_threads_can_be_used():
    calls = []
    worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)

    @ctypes.CFUNCTYPE(None, ctypes.c_int, worker, ctypes.c_void_p)
    def in_turn(n_workers, work, data):
        calls.append(n_workers)
        for i in range(n_workers):
            work(data, i)

    numbers_read = np.ones(1 << 20, np.float32)
    levels.set_num_threads(2)
    levels.set_parallel_for(ctypes.cast(in_turn, ctypes.c_void_p).value)
    try:
        assert levels.threads_of() is levels.Threads.given
        total = levels.stream_read(numbers_read.ctypes.data, numbers_read.nbytes)
    finally:
        levels.set_parallel_for(0)
        levels.set_num_threads(0)
    assert calls == [2]
    assert total == 1 << 20


def test_the_same_float_bits_come_out_of_a_cast_as_of_numpys(level):
    values = np.float32([0, -0.0, 1e-8, 6e-8, 65504, 65519, 65520, 1e30, np.inf, 1 / 3, -2.5e-5])
    rows = np.resize(values, (1, 1, 33))
    for name in ("float16", "bfloat16"):
        side = SideBytes(SideDtype(name), np.zeros((1, N_CELLS, 33), np.float32), 0)
        pool = attend.Pool(1, N_CELLS, side.layout(), side.layout())
        layout = attend.Layout(1, attend.Dtype.float32, attend.Dtype.float32, *[(33, 33)] * 4)
        cells = np.array([3])
        pool.write_cells(layout, cells, rows.ctypes.data, rows.ctypes.data)
        with np.errstate(over="ignore"):
            assert side.parts[0][:, 3].tobytes() == stored(rows, name).tobytes()
