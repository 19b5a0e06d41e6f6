"""Plans on the device: what a forward writes and reads in the layers of a group, as integers.

A plan is one buffer of 32-bit integers in sections, whose sizes are rounded up, so that the next
decode step has the same *form*: the same sections at the same places, the same grids, other numbers
in them. A step copies the numbers with one transfer, and a captured graph that has launched the
kernels with a form's arguments can be played again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.torch.gpu.attend.lists import ALL, MASK, CellList
from kvcellar.bookkeeping.cells.exact import BASE
from kvcellar.cache_config import FROZEN
from kvcellar.types import IntArray, Run, StepPlan, Write, cells_of

Ints = NDArray[np.int32]

LIST_INTS = 10
"""Integers of a list: first token, tokens, first run, runs, cells, cells that all its queries see,
kind, where its mask begins, window or the mask's width, splits."""

RUN_INTS = 3
"""Integers of a run: first cell (or -1 less its place in the index), begin and end in the list."""

SHORT_RUN = 16
"""Runs of fewer cells are read by index where they follow each other."""

FEW_ROWS = 256
"""Up to this many rows of a list (query heads of a KV head) its cells are split."""

MOST_SPLITS = 64


class Tiling(NamedTuple):
    """Sizes of a launch.

    Attributes:
        group: query heads of a KV head.
        n_kv_heads: KV heads.
        few: rows of a tile of few queries at most.
        many: rows of a tile of many queries.
        cells: of a tile.
        stages: tiles that are fetched ahead, and the one at hand.
        n_programs: so many keep the device busy.
    """

    group: int
    n_kv_heads: int
    few: int
    many: int
    cells: int
    stages: int
    n_programs: int


class PlanForm(NamedTuple):
    """Form of a plan: of equal forms the launches are equal, but for pointers.

    Attributes:
        sections: integers of each section, in the order of ``SECTIONS``.
        rows: of a tile with few queries.
        n_slots: parts of a query head that are kept until they are merged.
        has_masks: whether a list has a mask.
    """

    sections: tuple[int, ...]
    rows: int
    n_slots: int
    has_masks: bool


SECTIONS = (
    "few", "many", "lists", "runs", "tokens", "merged", "writes", "exact", "index", "masks"
)  # fmt: skip
"""Sections of a plan: tiles (list, first row, split) of lists of few queries and of many; lists;
runs; tokens of lists (token, first slot or -1: its result is whole); merged tokens (token, first
slot, stop); the cell of each token, and its exact one, -1 for none; cells by index; masks, a byte
for each cell."""

_WIDTHS = (3, 3, LIST_INTS, RUN_INTS, 2, 3, 1, 1, 1, 1)

BESIDE = 1 << 30
"""First cell of the pool beside, as a plan names it: exact cells, or those of a frozen prefix."""

LEAST_RUNS = 8
"""Runs that a plan has room for at least: a history that gets one more keeps its plan's form."""


class Moving(NamedTuple):
    """Integers of a decode step's plan that are one more in the step after it.

    Attributes:
        grown: places of those, where each sequence has one cell more behind its last one.
        slid: places of those, where each sequence's cells have moved by one; None: others change.
        n_left: times that they may have grown before lists are split otherwise.
    """

    grown: IntArray
    slid: IntArray | None
    n_left: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedPlan:
    """A plan in one array."""

    form: PlanForm
    numbers: Ints
    moving: Moving | None = None
    """How a step after it may differ; None: it is packed anew."""


def pack(
    plan: StepPlan,
    lists: Sequence[CellList],
    tiling: Tiling,
    n_tokens: int | None = None,
    exact: Sequence[Write] = (),
    *,
    stores: bool = True,
) -> PackedPlan:
    """Put a plan's writes and its lists in one array.

    Args:
        plan: of a step.
        lists: of its reads.
        tiling: sizes of the launches.
        n_tokens: of the batch with those that pad it, a power of two; None: nothing pads it.
        exact: writes to exact cells, counted from 0.
        stores: false for layers that write nothing.
    """
    n_tokens = plan.n_tokens if n_tokens is None else n_tokens
    few = [one for one in lists if one.n_tokens * tiling.group <= FEW_ROWS]
    many = [one for one in lists if one.n_tokens * tiling.group > FEW_ROWS]
    rows = max((one.n_tokens * tiling.group for one in few), default=1)
    rows = min(tiling.few, max(16, rounded_up(rows)))
    ordered = [*few, *many]
    splits = [*_splits(few, rows, tiling), *[1] * len(many)]
    tokens = [_tokens_of(one) for one in ordered]
    slots, merged, n_slots = _slots(tokens, splits, n_tokens)
    table = np.zeros((len(ordered), LIST_INTS), np.int32)
    runs: list[tuple[int, int, int]] = []
    index: list[IntArray] = []
    masks: list[NDArray[np.uint8]] = []
    first_token = n_mask = 0
    for i, one in enumerate(ordered):
        first_run = len(runs)
        _add_runs(one.runs, runs, index)
        aux = one.window
        if one.kind == MASK:
            assert one.mask is not None
            masks.append(np.ascontiguousarray(one.mask).view(np.uint8).reshape(-1))
            aux = one.mask.shape[1]
        n_runs = len(runs) - first_run
        table[i] = (
            first_token, one.n_tokens, first_run, n_runs, one.n_cells, one.n_free, one.kind,
            n_mask, aux, splits[i],
        )  # fmt: skip
        first_token += one.n_tokens
        n_mask += one.mask.size if one.kind == MASK and one.mask is not None else 0
    pairs = [np.stack(pair, axis=1) for pair in zip(tokens, slots, strict=True)]
    bytes_of = np.concatenate(masks) if masks else np.empty(0, np.uint8)
    parts = (
        _tiles(few, 0, rows, tiling.group, splits),
        _tiles(many, len(few), tiling.many, tiling.group, splits),
        table,
        np.array(runs, np.int64).reshape(-1, RUN_INTS),
        np.concatenate(pairs) if pairs else np.empty((0, 2), np.int64),
        merged,
        plan.write_cells if stores and plan.writes else np.empty(0, np.int64),
        _exact_cells(exact, plan.n_tokens),
        np.concatenate(index) if index else np.empty(0, np.int64),
        np.pad(bytes_of, (0, -len(bytes_of) % 4)).view(np.int32),
    )
    form, numbers = _joined(parts, rows, n_slots, bool(masks))
    packed = PackedPlan(form, numbers)
    return replace(packed, moving=_moving(packed, plan, ordered, tiling, stores=stores))


def rounded_up(n: int) -> int:
    """Return the power of two that is at least ``n``; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def _splits(few: Sequence[CellList], rows: int, tiling: Tiling) -> list[int]:
    """Return into how many parts the cells of each list with few queries are split.

    All programs have about as many cells: those of a long list that many share, and of short ones.
    """
    sizes = [_in_steps(one.n_cells, tiling) for one in few]
    tiles = [-(-one.n_tokens * tiling.group // rows) for one in few]
    n_cells = sum(size * n for size, n in zip(sizes, tiles, strict=True)) * tiling.n_kv_heads
    each = max(2 * tiling.cells, -(-n_cells // tiling.n_programs))
    return [max(1, min(-(-size // each), MOST_SPLITS)) for size in sizes]


def _in_steps(n_cells: int, tiling: Tiling) -> int:
    """Return the next of some lengths, eight for each doubling: between them splits stay."""
    step = max(2 * tiling.cells, rounded_up(n_cells) // 8)
    return -(-n_cells // step) * step


def _moving(
    packed: PackedPlan,
    plan: StepPlan,
    lists: Sequence[CellList],
    tiling: Tiling,
    *,
    stores: bool,
) -> Moving | None:
    """Say what is one more in the step after a plan's, where each token is a sequence's own.

    A sequence has a list of its own then, whose last run ends with the token's cell.

    Args:
        packed: the plan, packed.
        plan: the same, as it was.
        lists: in the order of the table.
        tiling: sizes of the launches.
        stores: false where nothing is written.
    """
    n_tokens, n_lists = plan.n_tokens, sum(bool(one.runs) for one in lists)
    own = {one.tokens[0][0]: i for i, one in enumerate(lists) if one.n_tokens == 1 and one.runs}
    if not n_tokens or len(plan.reads) != n_tokens or len(own) < n_tokens:
        return None
    for read in plan.reads:
        one = lists[own[read.q_start]]
        if one.kind != ALL or one.runs[-1].stop != read.runs[-1].stop:
            return None
    firsts = dict(zip(SECTIONS, accumulate((0, *packed.form.sections)), strict=False))
    rows = np.array([own[read.q_start] for read in plan.reads], np.int64)
    at_lists = firsts["lists"] + rows * LIST_INTS
    first_run, n_runs, n_cells = packed.numbers[at_lists + np.array([[2], [3], [4]])]
    at_runs = firsts["runs"] + (first_run.astype(np.int64) + n_runs - 1) * RUN_INTS
    if (packed.numbers[at_runs] < 0).any():
        return None  # it is read by index
    at_writes = firsts["writes"] + np.arange(n_tokens if stores else 0)
    grown = np.concatenate([at_lists + 4, at_lists + 5, at_runs + 2, at_writes])
    is_whole = n_lists == n_tokens and bool((n_runs == 1).all())
    slid = np.concatenate([at_runs, at_writes]) if is_whole else None
    n_left = min(_in_steps(n, tiling) - n for n in n_cells.tolist())
    return Moving(grown, slid, n_left)


def _tokens_of(one: CellList) -> IntArray:
    return np.concatenate([np.arange(first, first + n, dtype=np.int64) for first, n in one.tokens])


def _slots(
    tokens: Sequence[IntArray], splits: Sequence[int], n_tokens: int
) -> tuple[list[IntArray], IntArray, int]:
    """Give each token of each list its first slot, or -1 where its part is the only one.

    Returns:
        Slots per list, the tokens that have some ``[n, 3]`` (token, first, stop), and how many
        slots there are.
    """
    counts = np.zeros(n_tokens, np.int64)
    before = []
    for of_list, n in zip(tokens, splits, strict=True):
        before.append(counts[of_list])
        counts[of_list] += n
    counts[counts < 2] = 0
    stops = np.cumsum(counts)
    firsts = stops - counts
    slots = [
        np.where(counts[of_list] > 0, firsts[of_list] + at, -1)
        for of_list, at in zip(tokens, before, strict=True)
    ]
    parted = np.flatnonzero(counts)
    merged = np.stack([parted, firsts[parted], stops[parted]], axis=1)
    return slots, merged, int(stops[-1]) if n_tokens else 0


def _tiles(
    lists: Sequence[CellList], first: int, rows: int, group: int, splits: Sequence[int]
) -> IntArray:
    """Return (list, first row, split) of each tile, the longest lists first."""
    order = sorted(range(len(lists)), key=lambda i: -lists[i].n_cells)
    found = [
        (first + i, row, split)
        for i in order
        for row in reversed(range(0, lists[i].n_tokens * group, rows))
        for split in range(splits[first + i])
    ]
    return np.array(found, np.int64).reshape(-1, 3)


def _add_runs(
    runs: Sequence[Run], table: list[tuple[int, int, int]], index: list[IntArray]
) -> None:
    """Append a list's runs to the table; short ones that follow each other go to the index."""
    at = 0
    told = [Run(_told(run.start), run.length) for run in runs]
    for (is_short, _), found in groupby(
        told, lambda run: (run.length < SHORT_RUN, run.start >= BESIDE)
    ):
        group = list(found)
        if is_short and len(group) > 1:
            start = -1 - sum(len(cells) for cells in index)
            index.append(cells_of(group))
            group = [Run(start, len(index[-1]))]
        for run in group:
            table.append((run.start, at, at + run.length))
            at += run.length


def _told(cell: int) -> int:
    """Return how a plan names a cell: those beside a pool's own begin at ``BESIDE``."""
    if cell < BASE:
        return cell
    return cell - (FROZEN if cell >= FROZEN else BASE) + BESIDE


def _exact_cells(writes: Sequence[Write], n_tokens: int) -> IntArray:
    """Return the exact cell of each token, -1 for none; nothing where no token has one."""
    if not writes:
        return np.empty(0, np.int64)
    cells = np.full(n_tokens, -1, np.int64)
    for q_start, run in writes:
        cells[q_start : q_start + run.length] = np.arange(run.start, run.stop)
    return cells


def _joined(
    parts: Sequence[IntArray | Ints], rows: int, n_slots: int, has_masks: bool
) -> tuple[PlanForm, Ints]:
    """Round the sections up, fill them with -1, and put them behind each other."""
    lengths = [rounded_up(len(part)) for part in parts]
    at_runs = SECTIONS.index("runs")
    lengths[at_runs] = max(lengths[at_runs], LEAST_RUNS)
    sizes = [-(-n * width // 4) * 4 for n, width in zip(lengths, _WIDTHS, strict=True)]
    numbers = np.full(sum(sizes), -1, np.int32)
    at = 0
    for part, size in zip(parts, sizes, strict=True):
        numbers[at : at + part.size] = part.reshape(-1)
        at += size
    return PlanForm(tuple(sizes), rows, rounded_up(n_slots), has_masks), numbers
