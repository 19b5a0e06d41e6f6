"""Small forwards of a network as graphs: all layers are recorded once and played again as one.

A step transfers its tokens and its plans in one buffer, and plays the graph of its shape. Batches
are padded to powers of two, so that a few graphs serve all of them; those of models with recurrent
layers are not, since a token that pads would move a state on.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import numpy as np
import torch

from kvcellar.backends.host_rows import slots_of
from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.backends.torch.cache.state_pools import Together, together
from kvcellar.backends.torch.gpu import choice
from kvcellar.backends.torch.gpu.attend.following import Following
from kvcellar.backends.torch.gpu.attend.plans import Ints, PackedPlan, Tiling, rounded_up
from kvcellar.backends.torch.gpu.record.capture import CudaGraphs, Graph, GraphDevice
from kvcellar.backends.torch.gpu.record.recording import (
    BufferedForward,
    Played,
    Shape,
    form_of,
    joined,
    put_tokens,
)
from kvcellar.backends.torch.gpu.transfer.side import RECORDING
from kvcellar.budget import MemoryBudget, format_size
from kvcellar.types import IntArray, StepPlan

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


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph, and where its results come."""

    graph: Graph
    results: Played


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """All of a step but its tokens.

    Attributes:
        plans: of its layer groups, as the bookkeeping has made them.
        rows: tokens whose logits are wanted.
        shape: of the step.
        numbers: that are transferred, with any tokens.
    """

    plans: Sequence[StepPlan]
    rows: IntArray
    shape: Shape
    numbers: Ints

    def is_of(
        self, plans: Sequence[StepPlan], rows: IntArray, length: int, *, has_features: bool
    ) -> bool:
        """Return true if a step is this one: plans are made once for each."""
        asked = (length, has_features) == (self.shape.rope_length, self.shape.has_features)
        return self.plans is plans and asked and np.array_equal(self.rows, rows)


class StepGraphs:
    """Small steps of one network over one cache as graphs, where they can be.

    A shape that comes for the second time is recorded; later where another graph is being recorded
    then, or another thread works beside the steps. Graphs are gone when anything that they were
    recorded over has moved: pools that have grown, or the buffer of plans.
    """

    def __init__(self, network: Any, device: GraphDevice, modules: Sequence[Any] = ()) -> None:
        """Record nothing yet; the inputs of ``modules`` are the features."""
        self._network, self._device, self._modules = network, device, modules
        self._home: torch.device = network.device
        self._graphs: OrderedDict[Shape, Recorded] = OrderedDict()
        self._met: set[Shape] = set()
        self._held: list[int] = []
        self._buffer = self._counts = torch.empty(0, dtype=torch.int32)
        self._cache: TorchCache | None = None
        self._slots: tuple[int, ...] = ()
        self._own_slots: tuple[int, ...] = ()
        self._following: dict[int, Following] = {}
        self._asked = _Asked(None)
        self._ready: _Ready | None = None
        self._is_full = False
        self.is_off = False
        """True from the first step on that could not be recorded."""

    @property
    def n_graphs(self) -> int:
        """Graphs that are kept."""
        return len(self._graphs)

    def run(
        self,
        cache: Any,
        ids: IntArray,
        at: IntArray,
        rows: IntArray | None,
        rope_length: int,
        *,
        has_features: bool = False,
    ) -> Played | None:
        """Run a step by a graph; complete afterwards.

        Args:
            cache: the session's.
            ids: ``[T]``.
            at: ``[T]`` positions.
            rows: ``[R]`` tokens whose logits are wanted; None: the last one.
            rope_length: the length of text whose RoPE factors turn the positions.
            has_features: the inputs of the modules are wanted.

        Returns:
            What came, until the next step; None where this step is for the modules themselves,
            whose turn it is then.

        Raises:
            StepError, PositionError: the tokens are not those that the cache expects.
        """
        wanted = np.array([len(ids) - 1], np.int64) if rows is None else rows
        if self.is_off or len(ids) > MOST_TOKENS or not len(wanted) or not self._follow(cache):
            return None
        ready = self._made_ready(cache, at, wanted, rope_length, has_features=has_features)
        if ready is None:
            return None
        shape, numbers = ready.shape, ready.numbers
        put_tokens(numbers, ids)
        self._settle(cache, len(numbers))
        recorded = self._graphs.get(shape)
        if recorded is None and not self._is_wanted(shape):
            return None
        self._device.send(numbers, self._buffer[: len(numbers)])
        self._await_transfers(cache, ready.plans)
        recorded = recorded or self._record_alone(cache, shape)
        if recorded is None:
            return None
        self._graphs.move_to_end(shape)
        recorded.graph.replay()
        cache.steps.wrote_all()
        logits, likeliest, features = recorded.results
        n = len(wanted)
        return Played(logits[:n], likeliest[:n], features[: len(ids)])

    def prepare(self, cache: Any, at: IntArray, rows: IntArray | None, rope_length: int) -> None:
        """Make a begun step ready whose tokens are not known, while the device works.

        Arguments as of ``run``.
        """
        wanted = np.array([len(at) - 1], np.int64) if rows is None else rows
        if not self.is_off and len(at) <= MOST_TOKENS and len(wanted) and self._follow(cache):
            self._made_ready(cache, at, wanted, rope_length, has_features=False)

    def _made_ready(
        self, cache: TorchCache, at: IntArray, rows: IntArray, length: int, *, has_features: bool
    ) -> _Ready | None:
        """Return all of a step but its tokens, as it was prepared or anew; None: it is no graph's.

        Raises:
            StepError, PositionError: the tokens are not those that the cache expects.
        """
        plans = cache.steps.plan_all(len(at), at)
        ready = self._ready
        if ready is not None and ready.is_of(plans, rows, length, has_features=has_features):
            return ready
        packed, advances = self._pack(cache, plans, len(at))
        if any(one.src is None or one.n_tokens > 1 for one in advances):
            return None  # a prompt's modules may ask the device for numbers
        shape = Shape(
            len(at) if advances else rounded_up(len(at)),
            rounded_up(len(rows)),
            length,
            has_features,
            tuple(map(form_of, advances)),
            tuple(one.form for one in packed),
        )
        numbers = joined(shape, at, rows, advances, packed)
        self._ready = _Ready(plans, rows, shape, numbers)
        return self._ready

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
        if not isinstance(cache, TorchCache):
            return False
        if cache is not self._cache:
            self.clear()
            self._cache, self._slots = cache, slots_of(cache.config.params)
            self._own_slots = tuple(sorted(set(self._slots)))
            self._following = {slot: Following() for slot in self._own_slots}
            self._asked = _Asked(cache.config.budget)
            finalize(self, self._asked.give_back)
            pools = cache.pools.of_layer
            self.is_off = not all(choice.has_cells(pool, self._home) for pool in pools)
        known = {} if cache.on_gpu is None else cache.on_gpu.tilings
        return not self.is_off and all(slot in known for slot in self._own_slots)

    def _pack(
        self, cache: TorchCache, plans: Sequence[StepPlan], n_tokens: int
    ) -> tuple[list[PackedPlan], list[Together]]:
        """Return the padded plans of the open step, by slot, and what recurrent layers run.

        Pools hold what they write then.
        """
        self._await_transfers(cache, plans)  # before pools grow
        n_groups = len(cache.pools.groups)
        states, device = cache.steps.begun_states(), self._home
        for slot, pool in zip(self._slots, cache.pools.of_layer, strict=True):
            pool.ensure(plans[slot % n_groups].n_cells, device)
        if states is not None and cache.pools.states is not None:
            for layer in range(len(cache.pools.states.of_layer)):
                cache.pools.states.ensure(layer, states.n_slots, device)
        n_padded = rounded_up(n_tokens) if states is None else n_tokens
        found = []
        for slot in self._own_slots:
            plan, group = plans[slot % n_groups], cache.pools.groups[slot % n_groups]
            assert cache.on_gpu is not None, "looked at in _follow"
            tiling: Tiling = cache.on_gpu.tilings[slot]
            packed = self._following[slot].packed(
                plan, group.sight, tiling, n_padded, stores=slot < n_groups
            )
            found.append(packed)
        return found, [] if states is None else together(states)

    def _await_transfers(self, cache: TorchCache, plans: Sequence[StepPlan]) -> None:
        """Have the device wait for transfers of cells and slots that the open step touches."""
        for group, plan in enumerate(plans):
            cache.pools.before_step(group, plan)
        states = cache.steps.begun_states()
        if states is not None:
            cache.pools.before_states(states)

    def _settle(self, cache: TorchCache, n_ints: int) -> None:
        """Have a buffer of so many integers; let graphs go where it, or a pool, lies elsewhere."""
        if n_ints > len(self._buffer):
            size = max(LEAST_BUFFER, rounded_up(n_ints))
            with torch.inference_mode(False):  # it outlives any inference_mode block
                self._buffer = torch.empty(size, dtype=torch.int32, device=self._home)
                self._counts = self._buffer.new_zeros(MOST_TOKENS)
            self.clear()
        held = [pool.n_cells for pool in cache.pools.of_layer]
        if cache.pools.states is not None:
            held += [len(layer[0]) for layer in cache.pools.states.of_layer]
        if held != self._held:
            self.clear()
            self._held = held

    def _is_wanted(self, shape: Shape) -> bool:
        """Return true if a shape is worth a graph: it has been met before, and there is room."""
        if shape in self._met:
            return not self._is_full
        if len(self._met) >= MOST_SHAPES:
            self._met.clear()
        self._met.add(shape)
        return False

    def _record_alone(self, cache: TorchCache, shape: Shape) -> Recorded | None:
        """Record the step that is in the buffer as ``_record``; None: not now, too."""
        if not RECORDING.acquire(blocking=False):
            return None  # to wait would hold up everybody's tokens
        try:
            return self._record(cache, shape)
        finally:
            RECORDING.release()

    def _record(self, cache: TorchCache, shape: Shape) -> Recorded | None:
        """Record the step that is in the buffer; None: it cannot be, or there is no memory."""
        if len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        modules = self._modules if shape.has_features else ()
        buffers = self._buffer, self._counts
        call = BufferedForward(self._network, cache, shape, *buffers, self._slots, modules)
        try:
            self._device.warm_up(call)
            recorded = Recorded(*self._device.capture(call))
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        self._graphs[shape] = recorded
        of_driver = sum(one.graph.driver_bytes for one in self._graphs.values())
        n_bytes = self._device.size_bytes + self._buffer.nbytes + of_driver
        if not self._asked.ask(n_bytes):
            self._give_up(f"the memory budget has no room for {format_size(n_bytes)}")
            return None
        self._is_full = n_bytes >= MOST_BYTES
        cache.pools.graph_bytes = n_bytes
        return recorded

    def _give_up(self, why: str) -> None:
        """Run all steps by the modules from now on, and say so."""
        self.is_off = True
        self.clear()
        log.warning("steps are not recorded as graphs, each layer is launched: %s", why)


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


def graphs_for(network: Any, modules: Sequence[Any]) -> StepGraphs:
    """Return the graphs of a network on a CUDA or ROCm card, none yet; see :class:`StepGraphs`."""
    return StepGraphs(network, CudaGraphs(network.device), modules)
