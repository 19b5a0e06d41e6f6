"""Rows of pictures in a forward: in place of embeddings, and beside what the first layers say.

A network is called with ids, as for text; whoever runs it says which of its tokens stand for rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_current = threading.local()


class PlacedRows(NamedTuple):
    """Rows of one picture in a forward.

    Attributes:
        tokens: ``[n]`` tokens of the forward.
        rows: ``[n, hidden_size]``, their embeddings.
        deep: of the same shape, to be added behind the first layers.
    """

    tokens: Tensor
    rows: Tensor
    deep: tuple[Tensor, ...]


class Pictures:
    """Lets the network that this thread runs read pictures while a ``with`` lasts."""

    __slots__ = ("_placed",)

    def __init__(self, placed: Sequence[PlacedRows]) -> None:
        """Hold what is read of each picture."""
        self._placed = placed

    def __enter__(self) -> None:
        """Have this thread's forward read them."""
        _current.placed = self._placed

    def __exit__(self, *error: object) -> None:
        """Leave the forward."""
        _current.placed = ()


def read_pictures(network: Any, n_deep: int) -> None:
    """Have a network take rows of pictures where the forward of a thread has some, in place.

    Args:
        network: of transformers, with all of its modules as they will run.
        n_deep: of its first layers, behind which rows may be added.
    """
    network.get_input_embeddings().register_forward_hook(_embedded)
    for index, layer in enumerate(network.model.layers[:n_deep]):
        layer.register_forward_hook(_added(index))


def _embedded(module: Any, given: Any, result: Tensor) -> Tensor | None:
    placed: Sequence[PlacedRows] = getattr(_current, "placed", ())
    if not placed:
        return None
    result = result.clone()
    for one in placed:
        result[0, one.tokens] = one.rows.to(result.device, result.dtype)
    return result


def _added(index: int) -> Callable[[Any, Any, Any], Any]:
    """Return a hook that adds rows to what a layer says."""

    def add(module: Any, given: Any, result: Any) -> Any:
        placed: Sequence[PlacedRows] = getattr(_current, "placed", ())
        deep = [one for one in placed if index < len(one.deep)]
        if not deep:
            return None
        states = (result[0] if isinstance(result, tuple) else result).clone()
        for one in deep:
            states[0, one.tokens] += one.deep[index].to(states.device, states.dtype)
        return (states, *result[1:]) if isinstance(result, tuple) else states

    return add
