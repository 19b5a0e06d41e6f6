"""Blocks and boundary states: what they are called, how they become files and come back.

Both are immutable. Their address is a hash of the model key's root and every token up to their end,
so equal histories of equal models share them and nothing else does.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvcellar.backends.host_memory import Landing
from kvcellar.errors import StoreError
from kvcellar.history import History
from kvcellar.kv_dtype import KvDtype
from kvcellar.states import StateGroup, StateShape
from kvcellar.store.values.facts import MOST_INT
from kvcellar.store.values.format import (
    VERSION,
    DamagedError,
    FileBytes,
    Tensor,
    pack,
    read_file,
    read_header,
)
from kvcellar.store.values.layout import (
    NUMPY,
    Array,
    GroupRows,
    ModelKey,
    Rows,
    Side,
    States,
    WindowRows,
    rows_size_bytes,
    side_parts,
    states_size_bytes,
)
from kvcellar.store.values.precision import (
    EXACT,
    PRECISIONS,
    from_precision,
    stored_dtype,
    to_precision,
)
from kvcellar.types import IntArray, LayerGroup

ADDRESS_BYTES = 16


class Kind(enum.StrEnum):
    """Kinds of files that an address names.

    BLOCK: K and V of consecutive tokens in the full-history groups.
    BOUNDARY: what a history needs at its end beside blocks: rows of groups with a window or chunk,
        states of recurrent layers. Its files are in ``windows``.
    """

    BLOCK = "block"
    BOUNDARY = "window"


_PERSON = {Kind.BLOCK: b"kvcellar block 1", Kind.BOUNDARY: b"kvcellar windw 1"}


def address_of(kind: Kind, parent: bytes, tokens: IntArray) -> bytes:
    """Hash what lies before, and these tokens, to 16 bytes.

    Args:
        kind: what is named.
        parent: address of the full block before, or the model key's root.
        tokens: the block's tokens; for a boundary state those behind the last full block.
    """
    digest = blake2b(parent, digest_size=ADDRESS_BYTES, person=_PERSON[kind])
    digest.update(tokens.astype("<i8", copy=False).tobytes())
    return digest.digest()


class Link(NamedTuple):
    """One block of a history, by name."""

    address: bytes
    parent: bytes
    start: int
    stop: int


def chain(key: ModelKey, tokens: History) -> Iterator[Link]:
    """Yield the blocks of a history: full ones, then the tail where tokens are left over."""
    parent, size = key.root, key.layout.block_tokens
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        address = address_of(Kind.BLOCK, parent, part)
        yield Link(address, parent, start, start + len(part))
        parent = address


def boundary_link(key: ModelKey, tokens: History) -> Link:
    """Name the boundary state at the end of a history; ``start`` is where its last part begins."""
    size = key.layout.block_tokens
    start = len(tokens) // size * size
    parent = key.root
    for link in chain(key, tokens.prefix(start)):
        parent = link.address
    return Link(address_of(Kind.BOUNDARY, parent, tokens[start:]), parent, start, len(tokens))


@dataclass(frozen=True, slots=True)
class Info:
    """Facts of a block or boundary state, without its rows.

    Attributes:
        kind: block or boundary state.
        address: its name.
        root: of the model key.
        parent: address of the full block before it, or ``root``.
        start: position of its first token; of a boundary state, of the first of ``tokens``.
        tokens: ``[n]`` int64; of a boundary state those behind the last full block.
        first: of a boundary state the shortest length that can be resumed from it; else 0.
        is_exact: whether the rows are those of the pool, bit for bit.
        size_bytes: of the file.
        checksum: of the file; empty for what is no file yet.
    """

    kind: Kind
    address: bytes
    root: bytes
    parent: bytes
    start: int
    tokens: IntArray
    first: int
    is_exact: bool
    size_bytes: int
    checksum: str

    @property
    def stop(self) -> int:
        """One past the position of its last token: of a boundary state, the boundary."""
        return self.start + len(self.tokens)


_HERE = Landing()


@dataclass(frozen=True, slots=True, eq=False)
class Unsealed:
    """A block or boundary state as the cache gave it: not yet the bytes of a file.

    Attributes:
        key: of its model.
        info: facts of it.
        parts: arrays of a block's rows; they are no rows before they have landed.
        window_parts: the same of windows.
        states: of recurrent layers.
        landing: when the arrays are filled, and the piece of memory that they lie in.
    """

    key: ModelKey
    info: Info
    parts: Rows = ()
    window_parts: tuple[WindowRows, ...] = ()
    states: States = ()
    landing: Landing = _HERE

    @property
    def rows(self) -> Rows:
        """The rows of a block, when they are there."""
        self.landing.arrival.wait()
        return self.parts

    @property
    def windows(self) -> tuple[WindowRows, ...]:
        """The rows of windows, when they are there."""
        self.landing.arrival.wait()
        return self.window_parts

    def seal(self, precision: str) -> Sealed:
        """Make the file, with the rows in a tier's precision.

        Rows that are stored as they are stay where they have come to: the file is around them.
        """
        layout = self.key.layout
        have, want = layout.kv, stored_dtype(layout.kv, precision)
        tensors = {"tokens": Tensor("I64", self.info.tokens)}
        if self.info.kind is Kind.BLOCK:
            held = dict(zip(layout.full_groups, self.rows, strict=True))
            positions = np.arange(self.info.start, self.info.stop)
            tensors["positions"] = Tensor("I64", positions)
        else:
            windows = dict(zip(layout.window_groups, self.windows, strict=True))
            held = {i: window.rows for i, window in windows.items()}
            for index, window in windows.items():
                tensors[f"positions.{index}"] = Tensor("I64", window.positions)
            states = itertools.chain(*self.states)
            for name, array in zip(_state_names(layout.state), states, strict=True):
                tensors[name] = Tensor("F32", array)
        for index, rows in held.items():
            group = layout.groups[index]
            tensors |= _tensors(index, group, to_precision(rows, group, have, want), want)
        info = self.info
        metadata = {
            "kind": info.kind.value,
            "version": VERSION,
            "address": info.address.hex(),
            "root": info.root.hex(),
            "parent": info.parent.hex(),
            "start": str(info.start),
            "first": str(info.first),
            "precision": precision if held and want != have else EXACT,
            "fingerprint": self.key.fingerprint,
            "layout": layout.as_json,
        }
        return opened(pack(tensors, metadata, self.landing.memory))

    @property
    def size_bytes(self) -> int:
        """Bytes of its rows in memory."""
        return self.info.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Sealed:
    """A block or boundary state as the bytes of its file."""

    info: Info
    file: FileBytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.file.data.nbytes

    def check_finite(self) -> None:
        """Check that rows and states are numbers, as what a stranger has written need not be.

        Raises:
            DamagedError: one is infinite or none.
        """
        for name, array in self.file.tensors.items():
            if array.dtype.kind == "f":
                is_finite = bool(np.isfinite(array).all())
            elif array.dtype == np.uint16:  # bfloat16: an exponent of ones
                is_finite = not bool(((array & 0x7F80) == 0x7F80).any())
            elif array.dtype == np.uint8 and not name.endswith(".packed"):  # fp8: has no infinity
                is_finite = not bool(((array & 0x7F) == 0x7F).any())
            else:
                continue
            if not is_finite:
                raise DamagedError(f"{name[:40]!r} holds what is no finite number")

    @property
    def precision(self) -> str:
        """Precision in which float rows are held."""
        return self.file.metadata["precision"]

    def rows_for(self, key: ModelKey) -> Rows:
        """Return the rows of a block as the pool of ``key`` stores them; views where exact.

        Raises:
            DamagedError: the file is of another model, or lacks an array.
        """
        return tuple(rows for _, rows in self._groups(key, Kind.BLOCK))

    def windows_for(self, key: ModelKey) -> tuple[WindowRows, ...]:
        """Return the rows of a boundary state, as :meth:`rows_for`."""
        windows = []
        for index, rows in self._groups(key, Kind.BOUNDARY):
            positions = self.file.tensors.get(f"positions.{index}")
            if positions is None or not _follow(positions, self.info.stop):
                raise DamagedError(f"the positions of layer group {index} do not lead to its end")
            windows.append(WindowRows(positions, rows))
        return tuple(windows)

    def states_for(self, key: ModelKey) -> States:
        """Return the states of recurrent layers of a boundary state, which are always exact.

        Raises:
            DamagedError: the file is of another model, or lacks a state, or says that it serves
                other lengths than its end.
        """
        self._check_kind(key, Kind.BOUNDARY)
        group = key.layout.state
        if group is None:
            return ()
        if self.info.first != self.info.stop:
            raise DamagedError("a state serves no length but its own")
        found = iter([self.file.tensors.get(name) for name in _state_names(group)])
        return tuple(tuple(_state(next(found), state) for state in layer) for layer in group.layers)

    def _check_kind(self, key: ModelKey, kind: Kind) -> None:
        if self.info.root != key.root or self.info.kind is not kind:
            raise DamagedError("it belongs to another model, layout or kind")

    def _groups(self, key: ModelKey, kind: Kind) -> Iterator[tuple[int, GroupRows]]:
        self._check_kind(key, kind)
        layout = key.layout
        want, have = layout.kv, stored_dtype(layout.kv, self.precision)
        indices = layout.full_groups if kind is Kind.BLOCK else layout.window_groups
        for index in indices:
            group = layout.groups[index]
            if kind is Kind.BLOCK:
                n = len(self.info.tokens)
            else:
                positions = self.file.tensors.get(f"positions.{index}")
                n = 0 if positions is None else positions.size
            yield index, from_precision(self._group(index, group, have, n), group, have, want)

    def _group(self, index: int, group: LayerGroup, have: KvDtype, n: int) -> GroupRows:
        sides = []
        for name, dtype, dim in (("k", have.k, group.head_dim), ("v", have.v, group.v_head_dim)):
            parts: list[Array] = []
            for part in side_parts(dtype, dim):
                array = self.file.tensors.get(f"{name}.{index}{part.suffix}")
                shape = (len(group.layers), group.n_kv_heads, n, part.width)
                if array is None or (array.shape, array.dtype) != (shape, NUMPY[part.dtype]):
                    raise DamagedError(f"{name} of layer group {index} is not {shape} {part.dtype}")
                parts.append(array)
            sides.append(Side(*parts))
        return GroupRows(*sides)


def unsealed_block(
    key: ModelKey, link: Link, tokens: IntArray, rows: Rows, landing: Landing = _HERE
) -> Unsealed:
    """Make a block of ``tokens``, which are those of ``[link.start, link.stop)``.

    Raises:
        ShapeError: rows that are not what the layout says.
        StoreError: another number of groups.
    """
    indices = key.layout.full_groups
    _check_groups("full-history", len(indices), len(rows))
    for index, group_rows in zip(indices, rows, strict=True):
        key.layout.check_rows(index, group_rows, len(tokens))
    size = tokens.nbytes + sum(map(rows_size_bytes, rows))
    info = Info(
        Kind.BLOCK, link.address, key.root, link.parent, link.start, tokens, 0, True, size, ""
    )
    return Unsealed(key, info, parts=rows, landing=landing)


def unsealed_boundary(
    key: ModelKey,
    link: Link,
    tokens: IntArray,
    windows: Sequence[WindowRows],
    states: States = (),
    landing: Landing = _HERE,
) -> Unsealed:
    """Make the boundary state at ``link.stop``, with the tokens of ``[link.start, link.stop)``.

    Raises:
        ShapeError: rows or states that are not what the layout says.
        StoreError: another number of groups, or positions that do not lead up to the boundary.
    """
    first = _first_resumable(key, link.stop, windows)
    key.layout.check_states(states)
    if states:
        first = link.stop  # they cannot be cut back
    size = tokens.nbytes + sum(w.positions.nbytes + rows_size_bytes(w.rows) for w in windows)
    size += states_size_bytes(states)
    kind, root = Kind.BOUNDARY, key.root
    info = Info(kind, link.address, root, link.parent, link.start, tokens, first, True, size, "")
    return Unsealed(key, info, window_parts=tuple(windows), states=states, landing=landing)


def _first_resumable(key: ModelKey, stop: int, windows: Sequence[WindowRows]) -> int:
    """Return the shortest length that can be resumed from windows that end before ``stop``.

    Raises:
        ShapeError, StoreError: as ``unsealed_boundary``.
    """
    indices = key.layout.window_groups
    _check_groups("sliding-window", len(indices), len(windows))
    first = 0
    for index, window in zip(indices, windows, strict=True):
        if not _follow(window.positions, stop):
            raise StoreError(
                f"a boundary state at {stop} tokens holds consecutive positions up to "
                f"{stop - 1}; layer group {index} brings {_span(window.positions)}"
            )
        key.layout.check_rows(index, window.rows, len(window.positions))
        lowest = int(window.positions[0]) if len(window.positions) else stop
        first = max(first, key.layout.groups[index].sight.first_clear_of(lowest))
    if first > stop:
        raise StoreError(
            f"a boundary state at {stop} tokens could be resumed from {first} on at the "
            f"earliest: it lacks positions that the next token sees; give those of each group"
        )
    return first


def opened(file: FileBytes) -> Sealed:
    """Read a verified file as what its metadata says it is.

    Raises:
        DamagedError: the metadata contradicts itself.
    """
    info = _info(file.metadata, file.tensors.get("tokens"), file.data.nbytes)
    if info.kind is Kind.BLOCK:
        positions = file.tensors.get("positions")
        if positions is None or positions.shape != info.tokens.shape:
            raise DamagedError("a block has one position per token")
        if not _follow(positions, info.stop):
            raise DamagedError("its positions are not those of its place")
    return Sealed(info, file)


def read_sealed(path: Path, address: bytes) -> Sealed:
    """Read and verify the file of an address.

    Raises:
        DamagedError: it is not as it was written, or belongs to another address.
        OSError: it cannot be read.
    """
    sealed = opened(read_file(path))
    if sealed.info.address != address:
        raise DamagedError(f"it is the file of {sealed.info.address.hex()}")
    return sealed


def read_info(path: Path) -> Info:
    """Read what a file says of itself, verified for its address alone.

    Raises:
        DamagedError: its header cannot be read, or contradicts its tokens.
        OSError: it cannot be read.
    """
    metadata, tokens = read_header(path)
    return _info(metadata, tokens, path.stat().st_size)


def _info(metadata: dict[str, str], tokens: IntArray | None, size_bytes: int) -> Info:
    try:
        kind = Kind(metadata["kind"])
        root, parent = bytes.fromhex(metadata["root"]), bytes.fromhex(metadata["parent"])
        start, first = int(metadata["start"]), int(metadata["first"])
        address = bytes.fromhex(metadata["address"])
        checksum = metadata["checksum"].removeprefix("xxh3_128:")
        precision = metadata["precision"]
    except (ValueError, KeyError) as error:
        raise DamagedError(f"its metadata cannot be read ({error})") from error
    if not (0 <= start <= MOST_INT and 0 <= first <= MOST_INT):
        raise DamagedError("its place is none")
    if tokens is None or tokens.dtype != np.int64 or tokens.ndim != 1:
        raise DamagedError("its tokens are no list of integers")
    if address != address_of(kind, parent, tokens):
        raise DamagedError("its address is not that of its tokens")
    if precision not in PRECISIONS:
        raise DamagedError(f"precision {precision!r} is not known")
    if start == 0 and parent != root:
        raise DamagedError("its place is not that of its parent")
    return Info(
        kind,
        address,
        root,
        parent,
        start,
        tokens,
        first,
        precision == EXACT,
        size_bytes,
        checksum,
    )


def _tensors(index: int, group: LayerGroup, rows: GroupRows, kv: KvDtype) -> dict[str, Tensor]:
    out = {}
    sides = zip("kv", rows, (kv.k, kv.v), (group.head_dim, group.v_head_dim), strict=True)
    for name, side, dtype, dim in sides:
        for part, array in zip(side_parts(dtype, dim), side.parts(), strict=True):
            out[f"{name}.{index}{part.suffix}"] = Tensor(part.dtype, array)
    return out


def _state_names(group: StateGroup | None) -> list[str]:
    """Return the tensors of states, in the order of the layers."""
    layers = () if group is None else group.layers
    return [f"state.{i}.{j}" for i, layer in enumerate(layers) for j in range(len(layer))]


def _state(array: Array | None, state: StateShape) -> Array:
    """Return a state as its file has it.

    Raises:
        DamagedError: it is not there, or of another shape or type.
    """
    if array is None or array.shape != state.shape or array.dtype != NUMPY["F32"]:
        raise DamagedError(f"a {state.kind} state is not float32 {list(state.shape)}")
    return array


def _check_groups(what: str, n_want: int, n_got: int) -> None:
    if n_want != n_got:
        raise StoreError(
            f"the layout has {n_want} {what} layer groups, rows of {n_got} came; give one entry "
            f"per such group, in the layout's order"
        )


def _follow(positions: IntArray, stop: int) -> bool:
    """Return true if positions are consecutive and end before ``stop``."""
    n = positions.size
    return n <= stop and bool(np.array_equal(positions, np.arange(stop - n, stop)))


def _span(positions: IntArray) -> str:
    if not len(positions):
        return "none"
    return f"{len(positions)} from {int(positions[0])} to {int(positions[-1])}"
