"""A padded batch as others know it: rows of one length, whose attention is the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice

import torch
from torch import Tensor

from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.backends.torch.cache.codecs import rotate
from kvcellar.backends.torch.cache.exact import LayerPool
from kvcellar.backends.torch.cache.port import TorchPools
from kvcellar.bookkeeping import Sequences
from kvcellar.bookkeeping.layouts.reads import whole_reads
from kvcellar.cache_config import CacheConfig
from kvcellar.errors import ShapeError
from kvcellar.types import Run, StepPlan, cells_of

Places = list[Run | Tensor]
"""Per row what it reads: a run, or cells by index."""


class TorchBatchCache(TorchCache, Sequences):
    """Each row is a sequence; rows that go on from the same one share its cells.

    Invariant: all rows have one length; padding is tokens like others.
    """

    def __init__(self, config: CacheConfig, n_rows: int) -> None:
        """Create ``n_rows`` rows without tokens; ``config.capacity`` is for all together."""
        TorchCache.__init__(self, TorchPools(config))
        Sequences.__init__(self, config, self.pools, reads=whole_reads)
        self.rows = list(range(n_rows))
        """The sequence of each row."""
        self._places: list[tuple[StepPlan, Places] | None] = [None] * len(self.pools.groups)

    @property
    def length(self) -> int:
        """Tokens of each row; those of a forward count when its last layer has written."""
        return self.steps.lengths.get(self.rows[0], 0)

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
        index = self.steps.group_of(layer)
        if not self.steps.awaits(layer):
            self.begin_step([(row, k.shape[2]) for row in self.rows])
        flat_k, flat_v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (k, v))
        if self.is_rotated:
            flat_k = rotate(flat_k.float())
        prepared = self._prepare(layer, index, None, flat_k, flat_v)
        pool = self.pools.of_layer[layer]
        self._write(layer, pool, prepared, flat_k, flat_v)
        dtypes = torch.float32 if self.is_rotated else k.dtype, v.dtype
        places = self._places_of(index, prepared.plan, k.device)
        found = [_read(pool, place, dtypes) for place in places]
        keys, values = (
            sides[0] if len(sides) == 1 else torch.cat(sides) for sides in zip(*found, strict=True)
        )
        if self.is_rotated:
            keys = rotate(keys).to(k.dtype)  # the rotation is its own inverse
        return keys, values

    def read_batch(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return copies of the K and V that a layer can still attend; None where there are none.

        Args:
            layer: which layer.
            dtype: of what is returned.

        Returns:
            K and V ``[n_rows, n_kv_heads, L, dim]``; of a layer with a window or a chunk its last
            tokens, which the next one sees.
        """
        index, pool = self.steps.group_of(layer), self.pools.of_layer[layer]
        if not self.length:
            return None
        low = self.pools.groups[index].first_seen(self.length)
        exact = self.pools.exact[index]
        dtypes = torch.float32 if self.is_rotated else dtype, dtype
        sides: list[tuple[Tensor, Tensor]] = []
        for row in self.rows:
            cells = cells_of(self.layouts[index].pool.runs(row, low, self.length))
            if exact is not None:
                cells = cells_of(exact.runs(cells))
            sides.append(_read(pool, torch.as_tensor(cells, device=pool.device), dtypes))
        k, v = (torch.cat(parts) for parts in zip(*sides, strict=True))
        return rotate(k).to(dtype) if self.is_rotated else k, v

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
        self.steps.settle()
        rows = self.rows if self.length else []
        for row in rows:
            self.check_resume(row, length, "rewind")
        for row in rows:
            self.seq_rm(row, length)

    def _places_of(self, index: int, plan: StepPlan, device: torch.device) -> Places:
        """Return where each row's K and V lie, worked out once per forward and layer group."""
        kept = self._places[index]
        if kept is not None and kept[0] is plan:
            return kept[1]
        exact = self.pools.exact[index]
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
