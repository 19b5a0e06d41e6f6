"""Random plans, and what attention over them is: dense, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.bookkeeping.layouts.reads import band
from kvcellar.sight import Sight
from kvcellar.types import AttendKind, AttendSpec, Run, StepPlan, Write, cells_of, join_runs


def random_plan(
    rng: np.random.Generator, n_cells: int, lengths: Sequence[int], sight: Sight, trunk: int = 0
) -> StepPlan:
    """Reads of so many queries each, over cells anywhere; the first ``trunk`` are in all of them.

    Writes cover the queries, in cells that no read has.
    """
    order = _in_pieces(rng, n_cells)
    shared, rest = order[:trunk], list(order[trunk:])
    reads, writes, q_start = [], [], 0
    for q_len in lengths:
        n_own = q_len + int(rng.integers(0, 24))
        own, rest = rest[:n_own], rest[n_own:]
        runs = _runs([*shared, *own])
        reads.append(_read(rng, q_start, q_len, runs, sight))
        writes += [Write(q_start + i, Run(int(cell), 1)) for i, cell in enumerate(rest[:q_len])]
        rest = rest[q_len:]
        q_start += q_len
    return StepPlan(q_start, tuple(writes), tuple(reads), n_cells)


def _in_pieces(rng: np.random.Generator, n_cells: int) -> list[int]:
    """All cells, in pieces of any length, in any order."""
    cuts = np.sort(rng.choice(np.arange(1, n_cells), n_cells // 9, replace=False))
    pieces = np.split(np.arange(n_cells), cuts)
    rng.shuffle(pieces)  # type: ignore[arg-type]
    return [int(cell) for piece in pieces for cell in piece]


def _runs(cells: Sequence[int]) -> tuple[Run, ...]:
    return join_runs(Run(cell, 1) for cell in cells)


def _read(
    rng: np.random.Generator, q_start: int, q_len: int, runs: tuple[Run, ...], sight: Sight
) -> AttendSpec:
    n_cells = sum(run.length for run in runs)
    if sight.window is not None and q_len > 1:
        mask = band(q_len, n_cells - q_len, sight)
        return AttendSpec(q_start, q_len, runs, AttendKind.EXPLICIT, mask)
    kind = [AttendKind.NONE, AttendKind.CAUSAL, AttendKind.EXPLICIT][int(rng.integers(0, 3))]
    if kind is AttendKind.EXPLICIT:
        mask = rng.random((q_len, min(n_cells, q_len + 2))) < 0.5
        mask[:, -1] = True
        return AttendSpec(q_start, q_len, runs, kind, mask)
    return AttendSpec(q_start, q_len, runs, kind)


def attended(
    plan: StepPlan,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    softcap: float | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Dense attention of ``q [H, T, D]`` over ``k [Hkv, cells, D]``, in float64."""
    group = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    out = np.empty((*q.shape[:2], v.shape[2]))
    for read in plan.reads:
        cells, at = cells_of(read.runs), slice(read.q_start, read.q_start + read.q_len)
        logits = scale * q[:, at].astype(float) @ k[:, cells].astype(float).transpose(0, 2, 1)
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        logits[:, ~_seen(read, len(cells))] = -np.inf
        if sinks is not None:
            column = np.broadcast_to(sinks[:, None, None], (*logits.shape[:2], 1))
            logits = np.concatenate([logits, column], axis=2)
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        out[:, at] = weights[:, :, : len(cells)] @ v[:, cells].astype(float)
    return out


def _seen(read: AttendSpec, n_cells: int) -> np.ndarray:
    seen = np.ones((read.q_len, n_cells), bool)
    if read.kind is AttendKind.CAUSAL:
        seen = np.tri(read.q_len, n_cells, n_cells - read.q_len, bool)
    elif read.kind is AttendKind.EXPLICIT:
        assert read.mask is not None
        seen[:, n_cells - read.mask.shape[1] :] = read.mask
    return seen


def seen_cells(read: AttendSpec) -> list[list[int]]:
    """Cells that each query of a read sees."""
    cells = cells_of(read.runs)
    return [cells[row].tolist() for row in _seen(read, len(cells))]
