"""Layout of a block's rows: NumPy arrays in one canonical order, whatever the backend.

Rows of some tokens are, per layer group, K and V as ``[n_layers, n_kv_heads, n_tok, width]``: the
group's layers in ascending order, then heads, then tokens, then the numbers of a row. A float side
is one array; a quantised side is three, as :mod:`kvcellar.kv_dtype` defines them. States of
recurrent layers after some tokens are, per layer and state, one array of float32 in the shape that
the model's state group says: a convolution's ``[channels, width]`` oldest input first, a recurrent
one as torch's modules of transformers have it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcellar.cache_config import CacheConfig
from kvcellar.errors import ConfigError, ShapeError
from kvcellar.kv_dtype import STORED_TYPES, KvDtype, SideDtype, parse_kv_dtype
from kvcellar.states import StateGroup
from kvcellar.types import IntArray, LayerGroup

BLOCK_TOKENS = 256
"""Tokens of a full block."""

ROOT_HASH = b"kvcellar root  1"
Array = NDArray[Any]


class Side(NamedTuple):
    """K or V of some tokens in the layers of one group.

    Attributes:
        data: ``[n_layers, n_kv_heads, n_tok, dim]`` float32, float16, or uint16 (the bits of
            bfloat16) or uint8 (floats of 8 bits); of a quantised side ``[..., packed_bytes]``
            uint8.
        scales: ``[n_layers, n_kv_heads, n_tok, n_groups]`` float16 of a quantised side, else None.
        biases: as ``scales``.
    """

    data: Array
    scales: Array | None = None
    biases: Array | None = None

    def parts(self) -> Iterator[Array]:
        """Return the arrays that are there."""
        return (part for part in self if part is not None)


class GroupRows(NamedTuple):
    """K and V of some tokens in the layers of one group."""

    k: Side
    v: Side


Rows = tuple[GroupRows, ...]
"""One per full-history group, in the order of the layout's groups."""


class WindowRows(NamedTuple):
    """Rows of one group with a window or chunk at the end of a history.

    Attributes:
        positions: ``[n]`` int64, consecutive, ascending; the last is the history's last.
        rows: K and V of these positions.
    """

    positions: IntArray
    rows: GroupRows


States = tuple[tuple[Array, ...], ...]
"""Per recurrent layer its states after some tokens, float32; empty for models without any."""


class PartSpec(NamedTuple):
    """One array of a side: the end of its name, its type as safetensors calls it, its width."""

    suffix: str
    dtype: str
    width: int


@dataclass(frozen=True)
class RowLayout:
    """The shape and storage type of a model's K, V and states, as files hold them.

    Attributes:
        groups: the model's layer groups with all of their KV heads.
        kv_dtype: how the pool stores K and V: a name that ``kv_dtype.parse_kv_dtype`` reads.
        block_tokens: tokens of a full block.
        state: the states of the model's recurrent layers; None: it has none.
    """

    groups: tuple[LayerGroup, ...]
    kv_dtype: str
    block_tokens: int = BLOCK_TOKENS
    state: StateGroup | None = None

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"a block has at least 1 token, got {self.block_tokens}")
        for group in self.groups:
            for side, dim in ((self.kv.k, group.head_dim), (self.kv.v, group.v_head_dim)):
                side.row_bytes(dim)  # a group size that does not divide the row is refused

    @classmethod
    def from_config(cls, config: CacheConfig, block_tokens: int = BLOCK_TOKENS) -> RowLayout:
        """Return the layout of the model that a cache is for, its storage type included."""
        params = config.params
        return cls(params.groups, config.kv_dtype, block_tokens, params.state)

    @cached_property
    def kv(self) -> KvDtype:
        """``kv_dtype``, read."""
        return parse_kv_dtype(self.kv_dtype)

    @cached_property
    def full_groups(self) -> tuple[int, ...]:
        """Indices of the groups that keep all of the history."""
        return tuple(i for i, group in enumerate(self.groups) if group.is_full)

    @cached_property
    def window_groups(self) -> tuple[int, ...]:
        """Indices of the groups with a window or a chunk, which let go of their past."""
        return tuple(i for i, group in enumerate(self.groups) if not group.is_full)

    @property
    def has_boundaries(self) -> bool:
        """True if a history goes on only from where somebody kept what blocks do not hold."""
        return bool(self.window_groups) or self.state is not None

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states at one position; 0 without recurrent layers."""
        return 0 if self.state is None else self.state.slot_bytes

    def rows_bytes(self, n_tokens: int) -> int:
        """Return the bytes of the rows of so many tokens in the full-history groups."""
        return n_tokens * sum(self.groups[i].cell_bytes(self.kv) for i in self.full_groups)

    @cached_property
    def as_json(self) -> str:
        """The layout as canonical JSON: equal exactly where blocks can be exchanged."""
        value: dict[str, Any] = {
            "block_tokens": self.block_tokens,
            "groups": [
                {
                    "layers": list(group.layers),
                    "n_kv_heads": group.n_kv_heads,
                    "window": group.window,
                    **({} if group.chunk is None else {"chunk": group.chunk}),
                    "k": _side_json(self.kv.k, group.head_dim),
                    "v": _side_json(self.kv.v, group.v_head_dim),
                }
                for group in self.groups
            ],
        }
        if self.state is not None:
            value["states"] = self.state.layers
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    def check_states(self, states: States) -> None:
        """Make sure that states are what the recurrent layers have at one position.

        Raises:
            ShapeError: another number, shape or type than the layout says.
        """
        layers = () if self.state is None else self.state.layers
        want = [[(state.shape, NUMPY["F32"]) for state in layer] for layer in layers]
        got = [[(array.shape, array.dtype) for array in layer] for layer in states]
        if got != want:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(got, want, strict=False))
            at = sum(1 for _ in same)
            came, wanted = (part[at] if at < len(part) else [] for part in (got, want))
            raise ShapeError(
                f"states of recurrent layer {at} come as {_shapes(came)}; the layout has "
                f"{_shapes(wanted)}; give those of one sequence, float32"
            )

    def check_rows(self, index: int, rows: GroupRows, n_tokens: int) -> None:
        """Make sure that rows are what group ``index`` has for so many tokens.

        Raises:
            ShapeError: another shape or type than the layout says.
        """
        group = self.groups[index]
        for name, side, dtype, dim in (
            ("K", rows.k, self.kv.k, group.head_dim),
            ("V", rows.v, self.kv.v, group.v_head_dim),
        ):
            want = [
                ((len(group.layers), group.n_kv_heads, n_tokens, part.width), NUMPY[part.dtype])
                for part in side_parts(dtype, dim)
            ]
            got = [(part.shape, part.dtype) for part in side.parts()]
            if got != want:
                raise ShapeError(
                    f"{name} of layer group {index} ({dtype.name}) comes as {_shapes(got)}; the "
                    f"layout has {_shapes(want)}; give [n_layers, n_kv_heads, n_tok, width], "
                    f"bfloat16 as its bits in uint16, floats of 8 bits as bytes"
                )


NUMPY: dict[str, np.dtype[Any]] = {
    **{one.file: np.dtype(one.array).newbyteorder("<") for one in STORED_TYPES.values()},
    "I64": np.dtype("<i8"),
}
"""The NumPy type in which each safetensors type is held."""


def side_parts(dtype: SideDtype, dim: int) -> tuple[PartSpec, ...]:
    """Return the arrays that a side of this type consists of."""
    if not dtype.is_quantised:
        return (PartSpec("", STORED_TYPES[dtype.name].file, dim),)
    n_groups = dtype.n_groups(dim)
    return (
        PartSpec(".packed", "U8", dtype.packed_bytes(dim)),
        PartSpec(".scales", "F16", n_groups),
        PartSpec(".biases", "F16", n_groups),
    )


def slice_rows(rows: GroupRows, start: int, stop: int) -> GroupRows:
    """Return the rows of tokens ``[start, stop)``: views, no copy."""
    return GroupRows(*(Side(*(p[:, :, start:stop] for p in side.parts())) for side in rows))


def rows_size_bytes(rows: GroupRows) -> int:
    """Return the bytes of the numbers in rows."""
    return sum(part.nbytes for side in rows for part in side.parts())


def states_size_bytes(states: States) -> int:
    """Return the bytes of the numbers in states."""
    return sum(array.nbytes for layer in states for array in layer)


def _side_json(dtype: SideDtype, dim: int) -> dict[str, Any]:
    value: dict[str, Any] = {"dtype": dtype.name, "dim": dim}
    if dtype.is_quantised:
        value |= {"group_size": dtype.group_of(dim), "is_rotated": dtype.is_rotated}
    return value


def _shapes(parts: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in parts) or "none"


_ROPE, _LONG = "\nrope:", "\nlong"
_SALT = "\nsalt:"
"""Between the fingerprint of a model and the salt."""


@dataclass(frozen=True, eq=False)
class ModelKey:
    """Key of the model whose KV it is: blocks are shared exactly where two keys have the same root.

    Such keys are equal, whatever else their layer groups say of how they are attended.

    Attributes:
        fingerprint: of the model, as ``models.fingerprint`` makes it; any text that differs
            wherever the same tokens may give other K and V.
        layout: the shape and storage type of the rows.
    """

    fingerprint: str
    layout: RowLayout

    def salted(self, salt: str) -> ModelKey:
        """Return the key of those who share a salt; of everybody, where it is empty."""
        bare = self.fingerprint.partition(_SALT)[0]
        return replace(self, fingerprint=f"{bare}{_SALT}{salt}" if salt else bare)

    def turning(self, border: int) -> ModelKey:
        """Return the key of a model that turns texts of more tokens than ``border`` otherwise."""
        bare, mark, salt = self.fingerprint.partition(_SALT)
        return replace(self, fingerprint=f"{bare}{_ROPE}{border}{mark}{salt}")

    def for_length(self, n_tokens: int) -> ModelKey:
        """Return the key of rows of texts of so many tokens: of long ones, this one's or another.

        Only of a model whose RoPE says so do long texts have a key of their own.
        """
        bare, mark, salt = self.fingerprint.partition(_SALT)
        border = bare.partition(_ROPE)[2]
        if not border or border.endswith(_LONG) or n_tokens <= int(border):
            return self
        return replace(self, fingerprint=f"{bare}{_LONG}{mark}{salt}")

    def for_any_length(self) -> ModelKey:
        """Return the key by which a model is known, whatever the length of its texts."""
        bare, mark, salt = self.fingerprint.partition(_SALT)
        return replace(self, fingerprint=f"{bare.removesuffix(_LONG)}{mark}{salt}")

    @property
    def salt(self) -> str:
        """Salt of those who share these blocks; empty: everybody may."""
        return self.fingerprint.partition(_SALT)[2]

    @cached_property
    def root(self) -> bytes:
        """16 bytes: the address before the first block of every history of this model."""
        return root_address(self.fingerprint, self.layout.as_json)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelKey) and other.root == self.root

    def __hash__(self) -> int:
        return hash(self.root)


def root_address(fingerprint: str, layout_json: str) -> bytes:
    """Return the root of the model key of which only these texts are known."""
    value = json.dumps([fingerprint, layout_json]).encode()
    return blake2b(value, digest_size=16, person=ROOT_HASH).digest()
