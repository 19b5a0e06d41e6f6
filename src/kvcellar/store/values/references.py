"""References: a named history, the blocks that hold its KV, where it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from kvcellar.errors import StoreError
from kvcellar.history import History
from kvcellar.store.values.blocks import ADDRESS_BYTES
from kvcellar.store.values.facts import (
    MOST_INT,
    BadFactError,
    flag,
    number,
    object_of,
    parse_json,
    text,
    whole,
)
from kvcellar.store.values.format import VERSION, DamagedError, FileBytes, Tensor, pack
from kvcellar.types import IntArray

MAX_NAME_BYTES = 512

DROPPED = "dropped/"
"""How the names of histories begin that are kept as long as nobody needs their room."""

SERIAL = "serial"
"""The one fact of a caller's metadata that the store reads; see ``journal``."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Length at which the window groups' state is stored."""

    length: int
    address: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """One published state of a named history.

    Attributes:
        name: any text without control characters, up to 512 bytes of UTF-8.
        fingerprint: of the model whose KV it is.
        layout_json: of the rows; ``RowLayout.as_json``.
        tokens: the whole history, also what no KV is stored of.
        blocks: addresses of the leading blocks that are stored, full ones and then a tail.
        n_stored: tokens that these cover.
        boundaries: the boundary states that are kept, by length ascending; empty without windows.
        parent: name of the history it was forked from; it may be gone by now.
        parent_position: tokens that the two have in common since the fork.
        metadata: JSON of the caller's own.
        is_evicted: its KV was given up to make room; the tokens remain.
        revision: 1 for the first state of the name, one more with each.
        saved_at: seconds since 1970.
    """

    name: str
    fingerprint: str
    layout_json: str
    tokens: History
    blocks: tuple[bytes, ...] = ()
    n_stored: int = 0
    boundaries: tuple[Boundary, ...] = ()
    parent: str | None = None
    parent_position: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_evicted: bool = False
    revision: int = 1
    saved_at: float = 0.0

    @property
    def addresses(self) -> set[bytes]:
        """Addresses that it keeps from being garbage."""
        return {*self.blocks, *(boundary.address for boundary in self.boundaries)}

    @property
    def serial(self) -> int:
        """Number of the caller's state, as its metadata says it; 0 where it says none."""
        value = self.metadata.get(SERIAL)
        return value if type(value) is int and 0 < value <= MOST_INT else 0

    def pack(self, more: Mapping[str, Tensor] | None = None) -> FileBytes:
        """Make the bytes of its file, with more tensors where a tier has something to say.

        Raises:
            StoreError: metadata that is no JSON.
        """
        windows = b"".join(boundary.address for boundary in self.boundaries)
        lengths = [boundary.length for boundary in self.boundaries]
        facts = {
            "name": self.name,
            "n_stored": self.n_stored,
            "parent": self.parent,
            "parent_position": self.parent_position,
            "is_evicted": self.is_evicted,
            "revision": self.revision,
            "saved_at": self.saved_at,
            "is_pinned": False,  # says nothing, but a file of version 1 without it cannot be read
        }
        return pack(
            {
                "tokens": Tensor("I64", self.tokens.tokens),
                "blocks": Tensor("U8", _table(b"".join(self.blocks))),
                "windows": Tensor("U8", _table(windows)),
                "window_lengths": Tensor("I64", np.array(lengths, np.int64)),
                **(more or {}),
            },
            {
                "kind": "reference",
                "version": VERSION,
                "fingerprint": self.fingerprint,
                "layout": self.layout_json,
                "facts": json.dumps(facts),
                "metadata": checked_json(self.metadata),
            },
        )


def unpack_reference(file: FileBytes) -> Reference:
    """Read a verified file as the reference that it is; every fact is checked.

    Raises:
        DamagedError: it is none, or says what cannot be.
    """
    try:
        return _read(file)
    except (KeyError, BadFactError, StoreError) as error:
        said = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedError(f"its facts cannot be read: {said}") from error


def _read(file: FileBytes) -> Reference:
    if file.metadata["kind"] != "reference":
        raise DamagedError(f"it is a {file.metadata['kind'][:40]} and no reference")
    facts = object_of(parse_json(file.metadata["facts"], "facts"), "facts")
    tokens = _integers(file, "tokens", MOST_INT)
    n = len(tokens)
    lengths = _integers(file, "window_lengths", n).tolist()
    windows = _addresses(file, "windows")
    if len(windows) != len(lengths) or lengths != sorted(set(lengths)):
        raise BadFactError("window_lengths have to ascend, one for each window")
    parent, position = facts["parent"], facts["parent_position"]
    return Reference(
        name=checked_name(text(facts["name"], "name")),
        fingerprint=text(file.metadata["fingerprint"], "fingerprint"),
        layout_json=text(file.metadata["layout"], "layout"),
        tokens=History(tokens),
        blocks=_addresses(file, "blocks"),
        n_stored=whole(facts["n_stored"], "n_stored", 0, n),
        boundaries=tuple(map(Boundary, lengths, windows)),
        parent=None if parent is None else checked_name(text(parent, "parent")),
        parent_position=None if position is None else whole(position, "parent_position"),
        metadata=object_of(parse_json(file.metadata["metadata"], "metadata"), "metadata"),
        is_evicted=flag(facts["is_evicted"], "is_evicted"),
        revision=whole(facts["revision"], "revision", 1),
        saved_at=number(facts["saved_at"], "saved_at"),
    )


def _integers(file: FileBytes, name: str, most: int) -> IntArray:
    """Return a tensor ``[n]`` of integers in ``[0, most]``."""
    array = file.tensors[name]
    if array.dtype != np.int64 or array.ndim != 1:
        raise BadFactError(f"{name} have to be a list of integers")
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) <= most:
        raise BadFactError(f"{name} have to lie between 0 and {most}")
    return array


def _addresses(file: FileBytes, name: str) -> tuple[bytes, ...]:
    """Return the rows of a tensor ``[n, ADDRESS_BYTES]`` of bytes."""
    array = file.tensors[name]
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != ADDRESS_BYTES:
        raise BadFactError(f"{name} have to be addresses of {ADDRESS_BYTES} bytes")
    return tuple(row.tobytes() for row in array)


def checked_name(name: str) -> str:
    """Return a name that can be one.

    Raises:
        StoreError: it is empty, too long, or has control characters.
    """
    size = len(name.encode("utf-8", "replace"))
    if not name or size > MAX_NAME_BYTES or not name.isprintable():
        raise StoreError(
            f"{name[:40]!r} ({size} bytes) cannot name a history; choose 1 to {MAX_NAME_BYTES} "
            f"bytes of printable text"
        )
    return name


def checked_json(value: Mapping[str, Any]) -> str:
    """Return metadata as JSON.

    Raises:
        StoreError: it is none.
    """
    try:
        return json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise StoreError(f"metadata has to be JSON ({error}); give numbers, texts, lists") from None


def file_stem(name: str) -> str:
    """Return the name of a reference's file, without its ending; any file system takes it."""
    return blake2b(name.encode("utf-8"), digest_size=16, person=b"kvcellar refer 1").hexdigest()


def _table(addresses: bytes) -> Any:
    return np.frombuffer(addresses, np.uint8).reshape(-1, ADDRESS_BYTES)
