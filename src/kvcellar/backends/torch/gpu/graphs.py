"""Small forwards of a network as graphs: all layers are recorded once and played again as one.

A step transfers its tokens and its plans in one buffer, and plays the graph of its shape. Batches
are padded to powers of two, so that a few graphs serve all of them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from kvcellar.backends.host_rows import slots_of
from kvcellar.backends.torch.caches import TorchCache
from kvcellar.backends.torch.codecs import rotate, rotate_queries
from kvcellar.backends.torch.gpu import choice, launch
from kvcellar.backends.torch.gpu.capture import CudaGraphs, Graph, GraphDevice
from kvcellar.backends.torch.gpu.launch import PoolArguments
from kvcellar.backends.torch.gpu.plans import Form, Ints, PackedPlan, Tiling, rounded_up
from kvcellar.backends.torch.gpu.steps import GroupPlan, Places, places_of
from kvcellar.backends.torch.positions import Positions
from kvcellar.budget import MemoryBudget, format_size
from kvcellar.errors import StepError
from kvcellar.registry import use_cache
from kvcellar.types import IntArray

log = logging.getLogger("kvcellar.torch")

MOST_TOKENS = 128
"""Tokens of the largest forward that is recorded: decode steps, drafts, ends of prompts."""

MOST_GRAPHS = 32
"""Graphs that are kept, the last ones used."""

MOST_BYTES = 512 << 20
"""Memory of all graphs, from which on no more of them are recorded until all are let go."""

MOST_SHAPES = 1024
"""Shapes that are remembered before all are forgotten: most are never met again."""

LEAST_BUFFER = 65_536
"""Integers of the smallest buffer of a step: its tokens and the plans of all layer groups."""


class Shape(NamedTuple):
    """Shape of a padded step: of equal shapes the launches are equal, over the same addresses.

    Attributes:
        n_tokens: of the batch.
        n_rows: tokens whose logits come.
        rope_length: the length of text whose RoPE factors turn positions.
        forms: of the plans, in the order of their slots.
    """

    n_tokens: int
    n_rows: int
    rope_length: int
    forms: tuple[Form, ...]

    @property
    def input_ints(self) -> int:
        """Integers of 32 bits before the plans: ids, positions and rows of 64, rounded up."""
        return -(-2 * (2 * self.n_tokens + self.n_rows) // 4) * 4


class OnDevice(NamedTuple):
    """A plan whose integers lie on the device."""

    form: Form
    sections: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph, and where its result comes."""

    graph: Graph
    logits: Tensor


class PlannedForward:
    """A forward whose plans and cells lie where they lie: its layers launch, and count nothing.

    It stands for the cache in the op while a network is recorded.
    """

    takes_tensors = True

    def __init__(
        self, cache: TorchCache, plans: Sequence[GroupPlan], pools: Sequence[PoolArguments]
    ) -> None:
        """Hold the plan and the pool of each layer."""
        self.config = cache.config
        self._steps, self._is_rotated = cache.steps, cache.is_rotated
        self._plans, self._pools = plans, pools
        self._left = set(range(len(pools)))

    def update_and_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        layer_id: int,
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write and attend one layer; see :func:`kvcellar.op.eager_update_and_attend`.

        Raises:
            StepError: its queries are others than those that the plan was made for.
        """
        (plan, tiling), pool = self._plans[layer_id], self._pools[layer_id]
        if self._is_rotated:
            q, k = rotate_queries(q.float(), k.shape[-1]), rotate(k.float())
        q = q.to(v.dtype)
        found = launch.tiling_of(q.shape[1], pool, q.dtype, q.device)
        if found != tiling:
            raise StepError(f"layer {layer_id} wants tiles of {found}; planned were {tiling}")
        launch.write(plan, pool, k, v)
        self._left.discard(layer_id)
        softcap = self._steps.groups[self._steps.group_of(layer_id)].softcap
        return launch.attend(plan, pool, tiling, q, scale, out_dtype, softcap, sinks)

    def check(self) -> None:
        """Raise StepError if a layer has not attended."""
        if self._left:
            raise StepError(f"layers {sorted(self._left)} have not attended in this forward")


class StepGraphs:
    """Small steps of one network over one cache as graphs, where they can be.

    A shape that comes for the second time is recorded. Graphs are gone when anything that they were
    recorded over has moved: pools that have grown, or the buffer of plans.
    """

    def __init__(self, network: Any, device: GraphDevice) -> None:
        """Record nothing yet."""
        self._network, self._device = network, device
        self._graphs: OrderedDict[Shape, Recorded] = OrderedDict()
        self._met: set[Shape] = set()
        self._places: tuple[Places, ...] = ()
        self._buffer = torch.empty(0, dtype=torch.int32)
        self._cache: TorchCache | None = None
        self._slots: tuple[int, ...] = ()
        self._asked = _Asked(None)
        self._is_full = False
        self.is_off = False
        """True from the first step on that could not be recorded."""

    @property
    def n_graphs(self) -> int:
        """Graphs that are kept."""
        return len(self._graphs)

    def run(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, rope_length: int
    ) -> Tensor | None:
        """Run a step by a graph; complete afterwards.

        Args:
            cache: the session's.
            ids: ``[T]``.
            at: ``[T]`` positions.
            rows: ``[R]`` tokens whose logits are wanted; None: the last one.
            rope_length: the length of text whose RoPE factors turn the positions.

        Returns:
            Logits ``[R, vocab_size]`` on the device, of their own; None where this step is for the
            modules themselves, whose turn it is then.

        Raises:
            StepError, PositionError: the tokens are not those that the cache expects.
        """
        wanted = np.array([len(ids) - 1], np.int64) if rows is None else rows
        if self.is_off or len(ids) > MOST_TOKENS or not len(wanted) or not self._follow(cache):
            return None
        packed = self._pack(cache, ids, at)
        forms = tuple(one.form for one in packed)
        shape = Shape(rounded_up(len(ids)), rounded_up(len(wanted)), rope_length, forms)
        numbers = _numbers(shape, ids, at, wanted, packed)
        self._settle(cache, len(numbers))
        recorded = self._graphs.get(shape)
        if recorded is None and not self._is_wanted(shape):
            return None
        self._buffer[: len(numbers)].copy_(torch.from_numpy(numbers), non_blocking=True)
        recorded = recorded or self._record(cache, shape)
        if recorded is None:
            return None
        self._graphs.move_to_end(shape)
        recorded.graph.replay()
        cache.steps.wrote_all()
        return recorded.logits[: len(wanted)].clone()

    def clear(self) -> None:
        """Let all graphs go, and their memory; their shapes are recorded when they come again."""
        self._is_full = False
        if self._graphs:
            self._graphs.clear()
            self._device.forget()
        self._asked.give_back()
        if self._cache is not None:
            self._cache.pools.graph_bytes = 0

    def _follow(self, cache: object) -> bool:
        """Return true if a cache's layers all launch Triton's kernels, and have done so before."""
        if not isinstance(cache, TorchCache) or cache.on_gpu is None:
            return False
        if cache is not self._cache:
            self.clear()
            self._cache, self._slots = cache, slots_of(cache.config.params)
            self._asked = _Asked(cache.config.budget)
            finalize(self, self._asked.give_back)
            device = self._network.device
            self.is_off = cache.config.params.state is not None or not all(
                choice.has_cells(pool, device) for pool in cache.pools.of_layer
            )
        return not self.is_off and set(self._slots) <= cache.on_gpu.tilings.keys()

    def _pack(self, cache: TorchCache, ids: IntArray, at: IntArray) -> list[PackedPlan]:
        """Return the padded plans of the open step, by slot; pools hold what they write then."""
        assert cache.on_gpu is not None, "looked at in _follow"
        plans, n_groups = cache.steps.plan_all(len(ids), at), len(cache.pools.groups)
        for slot, pool in zip(self._slots, cache.pools.of_layer, strict=True):
            pool.ensure(plans[slot % n_groups].n_cells, self._network.device)
        found = []
        for slot in sorted(set(self._slots)):
            plan, group = plans[slot % n_groups], cache.pools.groups[slot % n_groups]
            own = plan if slot < n_groups else replace(plan, writes=())
            tiling: Tiling = cache.on_gpu.tilings[slot]
            found.append(launch.compiled(own, group.sight, tiling, rounded_up(len(ids))))
        return found

    def _settle(self, cache: TorchCache, n_ints: int) -> None:
        """Have a buffer of so many integers; let graphs go where it, or a pool, lies elsewhere."""
        if n_ints > len(self._buffer):
            size = max(LEAST_BUFFER, rounded_up(n_ints))
            with torch.inference_mode(False):  # it outlives any inference_mode block
                self._buffer = torch.empty(size, dtype=torch.int32, device=self._network.device)
            self.clear()
        where = tuple(places_of(pool) for pool in cache.pools.of_layer)
        if where != self._places:
            self.clear()
            self._places = where

    def _is_wanted(self, shape: Shape) -> bool:
        """Return true if a shape is worth a graph: it has been met before, and there is room."""
        if shape in self._met:
            return not self._is_full
        if len(self._met) >= MOST_SHAPES:
            self._met.clear()
        self._met.add(shape)
        return False

    def _record(self, cache: TorchCache, shape: Shape) -> Recorded | None:
        """Record the step that is in the buffer; None: it cannot be, or there is no memory."""
        if len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        call = _Call(self._network, cache, shape, self._buffer, self._slots)
        try:
            self._device.warm_up(call)
            recorded = Recorded(*self._device.capture(call))
            n_bytes = self._device.size_bytes + self._buffer.nbytes
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        if not self._asked.ask(n_bytes):
            self._give_up(f"the memory budget has no room for {format_size(n_bytes)}")
            return None
        self._is_full = n_bytes >= MOST_BYTES
        self._graphs[shape] = recorded
        cache.pools.graph_bytes = n_bytes
        return recorded

    def _give_up(self, why: str) -> None:
        """Run all steps by the modules from now on, and say so."""
        self.is_off = True
        self.clear()
        log.warning("steps are not recorded as graphs, each layer is launched: %s", why)


def _numbers(
    shape: Shape, ids: IntArray, at: IntArray, rows: IntArray, packed: Sequence[PackedPlan]
) -> Ints:
    """Return what a step transfers: tokens, positions and rows, padded with zeros, and plans."""
    first = np.zeros(shape.input_ints, np.int32)
    inputs, n = first.view(np.int64), shape.n_tokens
    inputs[: len(ids)], inputs[n : n + len(at)] = ids, at
    inputs[2 * n : 2 * n + len(rows)] = rows
    return np.concatenate([first, *(one.numbers for one in packed)])


class _Call:
    """A whole forward over the buffer: what is recorded, with the addresses of that moment."""

    def __init__(
        self,
        network: Any,
        cache: TorchCache,
        shape: Shape,
        buffer: Tensor,
        slots: Sequence[int],
    ) -> None:
        """Take views of the buffer, and where the pools lie."""
        assert cache.on_gpu is not None, "looked at in _follow"
        self._network, self._cache, self._rope_length = network, cache, shape.rope_length
        n = shape.n_tokens
        inputs = buffer[: shape.input_ints].view(torch.int64)
        self._ids, self._at = inputs[:n][None], inputs[n : 2 * n][None]
        self._rows = inputs[2 * n : 2 * n + shape.n_rows]
        first = shape.input_ints
        plans: dict[int, GroupPlan] = {}
        for slot, form in zip(sorted(set(slots)), shape.forms, strict=True):
            stop = first + sum(form.sections)
            plan = OnDevice(form, launch.sections_of(form, buffer[first:stop]))
            plans[slot] = GroupPlan(plan, cache.on_gpu.tilings[slot])
            first = stop
        self._plans = [plans[slot] for slot in slots]
        self._pools = [
            cache.on_gpu.arguments(layer, pool) for layer, pool in enumerate(cache.pools.of_layer)
        ]

    def __call__(self) -> Tensor:
        """Return logits ``[R, vocab_size]`` of the step that is in the buffer."""
        layers = PlannedForward(self._cache, self._plans, self._pools)
        with use_cache(cast(Any, layers)), Positions(self._at, self._rope_length):
            logits: Tensor = self._network(
                input_ids=self._ids,
                position_ids=self._at,
                use_cache=False,
                logits_to_keep=self._rows,
            ).logits[0]
        layers.check()
        return logits


class _Asked:
    """Bytes that graphs hold of a memory budget."""

    def __init__(self, budget: MemoryBudget | None) -> None:
        self._budget, self._n_bytes = budget, 0

    def ask(self, n_bytes: int) -> bool:
        """Hold so many bytes. False: refused, nothing was changed."""
        if self._budget is not None and n_bytes > self._n_bytes:
            if not self._budget.ask(n_bytes - self._n_bytes):
                return False
            self._n_bytes = n_bytes
        return True

    def give_back(self) -> None:
        """Hold none."""
        if self._budget is not None:
            self._budget.give_back(self._n_bytes)
            self._n_bytes = 0


def graphs_for(network: Any) -> StepGraphs:
    """Return the graphs of a network on a CUDA or ROCm card, none yet."""
    return StepGraphs(network, CudaGraphs(network.device))
