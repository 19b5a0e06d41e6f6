"""The torch caches: shared bookkeeping plus pools of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcellar.backends.host_rows import LeavingRows, RowMoves, slots_of
from kvcellar.backends.shapes import check_shapes
from kvcellar.backends.torch.cache import kernel
from kvcellar.backends.torch.cache.attention import Part, Segment, attend, attend_one
from kvcellar.backends.torch.cache.codecs import rotate, rotate_queries
from kvcellar.backends.torch.cache.exact import ExactPool, LayerPool
from kvcellar.backends.torch.cache.port import TorchPools
from kvcellar.backends.torch.cache.state_pools import (
    StateArrays,
    StateKeeper,
    Stretches,
    stretches_of,
)
from kvcellar.backends.torch.gpu import choice
from kvcellar.bookkeeping import OneSequence, Sequences, Steps, TreeSequences
from kvcellar.bookkeeping.cells.exact import layer_plan
from kvcellar.bookkeeping.layouts.both_ways import seen_both_ways
from kvcellar.cache_config import FROZEN, CacheConfig
from kvcellar.errors import ShapeError
from kvcellar.kernel import attend as native
from kvcellar.kernel import recurrent
from kvcellar.states import StatePlan
from kvcellar.types import (
    AttendKind,
    AttendSpec,
    IntArray,
    Run,
    StepPlan,
    Write,
    cells_of,
    clip_runs,
)

if TYPE_CHECKING:
    from kvcellar.backends.torch.gpu.attend.steps import GpuSteps, GroupPlan

LONG_RUN = 512
"""Runs of at least this many cells are attended where they lie; shorter ones are gathered."""

FEW_RUNS = 4
"""Up to this many runs are written as slices, more by index."""


class PartRead(NamedTuple):
    """One part to fetch: a run as a view, or cells by index."""

    run: Run | None
    cells: Tensor | None
    bias: Tensor | None
    is_causal: bool


Reads = tuple[tuple[int, int, tuple[PartRead, ...]], ...]
"""(first query, how many, what they read) of each segment."""


@dataclass(slots=True)
class Prepared:
    """A plan in tensors, made once per forward and layer group, and once for those that share."""

    plan: StepPlan
    writes: tuple[Write, ...]
    """Tokens that are written; none in layers that share rows."""
    write_cells: Tensor | None
    reads: Reads
    decode: tuple[int, Run] | None
    """(cell to write, run to read) of one token of one sequence in one run: the hot path."""
    shapes: tuple[torch.Size, torch.Size, torch.Size | None]
    """Shapes of k, v and q: checked once, equal in all layers of the group."""
    by_kernel: native.Plan | None = None
    """What the CPU kernel does: all writes and some reads; ``reads`` are the others."""
    exact_writes: tuple[Write, ...] = ()
    """Tokens that go to exact cells too."""
    exact_by_kernel: native.Plan | None = None
    """Plan for the kernel."""
    on_gpu: GroupPlan | None = None
    """The step's writes and reads on a GPU, as Triton's kernels take them."""


class TorchCache(RowMoves, StateKeeper):
    """Cache of tensors, without a kind of bookkeeping: writes, reads and attention.

    A cache is this and a face of the bookkeeping, whose steps say what to write and read.
    """

    config: CacheConfig
    steps: Steps
    pools: TorchPools

    takes_tensors = True
    """An op of another runtime may call ``update_and_attend`` with its tensors, by DLPack."""

    def __init__(self, pools: TorchPools) -> None:
        """Create the byte side of a cache whose bytes are in ``pools``."""
        self.pools = pools
        self.is_rotated = pools.config.kv.k.is_rotated
        """True if K is stored rotated: who attends rotates queries too."""
        self._prepared: list[Prepared | None] = [None] * (2 * len(pools.groups))
        """Per layer group for those of its layers that store rows, then for those that share."""
        self.on_gpu: GpuSteps | None = None
        """Plans of steps on a GPU; None before the first forward there."""
        self.both_ways: tuple[tuple[int, int], ...] = ()
        """``(first, stop)`` of tokens of the next forward that see each other both ways."""
        self.both_ways_in_windows = False
        """True if they do so in layers with a window alone."""
        self._both_ways: tuple[StepPlan, StepPlan] | None = None
        self._slots = slots_of(pools.config.params)
        self._row_layouts = [kernel.TensorLayout() for _ in pools.groups]
        self._stretches: tuple[StatePlan, tuple[Stretches, ...]] | None = None
        self._batch: tuple[StatePlan, torch.dtype, recurrent.StateBatch] | None = None

    @property
    def rows_are_apart(self) -> bool:
        """True if rows lie on a card."""
        return self.pools.home.type != "cpu"

    # The op's face -----------------------------------------------------------------------------

    def update_and_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor | Sequence[int] | None,
        layer_id: int,
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store K and V and attend; see :func:`kvcellar.op.eager_update_and_attend`."""
        index = self.steps.group_of(layer_id)
        group = self.steps.groups[index]
        q, k = self.as_stored(q, k)
        prepared = self._prepare(layer_id, index, position, k, v, q)
        pool = self.pools.of_layer[layer_id]
        if prepared.on_gpu is not None:
            out = self.launch(layer_id, prepared.on_gpu, q, k, v, scale, out_dtype, sinks)
            self.steps.wrote(layer_id)
            return out
        if prepared.by_kernel is not None:
            return self._by_kernel(layer_id, prepared, q, k, v, scale, out_dtype, sinks)
        if prepared.decode is not None and sinks is None and group.softcap is None:
            one = self._decode(layer_id, pool, prepared.decode, q, k, v, scale)
            if one is not None:
                return one if one.dtype == out_dtype else one.to(out_dtype)
        segments = self._store(layer_id, pool, prepared, k, v)
        return attend(q, segments, scale, out_dtype, softcap=group.softcap, sinks=sinks)

    def as_stored(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and K as the pools store K: rotated where they do."""
        if self.is_rotated:
            return rotate_queries(q.float(), k.shape[-1]), rotate(k.float())
        return q, k

    def launch(
        self,
        layer: int,
        planned: GroupPlan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None,
    ) -> Tensor:
        """Launch a layer's writes and attention on a GPU; the bookkeeping is not told.

        Arguments as of ``update_and_attend``, with q and k as ``as_stored`` gives them, and
        ``planned``, the plan of the layer's group on the device.
        """
        softcap = self.steps.groups[self.steps.group_of(layer)].softcap
        pool, q = self.pools.of_layer[layer], q.to(v.dtype)
        return self._gpu_steps().run(
            layer, planned, pool, q, k, v, scale, out_dtype, softcap, sinks
        )

    def update_and_fetch(
        self, layer: int, position: Tensor | Sequence[int] | None, k: Tensor, v: Tensor
    ) -> list[Segment]:
        """Store this forward's K and V of one layer; say what each query reads.

        Arguments and errors as in ``update_and_attend``. Queries of a rotated K must be rotated by
        whoever attends.
        """
        k = rotate(k.float()) if self.is_rotated else k
        prepared = self._prepare(layer, self.steps.group_of(layer), position, k, v)
        return self._store(layer, self.pools.of_layer[layer], prepared, k, v)

    def begin_states(
        self, layer: int, n_tokens: int, position: Tensor | None, device: torch.device
    ) -> list[Tensor]:
        """Let a recurrent layer have its turn; see :class:`StateKeeper`."""
        assert self.pools.states is not None, "the model has recurrent layers"
        positions = self._positions(position) if self.steps.needs_positions() else None
        plan = self.steps.plan_states(layer, n_tokens, positions)
        if self._stretches is None or self._stretches[0] is not plan:
            self._stretches = plan, stretches_of(plan, device)
            self.pools.before_states(plan)
        return self.pools.states.ensure(layer, plan.n_slots, device)

    @property
    def keeps_states(self) -> bool:
        """True if the model has recurrent layers."""
        return self.pools.states is not None

    def states_of(self, layer: int) -> list[Tensor]:
        """Return the states of a layer that has had its turn; see :class:`StateKeeper`."""
        assert self.pools.states is not None, "the model has recurrent layers"
        return self.pools.states.of_layer[layer]

    def wrote_states(self, layer: int) -> None:
        """Note that a recurrent layer's states are stored."""
        self.steps.wrote_states(layer)

    @property
    def stretches(self) -> tuple[Stretches, ...]:
        """Advances of the last forward that has come to a recurrent layer, in tensors."""
        assert self._stretches is not None, "a recurrent layer has had its turn"
        return self._stretches[1]

    def state_batch(self, dtype: torch.dtype) -> recurrent.StateBatch:
        """Return the same for the CPU kernel, for rows of a type; made once per forward."""
        assert self._stretches is not None, "a recurrent layer has had its turn"
        plan = self._stretches[0]
        if self._batch is None or self._batch[0] is not plan or self._batch[1] != dtype:
            made = recurrent.StateBatch(plan.n_tokens, kernel.dtype_of(dtype), plan.advances)
            self._batch = plan, dtype, made
        return self._batch[2]

    def read_states(self, slots: Sequence[int] | IntArray) -> StateArrays:
        """Return copies of the states of some slots: per recurrent layer and state ``[n, ...]``."""
        return self.pools.read_states(np.asarray(slots, np.int64))

    def begin_read(self, tables: Sequence[IntArray]) -> LeavingRows:
        """Begin to copy rows; see :class:`RowMoves`."""
        return self.pools.begin_read(tables)

    def write_states(self, slots: Sequence[int] | IntArray, states: StateArrays) -> None:
        """Put states as ``read_states`` gives them in as many slots; they are copied."""
        if self.pools.states is not None:
            self.pools.write_states(np.asarray(slots, np.int64), states)

    def _prepare(
        self,
        layer: int,
        index: int,
        position: Tensor | Sequence[int] | None,
        k: Tensor,
        v: Tensor,
        q: Tensor | None = None,
    ) -> Prepared:
        """Check the shapes, ask for the plan, put it in tensors once per forward and group."""
        slot = self._slots[layer]
        prepared = self._prepared[slot]
        shapes = (k.shape, v.shape, None if q is None else q.shape)
        if (
            prepared is not None
            and shapes == prepared.shapes
            and self.steps.take_plan(layer, prepared.plan)
        ):
            self.pools.of_layer[layer].ensure(prepared.plan.n_cells, k.device)
            return prepared
        group = self.pools.groups[index]
        check_shapes(layer, group, *shapes)
        n_tok = k.shape[2]
        positions = self._positions(position) if self.steps.needs_positions() else None
        plan = self.steps.plan(layer, n_tok, positions)
        self.pools.before_step(index, plan)
        exact = self.pools.exact[index]
        own, exact_writes = layer_plan(self._seen(index, plan), exact, stores=slot == index)
        is_read = not group.is_latent or self.pools.of_layer[layer].is_joined
        pool = self.pools.of_layer[layer]
        if q is not None and choice.takes(k.device, q):
            pool.ensure(plan.n_cells, k.device)
            prepared = Prepared(plan, own.writes, None, (), None, shapes)
            to = layer, slot, own, group, pool, q.to(v.dtype), exact_writes
            prepared.on_gpu = self._gpu_steps().prepare(*to)
        elif q is not None and kernel.takes(k.device, self.config.kv) and is_read:
            most = kernel.most_queries(self.config.kv, q.dtype)
            compiled, left = kernel.compile_plan(own, most)
            prepared = Prepared(plan, own.writes, None, _reads(left, k), None, shapes, compiled)
            if exact is not None and exact_writes:
                prepared.exact_by_kernel = kernel.compile_writes(n_tok, exact_writes, exact.n_cells)
        else:
            prepared = _prepare(own, k, shapes)
            prepared.plan, prepared.exact_writes = plan, exact_writes
        self._prepared[slot] = prepared
        self.pools.of_layer[layer].ensure(plan.n_cells, k.device)
        return prepared

    def _seen(self, index: int, plan: StepPlan) -> StepPlan:
        """Return a group's plan with what tokens see that see each other both ways."""
        if not self.both_ways or (self.both_ways_in_windows and self.steps.groups[index].is_full):
            return plan
        if self._both_ways is None or self._both_ways[0] is not plan:
            self._both_ways = plan, seen_both_ways(plan, self.both_ways)
        return self._both_ways[1]

    def _gpu_steps(self) -> GpuSteps:
        """Return what lies on the GPU, made with the first forward: Triton is imported then."""
        from kvcellar.backends.torch.gpu.attend.steps import GpuSteps

        if self.on_gpu is None:
            self.on_gpu = GpuSteps()
        return self.on_gpu

    def _by_kernel(
        self,
        layer: int,
        prepared: Prepared,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None,
    ) -> Tensor:
        """Writes and the reads of few queries by the CPU kernel, the others as segments."""
        assert prepared.by_kernel is not None
        index = self.steps.group_of(layer)
        pool, softcap = self.pools.of_layer[layer], self.steps.groups[index].softcap
        if pool.is_joined:
            k = torch.cat((v, k), dim=-1)
        to_exact = None
        if prepared.exact_by_kernel is not None:
            assert isinstance(pool, ExactPool)
            to_exact = prepared.exact_by_kernel, pool.exact.for_kernel()
        out = kernel.attend(
            prepared.by_kernel,
            pool.for_kernel(),
            self._row_layouts[index],
            q,
            k,
            v,
            scale,
            out_dtype,
            softcap,
            sinks,
            to_exact,
        )
        self.steps.wrote(layer)
        if prepared.reads:
            segments = _segments(pool, prepared)
            attend(q, segments, scale, out_dtype, softcap=softcap, sinks=sinks, out=out)
        return out

    def _store(
        self, layer: int, pool: LayerPool, prepared: Prepared, k: Tensor, v: Tensor
    ) -> list[Segment]:
        self._write(layer, pool, prepared, k, v)
        return _segments(pool, prepared)

    def _write(self, layer: int, pool: LayerPool, prepared: Prepared, k: Tensor, v: Tensor) -> None:
        if prepared.write_cells is not None:
            pool.scatter_rows(prepared.write_cells, k, v)
        else:
            for q_start, run in prepared.writes:
                stop = q_start + run.length
                pool.write_run(run.start, k[:, :, q_start:stop], v[:, :, q_start:stop])
        if prepared.exact_writes:
            assert isinstance(pool, ExactPool)
            pool.write_exact(prepared.exact_writes, k, v)
        self.steps.wrote(layer)

    def _decode(
        self,
        layer: int,
        pool: LayerPool,
        decode: tuple[int, Run],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
    ) -> Tensor | None:
        """Attend one token over one run: as a hand-written cache would, and no more."""
        if pool.dtype != q.dtype:
            return None
        cell, run = decode
        pool.write_run(cell, k, v)
        self.steps.wrote(layer)
        keys, values = pool.read(run.start, run.length)
        assert isinstance(keys, Tensor) and isinstance(values, Tensor), "the pool's type is float"
        return attend_one(q, keys, values, scale)

    def _positions(self, position: Tensor | Sequence[int] | None) -> Sequence[int] | None:
        if isinstance(position, Tensor):
            if position.numel() == 1:
                return [int(position.item())]
            if position.dim() == 2 and position.shape[1] != 1:
                raise ShapeError(
                    f"position is [T] or [T, 1], one int per token; got {tuple(position.shape)}"
                )
            flat: list[int] = position.reshape(-1).tolist()
            return flat
        return position


def _prepare(
    plan: StepPlan, k: Tensor, shapes: tuple[torch.Size, torch.Size, torch.Size | None]
) -> Prepared:
    """Everything about a plan that does not depend on the layer."""
    first = plan.reads[0]
    if plan.n_tokens == 1 and first.kind is AttendKind.NONE and len(first.runs) == 1:
        run = first.runs[0]
        reads = ((0, 1, (PartRead(run, None, None, False),)),)
        decode = (plan.writes[0].run.start, run) if plan.writes else None
        return Prepared(plan, plan.writes, None, reads, decode, shapes)
    with torch.inference_mode(False):
        cells = None
        if len(plan.writes) > FEW_RUNS:
            cells = torch.as_tensor(plan.write_cells, device=k.device)
    return Prepared(plan, plan.writes, cells, _reads(plan.reads, k), None, shapes)


def _reads(specs: Sequence[AttendSpec], k: Tensor) -> Reads:
    if not specs:
        return ()
    with torch.inference_mode(False):
        return tuple((spec.q_start, spec.q_len, tuple(_part_reads(spec, k))) for spec in specs)


def _segments(pool: LayerPool, prepared: Prepared) -> list[Segment]:
    return [
        Segment(q_start, q_len, tuple(_fetch(pool, read) for read in reads))
        for q_start, q_len, reads in prepared.reads
    ]


def _lies_apart(run: Run) -> bool:
    """Return true if a run is attended where it lies, by itself."""
    return run.length >= LONG_RUN or run.start >= FROZEN


def _part_reads(spec: AttendSpec, k: Tensor) -> list[PartRead]:
    """Cut a read into what is seen whole, run by run, and the masked tail."""
    bias: Tensor | None = None
    n_tail = 0
    if spec.kind is AttendKind.CAUSAL:
        n_tail = spec.q_len
    elif spec.kind is AttendKind.EXPLICIT:
        assert spec.mask is not None
        n_tail = spec.mask.shape[1]
        bias = torch.zeros(spec.mask.shape, dtype=k.dtype, device=k.device)
        bias.masked_fill_(~torch.as_tensor(spec.mask.copy(), device=k.device), float("-inf"))
    n_head = spec.read_len - n_tail
    head = clip_runs(spec.runs, 0, n_head)
    tail = clip_runs(spec.runs, n_head, spec.read_len)
    parts = [PartRead(run, None, None, False) for run in head if _lies_apart(run)]
    short = [run for run in head if not _lies_apart(run)]
    if short:
        parts.append(_one_part(short, None, False, k))
    if tail:
        parts.append(_one_part(tail, bias, spec.kind is AttendKind.CAUSAL, k))
    return parts


def _one_part(runs: Sequence[Run], bias: Tensor | None, is_causal: bool, k: Tensor) -> PartRead:
    if len(runs) == 1:
        return PartRead(runs[0], None, bias, is_causal)
    return PartRead(None, torch.as_tensor(cells_of(runs), device=k.device), bias, is_causal)


def _fetch(pool: LayerPool, read: PartRead) -> Part:
    if read.run is not None:
        k, v = pool.read(read.run.start, read.run.length)
    else:
        assert read.cells is not None
        k, v = pool.gather(read.cells)
    return Part(k, v, read.bias, read.is_causal)


class TorchContiguousCache(TorchCache, OneSequence):
    """One sequence in one run: the single-stream hot path."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        TorchCache.__init__(self, TorchPools(config))
        OneSequence.__init__(self, config, self.pools)


class TorchSeqCache(TorchCache, Sequences):
    """Many sequences over shared cells."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        TorchCache.__init__(self, TorchPools(config))
        Sequences.__init__(self, config, self.pools)


class TorchPagedCache(TorchCache, TreeSequences):
    """Many sequences over shared blocks, each with or without a draft tree."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache, laid out as the config says."""
        TorchCache.__init__(self, TorchPools(config, in_blocks=True))
        TreeSequences.__init__(self, config, self.pools, block_size=config.block_size)


class TorchTreeCache(TorchCache, TreeSequences):
    """Many sequences over shared cells, each with or without a draft tree."""

    def __init__(self, config: CacheConfig) -> None:
        """Create an empty cache."""
        TorchCache.__init__(self, TorchPools(config))
        TreeSequences.__init__(self, config, self.pools)
