"""One tiny model of each architecture of GGUF that is read, and what its converter does to it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import transformers

from tests.models.gguf.case import HEADLESS, Case, added, turned
from tests.models.gguf.dense import DENSE
from tests.models.gguf.mixtures import MIXED
from tests.models.gguf.writing import SIZES

_QWEN35 = {
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
    "rope.dimension_sections": [2, 1, 1, 0],
    "rope.dimension_count": 8,
}


def _qwen35(kind: Any, **fields: Any) -> Any:
    return kind(
        **SIZES,
        **fields,
        full_attention_interval=2,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    )


def tiled_heads(config: Any) -> Any:
    """What the converter does to Qwen3.5: value heads are tiled, and more."""
    wide = config.linear_value_head_dim
    n_keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim

    def tiled(rows: np.ndarray, width: int) -> np.ndarray:
        heads = rows.reshape(2, 2, width, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    def change(name: str, values: np.ndarray) -> np.ndarray:
        leaf = name.split(".", 2)[-1]
        if leaf == "ssm_a":
            return tiled(-np.exp(values), 1)
        if leaf.startswith(("ssm_alpha", "ssm_beta", "ssm_dt")):
            return tiled(values, 1)
        if leaf == "attn_gate.weight":
            return tiled(values, wide)
        if leaf == "ssm_out.weight":
            return tiled(values.T, wide).T
        if leaf.startswith(("attn_qkv", "ssm_conv1d")):
            values = values[:, 0] if "conv" in leaf else values
            return np.concatenate([values[:n_keys], tiled(values[n_keys:], wide)])
        is_offset = name.endswith("norm.weight") and leaf != "ssm_norm.weight"
        return values + 1 if is_offset else values

    return change


def llama3_factors(factor: float, theta: float, width: int) -> np.ndarray:
    """The factors that llama.cpp's converter stores for Llama 3."""
    found = []
    for at in range(0, width, 2):
        wave = 2 * math.pi * theta ** (at / width)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LONG = [1.0 + 0.5 * i for i in range(8)]
_SHORT = [1.0 + 0.1 * i for i in range(8)]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OF_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}

CASES = {
    "llama": Case(
        "llama", lambda: transformers.LlamaConfig(**SIZES), {"rope.dimension_count": 16}, turned
    ),
    "llama-3": Case(
        "llama",
        lambda: transformers.LlamaConfig(**SIZES, rope_parameters=dict(_LLAMA3)),
        {},
        turned,
        extra={"rope_freqs.weight": llama3_factors(8.0, 500_000.0, 16)},
    ),
    "llama with biases, tied": Case(
        "llama",
        lambda: transformers.LlamaConfig(
            **SIZES | {"tie_word_embeddings": True}, attention_bias=True, mlp_bias=True
        ),
        {},
        turned,
    ),
    "mixtral": Case(
        "llama",
        lambda: transformers.MixtralConfig(
            **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        ),
        {"expert_count": 4, "expert_used_count": 2},
        turned,
    ),
    "qwen2": Case("qwen2", lambda: transformers.Qwen2Config(**HEADLESS)),
    "qwen2 with yarn": Case(
        "qwen2",
        lambda: transformers.Qwen2Config(**HEADLESS, rope_parameters=dict(_YARN)),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
    ),
    "qwen2moe": Case(
        "qwen2moe",
        lambda: transformers.Qwen2MoeConfig(
            **HEADLESS, **_EXPERTS, shared_expert_intermediate_size=48
        ),
        {**_OF_EXPERTS, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3": Case("qwen3", lambda: transformers.Qwen3Config(**SIZES)),
    "qwen3moe": Case(
        "qwen3moe",
        lambda: transformers.Qwen3MoeConfig(**SIZES, **_EXPERTS, norm_topk_prob=True),
        _OF_EXPERTS,
    ),
    "qwen3vlmoe": Case(
        "qwen3vlmoe",
        lambda: transformers.Qwen3MoeConfig(**SIZES, **_EXPERTS, norm_topk_prob=True),
        {**_OF_EXPERTS, "rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 1},
    ),
    "gemma": Case(
        "gemma",
        lambda: transformers.GemmaConfig(**SIZES | {"tie_word_embeddings": True}),
        {},
        added,
    ),
    "gemma2": Case(
        "gemma2",
        lambda: transformers.Gemma2Config(
            **SIZES | {"tie_word_embeddings": True},
            query_pre_attn_scalar=16,
            sliding_window=8,
        ),
        {
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        added,
    ),
    "gemma3": Case(
        "gemma3",
        lambda: transformers.Gemma3TextConfig(
            **SIZES | {"tie_word_embeddings": True, "num_hidden_layers": 7},
            query_pre_attn_scalar=16,
            sliding_window=8,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        {
            "attention.sliding_window": 8,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        added,
    ),
    "phi3": Case(
        "phi3",
        lambda: transformers.Phi3Config(
            **HEADLESS,
            original_max_position_embeddings=128,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "long_factor": _LONG,
                "short_factor": _SHORT,
                "original_max_position_embeddings": 128,
                "factor": 4.0,
            },
        ),
        {"rope.scaling.original_context_length": 128, "rope.dimension_count": 16},
        extra={
            "rope_factors_long.weight": np.array(_LONG, np.float32),
            "rope_factors_short.weight": np.array(_SHORT, np.float32),
        },
    ),
    "glm4": Case(
        "glm4",
        lambda: transformers.Glm4Config(
            **SIZES,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        {"rope.dimension_count": 8},
    ),
    "granite": Case(
        "granite",
        lambda: transformers.GraniteConfig(
            **HEADLESS,
            attention_multiplier=0.3,
            embedding_multiplier=6.0,
            residual_multiplier=0.4,
            logits_scaling=3.0,
        ),
        {
            "attention.scale": 0.3,
            "embedding_scale": 6.0,
            "residual_scale": 0.4,
            "logit_scale": 3.0,
        },
        turned,
    ),
    "qwen35": Case("qwen35", lambda: _qwen35(transformers.Qwen3_5TextConfig), _QWEN35, tiled_heads),
    "qwen35moe": Case(
        "qwen35moe",
        lambda: _qwen35(
            transformers.Qwen3_5MoeTextConfig, **_EXPERTS, shared_expert_intermediate_size=48
        ),
        {**_QWEN35, **_OF_EXPERTS, "expert_shared_feed_forward_length": 48},
        tiled_heads,
    ),
    "lfm2": Case(
        "lfm2",
        lambda: transformers.Lfm2Config(
            **HEADLESS | {"tie_word_embeddings": True},
            block_auto_adjust_ff_dim=False,
            norm_eps=1e-6,
            layer_types=["conv", "full_attention"],
            conv_L_cache=3,
            conv_bias=False,
        ),
        {
            "attention.head_count_kv": [0, 2],
            "shortconv.l_cache": 3,
            "attention.layer_norm_rms_epsilon": 1e-6,
        },
        lambda config: lambda name, values: values[:, 0] if ".conv." in name else values,
    ),
    "smollm3": Case(
        "smollm3",
        lambda: transformers.SmolLM3Config(**HEADLESS | {"num_hidden_layers": 4}),
        {},
        turned,
    ),
    **DENSE,
    **MIXED,
}
