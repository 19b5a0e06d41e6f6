"""Cells that are kept in full precision beside quantised ones: which tokens, and where they are."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.bookkeeping.cells.exact import (
    BASE,
    N_SEQUENCES,
    ExactCells,
    exact_bytes,
    exact_cells,
    layer_plan,
)
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.types import AttendKind, AttendSpec, LayerGroup, Run, StepPlan, Write


@settings(max_examples=5 * settings().max_examples)
@given(data=st.data(), first=st.integers(0, 3), last=st.integers(0, 4))
def test_every_exact_read_finds_what_was_written_to_its_cell(
    data: st.DataObject, first: int, last: int
) -> None:
    """The oracle: names of tokens in place of bytes."""
    if first + last == 0:
        return
    exact = ExactCells(first, last)
    cells: dict[int, int] = {}
    copies: dict[int, int] = {}
    histories: dict[int, list[int]] = {}
    name = 0
    for _ in range(data.draw(st.integers(1, 30))):
        seq = data.draw(st.integers(0, 30))
        history = histories.setdefault(seq, [])
        action = data.draw(st.sampled_from(["step", "step", "step", "cut", "move", "restore"]))
        if action == "step":
            taken = {cell for cells_ in histories.values() for cell in cells_}
            free = [cell for cell in range(300) if cell not in taken]
            new = free[: data.draw(st.integers(1, 6))]
            history += new
            n = len(new)
            writes = tuple(Write(i, Run(cell, 1)) for i, cell in enumerate(new))
            runs = tuple(Run(cell, 1) for cell in history)
            kind = AttendKind.CAUSAL if n > 1 else AttendKind.NONE
            plan = StepPlan(n, writes, (AttendSpec(0, n, runs, kind),), max(history) + 1)
            own, extra = exact.rewrite(plan)
            assert exact.rewrite(plan) == (own, extra)
            names = list(range(name, name + n))
            name += n
            cells |= dict(zip(new, names, strict=True))
            for q_start, run in extra:
                for i in range(run.length):
                    copies[run.start + i] = names[q_start + i]
                    assert run.start + i < exact.n_cells
            (read,) = own.reads
            read_cells = [cell for run in read.runs for cell in range(run.start, run.stop)]
            assert len(read_cells) == len(history)
            for i, (cell, want) in enumerate(zip(read_cells, history, strict=True)):
                if cell >= BASE:
                    assert i < first or i >= len(history) - last
                    assert copies[cell - BASE] == cells[want]
                else:
                    assert cell == want
            if last >= n and n:
                assert all(cell >= BASE for cell in read_cells[-min(n, last) :])
        elif action == "cut" and history:
            del history[data.draw(st.integers(0, len(history) - 1)) :]
        elif action == "move" and history:
            base = 300 + 400 * data.draw(st.integers(0, 3))
            taken = {c for s, cells_ in histories.items() if s != seq for c in cells_}
            if not taken & set(range(base, base + len(history))):
                froms, to = exact.move(base, np.array(history))
                copies |= dict(zip(to.tolist(), [copies[c] for c in froms.tolist()], strict=True))
                moved = [cells[cell] for cell in history]
                histories[seq] = list(range(base, base + len(history)))
                cells |= dict(zip(histories[seq], moved, strict=True))
        elif action == "restore" and history:
            exact.drop(np.array(history))
            cells |= {cell: (name := name + 1) for cell in history}
        exact.check()


def step(history: list[int], n_new: int) -> StepPlan:
    """A step that writes the last cells of a history and reads all of it."""
    start = len(history) - n_new
    writes = tuple(Write(i, Run(cell, 1)) for i, cell in enumerate(history[start:]))
    kind = AttendKind.CAUSAL if n_new > 1 else AttendKind.NONE
    read = AttendSpec(0, n_new, tuple(Run(cell, 1) for cell in history), kind)
    return StepPlan(n_new, writes, (read,), max(history) + 1)


def test_a_read_takes_both_ends_from_exact_cells_and_the_middle_as_it_is():
    exact = ExactCells(2, 3)
    assert exact.n_cells == N_SEQUENCES * 5
    own, writes = exact.rewrite(step(list(range(8)), 8))
    assert writes == (Write(0, Run(0, 2)), Write(5, Run(2, 3)))
    (read,) = own.reads
    assert read.runs == (Run(BASE, 2), Run(2, 3), Run(BASE + 2, 3))
    assert (read.q_start, read.q_len, read.kind, read.mask) == (0, 8, AttendKind.CAUSAL, None)
    assert (own.n_tokens, own.n_cells, len(own.writes)) == (8, 8, 8)
    own, writes = exact.rewrite(step(list(range(9)), 1))
    assert writes == (Write(0, Run(5, 1)),)
    assert own.reads[0].runs == (Run(BASE, 2), Run(2, 4), Run(BASE + 3, 3))
    exact.check()


def test_cells_that_no_read_has_wanted_for_longest_are_given_to_others():
    exact = ExactCells(0, 1)
    for seq in range(N_SEQUENCES):
        exact.rewrite(step([10 * seq], 1))
    exact.rewrite(step([0, 1], 1))  # the end moves on: 0 is not wanted any more
    assert exact.runs(np.arange(2)) == [Run(0, 1), Run(BASE, 1)]
    exact.rewrite(step([99], 1))
    assert exact.runs(np.array([10, 20, 99])) == [Run(10, 1), Run(BASE + 2, 1), Run(BASE + 1, 1)]
    exact.check()


def test_what_is_at_neither_end_is_not_written_to_exact_cells():
    exact = ExactCells(2, 0)
    assert exact.rewrite(step([0, 1, 2], 3))[1] == (Write(0, Run(0, 2)),)
    own, writes = exact.rewrite(step([0, 1, 2, 3], 1))
    assert writes == () and own.reads[0].runs == (Run(BASE, 2), Run(2, 2))


def test_where_one_step_wants_more_than_there_is_its_last_tokens_get_it():
    exact = ExactCells(0, 1)
    n = N_SEQUENCES + 3
    reads = tuple(AttendSpec(i, 1, (Run(i, 1),), AttendKind.NONE) for i in range(n))
    own, writes = exact.rewrite(StepPlan(n, (Write(0, Run(0, n)),), reads, n))
    assert writes == (Write(3, Run(0, N_SEQUENCES)),)
    assert [read.runs[0].start >= BASE for read in own.reads] == [False] * 3 + [True] * N_SEQUENCES


def test_bytes_that_move_take_their_copies_along():
    exact = ExactCells(1, 1)
    exact.rewrite(step([3, 4, 5], 3))
    froms, to = exact.move(0, np.array([3, 5]))
    assert froms.tolist() == [0, 1] and len(to) == 2
    assert not set(to.tolist()) & {0, 1}, "others may own the old cells still"
    assert exact.runs(np.array([0, 1])) == [Run(BASE + int(to[0]), 2)]
    exact.drop(np.array([3]))
    exact.check()
    exact.drop(np.array([1]))
    assert exact.runs(np.array([0, 1])) == [Run(BASE + int(to[0]), 1), Run(1, 1)]
    assert exact.runs(np.array([70])) == [Run(70, 1)], "a cell that it has never heard of"
    exact.check()


def test_a_layer_that_shares_rows_reads_exact_cells_and_writes_nothing():
    plan, exact = step([0, 1], 2), ExactCells(0, 2)
    own, writes = layer_plan(plan, exact)
    assert (own.writes, writes) == (plan.writes, (Write(0, Run(0, 2)),))
    shared, writes = layer_plan(plan, exact, stores=False)
    assert (shared.writes, shared.reads, writes) == ((), own.reads, ())
    assert layer_plan(plan, None) == (plan, ())


def test_a_window_has_no_beginning_to_keep_and_its_bytes_are_counted():
    full, window = (LayerGroup((i, i + 2), 2, 8, 4, window=w) for i, w in enumerate((None, 6)))
    kinds = {name: parse_kv_dtype(name) for name in ("int8", "int8:first2", "int8:first2:last6")}
    made = {
        name: [exact_cells(group, kv) for group in (full, window)] for name, kv in kinds.items()
    }
    assert made["int8"] == [None, None]
    assert made["int8:first2"][1] is None
    assert [(one.first, one.last) for one in made["int8:first2:last6"]] == [(2, 6), (0, 6)]
    cell = 2 * (2 * (8 + 4)) * 4  # two layers of two heads, in float32
    sizes = {name: exact_bytes((full, window), kv) for name, kv in kinds.items()}
    assert [size // (N_SEQUENCES * cell) for size in sizes.values()] == [0, 2, 8 + 6]
