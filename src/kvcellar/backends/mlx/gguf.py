"""GGUF files in models of mlx-lm: blocks that MLX multiplies as they are, and others made plain.

Tensors get the names and the form that ``mlx_lm.convert`` would have saved them in, so mlx-lm's own
``sanitize`` and its quantised layers do the rest.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from kvcellar.backends.mlx.cache.codecs import FLOAT_DTYPES
from kvcellar.backends.mlx.words import empty_model
from kvcellar.errors import ModelError
from kvcellar.models.files.checkpoint import few
from kvcellar.models.gguf.families import FAMILIES
from kvcellar.models.gguf.family import Family
from kvcellar.models.gguf.reader import GgufFile, GgufTensor, wrong

GROUP = 32
"""Inputs that share a scale and a minimum, in the blocks that are kept."""

_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""Types whose blocks MLX's affine quantisation holds with nothing lost -> bits of a number."""

_HOLDING = ("float16", "float32")
"""Types that hold a file's scales, which are float16, as they are."""

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_AT_A_TIME = 1 << 22
"""Numbers that are made plain at a time."""

_EXPERTS = re.compile(r"^model\.layers\.(\d+)\..*\.(?:switch_mlp|experts)\.(gate|up|down)_proj$")
"""Names of mlx-lm's layers of all experts."""

_UNREAD = re.compile(r"^(rope_freqs|rope_factors_long|rope_factors_short)\.weight$")
"""Tensors that the config was made of."""

Array = np.ndarray[Any, Any]


def pick_dtype(file: GgufFile) -> str:
    """Return the type of plain numbers and of scales that loses least, where none is asked for.

    Scales of blocks are float16, which bfloat16 would round; so it is float16 where blocks are
    kept, and otherwise bfloat16, or what the file's matrices are stored in.
    """
    types: Counter[str] = Counter()
    for one in file.tensors.values():
        types[one.type_name] += math.prod(one.shape) if len(one.shape) > 1 else 0
    if types.keys() & _BITS.keys():
        return "float16"
    return _PLAIN.get(types.most_common(1)[0][0], "bfloat16")


def read_network(
    file: GgufFile, raw: Mapping[str, Any], config: Any, dtype: str
) -> tuple[Any, str]:
    """Make a model of mlx-lm of a GGUF file; return it, and how its matrices are held, for people.

    Args:
        file: the model.
        raw: its config.
        config: the config object of it.
        dtype: type of plain numbers and of scales; with bfloat16 no blocks are kept.

    Raises:
        ModelError: mlx-lm makes no model of the config; an architecture whose tensors the backend
            torch alone reads; or tensors that are missing, or of nothing in the model.
    """
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise ModelError(
            f"{file.path} has the architecture {file.architecture!r}, whose GGUF files are read by "
            f"the backend torch and not by mlx; choose torch, or a checkpoint for MLX"
        )
    network, _ = empty_model(raw, config)
    quantisable = {path for path, one in network.named_modules() if hasattr(one, "to_quantized")}
    weights: dict[str, mx.array] = {}
    kept: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for name, source in _sources(file, network).items():
        tensor, base = file.tensors[source], name.removesuffix(".weight")
        n_heads = _heads_in_pairs(family, name, config)
        parts = _affine(file, tensor, n_heads, dtype) if base in quantisable else None
        if parts is None:
            offset = family.norm_offset if source.endswith("norm.weight") else 0.0
            weights[name] = _plain(file, tensor, n_heads, offset, dtype)
            if len(tensor.shape) > 1:
                made[tensor.type_name] += 1
        else:
            weights |= {f"{base}.{end}": part for end, part in parts.items()}
            kept[tensor.type_name] += 1
    return _filled(file, network, weights), _said(kept, made, dtype)


def _sources(file: GgufFile, network: Any) -> dict[str, str]:
    """Return the names that the parameters of a model have in a file, but that of a tied head.

    Raises:
        ModelError: tensors are missing, of other shapes, or of nothing in the model.
    """
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    n_layers = file.whole(f"{file.architecture}.block_count") or 0
    table: Any = gguf.get_tensor_name_map(known[file.architecture], n_layers)
    found: dict[str, str] = {}
    missing = []
    parameters: Any = tree_flatten(network.parameters())
    for name, one in parameters:
        base, _, end = name.rpartition(".")
        expert = _EXPERTS.match(base)
        stored = f"blk.{expert[1]}.ffn_{expert[2]}_exps" if expert else table.get_name(base)
        source = f"{stored}.{end}"
        tensor = file.tensors.get(source)
        if tensor is not None and len(tensor.shape) == one.ndim:  # others are of convolutions
            _check_shape(file, name, tensor, tuple(one.shape))
            found[name] = source
        elif name != "lm_head.weight":
            missing.append(name)
    others = sorted(
        one for one in file.tensors.keys() - set(found.values()) if not _UNREAD.match(one)
    )
    if missing or others:
        there = f"it has no {few(missing)}" if missing else f"that has no place for {few(others)}"
        raise ModelError(
            f"{file.path} does not fit the {type(network).__module__} of mlx-lm: {there}; choose "
            f"the backend torch, or a checkpoint for MLX"
        )
    return found


def _check_shape(file: GgufFile, name: str, tensor: GgufTensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that does not make a parameter.

    Raises:
        ModelError: so it is.
    """
    if tensor.shape != shape:
        raise wrong(
            file.path,
            f"has {list(tensor.shape)} numbers for {name}, and its metadata wants {list(shape)}",
        )


def _heads_in_pairs(family: Family, name: str, config: Any) -> int | None:
    """Return the heads whose rows lie in pairs and are wanted in halves; None: rows stay."""
    if family.is_turned and ".q_proj." in name:
        return int(config.num_attention_heads)
    if family.is_turned and ".k_proj." in name:
        return int(config.num_key_value_heads)
    return None


def _turned(rows: Array, n_heads: int | None) -> Array:
    """Return rows ``[n, ...]`` of heads whose halves turn together, of rows that turn in pairs."""
    if n_heads is None:
        return rows
    by_pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
    return by_pairs.swapaxes(1, 2).reshape(rows.shape)


def _affine(
    file: GgufFile, tensor: GgufTensor, n_heads: int | None, dtype: str
) -> dict[str, mx.array] | None:
    """Return blocks as MLX's affine quantisation has them; None where something would be lost.

    ``weight`` holds numbers from 0, ``[rows, inputs * bits / 32]``, the first in the lowest bits;
    a weight is ``scales`` times that, plus ``biases``, ``[rows, inputs / 32]``.
    """
    kind = tensor.type_name
    if kind not in _BITS or dtype not in _HOLDING:
        return None
    n_rows, n_groups = math.prod(tensor.shape[:-1]), tensor.shape[-1] // GROUP
    blocks = _turned(file.stored(tensor), n_heads).reshape(n_rows, n_groups, -1)
    start = 4 if kind == "Q4_1" else 2
    halves = np.ascontiguousarray(blocks[..., :start]).view("<f2").astype(dtype)
    scales, numbers = halves[..., 0], blocks[..., start:]
    if kind == "Q4_1":
        minima = halves[..., 1]
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            minima = scales * scales.dtype.type(-8 if kind == "Q4_0" else -128)
    if not np.isfinite(minima).all():  # float16 has no room for 128 times such a scale
        return None
    numbers = numbers ^ 0x80 if kind == "Q8_0" else _in_order(numbers)
    packed = np.ascontiguousarray(numbers).reshape(n_rows, -1).view("<u4")
    parts = {"weight": packed, "scales": scales, "biases": minima}
    return {name: mx.array(one.reshape(*tensor.shape[:-1], -1)) for name, one in parts.items()}


def _in_order(numbers: Array) -> Array:
    """Return 4-bit numbers ``[..., 16]``, two to a byte, of blocks whose high halves come last."""
    low, high = numbers & 15, numbers >> 4
    pairs = [half[..., 0::2] | half[..., 1::2] << 4 for half in (low, high)]
    return np.concatenate(pairs, axis=-1)


def _plain(
    file: GgufFile, tensor: GgufTensor, n_heads: int | None, offset: float, dtype: str
) -> mx.array:
    """Return a tensor's numbers, made of their blocks some rows at a time; less an offset."""
    rows = file.stored(tensor)
    if len(tensor.shape) == 1:
        rows = rows.reshape(tensor.shape[0], -1)
    rows, width = _turned(rows, n_heads), math.prod(tensor.shape) // len(rows)
    kind = gguf.GGMLQuantizationType(tensor.kind)
    step = max(1, _AT_A_TIME // width)
    parts = []
    for start in range(0, len(rows), step):
        with np.errstate(all="ignore"):  # a file may hold infinities
            some = gguf.dequantize(np.array(rows[start : start + step]), kind)
        parts.append(mx.array(some - np.float32(offset)).astype(FLOAT_DTYPES[dtype]))
        mx.eval(parts[-1])  # or all would be there in float32
    return mx.concatenate(parts).reshape(tensor.shape)


def _filled(file: GgufFile, network: Any, weights: dict[str, mx.array]) -> Any:
    """Return a model with its weights, in evaluation mode; its layers multiply kept blocks.

    Raises:
        ModelError: mlx-lm does not take them.
    """
    bits = {}
    for name, scales in weights.items():
        path, _, end = name.rpartition(".")
        if end == "scales":
            n_words = weights[f"{path}.weight"].shape[-1]
            bits[path] = 32 * n_words // (GROUP * scales.shape[-1])
    try:
        own: Any = getattr(network, "sanitize", dict)
        weights = dict(own(weights))
        quantize: Any = nn.quantize  # type: ignore[attr-defined]
        quantize(
            network,
            class_predicate=lambda path, module: (
                {"group_size": GROUP, "bits": bits[path]} if path in bits else False
            ),
        )
        network.eval()
        network.load_weights(list(weights.items()), strict=True)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{file.path} cannot be loaded by mlx-lm: {' '.join(str(error).split())[:300]}; choose "
            f"the backend torch, or a checkpoint for MLX"
        ) from error
    return network


def _said(kept: Counter[str], made: Counter[str], dtype: str) -> str:
    """Say how the matrices are held."""
    said = [f"{kept.total()} matrices stay as they are ({', '.join(kept)})"] if kept else []
    if made.total():
        said.append(f"{made.total()} are made {dtype} ({', '.join(made)})")
    return "; ".join(said)
