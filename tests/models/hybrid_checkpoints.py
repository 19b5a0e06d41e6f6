"""Small hybrid checkpoints that both transformers and mlx-lm read, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcellar.backends.torch.learn.shrink.checkpoints import (
    default_raw,
    make_tokenizer,
    random_network,
)

SMALL = {
    "vocab_size": 262, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "n_routed_experts": 4, "num_local_experts": 4,
    "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip
MAMBA = {
    "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_expand": 2, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 8, "n_groups": 1, "mamba_dt_rank": 4,
}  # fmt: skip
CONV = {
    "layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 3], "num_dense_layers": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": LINEAR,
    "qwen3_5_moe": {**EXPERTS, **LINEAR},
    "qwen3_next": {**EXPERTS, **LINEAR},
    "olmo_hybrid": {**LINEAR, "linear_num_key_heads": 4, "linear_value_head_dim": 16},
    "lfm2": CONV,
    "lfm2_moe": {**EXPERTS, **CONV},
    "falcon_h1": {**MAMBA, "mamba_n_heads": 4},
    "granitemoehybrid": {**EXPERTS, **MAMBA, "layer_types": ["mamba", "attention"] * 2,
                         "shared_intermediate_size": 32},
    "nemotron_h": {**EXPERTS, **MAMBA, "layers_block_type": ["mamba", "moe", "attention", "mlp"],
                   "expand": 1, "time_step_min": 1e-9},
    "kimi_linear": {**EXPERTS, **LINEAR, "num_experts_per_token": 2, "kv_lora_rank": 32,
                    "v_head_dim": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                    "linear_num_heads": 4, "linear_head_dim": 16, "num_key_value_heads": 4,
                    "mlp_layer_types": ["sparse"] * 4},
    "jamba": {**MAMBA, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
              "expert_layer_period": 2, "mamba_expand": 1, "num_experts": 1},
}  # fmt: skip
"""Family of transformers -> fields of its config, as a small model that mlx-lm reads as well."""


def hybrid_raw(family: str) -> dict[str, Any]:
    """The ``config.json`` of a family."""
    return default_raw(family, **{**SMALL, **FAMILIES[family]})


def write_hybrid(family: str, folder: Path) -> Any:
    """Write a checkpoint; return its network in torch."""
    network = random_network(hybrid_raw(family), attention="eager")
    # Qwen's own files of this family have all experts in one tensor, as the module has.
    is_split = family != "qwen3_5_moe"
    getattr(network, "whole", network).save_pretrained(folder, save_original_format=is_split)
    make_tokenizer().save_pretrained(folder)
    return network
