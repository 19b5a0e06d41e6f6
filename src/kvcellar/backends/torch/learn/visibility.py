"""Reads from the function of indices that transformers masks with which tokens a query sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""Mask function of transformers: (batch row, head, query, key) to whether that query sees it."""

FARTHEST = 1 << 22
"""A window or chunk of so many positions or more is all of the history."""

_NEAR = (0, 1, 2, 3, 7, 31, 1000)
"""Positions of queries that are looked at whatever the mask is."""


class _NoPadding(TorchFunctionMode):
    """A mode in which what a mask's function holds of a text without bytes is zero.

    On the meta device that is how much padding each row has: none.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def filled(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_meta and value.dim() <= 1:
                return torch.zeros(value.shape, dtype=value.dtype)
            return value

        return func(*tree_map(filled, args), **tree_map(filled, kwargs or {}))


def read_mask(function: MaskFunction) -> tuple[int | None, int | None] | None:
    """Return a mask's window and chunk, of which at most one is there; None: it is another mask.

    With neither, a query sees all of the history. It is looked at in places from which a window or
    chunk cannot be told from anything else by chance, near and far from the beginning.
    """
    try:
        with _NoPadding():
            return _read(function)
    except (RuntimeError, TypeError, IndexError):  # it depends on more than positions
        return None


def _read(function: MaskFunction) -> tuple[int | None, int | None] | None:
    if _sees(function, FARTHEST, 0):
        return (None, None) if _agrees(function, None, None, (*_NEAR, 70_001)) else None
    span = _span(function)
    places = (*_NEAR, *_around(span))
    if _agrees(function, span, None, places):
        return span, None
    return (None, span) if _agrees(function, None, span, places) else None


def _sees(function: MaskFunction, query: int, key: int) -> bool:
    return bool(_row(function, query, torch.tensor([key]))[0])


def _row(function: MaskFunction, query: int, keys: Tensor, head: int = 0) -> Tensor:
    """Return for each key whether the query sees it."""
    one = torch.tensor(0)
    seen = function(one, torch.tensor(head), torch.tensor(query), keys)
    return torch.as_tensor(seen).expand(len(keys))


def _span(function: MaskFunction) -> int:
    """Return the first position from which position 0 is out of sight."""
    low, high = 0, FARTHEST  # in sight at low, out of sight at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _sees(function, middle, 0) else (low, middle)
    return high


def _around(span: int) -> tuple[int, ...]:
    """Return positions of queries by which a window and a chunk of this length differ."""
    places = (span - 1, span, span + 1, 2 * span - 1, 2 * span, 3 * span + span // 2)
    return tuple(place for place in places if place >= 0)


def _agrees(
    function: MaskFunction, window: int | None, chunk: int | None, queries: tuple[int, ...]
) -> bool:
    """Return true if these queries see what they would with such a window or chunk."""
    for query in queries:
        first = 0
        if window is not None:
            first = max(0, query - window + 1)
        elif chunk is not None:
            first = query - query % chunk
        keys = torch.arange(max(0, first - 70), query + 9)
        want = (keys >= first) & (keys <= query)
        if not all(torch.equal(_row(function, query, keys, head), want) for head in (0, 1)):
            return False
        if first and bool(_row(function, query, torch.arange(0, first, 1 + first // 512)).any()):
            return False
    return True
