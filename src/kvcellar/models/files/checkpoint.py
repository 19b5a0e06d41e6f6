"""A checkpoint on disk, looked at before it is loaded: all of it must be there, and be whole.

Only headers are read, so a folder of 100 GB takes milliseconds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvcellar.errors import ConfigError, ModelError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES
from kvcellar.models.gguf.configs import config_of
from kvcellar.models.gguf.reader import read_gguf

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors format allows."""

_TYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of a number, by the format's names of types."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of the checkpoint.

    Raises:
        ModelError: it cannot be read, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} cannot be read as JSON ({error}); copy the file again from its source"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__} where an object is expected")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Read the checkpoint's ``config.json``, or make it of the metadata of a GGUF file.

    Raises:
        ModelError: there is none, it is not JSON, or not of a model that is read here.
    """
    if folder.is_file():
        return config_of(read_gguf(folder))
    path = folder / "config.json"
    if not path.is_file():
        there = sorted(p.name for p in folder.iterdir())
        shown = ", ".join(there[:6]) + (", ..." if len(there) > 6 else "")
        raise ModelError(
            f"{folder} has no config.json, so it is not a Hugging Face checkpoint; it holds "
            f"{shown or 'nothing'}; give the folder that the model was saved to"
        )
    return read_json(path)


def check_tokenizer_files(folder: Path) -> None:
    """Make sure that there is a tokenizer to load.

    Raises:
        ModelError: there is none.
    """
    if folder.is_file():
        return  # the one of a GGUF file is looked at when it is read
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelError(
            f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}); copy the tokenizer's files "
            f"from where the model came from"
        )


def check_weights(folder: Path) -> Counter[str]:
    """Make sure that every file of the weights is there and whole.

    Returns:
        How many tensors are stored in which type, by the format's names (``F32``, ``BF16`` ...).
        Of a GGUF file these are its matrices; those in blocks count as the type they are made.

    Raises:
        ModelError: no safetensors, a missing or truncated file, or a tensor that the index names
            and its file lacks.
    """
    if folder.is_file():
        kinds = [one.type_name for one in read_gguf(folder).tensors.values() if len(one.shape) > 1]
        return Counter(kind if kind in _STORED else "BF16" for kind in kinds)
    if (folder / _SINGLE).is_file():
        return Counter(tensor["dtype"] for tensor in read_header(folder / _SINGLE).values())
    if not (folder / _INDEX).is_file():
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        raise ModelError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}"
            + (
                f"; {pickles[0]} is a pickle, which could run code and is not loaded; convert the "
                f"weights to safetensors"
                if pickles
                else "; copy the weights from where the model came from"
            )
        )
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / _INDEX} has no weight_map; copy the file again")
    strange = [name for name in weight_map.values() if not _is_file_name(name)]
    if strange:
        raise ModelError(
            f"{folder / _INDEX} names {str(strange[0])[:80]!r}, which is no file beside it; copy "
            f"the file again"
        )
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files that its index names: "
            f"{few(missing)}; the checkpoint is half copied, copy it again"
        )
    dtypes: Counter[str] = Counter()
    for name in shards:
        tensors = read_header(folder / name)
        lost = [key for key, shard in weight_map.items() if shard == name and key not in tensors]
        if lost:
            raise ModelError(
                f"{folder / name} lacks {len(lost)} tensors that the index says it has: "
                f"{few(lost)}; index and files are not of one checkpoint, copy it again"
            )
        dtypes.update(tensor["dtype"] for tensor in tensors.values())
    return dtypes


def stored_bytes(folder: Path, skip: tuple[str, ...] = ()) -> int | None:
    """Bytes of all tensors of the weights; None where there are no weights in the folder.

    Args:
        folder: the checkpoint.
        skip: beginnings of names of tensors that do not count.

    Raises:
        ModelError: as ``check_weights`` does, where there are some.
    """
    if folder.is_file():
        return sum(one.n_bytes for one in read_gguf(folder).tensors.values())
    if not any(folder.glob("*.safetensors")):
        return None
    return sum(
        int(tensor["data_offsets"][1]) - int(tensor["data_offsets"][0])
        for tensor in _all_tensors(folder, skip).values()
    )


def stored_numbers(folder: Path, skip: tuple[str, ...] = (), group_size: int = 1) -> dict[str, int]:
    """Return how many numbers each tensor of the weights stands for.

    Args:
        folder: the checkpoint.
        skip: as above.
        group_size: numbers that share a scale, where tensors are quantised for MLX.

    Raises:
        ModelError: as above, or there are no weights.
    """
    tensors = _all_tensors(folder, skip)
    n_scales = {
        key.removesuffix(".scales"): math.prod(tensor["shape"])
        for key, tensor in tensors.items()
        if key.endswith(".scales")
    }
    beside = {base + end for base in n_scales for end in (".scales", ".biases")}
    return {
        key: n_scales[base] * group_size
        if (base := key.removesuffix(".weight")) in n_scales
        else math.prod(tensor["shape"])
        for key, tensor in tensors.items()
        if key not in beside
    }


def pick_dtype(dtype: Any, raw: Mapping[str, Any], stored: Counter[str], *, is_cpu: bool) -> str:
    """Return the type that weights are loaded in, by name; ``LoadOptions`` says by which rules.

    Args:
        dtype: what the caller asked for.
        raw: the checkpoint's ``config.json``.
        stored: tensors by stored type.
        is_cpu: whether they are for torch's CPU.

    Raises:
        ConfigError: a dtype that does not exist.
    """
    if dtype is None or dtype == "auto":
        text = raw.get("text_config") or {}
        names = [source.get(key) for source in (raw, text) for key in ("dtype", "torch_dtype")]
        names += [_STORED[name] for name, _ in stored.most_common() if name in _STORED]
        name = next((n for n in names if n in FLOAT_KV_DTYPES), "float32")
        return "bfloat16" if name == "float16" and is_cpu else name
    name = str(dtype).removeprefix("torch.")
    if name not in FLOAT_KV_DTYPES:
        known = ", ".join(FLOAT_KV_DTYPES)
        raise ConfigError(f"dtype {name!r} is not known; choose one of {known}")
    return name


class TensorPlace(NamedTuple):
    """Place of a tensor in a checkpoint, and what its header says.

    Attributes:
        file: name of the file beside the config.
        dtype: its type, by the format's name.
        shape: its axes.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]


def tensor_places(folder: Path) -> dict[str, TensorPlace]:
    """Return where each tensor of a checkpoint is.

    Raises:
        ModelError: a file is damaged.
    """
    return {
        key: TensorPlace(name, tensor["dtype"], tuple(tensor["shape"]))
        for name in _files(folder)
        for key, tensor in read_header(folder / name).items()
    }


def _files(folder: Path) -> list[str]:
    """Return the names of the files of weights."""
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    return sorted(set(read_json(folder / _INDEX)["weight_map"].values()))


def _all_tensors(folder: Path, skip: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    check_weights(folder)
    return {
        key: tensor
        for name in _files(folder)
        for key, tensor in read_header(folder / name).items()
        if not key.startswith(skip)
    }


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Read the header of a safetensors file whose size is what the header says.

    Returns:
        By the name of each tensor its ``dtype``, ``shape`` and ``data_offsets``.

    Raises:
        ModelError: it is no such file, or is damaged or truncated.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":  # the first words of a Git LFS pointer
            raise ModelError(
                f"{path} is a Git LFS pointer and not the weights; run 'git lfs pull' where it "
                f"came from, or download the file"
            )
        if len(start) < 8 or length > MAX_HEADER_BYTES:
            raise ModelError(f"{path} is not a safetensors file; copy it again from its source")
        raw = file.read(length)
    if len(raw) == length:
        try:
            header = json.loads(raw)
            header.pop("__metadata__", None)
            want_bytes = 8 + length + max(map(_end_of, header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"{path} has a damaged header ({error}); copy it again from its source"
            ) from error
    else:
        want_bytes = 8 + length
    if size_bytes < want_bytes:
        raise ModelError(
            f"{path} is truncated: {size_bytes} bytes of at least {want_bytes}; the checkpoint is "
            f"half copied, copy it again"
        )
    tensors: dict[str, dict[str, Any]] = header
    return tensors


def _end_of(tensor: Any) -> int:
    """Return where a tensor ends behind the header, in bytes.

    Raises:
        ValueError, TypeError, KeyError: what the header says of it cannot be.
    """
    dtype, shape, (start, stop) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    if dtype not in _TYPE_BITS:
        raise ValueError(f"a tensor of type {str(dtype)[:40]!r}, which is no type of safetensors")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError("a shape or place that is not in whole numbers")
    if 8 * (stop - start) != math.prod(shape) * _TYPE_BITS[dtype]:
        raise ValueError(f"{stop - start} bytes for {shape} numbers of type {dtype}")
    return int(stop)


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & {*name}


def few(names: list[str]) -> str:
    """Names for an error message: all of three, the first of many."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
