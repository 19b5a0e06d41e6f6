"""Formats in which checkpoints store weights: what is read, and what to take in place of others.

A checkpoint that was made smaller says so in its config, under ``quantization_config``; one of
MLX's says it under ``quantization``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError

MXFP4, FP8, COMPRESSED = "mxfp4", "fp8", "compressed-tensors"
MLX, AWQ, GPTQ = "mlx", "awq", "gptq"

GROUPED = (MLX, AWQ, GPTQ, COMPRESSED)
"""Methods that store numbers of few bits, with scales, and minima or zeros, for some of a row."""

_COMPRESSED_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
)
"""Formats of compressed-tensors that are read."""

_BITS = {MLX: (2, 3, 4, 5, 6, 8), AWQ: (4,), GPTQ: (2, 3, 4, 8)}
"""Bits of a number that are read, by method."""

_PACKINGS = {AWQ: ("gemm",), GPTQ: ("gptq", "gptq_v2")}
"""Orders of numbers in words that are read, by method; the first where a config names none."""

_INSTEAD = (
    "download the same model in bfloat16, in FP8, in GGUF or as compressed-tensors in its place, "
    "and let --weights int4 or int8 make it as small"
)


@dataclass(frozen=True, slots=True)
class Grouping:
    """Bits of a layer's numbers, and how many of a row share a scale.

    Attributes:
        bits: of a number.
        group: numbers of a row that share a scale.
        mode: ``affine``, where they share a minimum too, or ``mxfp4``.
    """

    bits: int
    group: int
    mode: str = "affine"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage of a checkpoint whose weights are not plain numbers.

    Attributes:
        method: ``mxfp4``, ``fp8``, ``compressed-tensors``, ``mlx``, ``awq`` or ``gptq``.
        blocks: rows and columns that share a scale, where the config says so.
        stored_bits: bits of one weight of a layer, the fewest.
        grouping: of MLX's layers that have none of their own.
        groupings: of MLX's other layers, by name.
        zeros_short: what GPTQ's zeros are stored short by: 1, as its first version does, or 0.
    """

    method: str
    blocks: tuple[tuple[int, int], ...] = ()
    stored_bits: int = 8
    grouping: Grouping | None = None
    groupings: Mapping[str, Grouping] = field(default_factory=dict)
    zeros_short: int = 0

    @property
    def said(self) -> str:
        """The format's name for people."""
        names = {MXFP4: "MXFP4", FP8: "FP8", MLX: "MLX", AWQ: "AWQ", GPTQ: "GPTQ"}
        name = names.get(self.method, self.method)
        return f"{name} in {self.stored_bits} bits" if self.method in _BITS else name


def format_of(raw: Mapping[str, Any], folder: Path) -> WeightFormat | None:
    """Return how a checkpoint stores weights, by its ``config.json``; None: as plain numbers.

    Raises:
        ModelError: as no numbers that are read here; the message says what to take in its place.
    """
    said = quantization_of(raw)
    if is_quantised_for_mlx(raw):
        return _for_mlx(raw.get("quantization") or said, folder)
    if not said:
        return None
    method = str(said.get("quant_method", "a way that it does not name"))
    if method == MXFP4:
        return WeightFormat(MXFP4, stored_bits=4)
    if method == FP8:
        block = said.get("weight_block_size")
        return WeightFormat(FP8, (_pair(block, folder),) if block else ())
    if method == COMPRESSED:
        return _compressed(said, folder)
    if method in _PACKINGS:
        return _packed(said, method, folder)
    raise ModelError(
        f"{folder} stores its weights by {method!r}, which only GPUs or other programs read; "
        f"{_INSTEAD}"
    )


def is_quantised_for_mlx(raw: Mapping[str, Any]) -> bool:
    """Return true if a checkpoint's config says that it was quantised by MLX's own functions.

    Raises:
        ModelError: as ``quantization_of``.
    """
    if isinstance(raw.get("quantization"), Mapping):
        return True
    said = quantization_of(raw) or {}
    return "quant_method" not in said and {"bits", "group_size"} <= said.keys()


def is_packed_for_mlx(raw: Mapping[str, Any]) -> bool:
    """Return true if mlx-lm holds weights as a ``quantization_config`` says that they are stored.

    It expands FP8 when it loads it, and says itself which other ways it does not read.
    """
    said = quantization_of(raw)
    return said is not None and said.get("quant_method") != FP8


def quantization_of(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a ``config.json`` says of how weights are stored: of all, or of the text part.

    Raises:
        ModelError: it says it in no object.
    """
    text = raw.get("text_config")
    said = raw.get("quantization_config")
    if not said and isinstance(text, Mapping):
        said = text.get("quantization_config")
    if said and not isinstance(said, Mapping):
        raise ModelError(
            f"the config has quantization_config={said!r}, and it must be an object that says how "
            f"weights are stored; take the model's own config.json"
        )
    return said or None


def without_format(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` without what it says of how weights are stored."""
    plain = {k: v for k, v in raw.items() if k not in ("quantization", "quantization_config")}
    if isinstance(plain.get("text_config"), Mapping):
        plain["text_config"] = without_format(plain["text_config"])
    return plain


def _for_mlx(said: Any, folder: Path) -> WeightFormat:
    """Read what MLX's functions write of how they quantised a checkpoint.

    Raises:
        ModelError: a layer is quantised in a way that is not read here.
    """
    each = {name: own for name, own in said.items() if isinstance(own, Mapping)}
    groupings = {name: _grouping(own, name, folder) for name, own in each.items()}
    main = _grouping(said, "its layers", folder)
    bits = min(one.bits for one in (main, *groupings.values()))
    return WeightFormat(MLX, stored_bits=bits, grouping=main, groupings=groupings)


def _grouping(said: Mapping[str, Any], what: str, folder: Path) -> Grouping:
    """Read how MLX quantised some layers.

    Raises:
        ModelError: in a way that is not read here.
    """
    found = Grouping(said.get("bits", 4), said.get("group_size", 64), said.get("mode", "affine"))
    is_number = type(found.group) is int and found.group > 0 and type(found.bits) is int
    known = {"affine": found.bits in _BITS[MLX], "mxfp4": (found.bits, found.group) == (4, 32)}
    if is_number and known.get(str(found.mode), False):
        return found
    raise ModelError(
        f"{folder} has {what} quantised by MLX in mode {found.mode!r} with {found.bits!r} bits and "
        f"groups of {found.group!r}, which is not read here; load it with the backend mlx, or "
        f"{_INSTEAD}"
    )


def _packed(said: Mapping[str, Any], method: str, folder: Path) -> WeightFormat:
    """Read a config of AWQ or GPTQ.

    Raises:
        ModelError: its numbers are packed in a way that is not read here.
    """
    names = [said.get(key) for key in ("checkpoint_format", "format", "version")]
    packing = next((str(name).lower() for name in names if name), _PACKINGS[method][0])
    bits = said.get("bits", said.get("w_bit", 4))
    if packing not in _PACKINGS[method] or bits not in _BITS[method]:
        raise ModelError(
            f"{folder} stores its weights by {method!r} packed as {packing!r} in {bits!r} bits, "
            f"which is not read here; {_INSTEAD}"
        )
    return WeightFormat(method, stored_bits=bits, zeros_short=int(packing == "gptq"))


def _compressed(said: Mapping[str, Any], folder: Path) -> WeightFormat:
    """Read a config of compressed-tensors.

    Raises:
        ModelError: it has parts that are not read here.
    """
    groups = [group for group in (said.get("config_groups") or {}).values() if group]
    weights = [group["weights"] for group in groups if group.get("weights")]
    formats = {said.get("format"), *(group.get("format") for group in groups)} - {None}
    unknown = sorted(str(each) for each in formats if each not in _COMPRESSED_FORMATS)
    bits = {int(each.get("num_bits", 8)) for each in weights}
    unknown += [f"{each} bits" for each in sorted(bits - {4, 8})]
    if (said.get("sparsity_config") or {}).get("format", "dense") != "dense":
        unknown.append("sparse weights")
    if (said.get("transform_config") or {}).get("config_groups"):
        unknown.append("rotated weights")
    if unknown:
        raise ModelError(
            f"{folder} stores its weights as compressed-tensors with {', '.join(unknown)}, which "
            f"is not read here; {_INSTEAD}"
        )
    blocks = [each["block_structure"] for each in weights if each.get("block_structure")]
    return WeightFormat(COMPRESSED, tuple(_pair(b, folder) for b in blocks), min(bits, default=8))


def _pair(block: Any, folder: Path) -> tuple[int, int]:
    """Return the rows and columns of a block.

    Raises:
        ModelError: it is not two sizes.
    """
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    raise ModelError(f"{folder} has blocks of {block!r} in its quantization_config; check the file")
