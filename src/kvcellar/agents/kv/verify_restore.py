"""Does what came out of the store fit this model? A few rows are computed again and compared.

Checksums prove that bytes are what was written. They cannot prove that what was written was right,
or that the model that reads it is the one that wrote it: a row that the model itself computes from
the rows before it can. So can states that it computes from earlier ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcellar.engine import Restore
from kvcellar.kv_dtype import STORED_TYPES, SideDtype
from kvcellar.models import Runner
from kvcellar.store import BoundaryState, GroupRows, Loaded, RowLayout, Side, States
from kvcellar.store.values.precision import as_floats
from kvcellar.types import IntArray, LayerGroup

MAX_ROWS = 8
"""Rows that are computed again, in one forward, of a model without recurrent layers."""

MAX_TAIL = 256
"""Tokens that are computed again to see whether the states behind them are right."""


@dataclass(frozen=True, slots=True)
class RestoreFinding:
    """Outcome of a comparison of what was restored with what was computed again.

    Attributes:
        n_checked: tokens that were computed again; 0 where none could be.
        bad: addresses of the blocks and boundary states that are wrong, and why.
    """

    n_checked: int
    bad: dict[bytes, str]


def check_restored(
    restore: Restore,
    runner: Runner,
    layout: RowLayout,
    blocks: Sequence[Loaded],
    boundaries: Sequence[BoundaryState],
    stop: int,
    *,
    at_random: bool = False,
) -> RestoreFinding:
    """Compute some of what was restored again and compare. Only between steps.

    Of a model without recurrent layers that is up to ``MAX_ROWS`` rows. States are computed from
    the nearest ones before them, with the rows in between: up to ``MAX_TAIL`` tokens.

    Args:
        restore: whose rows are written, and not published yet.
        runner: the model.
        layout: of the rows.
        blocks: what the full-history groups were restored from, in order.
        boundaries: what was restored beside blocks; the last is what the history goes on from.
        stop: one past the last position that was restored.
        at_random: compare rows that are drawn, which whoever wrote them cannot have known; else
            the ends of blocks.
    """
    check = _Check(restore, layout, blocks, boundaries)
    if layout.state is not None:
        return check.tail(runner, stop)
    positions = check.positions(stop, at_random=at_random)
    computed = restore.compute_again(runner, positions) if positions else None
    if computed is None:
        return RestoreFinding(0, {})
    check.compare_rows([np.array(positions)] * len(layout.groups), computed)
    return RestoreFinding(len(positions), check.bad)


@dataclass(frozen=True, slots=True, eq=False)
class _Check:
    """Comparison of what was restored, and findings so far."""

    restore: Restore
    layout: RowLayout
    blocks: Sequence[Loaded]
    boundaries: Sequence[BoundaryState]
    bad: dict[bytes, str] = field(default_factory=dict)

    def positions(self, stop: int, *, at_random: bool) -> list[int]:
        """Choose the positions to compare: the ends of blocks, evenly, and the last of all.

        Or as many that are drawn at random.
        """
        restore, size = self.restore, self.restore.block_size
        if at_random:
            first = -(-restore.first // size) * size
            able = [p for p in range(first, stop, size) if restore.can_compute_again(p)]
            return sorted(secrets.SystemRandom().sample(able, min(MAX_ROWS, len(able))))
        ends = [block.stop for block in self.blocks] if self.layout.full_groups else [stop]
        wanted = {max(restore.first, (end - 1) // size * size) for end in (*ends, stop)}
        if restore.first == 0:
            wanted.add(0)  # it stands on nothing, so it can be computed behind any window
        found = sorted(p for p in wanted if p < stop and restore.can_compute_again(p))
        if len(found) <= MAX_ROWS:
            return found
        picked = np.linspace(0, len(found) - 1, MAX_ROWS).round().astype(int)
        return [found[i] for i in picked]

    def tail(self, runner: Runner, stop: int) -> RestoreFinding:
        """Compute the last tokens again, and compare their rows and the states behind them."""
        restore = self.restore
        starts = range(stop - 1, max(-1, stop - 1 - MAX_TAIL), -1)
        start = next(filter(restore.can_compute_again, starts), None)
        if start is not None and restore.has_pictures(start, stop):
            start = None
        tail = None if start is None else restore.compute_tail(runner, start, stop)
        if start is None or tail is None:
            return RestoreFinding(0, {})
        self.compare_rows(tail.positions, tail.rows)
        earlier = [boundary for boundary in self.boundaries if boundary.n_tokens == start]
        if self.bad and earlier:
            self.bad[earlier[0].address] = f"rows behind the states at {start} tokens are wrong"
        error = self._state_error(restore.read_states(stop), tail.states)
        limit = max(map(self.limit, (self.layout.kv.k, self.layout.kv.v)))
        if not error <= limit:
            self.bad[self.boundaries[-1].address] = (
                f"a state after {stop} tokens is {error:.2f} of its length away from what this "
                f"model computes; up to {limit:g} is rounding"
            )
        return RestoreFinding(stop - start, self.bad)

    def compare_rows(self, positions: Sequence[IntArray], computed: Any) -> None:
        """Compare restored rows with computed ones.

        Args:
            positions: per layer group those that were computed; where nothing was restored they
                are left out.
            computed: per layer group their rows.
        """
        layout, restore = self.layout, self.restore
        cells = [table[at] for table, at in zip(restore.tables, positions, strict=False)]
        there = [np.flatnonzero(some >= 0) for some in cells]
        stored = restore.read([some[at] for some, at in zip(cells, there, strict=True)])
        for index, group in enumerate(layout.groups):
            if not there[index].size:
                continue
            had, got = (
                as_floats(GroupRows(*(Side(*side) for side in rows[index])), group, layout.kv)
                for rows in (stored, computed)
            )
            at = positions[index][there[index]]
            for name, dtype, a, b in zip("KV", (layout.kv.k, layout.kv.v), had, got, strict=True):
                limit = self.limit(dtype)
                for position, error in zip(at, _errors(a, b[:, :, there[index]]), strict=True):
                    if not error <= limit:
                        self.bad[self._address(int(position), group)] = (
                            f"{name} of position {position} is {error:.2f} of its length away from "
                            f"what this model computes; up to {limit:g} is rounding"
                        )

    def _state_error(self, had: States, got: States) -> float:
        """Return the largest distance of any state, as a share of its length.

        The oldest input of a convolution is left out: the next token does not see it, and not
        every backend keeps it.
        """
        assert self.layout.state is not None
        errors = [0.0]
        for shapes, old, new in zip(self.layout.state.layers, had, got, strict=True):
            for (kind, _), a, b in zip(shapes, old, new, strict=True):
                first = int(kind == "convolution")
                a, b = (x[..., first:].astype(np.float64) for x in (a, b))
                distance, length = (float(np.linalg.norm(x)) for x in (a - b, b))
                errors.append(distance / max(length, 1e-6))
        return max(errors)

    def limit(self, dtype: SideDtype) -> float:
        """Return how far what is stored so may be from what is computed."""
        exact = (*(b.is_exact for b in self.blocks), *(b.is_exact for b in self.boundaries))
        own, rounded = STORED_TYPES[dtype.name].tolerance, STORED_TYPES["int8"].tolerance
        return max(own, 0.0 if all(exact) else rounded)

    def _address(self, position: int, group: LayerGroup) -> bytes:
        """Return the address of the block or boundary state that a row came from."""
        if not group.is_full:
            assert self.boundaries, "rows of a group that lets go come from a boundary state"
            return self.boundaries[-1].address
        return next(b.address for b in self.blocks if b.start <= position < b.stop)


def _errors(had: np.ndarray, got: np.ndarray) -> list[float]:
    """Return each row's largest distance in any layer, as a share of its length there."""
    distance = np.sqrt(((had - got).astype(np.float64) ** 2).sum((1, 3)))
    length = np.sqrt((got.astype(np.float64) ** 2).sum((1, 3)))
    worst: list[float] = (distance / np.maximum(length, 1e-6)).max(0).tolist()
    return worst
