"""Tensors of a checkpoint, mapped, by the names of a plan: safetensors and GGUF files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.reference.pools import from_bfloat16_bits
from kvcellar.errors import ModelError
from kvcellar.models.files.checkpoint import TensorPlace, read_header, tensor_places
from kvcellar.models.gguf.families import FAMILIES, TILED
from kvcellar.models.gguf.names import stored_name
from kvcellar.models.gguf.reader import GgufFile, GgufTensor, read_gguf
from kvcellar.models.plans.plan import LatentPlan, ModelPlan, NormPlan
from kvcellar.models.weights import GROUP
from kvcellar.types import IntArray

Array = NDArray[Any]

TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Types of safetensors that are read, and of the arrays that hold them; bfloat16 as its bits."""

OLDER_NAMES = (
    (".mlp.", ".block_sparse_moe."),
    (".router.weight", ".router.layer.weight"),
    (".gate.e_score_correction_bias", ".e_score_correction_bias"),
    (".input_layernorm.", ".attention_layer_norm."),
    (".post_attention_layernorm.", ".feedforward_layer_norm."),
)
"""Parts of names of transformers, and what checkpoints have in their place."""

_OF_WRAPPERS = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Beginnings of names in files of multimodal models, and in a plan of their text."""

_NORMS = {
    "glm4": {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
}
"""Architecture of GGUF -> its norms around parts of a layer, and what others call those places."""

_GATE_UP = "gate_up_proj"

_PACKED = {_GATE_UP: "input_linear.weight", "down_proj": "output_linear.weight"}
"""Parameters of all experts -> tensors of a mixture's block that are the same."""

_EACH = {
    _GATE_UP: (("gate_proj.weight", "up_proj.weight"), ("w1.weight", "w3.weight")),
    "down_proj": (("down_proj.weight",), ("w2.weight",)),
}
"""Parameters of all experts -> tensors of each that they are made of, in one way or another."""

_IN_GGUF = {
    _GATE_UP: (("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_up_exps",)),
    "down_proj": (("ffn_down_exps",),),
}
"""Parameters of all experts -> tensors of a layer in a GGUF file that they are made of."""


_JOINED = {
    "shared_mlp.input_linear.weight": (("ffn_gate", "ffn_up"), ("ffn_gate_shexp", "ffn_up_shexp"))
}
"""Ends of names of matrices -> tensors of a layer in a GGUF file that they are made of."""

_CONVOLUTION = ".conv1d.weight"
"""End of the name of a convolution's weight, which may be there in three: of q, of k and of v."""

_EXPANDS = ".self_attn.kv_b_proj.weight"
"""End of the name of a matrix that expands latents."""

_FLAT = (".mamba.A_log", ".mamba.D", ".mamba.norm.weight")
"""Ends of names of tensors that have one axis, where GGUF files may give them two."""


_TILED = {
    "in_proj_qkv.weight": (True, True),
    "conv1d.weight": (True, True),
    "in_proj_z.weight": (False, True),
    "in_proj_a.weight": (False, False),
    "in_proj_b.weight": (False, False),
    "A_log": (False, False),
    "dt_bias": (False, False),
}
"""Tensors of a delta net -> whether keys come before value heads, and whether those are whole."""


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


class ExpertRows(NamedTuple):
    """A matrix of each expert of a mixture, as a checkpoint stores it.

    Attributes:
        kind: type by the format's name; ``MXFP4``: blocks as GGUF has them.
        n_experts: how many.
        n_out: outputs; of gate and up together gate's come first.
        n_in: inputs.
        of: returns an expert's rows, as of :class:`TensorRows`.
    """

    kind: str
    n_experts: int
    n_out: int
    n_in: int
    of: Callable[[int], Array]


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

    def norm(self, plan: NormPlan) -> NDArray[np.float32]:
        """Read the weight of a norm, what is added to it included; errors as of ``matrix``."""
        ...

    def order_of_inputs(self, name: str) -> IntArray | None:
        """Return which of a plan's inputs each of a matrix's is; None: it has their order."""
        ...

    def expansion(self, plan: LatentPlan) -> tuple[TensorRows, ...]:
        """Map what expands latents; errors as of ``matrix``.

        Returns:
            The matrix ``[n_heads * (plain_dim + v_dim), latent_dim]``; or, where a checkpoint has
            it so, what queries are multiplied by, ``[n_heads * latent_dim, plain_dim]``, and what
            attended latents are, ``[n_heads * v_dim, latent_dim]``.
        """
        ...

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the type and the axes of a tensor, of which nothing is read.

        Raises:
            ModelError: there is none of that name.
        """
        ...

    def experts(self, name: str, *, is_crossed: bool) -> ExpertRows:
        """Map the matrices of a mixture's experts, in whatever form they are.

        Args:
            name: of transformers' parameter, which has all of them.
            is_crossed: true if that has outputs last, gate's and up's by turns.

        Raises:
            ModelError: there are none, or of types that are not read together.
        """
        ...

    def expert_biases(self, name: str, *, is_crossed: bool) -> NDArray[np.float32]:
        """Read the biases of experts, ``[n_experts, n_out]``, as of ``experts``."""
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
        places = tensor_places(folder)
        self._stored = {_of_text(name): name for name in places}
        """Names in the files, by those that a plan of their text has."""
        self._places = {name: places[stored] for name, stored in self._stored.items()}
        self._files: dict[str, tuple[Array, Mapping[str, Any]]] = {}

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return a tensor's type and axes; see :class:`Tensors`."""
        parts = self._parts(name)
        first, *others = [self._place(one) for one in parts or (name,)]
        if not others:
            return first.dtype, first.shape
        n_rows = sum(math.prod(place.shape[:1]) for place in (first, *others))
        return first.dtype, (n_rows, *first.shape[1:])

    def _parts(self, name: str) -> list[str]:
        """Return the tensors that a file may have in place of a convolution's weight."""
        if not name.endswith(_CONVOLUTION) or name in self._places:
            return []
        ways = [name.replace(_CONVOLUTION, f".{one}_{_CONVOLUTION[1:]}") for one in "qkv"]
        return ways if all(one in self._places for one in ways) else []

    def _place(self, name: str) -> TensorPlace:
        place = self._places.get(self._known(name))
        if place is None or place.dtype not in TYPES:
            there = "is not there" if place is None else f"is in {place.dtype}"
            raise ModelError(
                f"{self._folder}: the tensor {name} {there}, and the native backend reads "
                f"{', '.join(TYPES)}; load the model with the backend torch"
            )
        return place

    def _known(self, name: str) -> str:
        """Return the name that a checkpoint has for a tensor, where it has an older one."""
        others = (name.replace(*each) for each in OLDER_NAMES)
        return next((one for one in (name, *others) if one in self._places), name)

    def _numbers(self, name: str) -> tuple[str, Array]:
        parts = self._parts(name)
        if parts:
            (kind, *others), rows = zip(*map(self._numbers, parts), strict=True)
            if {kind, *others} != {kind} or len({one.shape[1:] for one in rows}) > 1:
                raise ModelError(f"{self._folder}: {' and '.join(parts)} do not fit each other")
            return kind, np.concatenate(rows)
        place = self._place(name)
        return place.dtype, self._mapped(self._known(name), place, TYPES[place.dtype])

    def _mapped(self, name: str, place: TensorPlace, kind: Any) -> Array:
        """Map a tensor that is at a place."""
        if place.file not in self._files:
            path = self._folder / place.file
            self._files[place.file] = np.memmap(path, np.uint8, "r"), read_header(path)
        data, header = self._files[place.file]
        length = int.from_bytes(data[:8].tobytes(), "little")
        start, stop = (8 + length + at for at in header[self._stored[name]]["data_offsets"])
        numbers: Array = data[start:stop].view(kind).reshape(place.shape)
        return numbers

    def experts(self, name: str, *, is_crossed: bool) -> ExpertRows:
        """Map matrices: in one tensor, in two of MXFP4, or each by itself; see :class:`Tensors`."""
        within, _, leaf = name.rpartition(".")
        is_by_turns = is_crossed and leaf == _GATE_UP
        if f"{name}_blocks" in self._places:
            return self._shipped(name, is_by_turns)
        packed = f"{within.rpartition('.')[0]}.{_PACKED[leaf]}"
        there = next((one for one in (name, packed) if one in self._places), None)
        if there is not None:
            kind, found = self._numbers(there)
            if found.ndim != 3:
                raise ModelError(f"{self._folder}: {there} has {found.ndim} axes, where experts' 3")
            whole = found.swapaxes(1, 2) if is_crossed else found
            n_experts, n_out, n_in = whole.shape
            return ExpertRows(
                kind, n_experts, n_out, n_in, lambda at: in_order(whole[at], is_by_turns)
            )
        for parts in _EACH[leaf]:
            each = [f"{within}.{{}}.{part}" for part in parts]
            n_experts = 0
            while self._known(each[0].format(n_experts)) in self._places:
                n_experts += 1
            if n_experts:
                return self._by_expert(each, n_experts)
        self._place(name)  # which is not there
        raise AssertionError("a tensor that is there was found above")

    def _by_expert(self, names: Sequence[str], n_experts: int) -> ExpertRows:
        """Map matrices that are tensors of their own; names have a place for the expert's number.

        Raises:
            ModelError: they differ in their types or shapes.
        """
        places = [self._place(one.format(at)) for at in range(n_experts) for one in names]
        if len({(one.dtype, one.shape) for one in places}) > 1 or len(places[0].shape) != 2:
            raise ModelError(
                f"{self._folder}: experts {names[0]} are of several types or shapes, which the "
                f"native backend does not read; load the model with the backend torch"
            )
        n_out, n_in = places[0].shape
        shape = n_experts, len(names) * n_out, n_in

        def of(at: int) -> Array:
            return np.concatenate([self._numbers(one.format(at))[1] for one in names])

        return ExpertRows(places[0].dtype, *shape, of)

    def _shipped(self, name: str, is_by_turns: bool) -> ExpertRows:
        """Map experts in MXFP4, whose numbers and exponents are two tensors of bytes.

        Raises:
            ModelError: they do not fit each other.
        """
        names = f"{name}_blocks", f"{name}_scales"
        there = [place for one in names if (place := self._places.get(one)) is not None]
        shapes = [place.shape for place in there if place.dtype == "U8"]
        if len(shapes) < 2 or len(shapes[1]) != 3 or shapes[0] != (*shapes[1], GROUP // 2):
            raise ModelError(
                f"{self._folder}: {' and '.join(names)} have the shapes {shapes}, which are no "
                f"weights in MXFP4; copy the checkpoint again"
            )
        numbers, exponents = (self._mapped(one, self._places[one], np.uint8) for one in names)
        n_experts, n_out, n_groups = shapes[1]

        def of(at: int) -> Array:
            made = _as_blocks(numbers[at].reshape(n_out, n_groups, -1), exponents[at])
            return in_order(made, is_by_turns)

        return ExpertRows("MXFP4", n_experts, n_out, n_groups * GROUP, of)

    def order_of_inputs(self, name: str) -> IntArray | None:
        """Return None: files have the order of transformers."""
        return None

    def expert_biases(self, name: str, *, is_crossed: bool) -> NDArray[np.float32]:
        """Read biases; see :class:`Tensors`."""
        is_by_turns = is_crossed and name.endswith(f".{_GATE_UP}_bias")
        biases = self.vector(name)
        if biases.ndim != 2:
            raise ModelError(f"{self._folder}: {name} has {biases.ndim} axes, where biases' are 2")
        return np.ascontiguousarray(in_order(biases.T, is_by_turns).T)

    def matrix(self, name: str) -> TensorRows:
        """Map a matrix; see :class:`Tensors`."""
        kind, rows = self._numbers(name)
        return TensorRows(kind, rows, int(rows.shape[-1]))

    def expansion(self, plan: LatentPlan) -> tuple[TensorRows, ...]:
        """Map what expands latents; see :class:`Tensors`."""
        return (self.matrix(plan.expand),)

    def vector(self, name: str) -> NDArray[np.float32]:
        """Read a vector; see :class:`Tensors`."""
        return floats_of(*self._numbers(name))

    def norm(self, plan: NormPlan) -> NDArray[np.float32]:
        """Read the weight of a norm; see :class:`Tensors`."""
        return self.vector(plan.weight) + np.float32(plan.offset)


class GgufTensors:
    """Tensors of a GGUF file, mapped, by the names that transformers has for them."""

    def __init__(self, file: GgufFile, plan: ModelPlan) -> None:
        """Have a file's tensors.

        Raises:
            ModelError: the architecture has forms of its own that are not read here.
        """
        family = FAMILIES.get(file.architecture) or TILED.get(file.architecture)
        heads = list({one.heads for one in plan.layers if one.recurrent is None})
        if family is None or (family.is_turned and len(heads) != 1):
            raise ModelError(
                f"{file.path}: the native backend does not read GGUF files of the architecture "
                f"{file.architecture!r}; load it with the backend torch"
            )
        self._file, self._is_turned = file, family.is_turned
        self._offset = family.norm_offset
        self._norms = _NORMS.get(file.architecture, {})
        of_states = [one.recurrent for one in plan.layers if one.recurrent is not None]
        self._tiled = of_states[0] if of_states and file.architecture in TILED else None
        self._heads = {"attn_q": heads[0][0], "attn_k": heads[0][1]}

    def _tensor(self, name: str) -> tuple[GgufTensor, int]:
        """Return a tensor, and its heads where their rows are stored in pairs that turn, else 0."""
        module = name.split(".")[-2] if "." in name else ""
        usual = name.replace(f".{module}.", f".{self._norms.get(module, module)}.")
        found = stored_name(usual, self._file.tensors)
        tensor = self._file.tensors.get(found)
        if tensor is None:
            raise ModelError(
                f"{self._file.path} lacks the tensor that its plan has as {name}; load the model "
                f"with the backend torch"
            )
        return tensor, self._heads.get(found.split(".")[-2], 0) if self._is_turned else 0

    def _of_experts(self, name: str) -> list[GgufTensor]:
        """Return the tensors of a parameter of experts, whose outputs come one behind the other.

        Raises:
            ModelError: one is not there.
        """
        layer, leaf = name.split(".")[2], name.rpartition(".")[2]
        end = "bias" if leaf.endswith("_bias") else "weight"
        ways = [
            [f"blk.{layer}.{one}.{end}" for one in way]
            for way in _IN_GGUF[leaf.removesuffix("_bias")]
        ]
        there = self._file.tensors
        found = next((way for way in ways if all(one in there for one in way)), None)
        if found is None:
            raise ModelError(
                f"{self._file.path} lacks the tensors {', '.join(ways[0])}, which its plan has as "
                f"{name}; load the model with the backend torch"
            )
        return [there[one] for one in found]

    def experts(self, name: str, *, is_crossed: bool) -> ExpertRows:
        """Map matrices, of which no file has any crossed; see :class:`Tensors`."""
        tensors = self._of_experts(name)
        if any(len(one.shape) != 3 for one in tensors):
            shapes = [list(one.shape) for one in tensors]
            raise ModelError(f"{self._file.path} has {name} in {shapes}, where experts' axes are 3")
        kinds = {(one.type_name, one.shape[0], one.shape[-1]) for one in tensors}
        if len(kinds) > 1:
            raise ModelError(
                f"{self._file.path} has gate and up of {name} in several types, which the native "
                f"backend does not multiply together; load the model with the backend torch"
            )
        ((kind, n_experts, n_in),) = kinds
        stored = [(self._file.stored(one), one.shape[1]) for one in tensors]

        def of(at: int) -> Array:
            rows = np.concatenate([whole[at * n : (at + 1) * n] for whole, n in stored])
            return rows.view(TYPES[kind]).reshape(-1, n_in) if kind in TYPES else rows

        return ExpertRows(kind, n_experts, sum(n for _, n in stored), n_in, of)

    def expert_biases(self, name: str, *, is_crossed: bool) -> NDArray[np.float32]:
        """Read biases; see :class:`Tensors`."""
        return np.concatenate([self._floats(one, name) for one in self._of_experts(name)], axis=1)

    def _joined(self, name: str) -> list[GgufTensor]:
        """Return the tensors that a matrix is made of, where those are several.

        Raises:
            ModelError: they are of several types.
        """
        layer, _, end = name.removeprefix("model.layers.").partition(".")
        there = self._file.tensors
        ways = [[f"blk.{layer}.{one}.weight" for one in way] for way in _JOINED.get(end, ())]
        found = next((way for way in ways if all(one in there for one in way)), [])
        tensors = [there[one] for one in found]
        if len({(one.type_name, one.shape[-1]) for one in tensors}) > 1:
            raise ModelError(
                f"{self._file.path} has {' and '.join(found)} in several types, which the native "
                f"backend does not multiply together; load the model with the backend torch"
            )
        return tensors

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return a tensor's type and axes; see :class:`Tensors`."""
        halves = self._halves(name)
        if halves:
            (n_heads, latent_dim, plain_dim), (_, v_dim, _) = (one.shape for one in halves)
            return halves[0].type_name, (n_heads * (plain_dim + v_dim), latent_dim)
        joined = self._joined(name)
        if joined:
            return joined[0].type_name, (sum(one.shape[0] for one in joined), joined[0].shape[-1])
        tensor, _ = self._tensor(name)
        is_flat = name.endswith(_FLAT)
        return tensor.type_name, (math.prod(tensor.shape),) if is_flat else tensor.shape

    def matrix(self, name: str) -> TensorRows:
        """Map a matrix; see :class:`Tensors`."""
        joined, n_heads = self._joined(name), 0
        if joined:
            tensor = joined[0]
            rows = np.concatenate([self._file.stored(one) for one in joined])
        else:
            tensor, n_heads = self._tensor(name)
            rows = self._file.stored(tensor)
        kind, n_in = tensor.type_name, tensor.shape[-1]
        rows = self._untiled(_by_halves(rows, n_heads), name)
        return TensorRows(kind, _numbers_of(rows, tensor), n_in)

    def vector(self, name: str) -> NDArray[np.float32]:
        """Read a vector; see :class:`Tensors`."""
        tensor, n_heads = self._tensor(name)
        numbers = self._untiled(self._floats(tensor, name), name).reshape(-1)
        numbers = _by_halves(numbers, n_heads)
        return np.log(-numbers) if name.endswith(".A_log") else numbers

    def _halves(self, name: str) -> list[GgufTensor]:
        """Return the two tensors of three axes that a file may have in place of an expansion.

        They are from queries to latents, and from latents to results; empty: it has it whole.
        """
        if not name.endswith(_EXPANDS) or stored_name(name, self._file.tensors) != name:
            return []
        there = [f"blk.{name.split('.')[2]}.{one}.weight" for one in ("attn_k_b", "attn_v_b")]
        found = [one for each in there if (one := self._file.tensors.get(each)) is not None]
        return found if [len(one.shape) for one in found] == [3, 3] else []

    def expansion(self, plan: LatentPlan) -> tuple[TensorRows, ...]:
        """Map what expands latents; see :class:`Tensors`.

        Raises:
            ModelError: halves are of other sizes.
        """
        halves, shape = self._halves(plan.expand), plan.shape
        if not halves:
            return (self.matrix(plan.expand),)
        sizes = (shape.latent_dim, shape.plain_dim), (shape.v_dim, shape.latent_dim)
        wanted = [(shape.n_kv_heads, *each) for each in sizes]
        if [one.shape for one in halves] != wanted:
            raise ModelError(
                f"{self._file.path} has {plan.expand} in halves of the shapes "
                f"{[list(one.shape) for one in halves]}, where {[list(one) for one in wanted]} are "
                f"expected; copy the file again"
            )
        return tuple(
            TensorRows(one.type_name, _numbers_of(self._file.stored(one), one), one.shape[-1])
            for one in halves
        )

    def _untiled(self, rows: Array, name: str) -> Array:
        """Return rows whose value heads come by key heads, of those that files have tiled."""
        end = name.split(".linear_attn.")[-1]
        if self._tiled is None or end not in _TILED:
            return rows
        before, width = _TILED[end]
        n_heads, n_keys, k_dim, v_dim = self._tiled.heads
        start, size = 2 * n_keys * k_dim * before, v_dim if width else 1
        found = np.arange(n_heads * size).reshape(-1, n_keys, size).swapaxes(0, 1).reshape(-1)
        return rows[np.concatenate((np.arange(start), start + found))]

    def order_of_inputs(self, name: str) -> IntArray | None:
        """Return the order of value heads in what comes behind them; see :class:`Tensors`."""
        if self._tiled is None or not name.endswith(".linear_attn.out_proj.weight"):
            return None
        n_heads, n_keys, _, v_dim = self._tiled.heads
        return np.arange(n_heads * v_dim).reshape(n_keys, -1, v_dim).swapaxes(0, 1).reshape(-1)

    def _floats(self, tensor: GgufTensor, name: str) -> NDArray[np.float32]:
        """Read plain numbers.

        Raises:
            ModelError: they are in blocks.
        """
        kind = tensor.type_name
        if kind not in TYPES:
            raise ModelError(f"{self._file.path} has {name} in {kind}, where numbers are expected")
        stored = np.ascontiguousarray(self._file.stored(tensor)).view(TYPES[kind])
        return floats_of(kind, stored.reshape(tensor.shape))

    def norm(self, plan: NormPlan) -> NDArray[np.float32]:
        """Read the weight of a norm, to which the file may have added; see :class:`Tensors`."""
        return self.vector(plan.weight) + np.float32(plan.offset - self._offset)


def _of_text(name: str) -> str:
    """Return what the plan of a multimodal model's text calls a tensor of a file."""
    found = (one for one in _OF_WRAPPERS if name.startswith(one))
    return next((_OF_WRAPPERS[one] + name.removeprefix(one) for one in found), name)


def _numbers_of(rows: Array, tensor: GgufTensor) -> Array:
    """Return rows of bytes as the numbers that they are; those of blocks as they are."""
    kind = TYPES.get(tensor.type_name)
    if kind is None:
        return rows
    return np.ascontiguousarray(rows).view(kind).reshape(-1, tensor.shape[-1])


def in_order(rows: Array, is_by_turns: bool) -> Array:
    """Return rows of gate and then up, where they come by turns; others as they are."""
    return np.concatenate((rows[0::2], rows[1::2])) if is_by_turns else rows


def _as_blocks(numbers: Array, exponents: Array) -> Array:
    """Make blocks of GGUF: an exponent, and numbers 16 apart in one byte.

    Args:
        numbers: bytes ``[n_out, n_groups, 16]``, each of two numbers that follow each other.
        exponents: ``[n_out, n_groups]``.
    """
    each = np.stack((numbers & 15, numbers >> 4), -1).reshape(*exponents.shape, GROUP)
    both = each[..., : GROUP // 2] | each[..., GROUP // 2 :] << 4
    return np.concatenate((exponents[..., None], both), -1).reshape(len(exponents), -1)


def _by_halves(rows: Array, n_heads: int) -> Array:
    """Return rows whose halves turn together, of heads stored in pairs; of 0 heads as they are."""
    if not n_heads:
        return rows
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def floats_of(kind: str, numbers: Array) -> NDArray[np.float32]:
    """Return numbers of a type that is read in float32."""
    return from_bfloat16_bits(numbers) if kind == "BF16" else numbers.astype(np.float32)
