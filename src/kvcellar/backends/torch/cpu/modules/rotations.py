"""Rotations of queries and keys by position: which numbers of a head turn, and by how much."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcellar.backends.torch.bind.positions import Positions, RopeLength
from kvcellar.backends.torch.cache.kernel import address_of, dtype_of
from kvcellar.kernel import layers as native
from kvcellar.types import IntArray

STRETCH = 256
"""Positions whose rotations are worked out together."""

Sides = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rotation:
    """A way to turn the heads of q and k.

    Attributes:
        n_turned: the first so many numbers of a head turn; 0: none do.
        is_paired: true where neighbours turn against each other, false where halves do.
        layout: how cosines lie: each ``once``, all ``doubled`` (a, b, a, b), or each one
            ``repeated`` (a, a, b, b).
        is_whole: true if the kernel does it: all of a head, by halves, with doubled cosines.
        in_floats: true where products are rounded with their sum alone, not each.
    """

    n_turned: int
    is_paired: bool
    layout: str
    is_whole: bool
    in_floats: bool

    def apply(self, x: Tensor, sides: Sides | None) -> None:
        """Turn ``[1, T, heads, head_dim]`` in place; heads lie one behind the other.

        Args:
            x: q, k or both.
            sides: cosines and sines ``[1, T, numbers]`` as the model makes them.
        """
        if not self.n_turned:
            return
        assert sides is not None, "a rotation has cosines and sines"
        cos, sin = sides
        if self.is_whole and cos.dtype == x.dtype:
            rotate(x, cos, sin)
            return
        cos, sin = self._once(cos), self._once(sin)
        turned = x[..., : self.n_turned]
        if self.in_floats:
            cos, sin = cos.float(), sin.float()
        half = self.n_turned // 2
        if self.is_paired:
            a, b = turned[..., 0::2], turned[..., 1::2]
        else:
            a, b = turned[..., :half], turned[..., half:]
        left, right = a * cos - b * sin, b * cos + a * sin
        a.copy_(left)
        b.copy_(right)

    def _once(self, side: Tensor) -> Tensor:
        """Return ``[1, T, 1, n_turned / 2]`` of one side."""
        if self.layout == "doubled":
            side = side[..., : self.n_turned // 2]
        elif self.layout == "repeated":
            side = side[..., ::2]
        return side[:, :, None]


NO_ROTATION = Rotation(0, False, "once", False, False)
"""q and k as they are projected: positions are told otherwise, or not at all."""


def possible_rotations(sides: Any, head_dim: int) -> Iterator[Rotation]:
    """Yield what a layer may do to heads with what it is given for positions."""
    is_pair = isinstance(sides, tuple) and len(sides) == 2
    if is_pair and all(isinstance(side, Tensor) and side.dim() == 3 for side in sides):
        n = int(sides[0].shape[-1])
        for layout, n_turned in (("doubled", n), ("repeated", n), ("once", 2 * n)):
            if n_turned <= head_dim:
                for is_paired, in_floats in itertools.product((False, True), repeat=2):
                    is_plain = layout == "doubled" and not is_paired and not in_floats
                    is_whole = is_plain and n_turned == head_dim
                    yield Rotation(n_turned, is_paired, layout, is_whole, in_floats)
    yield NO_ROTATION


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate each head by its token's position, in place, halves against each other.

    Args:
        x: ``[1, T, heads, head_dim]``, whose heads lie one behind the other.
        cos: ``[1, T, head_dim]``, in the type of x.
        sin: the same.
    """
    _, n_tokens, n_heads, dim = x.shape
    cos, sin = (side.expand(1, n_tokens, dim).contiguous() for side in (cos, sin))
    native.rotate(
        address_of(x),
        n_tokens,
        n_heads,
        dim,
        x.stride(1),
        dtype_of(x.dtype),
        address_of(cos),
        address_of(sin),
    )


class Rotations:
    """Cosines and sines of positions as the model's own module computes them, and kept."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        """Keep rotations of a rotary embedding, for this type of q and k."""
        self._module = module
        self._like = torch.empty(0, dtype=dtype)
        self._stretches: dict[tuple[int, int], Tensor] = {}

    def of(self, positions: IntArray, rope_length: RopeLength = 0) -> Tensor:
        """Return cosines and sines ``[2, T, head_dim]``; ``rope_length``: whose factors."""
        if isinstance(rope_length, tuple):
            of_each = zip(positions.tolist(), rope_length, strict=True)
            places = [(*divmod(position, STRETCH), length) for position, length in of_each]
            return torch.stack([self._stretch(s, length)[:, at] for s, at, length in places], 1)
        if len(positions) == 1:
            stretch, at = divmod(int(positions[0]), STRETCH)
            return self._stretch(stretch, rope_length)[:, at : at + 1]
        of_all = [divmod(position, STRETCH) for position in positions.tolist()]
        return torch.stack([self._stretch(s, rope_length)[:, at] for s, at in of_all], 1)

    def _stretch(self, stretch: int, rope_length: int) -> Tensor:
        key = stretch, rope_length
        found = self._stretches.get(key)
        if found is None:
            positions = torch.arange(stretch * STRETCH, (stretch + 1) * STRETCH)
            found = self._stretches[key] = self._computed(positions, rope_length)
        return found

    def _computed(self, positions: Tensor, rope_length: int) -> Tensor:
        with torch.inference_mode(), Positions(positions[None], rope_length):
            sides: Sides = self._module(self._like, positions[None])
            return torch.cat(sides).contiguous()
