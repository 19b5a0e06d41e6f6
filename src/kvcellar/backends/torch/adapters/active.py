"""Adapters of the tokens of the forward that a thread runs; linear layers ask for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvcellar.errors import ModelError
from kvcellar.types import IntArray

Rows: TypeAlias = slice | Tensor
"""Rows of a layer's input: all that are between two, or those that are listed."""

Groups: TypeAlias = list[tuple[int, Rows]]
"""Numbers of adapters, and the rows that each computes."""

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
        _current.active, _current.groups = self, self._of_all

    def __exit__(self, *error: object) -> None:
        """Have the layers of this thread compute what is their own."""
        _current.active = _current.groups = None

    def groups_of_head(self) -> tuple[int, Groups]:
        """Return how many rows the head is given, and its groups."""
        return self._of_head

    def part(self, tokens: slice | Tensor) -> tuple[int, Groups]:
        """Return how many rows some of the tokens are, and their groups."""
        at = tokens if isinstance(tokens, slice) else tokens.cpu().numpy()
        return self._grouped(self._numbers[at])

    def _grouped(self, numbers: IntArray) -> tuple[int, Groups]:
        found: Groups = []
        for number in np.unique(numbers[numbers > 0]).tolist():
            at = np.flatnonzero(numbers == number)
            is_run = at[-1] - at[0] + 1 == len(at)
            rows = slice(int(at[0]), int(at[-1]) + 1)
            found.append((number, rows if is_run else torch.from_numpy(at).to(self._device)))
        return len(numbers), found


def is_active() -> bool:
    """Return true if the forward of this thread has tokens of adapters."""
    return getattr(_current, "active", None) is not None


def groups_for(n_rows: int, *, is_head: bool) -> Groups:
    """Return which adapters compute which rows of the input of a layer that runs now.

    Raises:
        ModelError: the layer is given other rows than those of the forward's tokens.
    """
    active: Active | None = getattr(_current, "active", None)
    if active is None:
        return []
    n, groups = active.groups_of_head() if is_head else _current.groups
    if n != n_rows:
        raise ModelError(
            f"a linear layer was given {n_rows} rows in a forward of {n} tokens, so it is not "
            f"known which adapter is whose"
        )
    found: Groups = groups
    return found


@contextmanager
def rows_of(tokens: slice | Tensor) -> Iterator[None]:
    """Say that layers are given some of the tokens, in this order, while a block lasts."""
    active: Active | None = getattr(_current, "active", None)
    if active is None:
        yield
        return
    before, _current.groups = _current.groups, active.part(tokens)
    try:
        yield
    finally:
        _current.groups = before
