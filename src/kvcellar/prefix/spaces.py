"""Spaces of one index: the same tokens in two of them are different tokens for it."""

from __future__ import annotations

import numpy as np

from kvcellar.history import History
from kvcellar.space import SHARED, Space
from kvcellar.types import IntArray

_TOKEN_BITS = 32
"""Bits of a token's id; the number of its space stands above them."""


class Spaces:
    """Numbers of spaces, in the order in which they were first met."""

    def __init__(self) -> None:
        """Create the number of the shared space, which is 0."""
        self._numbers: dict[Space, int] = {SHARED: 0}

    def key(self, tokens: History | IntArray, space: Space) -> IntArray:
        """Return what an index is to know tokens of a space by: in the shared one, themselves."""
        ids: IntArray = np.asarray(tokens)
        number = self._numbers.setdefault(space, len(self._numbers))
        return ids if number == 0 else ids.astype(np.int64) + (number << _TOKEN_BITS)
