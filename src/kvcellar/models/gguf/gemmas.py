"""Gemmas in GGUF: windows in most layers, a RoPE for each kind of layer, heads of two widths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from kvcellar.models.gguf.family import Family, Raw, of_layers, shape_of, whole_of, windows_of
from kvcellar.models.gguf.reader import GgufFile, wrong
from kvcellar.models.gguf.ropes import factors_of, theta_of

_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _scaled_by(n_layers: int) -> Callable[[GgufFile, Raw], None]:
    """Make what reads the scale of a Gemma's attention, which llama.cpp knows by its layers."""

    def finish(file: GgufFile, raw: Raw) -> None:
        is_largest = raw["num_hidden_layers"] == n_layers
        per_head = raw["hidden_size"] // raw["num_attention_heads"]
        raw["query_pre_attn_scalar"] = per_head if is_largest else raw["head_dim"]
        if file.architecture == "gemma3":
            raw["rope_parameters"] = {
                "full_attention": raw["rope_parameters"],
                "sliding_attention": _sliding_rope(file),
            }

    return finish


def _sliding_rope(file: GgufFile) -> Raw:
    theta = theta_of(file, f"{file.architecture}.rope.freq_base_swa", 10_000.0)
    return {"rope_type": "default", "rope_theta": theta}


def _proportional(file: GgufFile, head_dim: int, raw: Mapping[str, Any]) -> Raw:
    """Return Gemma 4's RoPE; its factors say that most of a wide head is not turned at all.

    Raises:
        ModelError: they say something else.
    """
    factors = np.asarray(factors_of(file, "rope_freqs.weight"))
    turned = int((factors == 1.0).sum())
    if not (np.all(factors[:turned] == 1.0) and np.all(factors[turned:] > 1e20)):
        raise wrong(file.path, "has factors in rope_freqs that turn no part of each head alone")
    full = {
        "rope_type": "proportional",
        "rope_theta": theta_of(file, "gemma4.rope.freq_base", 1_000_000.0),
        "partial_rotary_factor": turned / len(factors),
    }
    return {"full_attention": full, "sliding_attention": _sliding_rope(file)}


def _gemma4(file: GgufFile, raw: Raw) -> None:
    n_layers = raw["num_hidden_layers"]
    kinds = windows_of(file, n_layers, 6)
    heads = dict(zip(kinds, of_layers(file, "attention.head_count_kv", n_layers), strict=True))
    widths = set(of_layers(file, "feed_forward_length", n_layers))
    if len(widths) > 2 or max(widths) not in (min(widths), 2 * min(widths)):
        raise wrong(file.path, f"has layers of {sorted(widths)} inner numbers")
    full = kinds.index("full_attention") if "full_attention" in kinds else 0
    raw |= {
        "layer_types": kinds,
        "global_head_dim": raw["head_dim"],
        "head_dim": whole_of(file, "attention.key_length_swa"),
        "num_key_value_heads": heads.get("sliding_attention", max(heads.values())),
        "num_global_key_value_heads": heads.get("full_attention"),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "intermediate_size": min(widths),
        "use_double_wide_mlp": len(widths) == 2,
        "hidden_size_per_layer_input": raw.get("hidden_size_per_layer_input", 0),
        "enable_moe_block": bool(raw.get("num_experts")),
    }
    if raw["hidden_size_per_layer_input"]:
        raw["vocab_size_per_layer_input"] = shape_of(file, "per_layer_token_embd.weight")[0]
    is_uniform = raw["num_global_key_value_heads"] in (None, raw["num_key_value_heads"])
    if not is_uniform and not raw["attention_k_eq_v"]:
        raise wrong(file.path, "has layers of other heads whose values are not their keys")


def _both(file: GgufFile, head_dim: int, raw: Mapping[str, Any]) -> Raw:
    """Return the RoPE of each kind of layer, of which none is scaled."""
    full = {"rope_type": "default", "rope_theta": theta_of(file, "gemma3n.rope.freq_base", 1e6)}
    return {"full_attention": full, "sliding_attention": _sliding_rope(file)}


def _gemma3n(file: GgufFile, raw: Raw) -> None:
    """Read Gemma 3n; how many of a layer's inner numbers are cut off is said in deviations."""
    n_layers = raw["num_hidden_layers"]
    scales = file.numbers("gemma3n.activation_sparsity_scale") or [-math.inf] * n_layers
    if len(scales) < n_layers or any(type(one) is not float or one > 9 for one in scales):
        raise wrong(file.path, f"has {len(scales)} scales of sparsity for {n_layers} layers")
    cut = [0.0 if one < -9 else round(NormalDist().cdf(one), 6) for one in scales[:n_layers]]
    raw |= {
        "layer_types": windows_of(file, n_layers, 5),
        "activation_sparsity_pattern": cut,
        "laurel_rank": shape_of(file, "blk.0.laurel_l.weight")[0],
        "vocab_size_per_layer_input": shape_of(file, "per_layer_token_embd.weight")[0],
    }


_GEMMA4 = frozenset(
    (
        "attention.head_count_kv",
        "attention.value_length",
        "attention.key_length_swa",
        "attention.sliding_window_pattern",
        "feed_forward_length",
    )
)

GEMMA_FAMILIES = {
    "gemma": Family("gemma", norm_offset=1.0),
    "gemma2": Family("gemma2", {**_WINDOW, **_CAPS}, norm_offset=1.0, finish=_scaled_by(46)),
    "gemma3": Family("gemma3_text", {**_WINDOW, **_CAPS}, norm_offset=1.0, finish=_scaled_by(62)),
    "gemma3n": Family(
        "gemma3n_text",
        {
            **_WINDOW,
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "altup.num_inputs": "altup_num_inputs",
            "altup.active_idx": "altup_active_idx",
        },
        reads=frozenset(("attention.sliding_window_pattern",)),
        rope=_both,
        finish=_gemma3n,
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            **_WINDOW,
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        reads=_GEMMA4,
        rope=_proportional,
        finish=_gemma4,
    ),
}
"""Families of Gemmas by architecture of GGUF."""
