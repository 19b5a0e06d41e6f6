"""Prefix indexes: from token content to cells. One interface, three indexes.

Imports bookkeeping's words; no bytes and no sequences come in.

An index says which cells hold the KV of tokens that were computed before. It refers to cells and
holds no bytes: the caller retains what ``insert_prefix`` adopted and releases what ``evict`` gave
up, each once. ``RadixIndex`` is the default, ``HashedIndex`` looks up hash-chained blocks, and
``NaiveIndex`` never finds anything. What one holds can be told to other machines, as a digest.

How a sequence uses one: ``match_prefix`` its tokens but the last, ``lock_handle``, share the cells,
compute the rest; ``insert_prefix`` what it has computed as soon as others may want it, lock that
handle and unlock the old one; at its end insert once more, unlock, and let go of its own cells.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.errors import ConfigError
from kvcellar.prefix.digest import PrefixDigest, chunk_hashes, digest_of
from kvcellar.prefix.hashed import HashedIndex
from kvcellar.prefix.naive import NaiveIndex
from kvcellar.prefix.protocol import (
    Evicted,
    Inserted,
    PrefixHandle,
    PrefixIndex,
    PrefixMatch,
    SizeInfo,
)
from kvcellar.prefix.radix import RadixIndex
from kvcellar.prefix.spaces import key_of
from kvcellar.sight import Sight

__all__ = [
    "Evicted",
    "HashedIndex",
    "Inserted",
    "NaiveIndex",
    "PrefixDigest",
    "PrefixHandle",
    "PrefixIndex",
    "PrefixMatch",
    "RadixIndex",
    "SizeInfo",
    "chunk_hashes",
    "digest_of",
    "key_of",
    "make_index",
]


def make_index(kind: str, sights: Sequence[Sight], block_size: int = 1) -> PrefixIndex:
    """Create an empty index.

    Args:
        kind: ``radix``, ``hashed`` or ``naive``.
        sights: per layer group, how much of its history a query sees.
        block_size: tokens that are stored and matched together, as a whole or not at all.

    Raises:
        ConfigError: an unknown kind, or a number below 1.
    """
    if kind == "radix":
        return RadixIndex(sights, block_size)
    if kind == "hashed":
        return HashedIndex(sights, block_size)
    if kind == "naive":
        return NaiveIndex(sights)
    raise ConfigError(f"prefix index {kind!r} is not known; choose radix, hashed or naive")
