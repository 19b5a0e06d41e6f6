"""RoPE of GGUF files, by transformers' names.

A file says some of it in metadata and some as tensors of factors. Llama 3's factors follow from
four numbers, of which the file keeps none: the published ones are tried, and must give the factors
that are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvcellar.errors import ModelError
from kvcellar.models.gguf.reader import GgufFile, wrong

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MOST_FACTORS = 1 << 12
_YARN = {
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def theta_of(file: GgufFile, key: str, default: float) -> float:
    """Return the base of RoPE's frequencies that a key says, or the default where it is not there.

    Raises:
        ModelError: it is 0 or less, by which nothing could be turned.
    """
    found = file.number(key)
    if found is not None and found <= 0:
        raise wrong(file.path, f"has {key}={found}")
    return default if found is None else found


def rope_of_file(file: GgufFile, head_dim: int, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a file.

    Args:
        file: the model.
        head_dim: of its keys.
        raw: what is known of its config.

    Raises:
        ModelError: a scaling that is not read, or numbers that cannot be.
    """
    key = f"{file.architecture}.rope"
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": theta_of(file, f"{key}.freq_base", 10_000.0),
    }
    turned = file.whole(f"{key}.dimension_count")
    if turned is not None and turned != head_dim:
        if not 0 < turned < head_dim:
            raise wrong(file.path, f"has {key}.dimension_count={turned} for heads of {head_dim}")
        rope["partial_rotary_factor"] = turned / head_dim
    kind = file.text(f"{key}.scaling.type") or "none"
    factor = file.number(f"{key}.scaling.factor")
    if factor is not None and kind in ("linear", "yarn") and factor <= 0:
        raise wrong(file.path, f"has {key}.scaling.factor={factor}")
    if "rope_factors_long.weight" in file.tensors:
        return rope | _longrope(file, raw)
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3(file, rope["rope_theta"], turned or head_dim)
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor or 1.0}
    if kind == "yarn":
        return rope | _yarn(file, key, factor or 1.0)
    if kind != "none":
        raise ModelError(
            f"{file.path} has {key}.scaling.type={kind[:40]!r}, which is not read here; take the "
            f"model's own safetensors"
        )
    return rope


def _yarn(file: GgufFile, key: str, factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = file.whole(f"{key}.scaling.original_context_length")
    if original is not None:
        found["original_max_position_embeddings"] = original
    for theirs, ours in _YARN.items():
        value = file.number(f"{key}.scaling.{theirs}")
        if value is not None:
            found[ours] = value
    multiplier = file.number(f"{key}.scaling.yarn_log_multiplier")
    if multiplier:
        found |= _mscale(file, multiplier)
    return found


def _mscale(file: GgufFile, multiplier: float) -> dict[str, float]:
    """Return how scores grow with the factor; files of latent attention say a tenth of it.

    Both numbers of a model with latent attention are the same, where they are not 1.
    """
    if f"{file.architecture}.attention.kv_lora_rank" not in file.metadata:
        return {"mscale": 1.0, "mscale_all_dim": multiplier}
    whole = round(10 * multiplier, 6)
    return {"mscale": whole, "mscale_all_dim": whole}


def factors_of(file: GgufFile, name: str) -> list[float]:
    """Return the factors that a file has as a tensor."""
    tensor = file.tensors[name]
    if tensor.type_name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_FACTORS:
        raise wrong(file.path, f"has {list(tensor.shape)} of {tensor.type_name} for {name}")
    found: list[float] = np.array(file.stored(tensor)).view("<f4")[0].tolist()
    if not all(math.isfinite(one) and one > 0 for one in found):
        raise wrong(file.path, f"has factors in {name} that are no numbers above 0")
    return found


def _longrope(file: GgufFile, raw: Mapping[str, Any]) -> dict[str, Any]:
    key = f"{file.architecture}.rope.scaling"
    original = file.whole(f"{key}.original_context_length")
    if original is None or original <= 0 or "rope_factors_short.weight" not in file.tensors:
        raise wrong(file.path, "has factors for long texts alone, and says not what is long")
    found = {
        "rope_type": "longrope",
        "long_factor": factors_of(file, "rope_factors_long.weight"),
        "short_factor": factors_of(file, "rope_factors_short.weight"),
        "original_max_position_embeddings": original,
        "factor": raw["max_position_embeddings"] / original,
    }
    attention = file.number(f"{key}.attn_factor")
    return found if not attention else found | {"attention_factor": attention}


def _llama3(file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    """Return Llama 3's scaling, where its published numbers give the factors of the file.

    Raises:
        ModelError: they do not.
    """
    there = np.asarray(factors_of(file, "rope_freqs.weight"))
    if width != 2 * len(there):
        raise wrong(file.path, f"has {len(there)} factors in rope_freqs for heads of {width}")
    if np.all(there == 1.0):
        return {}
    factor = float(there.max())
    low, high, original = _LLAMA3.values()
    waves = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    part = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    made = 1 / ((1 - part) / factor + part)
    if not np.allclose(made, there, rtol=1e-3):
        raise ModelError(
            f"{file.path} turns positions by factors of its own (rope_freqs), and those of Llama "
            f"3 are read here; take the model's own safetensors"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
