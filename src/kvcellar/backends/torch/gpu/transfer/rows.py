"""Rows of all layers between pools and one buffer, as they are stored: one launch.

A *plane* is one head of one layer in one part of K or V, or a piece of a state: numbers that lie
equally far apart from cell to cell. A *member* is one or more planes that are neighbours in main
memory. The buffer has members one behind the other, of each the rows of all cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcellar.backends.torch.gpu.attend import stores
from kvcellar.backends.torch.gpu.attend.launch import on_device
from kvcellar.backends.torch.gpu.attend.plans import rounded_up

_NUMBERS = {
    1: (tl.uint8, torch.uint8), 2: (tl.int16, torch.int16),
    4: (tl.int32, torch.int32), 8: (tl.int64, torch.int64),
}  # fmt: skip
"""Types in which rows are copied, by their bytes."""

WIDEST = 1024
"""Numbers of the longest row of a plane; longer ones are several planes."""

AT_ONCE = 1024
"""Numbers that a program copies."""


class Strided(NamedTuple):
    """A part of K or V in one layer, or a state: tensors of rows, in bytes.

    Attributes:
        tensor: holds the bytes; it is kept alive by whoever moves them.
        address: of the first row's first number.
        n_heads: planes of rows.
        s_head: how far apart heads are,
        s_cell: cells of a block,
        s_block: and blocks.
        n_bytes: of a row in main memory.
        n_together: of numbers that lie together in the pool,
        step: and how far apart these are there; as many where a row is one piece.
    """

    tensor: Tensor
    address: int
    n_heads: int
    s_head: int
    s_cell: int
    s_block: int
    n_bytes: int
    n_together: int
    step: int


class Chunk(NamedTuple):
    """Planes and tokens that go through the buffer together; bytes ``[start, stop)`` of all.

    Attributes:
        first, last: planes, half-open.
        begin, end: tokens, half-open.
        start, stop: bytes of all members, half-open.
    """

    first: int
    last: int
    begin: int
    end: int
    start: int
    stop: int


class Planes:
    """Planes of all layers of a group, described on the device."""

    def __init__(self, parts: Sequence[Strided], block: int, device: torch.device) -> None:
        """Describe parts in the order of main memory; ``block`` is 0 for pools of one piece."""
        self.tensors = tuple(part.tensor for part in parts)
        self._block = block
        sizes = [
            n
            for part in parts
            for n in (part.address, part.s_head, part.s_cell, part.n_bytes, part.n_together,
                      part.step, *((part.s_block,) if block else ()))
        ]  # fmt: skip
        self._unit = unit = math.gcd(8, *sizes)
        self._is_plain = all(part.n_together == part.n_bytes for part in parts)
        rows: list[tuple[int, ...]] = []
        self._members: list[tuple[int, int]] = []
        before = 0
        for part in parts:
            width = part.n_bytes // unit
            for head in range(part.n_heads):
                self._members.append((len(rows), part.n_bytes))
                for at in range(0, width, WIDEST):
                    address = part.address + head * part.s_head
                    assert self._is_plain or width <= WIDEST, "numbers and scales are short"
                    rows.append(
                        (address + at * unit, part.s_cell // unit, part.s_block // unit,
                         min(WIDEST, width - at), part.n_together // unit, part.step // unit,
                         before, width, at)
                    )  # fmt: skip
                before += width
        self._n_planes = len(rows)
        self._pad = rounded_up(max(row[3] for row in rows))
        self._ends = np.cumsum([n for _, n in self._members])
        with torch.inference_mode(False):  # it outlives any inference_mode block
            self._table = torch.tensor(rows, dtype=torch.int64, device=device)

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows of one cell."""
        return int(self._ends[-1])

    def chunks(self, n: int, most_bytes: int) -> Iterator[Chunk]:
        """Cut the rows of ``n`` cells into pieces of so many bytes at most, or of one row."""
        at = 0
        while at < len(self._members):
            start = n * int(self._ends[at - 1]) if at else 0
            plane, n_bytes = self._members[at]
            if n * n_bytes > most_bytes:
                stop, some = at + 1, max(1, most_bytes // n_bytes)
                for begin in range(0, n, some):
                    end = min(n, begin + some)
                    bounds = start + begin * n_bytes, start + end * n_bytes
                    yield Chunk(plane, self._first_of(stop), begin, end, *bounds)
            else:
                stop = int(np.searchsorted(n * self._ends, start + most_bytes, side="right"))
                bounds = start, n * int(self._ends[stop - 1])
                yield Chunk(plane, self._first_of(stop), 0, n, *bounds)
            at = stop

    def copy(self, chunk: Chunk, cells: Tensor, buffer: Tensor, *, is_read: bool) -> None:
        """Copy rows between cells ``[n]`` and the beginning of a buffer; one launch.

        Args:
            chunk: of the rows.
            cells: int64 ``[n]``, on the device.
            buffer: uint8, a multiple of 8.
            is_read: true from the pools to the buffer, false back.
        """
        kind, same = _NUMBERS[self._unit]
        tokens = max(1, AT_ONCE // self._pad)
        n_tiles = triton.cdiv(chunk.end - chunk.begin, tokens)
        with on_device(buffer.device):
            stores.copy_planes[(chunk.last - chunk.first, n_tiles)](
                self._table, cells, buffer.view(same), len(cells), chunk.first, chunk.begin,
                chunk.end, chunk.start // self._unit,
                kind, tokens, self._pad, self._block, self._is_plain, is_read,
            )  # fmt: skip

    def _first_of(self, member: int) -> int:
        return self._members[member][0] if member < len(self._members) else self._n_planes
