"""Tiny models of mlx-lm with random weights, of its own classes: no checkpoint, no tokenizer."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

VOCAB_SIZE = 99
WINDOW = 8
MIXED = ["sliding_attention", "full_attention"] * 2
YARN = {
    "rope_type": "yarn", "type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1, "max_position_embeddings": 64,
}  # fmt: skip

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "norm_eps": 1e-5, "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "sliding_window": WINDOW, "layer_types": MIXED, "tie_word_embeddings": False,
    "partial_rotary_factor": 0.5, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "moe_k": 2, "use_qk_norm": True,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "query_pre_attn_scalar": 16, "logits_scaling": 1.0,
    "embedding_multiplier": 1.0, "attention_multiplier": 0.25, "residual_multiplier": 1.0,
    "dim_model_base": 32, "scale_depth": 1.0, "scale_emb": 1.0,
}  # fmt: skip
"""Fields of mlx-lm's arguments -> values, for those that a model has."""

GEMMA3N = {
    **SMALL, "model_type": "gemma3n", "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True,
    "altup_active_idx": 0, "laurel_rank": 8,
}  # fmt: skip
GEMMA4 = {
    "global_head_dim": 32, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "tie_word_embeddings": True,
}  # fmt: skip
MIMO = {
    "hybrid_layer_pattern": [1, 0, 1, 0], "moe_layer_freq": [0, 1, 1, 1],
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "sliding_window_size": WINDOW, "layernorm_epsilon": 1e-5, "swa_rope_theta": 10000.0,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 24,
    "swa_v_head_dim": 16, "head_dim": 24, "n_shared_experts": None,
}  # fmt: skip
LLAMA4 = {
    **SMALL, "attention_chunk_size": 8, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1,
    "intermediate_size_mlp": 96, "floor_scale": 4, "model_type": "llama4_text",
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama4": {"text_config": LLAMA4},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_vl": {"text_config": {**SMALL, "model_type": "qwen3"}},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 5.0},
    "gemma3": {"text_config": {**SMALL, "model_type": "gemma3_text", "sliding_window_pattern": 2}},
    "gpt_oss": {},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512, "n_ctx": 512},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": None},
    "mixtral": {},
    "ministral3": {"rope_parameters": YARN},
    "mistral3": {"text_config": {**SMALL, "model_type": "ministral3", "rope_parameters": YARN}},
    "mimo": {},
    "mimo_v2_flash": MIMO,
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "granite": {},
    "granitemoe": {},
    "cohere": {},
    "cohere2": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "exaone4": {"sliding_window_pattern": "LG"},
    "apertus": {"post_norm": False, "qk_norm": True},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"use_bias": False},
    "dots1": {},
    "deepseek": {},
    "deepseek_v2": {"topk_method": "greedy", "rope_scaling": YARN, "moe_layer_freq": 1},
    "helium": {},
    "hunyuan_v1_dense": {},
    "minicpm": {},
    "minicpm3": {"rope_scaling": {"type": "longrope", "long_factor": [1.5] * 4,
                                  "short_factor": [1.0] * 4,
                                  "original_max_position_embeddings": 64}},
    "minimax": {"rotary_dim": 8, "shared_intermediate_size": 32},
    "nanochat": {},
    "nemotron": {},
    "afmoe": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {},
    "telechat3": {},
}  # fmt: skip
"""Name of mlx-lm's model -> its arguments, beside those that are small."""

SHARED: dict[str, dict[str, Any]] = {
    "gemma3n": {"text_config": GEMMA3N},
    "gemma4": {"text_config": {**SMALL, **GEMMA4}},
    "gemma4_text": GEMMA4,
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
}
"""The same of models with layers that attend over the rows of earlier ones."""

LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"rope_scaling": YARN},
    "glm4_moe_lite": {},
    "mistral4": {"rope_parameters": YARN},
    "longcat_flash": {
        "attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 96,
        "moe_topk": 2, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "num_layers": 2,
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "qk_head_dim": 24,
    },
}  # fmt: skip
"""The same of models that keep latent rows."""


MAMBA2 = {
    "num_heads": 4, "head_dim": 16, "state_size": 8, "conv_kernel": 4, "n_groups": 1,
    "use_bias": False, "use_conv_bias": True, "time_step_limit": (0.0, 10.0), "time_step_rank": 4,
}  # fmt: skip
BAICHUAN = {"sliding_window_layers": [], "conv_window": 2}
NGRAM = {
    **LATENT["longcat_flash"], "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 2,
    "emb_split_num": 2,
}  # fmt: skip
"""Arguments of models that cannot be served."""


def make_model(name: str, seed: int = 3, **more: Any) -> Any:
    """Make a model whose weights are spread enough that attention is uneven; ``more`` arguments."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    asked = {**SMALL, **{**FAMILIES, **SHARED, **LATENT}.get(name, {}), **more}
    known = inspect.signature(module.ModelArgs).parameters
    made = {key: value for key, value in asked.items() if key in known}
    model = module.Model(module.ModelArgs.from_dict({**made, "model_type": name}))
    assert sum(array.size for _, array in tree_flatten(model.parameters())) < 2e7, "it is tiny"
    mx.random.seed(seed)
    model.update(tree_map(_random, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _random(array: mx.array) -> mx.array:
    if array.dtype != mx.float32:
        return array
    return 0.15 * mx.random.normal(array.shape) + (1.0 if array.ndim == 1 else 0.0)
