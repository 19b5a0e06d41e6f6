"""Tiny mixtures of experts and hybrids, and how llama.cpp's converter takes them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import transformers

from tests.models.gguf.case import HEADLESS, Case, added, turned
from tests.models.gguf.dense import OF_YARN, YARN
from tests.models.gguf.writing import SIZES

_USED = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_OF_LATENT = {
    **_USED,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 24,
    "rope.dimension_count": 8,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
}
_ALL_HEADS = SIZES | {"num_key_value_heads": 4, "head_dim": 8}
_LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}


def _split_latents(name: str, values: np.ndarray) -> Any:
    """The matrix for keys and values is two, and that for keys turned over."""
    if not name.endswith("kv_b_proj.weight"):
        return None
    keys, others = np.split(values.reshape(4, 40, 32), [16], axis=1)
    return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": others}


def _gpt_oss(name: str, values: np.ndarray) -> Any:
    """Experts' matrices are turned over, and gate and up are two."""
    turned_over = values.swapaxes(1, 2) if values.ndim == 3 else values
    if name.startswith("mlp.experts.gate_up_proj"):
        end = "bias" if name.endswith("bias") else "weight"
        gate, up = turned_over[:, 0::2], turned_over[:, 1::2]
        return {f"ffn_gate_exps.{end}": gate, f"ffn_up_exps.{end}": up}
    if name == "mlp.experts.down_proj_bias":
        return {"ffn_down_exps.bias": values}
    return {"ffn_down_exps.weight": turned_over} if name == "mlp.experts.down_proj" else None


def _key_heads(name: str, values: np.ndarray) -> Any:
    """Each key head's q, k, v and z become four matrices, of which three are one."""
    if name != "linear_attn.in_proj_qkvz.weight":
        return None
    heads = values.reshape(2, 48, -1)
    q, k, v, z = (
        part.reshape(-1, values.shape[1]) for part in np.split(heads, [8, 16, 32], axis=1)
    )
    return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}


def _recurrent(n_groups: int, change: Callable[[Any], Any] = lambda config: lambda n, v: v) -> Any:
    """Write Mamba 2 layers as the converter does."""

    def of(config: Any) -> Any:
        others = change(config)

        def stored(name: str, values: np.ndarray) -> np.ndarray:
            leaf = name.split(".", 2)[-1]
            if leaf == "ssm_a":
                return -np.exp(values).reshape(-1, 1)
            if leaf == "ssm_d":
                return values.reshape(-1, 1)
            if leaf == "ssm_conv1d.weight":
                return values[:, 0]
            return (
                values.reshape(n_groups, -1) if leaf == "ssm_norm.weight" else others(name, values)
            )

        return stored

    return of


def _qwen3_next(config: Any) -> Any:
    offset = added(config)

    def stored(name: str, values: np.ndarray) -> np.ndarray:
        leaf = name.split(".", 2)[-1]
        if leaf == "ssm_a":
            return -np.exp(values)
        if leaf == "ssm_conv1d.weight":
            return values[:, 0]
        return values if leaf == "ssm_norm.weight" else offset(name, values)

    return stored


_GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_OF_GRANITE = {
    "attention.scale": 0.3,
    "embedding_scale": 6.0,
    "residual_scale": 0.4,
    "logit_scale": 3.0,
    "expert_count": 4,
    "expert_used_count": 2,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
}
_OF_MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 1,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 4,
}
_HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}

_ONES = {
    **dict.fromkeys(
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
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
_BY_LAYER = {
    "block_count": 3,
    "attention.head_count_kv": [0, 2, 0],
    "attention.layer_norm_epsilon": 1e-6,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def _nemotron_h(kinds: list[str], **fields: Any) -> Any:
    sizes = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"}
    return transformers.NemotronHConfig(
        **sizes,
        **fields,
        layers_block_type=kinds,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=1,
        ssm_state_size=16,
        conv_kernel=4,
    )


def _dense_mlp(name: str, values: np.ndarray) -> Any:
    """Without experts the shared one is a layer's own."""
    if name == "shared_mlp.input_linear.weight":
        gate, up = np.split(values, 2)
        return {"ffn_gate.weight": gate, "ffn_up.weight": up}
    return {"ffn_down.weight": values} if name == "shared_mlp.output_linear.weight" else None


MIXED = {
    "gpt-oss": Case(
        "gpt-oss",
        lambda: transformers.GptOssConfig(
            **SIZES | {"intermediate_size": 64},
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            rope_parameters={**YARN, "truncate": False},
        ),
        {**_USED, "expert_feed_forward_length": 64, "attention.sliding_window": 8, **OF_YARN},
        parts=_gpt_oss,
    ),
    "deepseek2": Case(
        "deepseek2",
        lambda: transformers.DeepseekV3Config(
            **_ALL_HEADS,
            **_LATENT,
            n_group=2,
            topk_group=1,
            norm_topk_prob=True,
            rope_parameters=dict(_LATENT_YARN),
        ),
        {
            **_OF_LATENT,
            **OF_YARN,
            "rope.scaling.yarn_log_multiplier": 0.07,
            "expert_gating_func": 2,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_weights_norm": True,
        },
        parts=_split_latents,
    ),
    "deepseek2 of GLM": Case(
        "deepseek2",
        lambda: transformers.Glm4MoeLiteConfig(
            **_ALL_HEADS,
            **{key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
            mlp_layer_types=["dense", "sparse"],
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
        ),
        {
            **_OF_LATENT,
            "expert_gating_func": 2,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_weights_norm": True,
        },
        parts=_split_latents,
        read_as="DeepseekV3ForCausalLM",
    ),
    "deepseek2 as older files have it": Case(
        "deepseek2",
        lambda: transformers.DeepseekV2Config(
            **_ALL_HEADS, **_LATENT | {"q_lora_rank": None}, topk_method="greedy"
        ),
        {
            key: value
            for key, value in {
                **_OF_LATENT,
                "attention.head_count_kv": 4,
                "attention.key_length": 24,
                "attention.value_length": 24,
            }.items()
            if not key.endswith("_mla") and key != "attention.q_lora_rank"
        },
    ),
    "lfm2moe": Case(
        "lfm2moe",
        lambda: transformers.Lfm2MoeConfig(
            **HEADLESS | {"tie_word_embeddings": True},
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            num_dense_layers=1,
            layer_types=["conv", "full_attention"],
            norm_eps=1e-6,
        ),
        {
            **_USED,
            "attention.head_count_kv": [0, 2],
            "attention.layer_norm_rms_epsilon": 1e-6,
            "shortconv.l_cache": 3,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
        lambda config: lambda name, values: values[:, 0] if ".conv." in name else values,
    ),
    "granitemoe": Case(
        "granitemoe",
        lambda: transformers.GraniteMoeConfig(**HEADLESS, **_GRANITE),
        _OF_GRANITE,
        turned,
    ),
    "granitemoe with a shared expert": Case(
        "granitemoe",
        lambda: transformers.GraniteMoeSharedConfig(
            **HEADLESS, **_GRANITE, shared_intermediate_size=64
        ),
        {**_OF_GRANITE, "expert_shared_feed_forward_length": 64},
        turned,
    ),
    "granitehybrid": Case(
        "granitehybrid",
        lambda: transformers.GraniteMoeHybridConfig(
            **HEADLESS,
            **_GRANITE,
            **_MAMBA,
            shared_intermediate_size=64,
            layer_types=["linear_attention", "full_attention"],
        ),
        {
            **_OF_GRANITE,
            **_OF_MAMBA,
            "attention.head_count_kv": [0, 2],
            "expert_shared_feed_forward_length": 64,
            "rope.scaling.finetuned": False,
        },
        _recurrent(1, turned),
    ),
    "granitehybrid without experts": Case(
        "granitehybrid",
        lambda: transformers.GraniteMoeHybridConfig(
            **HEADLESS,
            **_GRANITE | {"num_local_experts": 0},
            **_MAMBA,
            shared_intermediate_size=96,
            layer_types=["linear_attention", "full_attention"],
        ),
        {
            **_OF_GRANITE,
            **_OF_MAMBA,
            "expert_count": 0,
            "expert_used_count": 0,
            "attention.head_count_kv": [0, 2],
            "expert_shared_feed_forward_length": 96,
            "rope.scaling.finetuned": False,
        },
        _recurrent(1, turned),
        _dense_mlp,
    ),
    "qwen3next": Case(
        "qwen3next",
        lambda: transformers.Qwen3NextConfig(
            **SIZES,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            rope_parameters=dict(_HALF),
        ),
        {
            **_USED,
            "expert_shared_feed_forward_length": 64,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 8,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 32,
            "full_attention_interval": 2,
            "rope.dimension_count": 8,
        },
        _qwen3_next,
        _key_heads,
    ),
    "glm4moe": Case(
        "glm4moe",
        lambda: transformers.Glm4MoeConfig(
            **SIZES,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_shared_experts=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
            rope_parameters=dict(_HALF),
        ),
        {
            **_USED,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "rope.dimension_count": 8,
            "block_count": 3,
            "nextn_predict_layers": 1,
        },
        extra={"blk.2.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)},
    ),
    "ernie4_5-moe": Case(
        "ernie4_5-moe",
        lambda: transformers.Ernie4_5_MoeConfig(
            **SIZES,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=32,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=1,
            moe_layer_interval=1,
        ),
        {
            **_USED,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": 32,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "hunyuan-moe": Case(
        "hunyuan-moe",
        lambda: transformers.HunYuanMoEV1Config(
            **SIZES | {"intermediate_size": 64}, num_experts=4, moe_topk=2
        ),
        {
            **_USED,
            "expert_feed_forward_length": 64,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": 64,
        },
    ),
    "minimax-m2": Case(
        "minimax-m2",
        lambda: transformers.MiniMaxM2Config(
            **SIZES | {"intermediate_size": 64},
            num_local_experts=4,
            num_experts_per_tok=2,
            rotary_dim=8,
            rope_parameters=dict(_HALF),
        ),
        {
            **_USED,
            "expert_feed_forward_length": 64,
            "expert_gating_func": 2,
            "rope.dimension_count": 8,
        },
    ),
    "olmoe": Case(
        "olmoe",
        lambda: transformers.OlmoeConfig(
            **HEADLESS | {"intermediate_size": 64, "num_key_value_heads": 4},
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=False,
        ),
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "falcon-h1": Case(
        "falcon-h1",
        lambda: transformers.FalconH1Config(**SIZES, **_MAMBA, mamba_d_ssm=128, **_ONES),
        _OF_MAMBA,
        _recurrent(1),
    ),
    "nemotron_h": Case(
        "nemotron_h",
        lambda: _nemotron_h(["mamba", "attention", "mlp"], layer_norm_epsilon=1e-6),
        {**_OF_MAMBA, **_BY_LAYER, "feed_forward_length": [0, 0, 96]},
        _recurrent(1),
    ),
    "nemotron_h_moe": Case(
        "nemotron_h_moe",
        lambda: _nemotron_h(
            ["mamba", "attention", "moe"],
            layer_norm_epsilon=1e-6,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=64,
            n_shared_experts=1,
            routed_scaling_factor=1.5,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
        ),
        {
            **_OF_MAMBA,
            **_BY_LAYER,
            **_USED,
            "feed_forward_length": [0, 0, 32],
            "expert_shared_feed_forward_length": 64,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_group_count": 1,
        },
        _recurrent(1),
    ),
}
