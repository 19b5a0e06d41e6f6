"""Rows and states between a cache on a card and main memory, beside the steps.

All layers of a group go through one buffer of bounded size: a launch and a copy for each filling of
it, on a stream of their own. Steps go on meanwhile. One that writes cells that are being read waits
for the last launch that reads them, and one that reads or writes cells that are being written for
the last that writes them: on the device, and the host waits for neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcellar.backends.host_memory import Arrival, empty_bytes
from kvcellar.backends.host_rows import GroupParts, check_rows
from kvcellar.backends.torch.cache.codecs import Parts
from kvcellar.backends.torch.cache.exact import LayerPool, PoolBeside
from kvcellar.backends.torch.cache.pools import BlockFirstPool, Pool
from kvcellar.backends.torch.cache.state_pools import StateArrays, StatePools
from kvcellar.backends.torch.gpu.transfer.pinned import pin_ahead
from kvcellar.backends.torch.gpu.transfer.rows import Planes, Strided
from kvcellar.backends.torch.gpu.transfer.side import Landed, SideStream
from kvcellar.states import StatePlan
from kvcellar.types import IntArray, LayerGroup, Run, StepPlan

ROOM = 16 << 20
"""Bytes of the buffer: half a millisecond of a bus, for which the launch takes a fiftieth."""

STATES = -1
"""Number of the slots of states, beside those of layer groups: their first layers."""

Arrays = Sequence[NDArray[Any]]


class _Moving(NamedTuple):
    """Cells that are read or written on the side stream.

    Attributes:
        of: the first layer of their group, or ``STATES``.
        cells: ascending.
        is_read: true if they are read.
        event: at the last launch that does so.
    """

    of: int
    cells: IntArray
    is_read: bool
    event: Any


class RowTransfers:
    """Moves rows of the layers of groups, and states, between a device and arrays."""

    def __init__(self, side: SideStream, room: int = ROOM) -> None:
        """Work on a side stream, by a buffer of so many bytes, or of the longest row."""
        self._side, self._room = side, room
        self._planes: dict[int, tuple[tuple[int, ...], Planes]] = {}
        self._moving: list[_Moving] = []

    def begin_read(
        self, pools: Sequence[LayerPool], cells: IntArray, group: LayerGroup, into: GroupParts
    ) -> Arrival | None:
        """Begin to copy the rows of ``cells [n]`` in a group's layers to contiguous arrays.

        Returns:
            When they are there; None where there are none.
        """
        arrays = [array for side in into for array in side]
        of = group.layers[0]
        return self._read(of, self._planes_of(of, _parts(pools, into)), cells, arrays)

    def write(
        self,
        pools: Sequence[LayerPool],
        cells: IntArray,
        given: GroupParts,
        group: LayerGroup,
        device: torch.device,
    ) -> None:
        """Store rows in ``cells [n]``; they are on their way when it returns.

        Raises:
            ShapeError: not as many rows as cells; nothing was written.
        """
        check_rows(cells, given)
        if not len(cells):
            return
        highest = int(cells.max()) + 1
        if any(_own(pool).n_cells < highest for pool in pools):
            self.before_all()
        for pool in pools:
            pool.ensure(highest, pool.device or device)
        of = group.layers[0]
        planes = self._planes_of(of, _parts(pools, given))
        self._write(of, planes, cells, [array for side in given for array in side])

    def read_states(self, pools: StatePools, slots: IntArray) -> StateArrays:
        """Return copies of the states of ``slots [n]``, when they are there."""
        found: StateArrays = [
            [np.empty((len(slots), *shape), np.float32) for shape in shapes]
            for shapes in pools.shapes
        ]
        flat = [array for layer in found for array in layer]
        if len(slots):
            self._ensure_slots(pools, slots, pools.device)
            planes = self._planes_of(STATES, _parts_of_states(pools))
            arrival = self._read(STATES, planes, slots, flat)
            assert arrival is not None, "there are slots"
            arrival.wait()
        return found

    def write_states(self, pools: StatePools, slots: IntArray, states: Sequence[Arrays]) -> None:
        """Put states in slots; they are on their way when it returns.

        Raises:
            ShapeError: they are not those of so many slots of this model; nothing was written.
        """
        pools.check(slots, states)
        if len(slots):
            self._ensure_slots(pools, slots, pools.device)
            flat = [np.ascontiguousarray(one, np.float32) for layer in states for one in layer]
            planes = self._planes_of(STATES, _parts_of_states(pools))
            self._write(STATES, planes, slots, flat)

    # What the side stream and steps owe each other ---------------------------------------------

    def before_step(self, of: int, plan: StepPlan, pool: LayerPool) -> None:
        """Have what is computed from now on wait for transfers of cells that a plan touches.

        Args:
            of: the first layer of its group.
            plan: of a step.
            pool: one of the group's, which may have to grow for it.
        """
        if not self._moving:
            return
        if plan.n_cells > _own(pool).n_cells:  # then the bytes move
            self.before_all()
            return
        writes = [run for _, run in plan.writes]
        self._before(of, [run for read in plan.reads for run in read.runs], writes)

    def before_states(self, plan: StatePlan, pools: StatePools) -> None:
        """Have what is computed from now on wait for transfers of slots that a plan touches."""
        if not self._moving:
            return
        if any(plan.n_slots > len(states[0]) for states in pools.of_layer):
            self.before_all()
            return
        reads = [Run(one.src, 1) for one in plan.advances]
        self._before(STATES, reads, [Run(one.dst, 1) for one in plan.advances])

    def before_all(self) -> None:
        """Have what is computed from now on wait for all transfers."""
        for one in self._moving:
            self._side.make_wait(one.event)
        self._moving.clear()

    def _before(self, of: int, reads: Sequence[Run], writes: Sequence[Run]) -> None:
        self._moving = [one for one in self._moving if not one.event.query()]
        left = []
        for one in self._moving:
            touched = writes if one.is_read else [*reads, *writes]
            if one.of == of and _meet(one.cells, touched):
                self._side.make_wait(one.event)  # what comes later waits behind that
            else:
                left.append(one)
        self._moving = left

    # How bytes move ----------------------------------------------------------------------------

    def _read(self, of: int, planes: Planes, cells: IntArray, arrays: Arrays) -> Landed | None:
        if not len(cells):
            return None
        to = _Stretches(arrays)
        with self._side.work() as before:
            self._side.wait(before)
            begun = self._side.begin()
            where = self._side.sent(np.asarray(cells, np.int64))
            buffer = self._buffer(planes, len(cells), where.device)
            read: Any = None
            for chunk in planes.chunks(len(cells), self._room):
                planes.copy(chunk, where, buffer, is_read=True)
                read = self._side.mark()
                for stretch, at, n in to.of(chunk.start, chunk.stop):
                    stretch.copy_(buffer[at : at + n], non_blocking=True)
            self._moving.append(_Moving(of, np.sort(cells), True, read))
            return self._side.end(begun, where, buffer, planes, to)

    def _write(self, of: int, planes: Planes, cells: IntArray, arrays: Arrays) -> None:
        come_from = _Stretches([_readable(array) for array in arrays])
        with self._side.work() as before:
            begun = self._side.begin()
            where = self._side.sent(np.asarray(cells, np.int64))
            buffer = self._buffer(planes, len(cells), where.device)
            for i, chunk in enumerate(planes.chunks(len(cells), self._room)):
                for stretch, at, n in come_from.of(chunk.start, chunk.stop):
                    buffer[at : at + n].copy_(stretch, non_blocking=True)
                if not i:
                    self._side.wait(before)
                planes.copy(chunk, where, buffer, is_read=False)
            self._moving.append(_Moving(of, np.sort(cells), False, self._side.mark()))
            self._side.end(begun, where, buffer, planes, come_from)

    def _buffer(self, planes: Planes, n: int, device: torch.device) -> Tensor:
        """Return a buffer of the side stream's: what it frees goes to nobody before its turn."""
        most = max((one.stop - one.start for one in planes.chunks(n, self._room)), default=0)
        return torch.empty(-(-most // 8) * 8, dtype=torch.uint8, device=device)

    def _planes_of(self, of: int, parts: tuple[list[Strided], int]) -> Planes:
        """Return planes of a group, described anew where a pool has moved."""
        strided, block = parts
        where = tuple(number for one in strided for number in one[1:])
        known = self._planes.get(of)
        if known is None or known[0] != where:
            device = strided[0].tensor.device
            known = self._planes[of] = where, Planes(strided, block, device)
        return known[1]

    def _ensure_slots(self, pools: StatePools, slots: IntArray, device: torch.device) -> None:
        highest = int(slots.max()) + 1
        home = next((s[0].device for s in pools.of_layer if len(s[0])), device)
        if any(len(states[0]) < highest for states in pools.of_layer):
            self.before_all()
        for layer in range(len(pools.of_layer)):
            pools.ensure(layer, highest, home)


class _Stretches:
    """Contiguous arrays in the order of planes, those that are neighbours in memory as one."""

    def __init__(self, arrays: Arrays) -> None:
        """Take arrays, larger types first as :func:`_parts` has them."""
        self._found: list[tuple[int, Tensor]] = []
        self._arrays = arrays
        total, stop, root_before = 0, -1, None
        start, begin = 0, 0
        flat: Any = None
        for array in sorted(arrays, key=lambda array: -array.dtype.itemsize):
            assert array.flags.c_contiguous, "else a copy of it would be moved"
            root = _root(array)
            at = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
            if root is not root_before or at != stop:
                if flat is not None:
                    self._found.append((start, torch.from_numpy(flat[begin:stop])))
                flat = root.reshape(-1).view(np.uint8)
                root_before, start, begin = root, total, at
            stop = at + array.nbytes
            total += array.nbytes
        if flat is not None:
            self._found.append((start, torch.from_numpy(flat[begin:stop])))

    def of(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        """Yield the memory of some bytes of all: of each stretch its part, where it is, how long.

        Where it is counts from ``start``.
        """
        for first, stretch in self._found:
            low, high = max(start, first), min(stop, first + len(stretch))
            if low < high:
                yield stretch[low - first : high - first], low - start, high - low


def _root(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array that an array is a view of, where that is one piece; else itself."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    return root if root.flags.c_contiguous else array


def _readable(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that a device copies from: itself, or a contiguous copy."""
    if array.flags.c_contiguous and _root(array).flags.writeable:
        return array
    found: NDArray[Any] = empty_bytes(array.nbytes).view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def _meet(cells: IntArray, runs: Sequence[Run]) -> bool:
    """Return true if any of ``cells``, ascending, is in a run."""
    if not runs or not len(cells):
        return False
    starts, lengths = np.array(runs, np.int64).T
    at = np.searchsorted(cells, starts)
    found = cells[np.minimum(at, len(cells) - 1)]
    return bool(((at < len(cells)) & (found < starts + lengths)).any())


def _own(pool: LayerPool) -> Pool | BlockFirstPool:
    """Return the pool of a layer's own cells."""
    while isinstance(pool, PoolBeside):
        pool = pool.cells
    return pool


def _parts(pools: Sequence[LayerPool], arrays: GroupParts) -> tuple[list[Strided], int]:
    """Return K's and V's parts in all layers, in the order of main memory, and a block's cells.

    Pools have scales and biases in turns; in main memory they are apart.
    """
    placed = [_own(pool).placed() for pool in pools]
    found: list[tuple[int, list[Strided]]] = []
    for side, of_layers in zip(arrays, ([p.k for p in placed], [p.v for p in placed]), strict=True):
        pieces = ((0, 1, 0),) if len(side) == 1 else ((0, 1, 0), (1, 2, 0), (1, 2, 1))
        for array, (part, step, at) in zip(side, pieces, strict=True):
            width = array.shape[3] * array.dtype.itemsize
            strided = [_strided(layer, part, step, at, width) for layer in of_layers]
            found.append((array.dtype.itemsize, strided))
    found.sort(key=lambda one: -one[0])
    return [one for _, strided in found for one in strided], placed[0].block_size


def _strided(parts: Parts, part: int, step: int, at: int, n_bytes: int) -> Strided:
    """Describe every ``step``-th number, from ``at`` on, of a part of one layer."""
    tensor = parts[part]
    e = tensor.element_size()
    s_block, s_head, s_cell = (tensor.stride(axis) * e for axis in (0, 1, 2))
    together = n_bytes if step == 1 else e
    return Strided(
        tensor, tensor.data_ptr() + at * e, tensor.shape[1], s_head, s_cell, s_block, n_bytes,
        together, together * step,
    )  # fmt: skip


def _parts_of_states(pools: StatePools) -> tuple[list[Strided], int]:
    """Describe all states of recurrent layers."""
    found = []
    for layer in pools.of_layer:
        for state in layer:
            n = state[0].numel() * state.element_size()
            found.append(Strided(state, state.data_ptr(), 1, 0, n, 0, n, n, n))
    return found, 0


def transfers_on(device: torch.device) -> RowTransfers:
    """Return what moves rows to and from a device; main memory for the first is pinned."""
    pin_ahead()
    return RowTransfers(SideStream(device))
