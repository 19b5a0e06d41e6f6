"""A padded batch as others know it: rows of one length, whose attention is the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor

from kvcellar.backends.torch.caches import TorchBytes
from kvcellar.backends.torch.codecs import rotate
from kvcellar.backends.torch.pools import LayerPool
from kvcellar.bookkeeping import SeqBookkeeping
from kvcellar.bookkeeping.sequences import Stretch
from kvcellar.bookkeeping.step import OpenStep
from kvcellar.errors import ShapeError
from kvcellar.types import (
    AttendKind,
    AttendSpec,
    CacheConfig,
    IntArray,
    Run,
    StepPlan,
    cells_of,
    join_runs,
)

Places = list[Run | Tensor]
"""Per row what it reads: a run, or cells by index."""


class TorchBatchCache(TorchBytes, SeqBookkeeping):
    """Each row is a sequence; rows that go on from the same one share its cells.

    Invariant: all rows have one length; padding is tokens like others.
    """

    def __init__(self, config: CacheConfig, n_rows: int) -> None:
        """``n_rows`` rows without tokens; ``config.capacity`` is for all of them together."""
        super().__init__(config)
        self.rows = list(range(n_rows))
        """The sequence of each row."""
        self._places: list[tuple[StepPlan, Places] | None] = [None] * len(self.groups)

    @property
    def length(self) -> int:
        """Tokens of each row; those of a forward count when its last layer has written."""
        return self._length.get(self.rows[0], 0)

    def update_batch(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store this forward's K and V of one layer; return all that its queries read together.

        For whoever attends by a mask: of a layer with a window, from the first position that the
        first query sees.

        Args:
            layer: which layer; the first of a forward begins its step.
            k: ``[n_rows, n_kv_heads, T, head_dim]``, rotated by position.
            v: ``[n_rows, n_kv_heads, T, v_head_dim]``.

        Returns:
            K and V ``[n_rows, n_kv_heads, L, dim]`` in the types of ``k`` and ``v``. Of one row
            views, where its K and V are stored so, which the next forward does not write into.

        Raises:
            ShapeError, StepError, CacheFullError: nothing was written.
        """
        if k.dim() != 4 or k.shape[0] != len(self.rows):
            raise ShapeError(
                f"layer {layer} brings k {tuple(k.shape)} to a cache of {len(self.rows)} rows; a "
                f"batch keeps its rows until reset"
            )
        index = self.group_of(layer)
        flat_k, flat_v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (k, v))
        if self._is_rotated:
            flat_k = rotate(flat_k.float())
        prepared = self._prepare(layer, index, None, flat_k, flat_v)
        pool = self.pools_of_layer[layer]
        self._write(layer, pool, prepared, flat_k, flat_v)
        dtypes = torch.float32 if self._is_rotated else k.dtype, v.dtype
        places = self._places_of(index, prepared.plan, k.device)
        found = [_read(pool, place, dtypes) for place in places]
        keys, values = (
            sides[0] if len(sides) == 1 else torch.cat(sides) for sides in zip(*found, strict=True)
        )
        if self._is_rotated:
            keys = rotate(keys).to(k.dtype)  # the rotation is its own inverse
        return keys, values

    def read_batch(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return copies of the K and V that a layer can still attend; None where there are none.

        Args:
            layer: which layer.
            dtype: of what is returned.

        Returns:
            K and V ``[n_rows, n_kv_heads, L, dim]``; of a layer with a window its last
            ``window - 1`` tokens, which the next one sees.
        """
        index, pool = self.group_of(layer), self.pools_of_layer[layer]
        if not self.length:
            return None
        window = self.groups[index].window
        low = 0 if window is None else max(0, self.length - window + 1)
        exact = self._exact[index]
        dtypes = torch.float32 if self._is_rotated else dtype, dtype
        sides: list[tuple[Tensor, Tensor]] = []
        for row in self.rows:
            spans = self.pools[index].spans(row, low, self.length)
            cells = cells_of(Run(span.cell, span.length) for span in spans)
            if exact is not None:
                cells = cells_of(exact.runs(cells))
            sides.append(_read(pool, torch.as_tensor(cells, device=pool.device), dtypes))
        k, v = (torch.cat(parts) for parts in zip(*sides, strict=True))
        return rotate(k).to(dtype) if self._is_rotated else k, v

    def take_rows(self, rows: Sequence[int]) -> None:
        """Row i goes on from what row ``rows[i]`` holds. Copies no bytes."""
        there = set(self.rows)
        made = list(islice((i for i in count() if i not in there), len(rows)))
        if self.length:
            for row, new in zip(rows, made, strict=True):
                self.seq_cp(self.rows[row], new)
            for old in self.rows:
                self.seq_rm(old)
        self.rows = made

    def rewind(self, length: int) -> None:
        """Cut every row back to its first ``length`` tokens.

        Raises:
            RewindError: a window has let go of what it would need; nothing was changed.
        """
        self._settle()
        rows = self.rows if self.length else []
        for row in rows:
            self._check_resume(row, length, "rewind")
        for row in rows:
            self.seq_rm(row, length)

    def _implicit_step(
        self, layer: int, n_tokens: int, positions: Sequence[int] | IntArray | None
    ) -> OpenStep:
        self.begin_step(np.repeat(self.rows, n_tokens // len(self.rows)))
        assert self._open is not None, "begin_step opens it or raises"
        return self._open

    def _reads(self, group: int, stretch: Stretch) -> list[AttendSpec]:
        """All that the stretch's queries see together; the mask is somebody else's."""
        window = self.groups[group].window
        low = 0 if window is None else max(0, stretch.first_pos - window + 1)
        spans = self.pools[group].spans(stretch.seq_id, low, stretch.first_pos + stretch.n_tokens)
        runs = join_runs(Run(span.cell, span.length) for span in spans)
        return [AttendSpec(stretch.q_start, stretch.n_tokens, runs, AttendKind.NONE)]

    def _places_of(self, index: int, plan: StepPlan, device: torch.device) -> Places:
        """Where each row's K and V lie, worked out once per forward and layer group."""
        kept = self._places[index]
        if kept is not None and kept[0] is plan:
            return kept[1]
        exact = self._exact[index]
        reads = plan.reads if exact is None else exact.rewrite(plan)[0].reads
        places: Places = [
            read.runs[0]
            if len(read.runs) == 1
            else torch.as_tensor(cells_of(read.runs), device=device)
            for read in reads
        ]
        self._places[index] = plan, places
        return places


def _read(
    pool: LayerPool, place: Run | Tensor, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor]:
    k, v = pool.read(*place) if isinstance(place, Run) else pool.gather(place)
    return k.to(dtypes[0]), v.to(dtypes[1])
