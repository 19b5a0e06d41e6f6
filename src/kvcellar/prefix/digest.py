"""Digest of a prefix index: which beginnings of prompts it holds, in a few kilobytes.

Whoever has several indexes on several machines cannot ask each of them about each prompt. A digest
has a hash per chunk of tokens, chained over all before it, so the longest stored prefix of a prompt
is found by its own hashes: to the chunk, and as of the moment at which the digest was made. Tokens
cannot be read from it. A wrong match is possible and harmless: a prompt goes where it is computed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcellar.errors import PrefixError
from kvcellar.prefix.hashed import TOKEN_BYTES, block_digest
from kvcellar.prefix.nodes import PathNode, Tokens, token_array
from kvcellar.prefix.protocol import PrefixIndex
from kvcellar.types import IntArray

CHUNK = 32
"""Tokens per hash: a match is known to so many."""

MOST = 4096
"""Hashes of one digest, of 8 bytes each."""

_FORMAT = 1
_MAGIC = b"kvpd"
_HEAD = struct.Struct("<4sHHQI")


@dataclass(frozen=True, slots=True, eq=False)
class PrefixDigest:
    """Hashes of the chunks that an index holds.

    Attributes:
        chunk: tokens per hash.
        revision: whoever makes digests of one index counts them; the highest is the newest.
        hashes: ``[n]`` uint64, sorted. With a chunk's hash are those of all chunks before it.
    """

    chunk: int
    revision: int
    hashes: NDArray[np.uint64]

    def match(self, tokens: Tokens) -> int:
        """Return how many of a prompt's first tokens the index held, a multiple of the chunk.

        Args:
            tokens: as the index knows them: see ``key_of``.
        """
        wanted = np.array(chunk_hashes(tokens, self.chunk), dtype=np.uint64)
        missing = np.flatnonzero(~np.isin(wanted, self.hashes))
        return self.chunk * int(missing[0] if missing.size else wanted.size)

    def to_bytes(self) -> bytes:
        """Return the digest for sending: a head of 20 bytes, and 8 bytes per hash."""
        head = _HEAD.pack(_MAGIC, _FORMAT, self.chunk, self.revision, self.hashes.size)
        return head + self.hashes.astype("<u8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> PrefixDigest:
        """Read a digest.

        Raises:
            PrefixError: it is none, it is cut off, or another version of the program made it.
        """
        if len(data) < _HEAD.size or data[:4] != _MAGIC:
            raise PrefixError(
                f"{len(data)} bytes are no digest of a prefix index; send a whole one"
            )
        _, made_as, chunk, revision, n = _HEAD.unpack_from(data)
        if made_as != _FORMAT:
            raise PrefixError(
                f"a digest of format {made_as} cannot be read, only {_FORMAT}; run one version of "
                f"kvcellar on all machines"
            )
        if chunk < 1 or len(data) != _HEAD.size + 8 * n:
            raise PrefixError(
                f"a digest of {n} hashes does not fit {len(data)} bytes; send it again"
            )
        hashes = np.frombuffer(data, dtype="<u8", offset=_HEAD.size).astype(np.uint64)
        return cls(chunk, revision, hashes)


def digest_of(
    index: PrefixIndex, *, revision: int = 0, chunk: int = CHUNK, most: int = MOST
) -> PrefixDigest:
    """Make a digest of an index; the index is as it was.

    Where it holds more than fits, what was used last is in the digest, and nothing behind a gap.

    Args:
        index: with tokens as ``key_of`` makes them.
        revision: to be told from older digests by.
        chunk: tokens per hash, 1 to 65535.
        most: hashes at most.
    """
    found: list[int] = []
    for digest in _hashes(index, chunk):
        if len(found) == most:
            break
        found.append(digest)
    return PrefixDigest(chunk, revision, np.unique(np.array(found, dtype=np.uint64)))


def chunk_hashes(tokens: Tokens, chunk: int = CHUNK) -> list[int]:
    """Return a hash for each whole chunk of a prompt, chained over all before it."""
    return list(_chained(None, token_array(tokens), chunk))


def _hashes(index: PrefixIndex, chunk: int) -> Iterator[int]:
    """Yield the hash of each stored chunk, that of the chunk before it earlier."""
    ends: dict[PathNode, tuple[int | None, IntArray]] = {}
    nothing = None, np.empty(0, dtype=np.int64)
    for node in index.by_use():
        assert node.parent is not None
        before, rest = ends.get(node.parent, nothing)
        tokens = np.concatenate([rest, node.ids()])
        chain = _chained(before, tokens, chunk)
        for before in chain:
            yield before
        ends[node] = before, tokens[tokens.size - tokens.size % chunk :]


def _chained(before: int | None, tokens: IntArray, chunk: int) -> Iterator[int]:
    """Yield the hash of each whole chunk of tokens that stand behind a hash."""
    data, size = tokens.astype("<i8").tobytes(), chunk * TOKEN_BYTES
    for at in range(0, len(data) - size + 1, size):
        before = block_digest(before, data[at : at + size])
        yield before
