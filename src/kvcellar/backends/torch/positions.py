"""Knowledge of a forward that its layers need, and that no module of transformers hands on to them.

Not every model gives its attention the positions, and none tells a rotary embedding whose session
it runs for; so whoever runs a model says it here.
"""

from __future__ import annotations

import threading

from torch import Tensor

_current = threading.local()


class Positions:
    """Lets the layers that this thread runs know its forward while a ``with`` lasts."""

    __slots__ = ("_positions", "_rope_length")

    def __init__(self, positions: Tensor, rope_length: int = 0) -> None:
        """Hold positions ``[1, T]``, and the length of text whose RoPE factors turn them."""
        self._positions, self._rope_length = positions, rope_length

    def __enter__(self) -> None:
        """Make this the forward of this thread."""
        _current.positions, _current.rope_length = self._positions, self._rope_length

    def __exit__(self, *error: object) -> None:
        """Leave the forward."""
        _current.positions, _current.rope_length = None, 0


def current_positions() -> Tensor | None:
    """Return the positions ``[1, T]`` of this thread's forward; None: nobody has said them."""
    return getattr(_current, "positions", None)


def current_rope_length() -> int:
    """Return whose factors turn positions: those of a text of so many; 0: of a short one."""
    return getattr(_current, "rope_length", 0)
