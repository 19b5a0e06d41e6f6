"""Spaces of one index: the same tokens in two of them are different tokens for it."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np

from kvcellar.history import History
from kvcellar.space import SHARED, Space
from kvcellar.types import IntArray

_TOKEN_BITS = 32
"""Bits of a token's id; a part of its space's digest stands above them."""

_PARTS = 4
"""Tokens over which a digest is spread, of 31 bits each."""


def key_of(tokens: History | IntArray, space: Space) -> IntArray:
    """Return what an index is to know tokens of a space by: in the shared one, themselves.

    No two spaces are known to have the same keys from the fourth token on: 124 bits of a digest
    stand in four tokens, and no table of the spaces that clients make up is kept.
    """
    ids: IntArray = np.asarray(tokens)
    if space == SHARED:
        return ids
    parts = np.resize(_parts(space), len(ids))
    return ids.astype(np.int64) ^ (parts << _TOKEN_BITS)  # pictures have bits there, too


@lru_cache(maxsize=256)
def _parts(space: Space) -> IntArray:
    digest = blake2b("\0".join(space).encode(), digest_size=4 * _PARTS, person=b"space").digest()
    return np.frombuffer(digest, dtype="<u4").astype(np.int64) & 0x7FFFFFFF
