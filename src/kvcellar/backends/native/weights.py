"""Weights of a planned model in NumPy arrays, as the CPU kernel multiplies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.large_pages import CHUNK, LINE, mapped
from kvcellar.backends.reference.pools import from_bfloat16_bits, to_bfloat16_bits
from kvcellar.errors import ModelError
from kvcellar.kernel import attend, blocks, layers
from kvcellar.kernel import linear as products
from kvcellar.models.checkpoint import TensorPlace, read_header, tensor_places
from kvcellar.models.gguf.families import FAMILIES
from kvcellar.models.gguf.reader import GgufFile, GgufTensor, read_gguf
from kvcellar.models.plan import LinearPlan, ModelPlan, NormPlan
from kvcellar.models.weights import BLOCK, FILE, MOST_EXACT_BITS, SHARED, is_fitted
from kvcellar.types import IntArray

Array = NDArray[Any]

_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Types of safetensors that are read, and of the arrays that hold them; bfloat16 as its bits."""

_FITTED_BLOCK, _FITTED_BYTES = 256, 144
"""Numbers of a block of Q4_K, and its bytes in a file."""


class TensorRows(NamedTuple):
    """A tensor as a checkpoint stores it.

    Attributes:
        kind: type by the format's name: ``F32``, ``BF16``, ``Q4_K`` ...
        rows: ``[n_out, n_in]`` numbers, bfloat16 as its bits, or bytes of blocks.
        n_in: numbers of a row.
    """

    kind: str
    rows: Array
    n_in: int

    @property
    def n_out(self) -> int:
        """Number of rows."""
        return int(self.rows.shape[0])


class Tensors(Protocol):
    """Protocol of a checkpoint's tensors, by the names of a plan."""

    def matrix(self, name: str) -> TensorRows:
        """Map a matrix as it is stored.

        Raises:
            ModelError: there is none of that name, or of a type that is not read.
        """
        ...

    def vector(self, name: str) -> NDArray[np.float32]:
        """Read the numbers of a tensor of one axis; errors as of ``matrix``."""
        ...

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the type and the axes of a tensor, of which nothing is read.

        Raises:
            ModelError: there is none of that name.
        """
        ...


def tensors_of(path: Path, plan: ModelPlan) -> Tensors:
    """Open the tensors of a checkpoint: a folder with safetensors, or a GGUF file."""
    return GgufTensors(read_gguf(path), plan) if path.is_file() else FolderTensors(path)


class FolderTensors:
    """Tensors of safetensors files, mapped."""

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            ModelError: a file is damaged.
        """
        self._folder = folder
        self._places = tensor_places(folder)
        self._files: dict[str, tuple[Array, Mapping[str, Any]]] = {}

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return a tensor's type and axes; see :class:`Tensors`."""
        place = self._place(name)
        return place.dtype, place.shape

    def _place(self, name: str) -> TensorPlace:
        place = self._places.get(name)
        if place is None or place.dtype not in _TYPES:
            there = "is not there" if place is None else f"is in {place.dtype}"
            raise ModelError(
                f"{self._folder}: the tensor {name} {there}, and the native backend reads "
                f"{', '.join(_TYPES)}; load the model with the backend torch"
            )
        return place

    def _numbers(self, name: str) -> tuple[str, Array]:
        place = self._place(name)
        if place.file not in self._files:
            path = self._folder / place.file
            self._files[place.file] = np.memmap(path, np.uint8, "r"), read_header(path)
        data, header = self._files[place.file]
        length = int.from_bytes(data[:8].tobytes(), "little")
        start, stop = (8 + length + at for at in header[name]["data_offsets"])
        return place.dtype, data[start:stop].view(_TYPES[place.dtype]).reshape(place.shape)

    def matrix(self, name: str) -> TensorRows:
        """Map a matrix; see :class:`Tensors`."""
        kind, rows = self._numbers(name)
        return TensorRows(kind, rows, int(rows.shape[-1]))

    def vector(self, name: str) -> NDArray[np.float32]:
        """Read a vector; see :class:`Tensors`."""
        return _floats(*self._numbers(name))


class GgufTensors:
    """Tensors of a GGUF file, mapped, by the names that transformers has for them."""

    def __init__(self, file: GgufFile, plan: ModelPlan) -> None:
        """Look names up in the format's own table.

        Raises:
            ModelError: the architecture has forms of its own that are not read here.
        """
        import gguf

        family, heads = FAMILIES.get(file.architecture), {one.heads for one in plan.layers}
        if family is None or family.norm_offset or len(heads) > 1:
            raise ModelError(
                f"{file.path}: the native backend does not read GGUF files of the architecture "
                f"{file.architecture!r}; load it with the backend torch"
            )
        self._file, self._is_turned = file, family.is_turned
        self._heads = {"attn_q": plan.layers[0].heads[0], "attn_k": plan.layers[0].heads[1]}
        known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names = gguf.get_tensor_name_map(known[file.architecture], len(plan.layers))

    def _tensor(self, name: str) -> tuple[GgufTensor, int]:
        """Return a tensor, and its heads where their rows are stored in pairs that turn, else 0."""
        base, _, suffix = name.rpartition(".")
        found = f"{self._names.get_name(base) or base}.{suffix}"
        tensor = self._file.tensors.get(found)
        if tensor is None:
            raise ModelError(
                f"{self._file.path} lacks the tensor {found}, which its plan has as {name}; load "
                f"the model with the backend torch"
            )
        return tensor, self._heads.get(found.split(".")[-2], 0) if self._is_turned else 0

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return a tensor's type and axes; see :class:`Tensors`."""
        tensor, _ = self._tensor(name)
        return tensor.type_name, tensor.shape

    def matrix(self, name: str) -> TensorRows:
        """Map a matrix; see :class:`Tensors`."""
        tensor, n_heads = self._tensor(name)
        kind, n_in = tensor.type_name, tensor.shape[-1]
        rows = _by_halves(self._file.stored(tensor), n_heads)
        if kind in _TYPES:
            rows = np.ascontiguousarray(rows).view(_TYPES[kind]).reshape(-1, n_in)
        return TensorRows(kind, rows, n_in)

    def vector(self, name: str) -> NDArray[np.float32]:
        """Read a vector; see :class:`Tensors`."""
        tensor, n_heads = self._tensor(name)
        kind = tensor.type_name
        if kind not in _TYPES:
            raise ModelError(f"{self._file.path} has {name} in {kind}, where numbers are expected")
        stored = np.ascontiguousarray(self._file.stored(tensor)).view(_TYPES[kind]).reshape(-1)
        return _floats(kind, _by_halves(stored, n_heads))


def _by_halves(rows: Array, n_heads: int) -> Array:
    """Return rows whose halves turn together, of heads stored in pairs; of 0 heads as they are."""
    if not n_heads:
        return rows
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _floats(kind: str, numbers: Array) -> NDArray[np.float32]:
    return from_bfloat16_bits(numbers) if kind == "BF16" else numbers.astype(np.float32)


class Arena:
    """Memory in large pages for arrays that are read whole in every step, one behind the other."""

    def __init__(self) -> None:
        """Create an empty arena."""
        self._rest = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> Array:
        """Return so many bytes of any value, on a cache line's boundary."""
        padded = -(-n_bytes // LINE) * LINE
        if padded > len(self._rest):
            size = max(padded, CHUNK)
            memory, start = mapped(size)
            self._rest = np.frombuffer(memory, np.uint8, count=size, offset=start)
        taken, self._rest = self._rest[:n_bytes], self._rest[padded:]
        return taken

    def copy(self, parts: Sequence[Array]) -> Array:
        """Copy arrays of one type and width, one behind the other."""
        n_rows, first = sum(len(part) for part in parts), parts[0]
        n_bytes = n_rows * first[:1].size * first.itemsize
        out = self.take(n_bytes).view(first.dtype).reshape(n_rows, *first.shape[1:])
        return np.concatenate(parts, out=out)


class Embedding:
    """Rows of tokens, which may be the weights of the head as well."""

    def __init__(
        self, weights: products.LinearWeights, table: Array | None, dtype: attend.Dtype
    ) -> None:
        """Take the rows as the kernel reads them.

        Args:
            weights: a row for each token.
            table: the same as an array in the model's type; None: the kernel unpacks them.
            dtype: type of the model.
        """
        self._weights, self._table, self._dtype = weights, table, dtype

    def layer(self) -> layers.LinearLayer:
        """Return the layer that multiplies with these rows: a head that is tied to them."""
        return layers.LinearLayer(self._weights, 0, [])

    def look_up(self, ids: IntArray, rows: Array) -> None:
        """Write the rows of tokens, which are in the vocabulary, to the first of ``rows``."""
        if self._table is not None:
            np.take(self._table, ids, axis=0, out=rows[: len(ids)])
        else:
            self._weights.gather(ids.ctypes.data, len(ids), self._dtype, rows.ctypes.data)


class WeightHolder:
    """Puts the weights of a model where the kernel reads them.

    Attributes:
        arena: where they lie.
        kept: every array that the kernel has an address of.
    """

    def __init__(self, tensors: Tensors, weights: str, dtype: str) -> None:
        """Choose how weights are held.

        Args:
            tensors: of the checkpoint.
            weights: ``bf16``, ``int8``, ``int4`` or ``file``; see ``LoadOptions``.
            dtype: type of everything else: ``float32`` or ``bfloat16``.
        """
        self.arena = Arena()
        self.kept: list[Array] = []
        self.dtype = attend.Dtype[dtype]
        self._tensors, self._weights = tensors, weights

    def numbers(self, values: NDArray[np.float32]) -> Array:
        """Keep an array in the model's type."""
        is_bf16 = self.dtype == attend.Dtype.bfloat16
        made = to_bfloat16_bits(values) if is_bf16 else np.ascontiguousarray(values)
        self.kept.append(made)
        return made

    def norm(self, plan: NormPlan | None) -> layers.Norm:
        """Describe a norm to the kernel, or none."""
        if plan is None:
            return layers.Norm(0, 0.0)
        return layers.Norm(self.vector(plan.weight).ctypes.data, plan.eps)

    def vector(self, name: str) -> Array:
        """Hold a vector of the checkpoint in the type that is computed in."""
        return self.numbers(self._tensors.vector(name))

    def matrices(
        self, names: Sequence[str], *, is_most_exact: bool
    ) -> list[products.LinearWeights]:
        """Hold matrices of the same inputs; their outputs come one behind the other.

        Args:
            names: of the tensors.
            is_most_exact: true for the head and the embedding, which keep more bits.

        Raises:
            ModelError: one is in a type that is not multiplied so.
        """
        found = [self._tensors.matrix(name) for name in names]
        if self._weights == FILE:
            return [self._blocks(one, name) for one, name in zip(found, names, strict=True)]
        rows = [_plain(one, name) for one, name in zip(found, names, strict=True)]
        n_in = found[0].n_in
        if self._weights == "bf16":
            held = self.arena.copy([_as_bf16(one) for one in rows])
            self.kept.append(held)
            weights = products.LinearWeights(
                products.WeightFormat.bf16, n_in, len(held), held.ctypes.data
            )
            return [weights]
        if is_fitted(self._weights, n_in, is_most_exact):
            return [self._placed("Q4_K", _fitted(one), n_in) for one in rows]
        return [self._packed(_joined(rows), MOST_EXACT_BITS)]

    def linear(self, plan: LinearPlan, *, is_most_exact: bool = False) -> layers.LinearLayer:
        """Hold linear layers of one input; errors as of ``matrices``."""
        first, *more = self.matrices(plan.weights, is_most_exact=is_most_exact)
        bias = 0
        if any(plan.biases):
            parts = [
                np.zeros(self._tensors.matrix(weight).n_out, np.float32)
                if name is None
                else self._tensors.vector(name)
                for name, weight in zip(plan.biases, plan.weights, strict=True)
            ]
            bias = self.numbers(np.concatenate(parts)).ctypes.data
        return layers.LinearLayer(first, bias, more)

    def embedding(self, name: str) -> Embedding:
        """Hold the rows of an embedding; errors as of ``matrices``."""
        (weights,) = self.matrices([name], is_most_exact=True)
        table = self.kept[-1] if self._weights == "bf16" else None
        return Embedding(weights, table, self.dtype)

    def _blocks(self, one: TensorRows, name: str) -> products.LinearWeights:
        if one.kind not in blocks.INPUTS:
            raise ModelError(
                f"the tensor {name} is in {one.kind}, which the kernel does not multiply as it is; "
                f"load the model with the backend torch, or choose --weights int8"
            )
        return self._placed(one.kind, one.rows, one.n_in)

    def _placed(self, kind: str, rows: Array, n_in: int) -> products.LinearWeights:
        rows = np.ascontiguousarray(rows)
        block, n_out = blocks.block_type(kind), len(rows)
        n_stored, n_data, n_beside = blocks.block_sizes(block, n_in, n_out)
        assert rows.nbytes == n_stored, "a file's rows are whole blocks"
        data, beside = self.arena.take(n_data), self.arena.take(n_beside)
        self.kept += data, beside
        to = data.ctypes.data, beside.ctypes.data
        blocks.place_blocks(block, rows.ctypes.data, n_in, n_out, *to)
        return blocks.block_weights(block, n_in, n_out, *to)

    def _packed(self, rows: Array, bits: int) -> products.LinearWeights:
        n_out, n_in = rows.shape
        n_blocks = -(-n_out // BLOCK)
        data = self.arena.take(n_blocks * BLOCK * n_in * bits // 8)
        scales = self.arena.take(2 * n_blocks * -(-n_in // SHARED[bits]) * BLOCK)
        self.kept += data, scales
        kind = products.format_of(bits)
        dtype = attend.Dtype["bfloat16" if rows.dtype == np.uint16 else "float32"]
        to = data.ctypes.data, scales.ctypes.data
        products.pack(rows.ctypes.data, dtype, kind, n_in, n_out, *to)
        return products.LinearWeights(kind, n_in, n_out, *to)


def _plain(one: TensorRows, name: str) -> Array:
    """Return the numbers of a matrix: float32, or bfloat16's bits.

    Raises:
        ModelError: it is in blocks.
    """
    if one.kind not in _TYPES:
        raise ModelError(
            f"the tensor {name} is in {one.kind}, which the native backend multiplies as it is and "
            f"does not pack anew; leave weights out, or load the model with the backend torch"
        )
    return one.rows.astype(np.float32) if one.kind == "F16" else one.rows


def _as_bf16(rows: Array) -> Array:
    return rows if rows.dtype == np.uint16 else to_bfloat16_bits(rows)


def _joined(rows: Sequence[Array]) -> Array:
    """Join matrices, in float32 where their types differ."""
    if len({one.dtype for one in rows}) > 1:
        rows = [from_bfloat16_bits(one) if one.dtype == np.uint16 else one for one in rows]
    return np.ascontiguousarray(rows[0]) if len(rows) == 1 else np.concatenate(rows)


def _fitted(rows: Array) -> Array:
    """Make weights blocks of Q4_K, as :func:`kvcellar.kernel.blocks.fit_q4_k` says."""
    rows = np.ascontiguousarray(rows)
    n_out, n_in = rows.shape
    made = np.empty((n_out, n_in // _FITTED_BLOCK * _FITTED_BYTES), np.uint8)
    dtype = attend.Dtype["bfloat16" if rows.dtype == np.uint16 else "float32"]
    blocks.fit_q4_k(rows.ctypes.data, dtype, n_in, n_out, made.ctypes.data)
    return made
