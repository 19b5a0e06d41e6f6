"""Adapters of the tokens of the forward that a thread runs; linear layers ask for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvcellar.errors import ModelError
from kvcellar.types import IntArray

Rows: TypeAlias = slice | Tensor
"""Rows of a layer's input: all that are between two, or those that are listed."""


class RowAdapters(NamedTuple):
    """Adapters of the rows of a layer's input.

    Attributes:
        groups: numbers of adapters, and the rows that each computes.
        numbers: ``[n_rows]``: of each row's adapter, 0 for none.
    """

    groups: list[tuple[int, Rows]]
    numbers: Tensor


_current = threading.local()


class Active:
    """The adapter of every token of a flat batch, while a ``with`` lasts."""

    def __init__(self, numbers: IntArray, kept: IntArray, device: torch.device) -> None:
        """Hold numbers ``[T]`` of adapters, 0 for none.

        Args:
            numbers: one per token.
            kept: ``[R]``: the tokens that the head is given.
            device: of the network.
        """
        self._numbers, self._device = numbers, device
        self._of_all = self._grouped(numbers)
        self._of_head = self._grouped(numbers[kept])

    def __enter__(self) -> None:
        """Make this what the layers of this thread ask."""
        _current.active, _current.rows = self, self._of_all

    def __exit__(self, *error: object) -> None:
        """Have the layers of this thread compute what is their own."""
        _current.active = _current.rows = None

    @property
    def of_head(self) -> RowAdapters:
        """Adapters of the rows that the head is given."""
        return self._of_head

    def part(self, tokens: slice | Tensor) -> RowAdapters:
        """Return the adapters of some of the tokens, in their order."""
        at = tokens if isinstance(tokens, slice) else tokens.cpu().numpy()
        return self._grouped(self._numbers[at])

    def _grouped(self, numbers: IntArray) -> RowAdapters:
        groups: list[tuple[int, Rows]] = []
        for number in np.unique(numbers[numbers > 0]).tolist():
            at = np.flatnonzero(numbers == number)
            is_run = at[-1] - at[0] + 1 == len(at)
            rows = slice(int(at[0]), int(at[-1]) + 1)
            groups.append((number, rows if is_run else torch.from_numpy(at).to(self._device)))
        return RowAdapters(groups, torch.from_numpy(numbers).to(self._device))


def is_active() -> bool:
    """Return true if the forward of this thread has tokens of adapters."""
    return getattr(_current, "active", None) is not None


def rows_for(n_rows: int, *, is_head: bool) -> RowAdapters:
    """Return the adapters of the rows of the input of a layer that runs now, in such a forward.

    Raises:
        ModelError: the layer is given other rows than those of the forward's tokens.
    """
    active: Active = _current.active
    found: RowAdapters = active.of_head if is_head else _current.rows
    if len(found.numbers) != n_rows:
        raise ModelError(
            f"a linear layer was given {n_rows} rows in a forward of {len(found.numbers)} tokens, "
            f"so it is not known which adapter is whose"
        )
    return found


@contextmanager
def rows_of(tokens: slice | Tensor) -> Iterator[None]:
    """Say that layers are given some of the tokens, in this order, while a block lasts."""
    active: Active | None = getattr(_current, "active", None)
    if active is None:
        yield
        return
    before, _current.rows = _current.rows, active.part(tokens)
    try:
        yield
    finally:
        _current.rows = before
