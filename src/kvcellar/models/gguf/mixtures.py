"""Mixtures of experts and hybrids in GGUF: what their metadata says beside that of other models."""

from __future__ import annotations

from dataclasses import replace

from kvcellar.errors import ModelError
from kvcellar.models.gguf.family import SIGMOID, Family, Raw, of_layers, whole_of
from kvcellar.models.gguf.reader import GgufFile, wrong

_USED = {"expert_used_count": "num_experts_per_tok"}
EXPERTS = {
    "expert_count": "num_experts",
    **_USED,
    "expert_feed_forward_length": "moe_intermediate_size",
}
LOCAL = {"expert_count": "num_local_experts", **_USED}
_ROUTED = {**EXPERTS, "expert_count": "n_routed_experts"}
_SCALED = {
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}


def _check_gate(file: GgufFile, known: int, kind: str) -> None:
    """Refuse experts that are chosen in another way than a family chooses.

    Raises:
        ModelError: so they are.
    """
    key = f"{file.architecture}.expert_gating_func"
    found = file.whole(key)
    if found not in (None, 0, known):
        raise ModelError(
            f"{file.path} has {key}={found}, and {kind} of transformers chooses experts by "
            f"{known}; take the model's own safetensors"
        )


def _groups(file: GgufFile, raw: Raw) -> None:
    """Read groups of experts, of which the best are looked into; one group is none."""
    name = file.architecture
    raw["n_group"] = file.whole(f"{name}.expert_group_count") or 1
    raw["topk_group"] = file.whole(f"{name}.expert_group_used_count") or raw["n_group"]


_GROUPS = frozenset(
    ("expert_group_count", "expert_group_used_count", "expert_weights_norm", "expert_gating_func")
)


# GPT-OSS, GLM 4.5, MiniMax, Ernie and Hunyuan ----------------------------------------------------


def _gpt_oss(file: GgufFile, raw: Raw) -> None:
    raw["intermediate_size"] = raw.pop("moe_intermediate_size", raw["intermediate_size"])
    if raw["rope_parameters"]["rope_type"] == "yarn":
        raw["rope_parameters"]["truncate"] = False


GPT_OSS = Family(
    "gpt_oss",
    {
        **LOCAL,
        "expert_feed_forward_length": "moe_intermediate_size",
        "attention.sliding_window": "sliding_window",
    },
    {"attention_bias": True},
    is_crossed=True,
    finish=_gpt_oss,
)


def _glm4_moe(file: GgufFile, raw: Raw) -> None:
    _check_gate(file, SIGMOID, "glm4_moe")
    _groups(file, raw)
    raw["norm_topk_prob"] = file.flag("glm4moe.expert_weights_norm") is not False


GLM4_MOE = Family(
    "glm4_moe",
    {**_ROUTED, **_SCALED},
    biases={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    reads=_GROUPS | {"rope.dimension_sections"},
    finish=_glm4_moe,
)


def _minimax_m2(file: GgufFile, raw: Raw) -> None:
    _check_gate(file, SIGMOID, "minimax_m2")
    raw["intermediate_size"] = raw.pop("moe_intermediate_size", raw["intermediate_size"])
    raw["rotary_dim"] = whole_of(file, "rope.dimension_count")


MINIMAX_M2 = Family(
    "minimax_m2",
    {**LOCAL, "expert_feed_forward_length": "moe_intermediate_size"},
    reads=frozenset(("expert_gating_func",)),
    finish=_minimax_m2,
)


def _ernie_moe(file: GgufFile, raw: Raw) -> None:
    raw["moe_layer_end_index"] = raw["num_hidden_layers"] - 1


ERNIE_MOE = Family(
    "ernie4_5_moe",
    {
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "moe_num_shared_experts",
        "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index",
    },
    biases={"use_bias": "attn_q.bias"},
    finish=_ernie_moe,
)


def _hunyuan_moe(file: GgufFile, raw: Raw) -> None:
    inner = {raw["intermediate_size"], raw.pop("moe_intermediate_size", raw["intermediate_size"])}
    if len(inner) != 1 or file.whole("hunyuan-moe.expert_shared_count") not in (None, 1):
        raise ModelError(
            f"{file.path} has experts of {sorted(inner)} inner numbers, and hunyuan_v1_moe of "
            f"transformers one shared expert as wide as the others; take the model's own "
            f"safetensors"
        )


HUNYUAN_MOE = Family(
    "hunyuan_v1_moe",
    {
        "expert_count": "num_experts",
        "expert_used_count": "moe_topk",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    biases={"attention_bias": "attn_q.bias"},
    reads=frozenset(("expert_shared_count",)),
    finish=_hunyuan_moe,
)


# Latent attention --------------------------------------------------------------------------------


def _deepseek2(file: GgufFile, raw: Raw) -> None:
    """Read latent attention; files that keep it whole say the widths of heads in other keys."""
    name = file.architecture
    rope = raw["head_dim"]
    whole_of(file, "attention.kv_lora_rank")
    whole = file.whole(f"{name}.attention.key_length_mla")
    key = whole or whole_of(file, "attention.key_length")
    value = file.whole(f"{name}.attention.value_length_mla")
    if key <= rope:
        raise wrong(file.path, f"has keys of {key} numbers, of which {rope} are turned")
    is_sigmoid = file.whole(f"{name}.expert_gating_func") == SIGMOID
    raw |= {
        "model_type": "deepseek_v3" if is_sigmoid else "deepseek_v2",
        "num_key_value_heads": raw["num_attention_heads"],
        "q_lora_rank": raw.get("q_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value or whole_of(file, "attention.value_length"),
        "norm_topk_prob": bool(file.flag(f"{name}.expert_weights_norm")),
    }
    if not raw.get("n_routed_experts"):
        raise ModelError(
            f"{file.path} has no experts, and deepseek2 is read here with some; take the model's "
            f"own safetensors"
        )
    _groups(file, raw)
    is_limited = raw["n_group"] > 1
    raw["topk_method"] = "group_limited_greedy" if is_limited else "greedy"


DEEPSEEK2 = Family(
    "deepseek_v3",
    {
        **_ROUTED,
        **_SCALED,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
    },
    reads=_GROUPS
    | {"attention.head_count_kv", "attention.value_length", "rope.scaling.yarn_log_multiplier"},
    head_dim="rope.dimension_count",
    finish=_deepseek2,
)


# Recurrent layers --------------------------------------------------------------------------------


def _qwen3_next(file: GgufFile, raw: Raw) -> None:
    period = file.whole(f"{file.architecture}.full_attention_interval") or 4
    n_heads = whole_of(file, "ssm.time_step_rank")
    raw["linear_value_head_dim"] = whole_of(file, "ssm.inner_size") // n_heads
    raw["rope_parameters"].setdefault("partial_rotary_factor", 1.0)  # what the file says of it
    raw["layer_types"] = [
        "linear_attention" if period < 1 or (at + 1) % period else "full_attention"
        for at in range(raw["num_hidden_layers"])
    ]


_DELTA_NET = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}

QWEN3_NEXT = Family(
    "qwen3_next",
    {**EXPERTS, **_SHARED, **_DELTA_NET},
    {"norm_topk_prob": True, "decoder_sparse_step": 1},
    biases={"attention_bias": "attn_q.bias"},
    norm_offset=1.0,
    finish=_qwen3_next,
)


def _qwen3_5(file: GgufFile, raw: Raw) -> None:
    """Read what Qwen3-Next has as well, and how tokens of images are turned."""
    _qwen3_next(file, raw)
    sections = file.numbers(f"{file.architecture}.rope.dimension_sections") or []
    if sections:
        used = [one for one in sections if one]
        raw["rope_parameters"] |= {"mrope_section": used, "mrope_interleaved": True}


QWEN3_5 = Family(
    "qwen3_5_text",
    _DELTA_NET,
    biases={"attention_bias": "attn_q.bias"},
    reads=frozenset(("rope.dimension_sections",)),
    norm_offset=1.0,
    finish=_qwen3_5,
)

QWEN3_5_MOE = replace(
    QWEN3_5, model_type="qwen3_5_moe_text", fields={**EXPERTS, **_SHARED, **_DELTA_NET}
)


def _lfm2(file: GgufFile, raw: Raw) -> None:
    heads = of_layers(file, "attention.head_count_kv", raw["num_hidden_layers"])
    raw |= {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if n else "conv" for n in heads],
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in file.tensors),
    }


LFM2 = Family(
    "lfm2",
    {"shortconv.l_cache": "conv_L_cache"},
    {"block_auto_adjust_ff_dim": False},
    reads=frozenset(("attention.head_count_kv",)),
    epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
    finish=_lfm2,
)


def _lfm2_moe(file: GgufFile, raw: Raw) -> None:
    _check_gate(file, SIGMOID, "lfm2_moe")
    _lfm2(file, raw)
    raw |= {
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in file.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


LFM2_MOE = Family(
    "lfm2_moe",
    {
        **EXPERTS,
        "leading_dense_block_count": "num_dense_layers",
        "shortconv.l_cache": "conv_L_cache",
    },
    reads=frozenset(("attention.head_count_kv", "expert_gating_func")),
    epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
    finish=_lfm2_moe,
)


def granite_shared(file: GgufFile, raw: Raw) -> None:
    """Read the experts of a Granite that all tokens use; without any it is another family."""
    shared = file.whole(f"{file.architecture}.expert_shared_feed_forward_length")
    if shared:
        raw |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}


GRANITE_HYBRID = frozenset(("attention.head_count_kv", "rope.scaling.finetuned"))


def _mamba(file: GgufFile) -> Raw:
    """Return the sizes of Mamba 2 layers, by the names of most families."""
    n_heads, inner = whole_of(file, "ssm.time_step_rank"), whole_of(file, "ssm.inner_size")
    return {
        "mamba_n_heads": n_heads,
        "mamba_d_head": inner // n_heads,
        "mamba_n_groups": whole_of(file, "ssm.group_count"),
        "mamba_d_state": whole_of(file, "ssm.state_size"),
        "mamba_d_conv": whole_of(file, "ssm.conv_kernel"),
    }


def granite_hybrid(file: GgufFile, raw: Raw) -> None:
    """Read which layers of a Granite are recurrent; those that attend know no positions."""
    heads = of_layers(file, "attention.head_count_kv", raw["num_hidden_layers"])
    shared = file.whole("granitehybrid.expert_shared_feed_forward_length")
    inner = whole_of(file, "ssm.inner_size")
    if inner % raw["hidden_size"]:
        raise wrong(file.path, f"has {inner} inner numbers for {raw['hidden_size']}")
    raw |= _mamba(file) | {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if n else "linear_attention" for n in heads],
        "num_local_experts": raw.get("num_local_experts", 0),
        "shared_intermediate_size": shared or raw["intermediate_size"],
        "mamba_expand": inner // raw["hidden_size"],
        "position_embedding_type": "rope" if file.flag(_FINETUNED) else None,
    }


_FINETUNED = "granitehybrid.rope.scaling.finetuned"


def _falcon_h1(file: GgufFile, raw: Raw) -> None:
    """Read Falcon's layers, whose multipliers are in the weights of a file already."""
    raw |= _mamba(file) | {
        "mamba_d_ssm": whole_of(file, "ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }


FALCON_H1 = Family(
    "falcon_h1",
    fixed=dict.fromkeys(
        (
            "embedding_multiplier",
            "lm_head_multiplier",
            "key_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        ),
        1.0,
    ),
    finish=_falcon_h1,
)


def _nemotron_h(file: GgufFile, raw: Raw) -> None:
    n_layers = raw.pop("num_hidden_layers")
    heads = of_layers(file, "attention.head_count_kv", n_layers)
    inner = of_layers(file, "feed_forward_length", n_layers)
    mlp = "moe" if "n_routed_experts" in raw else "mlp"
    sizes = _mamba(file)
    raw |= {
        "layers_block_type": [
            "attention" if n else mlp if width else "mamba"
            for n, width in zip(heads, inner, strict=True)
        ],
        "num_hidden_layers": n_layers,
        "num_key_value_heads": max(heads),
        "intermediate_size": max(inner),
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
    }
    if mlp == "moe":
        _groups(file, raw)
        raw["norm_topk_prob"] = file.flag("nemotron_h_moe.expert_weights_norm") is not False


_BY_LAYER = frozenset(("attention.head_count_kv", "feed_forward_length"))

NEMOTRON_H = Family(
    "nemotron_h",
    reads=_BY_LAYER,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
    finish=_nemotron_h,
)
NEMOTRON_H_MOE = Family(
    "nemotron_h",
    {
        **_ROUTED,
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    },
    reads=_BY_LAYER | _GROUPS,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
    finish=_nemotron_h,
)
