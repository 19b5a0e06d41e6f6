"""Tiny hybrid models of mlx-lm: arguments of layers that keep states beside layers that attend."""

from __future__ import annotations

from typing import Any

from tests.models.mlx_families import SMALL

LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 1, "mamba_proj_bias": False,
    "mamba_conv_bias": True, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
    "conv_kernel": 4, "n_groups": 1, "use_bias": False, "use_conv_bias": True,
    "time_step_limit": (0.001, 100.0), "time_step_min": 0.001, "time_step_max": 100.0,
}  # fmt: skip
DELTA = {
    "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 4,
    "short_conv_kernel_size": 4,
}  # fmt: skip
GROUPED = {"layer_group_size": 2, "group_norm_size": 2, "rope_interleave": True}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": {**SMALL, **LINEAR, "model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {
        "text_config": {**SMALL, **LINEAR, "model_type": "qwen3_5_moe_text", "num_experts": 4},
    },
    "qwen3_next": {**LINEAR, "rope_parameters": None},
    "olmo_hybrid": {
        **LINEAR, "linear_num_key_heads": 4, "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_theta": 10000.0},
    },
    "lfm2": {
        "conv_L_cache": 3, "conv_bias": False, "block_dim": 64, "block_ff_dim": 96,
        "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "lfm2_moe": {
        "conv_L_cache": 3, "conv_bias": False, "use_expert_bias": True, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "falcon_h1": {**MAMBA, "mamba_rms_norm": True, "lm_head_multiplier": 1.0},
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32,
    },
    "nemotron_h": {
        **MAMBA, "hybrid_override_pattern": ["M", "-", "*", "M", "E", "*"], "num_hidden_layers": 6,
        "moe_shared_expert_intermediate_size": 32,
    },
    "kimi_linear": {
        "linear_attn_config": DELTA, "model_max_length": 512, "num_experts_per_token": 2,
        "topk_group": 1, "num_expert_group": 1,
    },
    "bailing_hybrid": GROUPED,
    "bailing_moe_linear": GROUPED,
    "bailing_moe_v3": {**GROUPED, "short_conv_kernel_size": 4, "model_type": "bailing_hybrid"},
    "jamba": {
        **MAMBA, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2, "mamba_dt_rank": 4,
    },
    "plamo2": {
        **MAMBA, "hidden_size_per_head": 16, "attention_window_size": 512, "mamba_step": 2,
    },
    "gear": {"layer_types": ["conv_mixer", "full_attention"] * 2},
}  # fmt: skip
"""Name of mlx-lm's model -> its arguments, beside those that are small."""
