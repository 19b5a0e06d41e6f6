"""Configs of some dense families, whose fields are not those of others, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcellar.models.plans.ropes import Ropes, one_rope

Raw = Mapping[str, Any]


def as_usual_first_gemma(raw: Raw) -> Raw:
    """Return a config of the first Gemma, whose GELU is that with tanh by either name."""
    act = raw.get("hidden_act")
    return {**raw, "hidden_act": "gelu_pytorch_tanh"} if act == "gelu" else raw


_OF_GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def as_usual_gemma3(raw: Raw) -> Raw:
    """Return a config of Gemma 3 with what its class takes where nothing is said.

    Files of models that read pictures as well say little more of their text than its widths.
    """
    return {**_OF_GEMMA3, **raw}


def as_usual_gemma2(raw: Raw) -> Raw:
    """Return a config of Gemma 2 with the caps that its class takes where nothing is said."""
    return {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **raw}


def as_usual_seed_oss(raw: Raw) -> Raw:
    """Return a config of Seed-OSS with what its class takes where nothing is said."""
    return {"attention_bias": True, **raw}


def as_usual_glm(raw: Raw) -> Raw:
    """Return a config of GLM with what its class takes where nothing is said."""
    return {"attention_bias": True, "partial_rotary_factor": 0.5, **raw}


def as_usual_internlm3(raw: Raw) -> Raw:
    """Return a config of InternLM3 with the fields that others have.

    Raises:
        ValueError: attention has biases and the MLP has not, or the other way round.
    """
    made = dict(raw)
    if made.get("architectures") == ["InternLM3ForCausalLM"]:  # which is a Llama of transformers
        made["architectures"] = ["LlamaForCausalLM"]
    for name, other in (("attention_bias", "qkv_bias"), ("mlp_bias", "bias")):
        made.setdefault(name, made.pop(other, False))
    if made["attention_bias"] != made["mlp_bias"]:
        raise ValueError("no rule for biases of one part alone")
    return made


def as_usual_olmo3(raw: Raw) -> Raw:
    """Return a config of OLMo 3 in which each kind of layers has its rotary positions.

    Older files say one base and how layers that see all are stretched.

    Raises:
        ValueError: it says rotary positions in a third way.
    """
    made = dict(raw)
    if made.get("num_key_value_heads") is None:
        made["num_key_value_heads"] = made["num_attention_heads"]
    given = made.get("rope_parameters")
    if given is None:
        base = {"rope_theta": made.pop("rope_theta", 5e5)}
        made["rope_parameters"] = {
            "sliding_attention": base,
            "full_attention": base | (made.pop("rope_scaling", None) or {}),
        }
    elif not {*given} <= {"sliding_attention", "full_attention"}:
        raise ValueError("no rule for rotary positions of all kinds of layers")
    return made


def rope_but_where_all_is_seen(raw: Raw, head_dim: int) -> Ropes | None:
    """Return rotary positions that layers with a window have, where some have one; else all."""
    found = one_rope(raw, head_dim)
    if found is None or raw.get("sliding_window") is None:
        return found
    return found[0], tuple(0 if one == "sliding_attention" else None for one in raw["layer_types"])


def rope_of_ministral3(raw: Raw, head_dim: int) -> Ropes | None:
    """Return rotary positions of Ministral 3, among whose fields is how queries grow."""
    rope = dict(raw["rope_parameters"])
    for name in ("llama_4_scaling_beta", "max_position_embeddings"):
        rope.pop(name, None)
    return one_rope({**raw, "rope_parameters": rope}, head_dim)
