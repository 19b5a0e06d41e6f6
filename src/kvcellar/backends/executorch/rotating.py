"""Rotations by complex numbers, traced as what they are made of: ExecuTorch has no complex numbers.

Some models (DeepSeek V2, Llama 4) turn q and k by a product of complex numbers. While a graph is
traced, torch's functions from and to complex numbers give pairs of real ones, whose product is the
same numbers by four products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvcellar.backends.executorch.replacing import replaced


class Pairs:
    """Complex numbers as their real and imaginary parts."""

    def __init__(self, parts: Tensor) -> None:
        """Hold parts ``[..., 2]``."""
        self.parts = parts

    def __mul__(self, other: Any) -> Pairs:
        """Multiply with pairs, or with a real number."""
        if not isinstance(other, Pairs):
            return Pairs(self.parts * other)
        a, b = self.parts.unbind(-1)
        c, d = other.parts.unbind(-1)
        return Pairs(torch.stack((a * c - b * d, a * d + b * c), -1))

    def __getitem__(self, at: Any) -> Pairs:
        """Index as the complex numbers would be, without an ellipsis."""
        return Pairs(self.parts[at])

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return self.parts.device

    def unsqueeze(self, dim: int) -> Pairs:
        """Add a dimension before one that is counted from the first."""
        return Pairs(self.parts.unsqueeze(dim))

    def to(self, device: torch.device) -> Pairs:
        """Return them on a device."""
        return Pairs(self.parts.to(device))


@contextmanager
def pairs_for_complex() -> Iterator[None]:
    """Let torch's functions from and to complex numbers give and take pairs inside of the block.

    Holds for the whole process meanwhile, since it replaces the functions.
    """

    def polar(length: Tensor, angle: Tensor) -> Pairs:
        return Pairs(torch.stack((length * angle.cos(), length * angle.sin()), -1))

    def parts_of(pairs: Pairs) -> Tensor:
        return pairs.parts

    with (
        replaced(torch, "polar", polar),
        replaced(torch, "view_as_complex", Pairs),
        replaced(torch, "view_as_real", parts_of),
    ):
        yield
