"""Tiny models of dense families: windows, scaled RoPE, norms and biases of their own."""

from __future__ import annotations

import math

import numpy as np
import transformers

from tests.models.gguf.case import HEADLESS, Case, added, turned
from tests.models.gguf.writing import SIZES

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
OF_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
_FOUR = SIZES | {"num_hidden_layers": 4}
_PATTERN = {
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, True, False],
}
_LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
_HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_GEMMA4 = {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, False, True, True, False],
    "embedding_length_per_layer_input": 0,
    "attention.shared_kv_layers": 0,
    "rope.freq_base": 1_000_000.0,
    "rope.freq_base_swa": 10_000.0,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "final_logit_softcapping": 30.0,
}
_NOT_TURNED = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, np.float32)}


def _gemma4(**fields):
    return transformers.Gemma4TextConfig(
        **HEADLESS | {"num_hidden_layers": 6, "tie_word_embeddings": True} | fields,
        head_dim=16,
        global_head_dim=32,
        sliding_window=8,
        final_logit_softcapping=30.0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )


def _gate_up(name: str, values: np.ndarray):
    """Gemma 4's experts are stored as they are."""
    whole = {"experts.gate_up_proj": "ffn_gate_up_exps.weight"}.get(name)
    return whole and {whole: values}


def _gemma3n(n_shared: int, sparse: list[float]):
    return transformers.Gemma3nTextConfig(
        **SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": True},
        sliding_window=8,
        final_logit_softcapping=30.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=SIZES["vocab_size"],
        hidden_size_per_layer_input=256,
        num_kv_shared_layers=n_shared,
        laurel_rank=64,
        activation_sparsity_pattern=sparse,
    )


_GEMMA3N = {
    "feed_forward_length": 96,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False, True, False],
    "rope.freq_base": 1_000_000.0,
    "rope.freq_base_swa": 10_000.0,
    "embedding_length_per_layer_input": 256,
    "altup.num_inputs": 4,
    "altup.active_idx": 0,
    "final_logit_softcapping": 30.0,
}

_SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}

DENSE = {
    "qwen2vl": Case("qwen2vl", lambda: transformers.Qwen2Config(**HEADLESS), _SECTIONS),
    "qwen3vl": Case(
        "qwen3vl",
        lambda: transformers.Qwen3Config(**SIZES),
        {**_SECTIONS, "n_deepstack_layers": 1},
    ),
    "gemma3n": Case(
        "gemma3n",
        lambda: _gemma3n(0, [0.95] * 4),
        {
            **_GEMMA3N,
            "attention.shared_kv_layers": 0,
            "activation_sparsity_scale": [1.6448533535003662] * 4,
        },
    ),
    "gemma3n with shared layers": Case(
        "gemma3n",
        lambda: _gemma3n(2, [0.95, 0.0, 0.0, 0.0]),
        {
            **_GEMMA3N,
            "attention.shared_kv_layers": 2,
            "activation_sparsity_scale": [1.6448533535003662, *[-math.inf] * 3],
        },
    ),
    "gemma4": Case(
        "gemma4",
        lambda: _gemma4(
            hidden_size_per_layer_input=0, num_global_key_value_heads=1, attention_k_eq_v=True
        ),
        {**_GEMMA4, "attention.head_count_kv": [2, 2, 1, 2, 2, 1]},
        extra=_NOT_TURNED,
    ),
    "gemma4 with experts": Case(
        "gemma4",
        lambda: _gemma4(
            hidden_size_per_layer_input=0,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
        {
            **_GEMMA4,
            "attention.head_count_kv": [2, 2, 1, 2, 2, 1],
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
        },
        parts=_gate_up,
        extra=_NOT_TURNED,
    ),
    "gemma4 with shared layers": Case(
        "gemma4",
        lambda: _gemma4(
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=SIZES["vocab_size"],
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
        ),
        {
            **_GEMMA4,
            "embedding_length_per_layer_input": 32,
            "attention.shared_kv_layers": 3,
            "feed_forward_length": [96, 96, 96, 192, 192, 192],
        },
        extra=_NOT_TURNED,
    ),
    "mistral3": Case(
        "mistral3",
        lambda: transformers.Ministral3Config(
            **SIZES,
            rope_parameters={
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 8,
            },
        ),
        {
            **OF_YARN,
            "rope.scaling.original_context_length": 8,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
        turned,
    ),
    "mistral3 without positions in its queries": Case(
        "mistral3", lambda: transformers.MistralConfig(**SIZES, sliding_window=None), {}, turned
    ),
    "seed_oss": Case("seed_oss", lambda: transformers.SeedOssConfig(**SIZES, attention_bias=True)),
    "olmo2": Case("olmo2", lambda: transformers.Olmo2Config(**SIZES)),
    "olmo3": Case(
        "olmo2",
        lambda: transformers.Olmo3Config(
            **_FOUR,
            sliding_window=8,
            rope_parameters={
                "full_attention": dict(YARN),
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        ),
        {**_PATTERN, **OF_YARN},
    ),
    "exaone4": Case(
        "exaone4",
        lambda: transformers.Exaone4Config(**_FOUR, sliding_window=8, layer_types=WINDOWS),
        _PATTERN,
    ),
    "exaone4 without windows": Case(
        "exaone4",
        lambda: transformers.Exaone4Config(
            **SIZES, sliding_window=None, layer_types=["full_attention"] * 2
        ),
    ),
    "hunyuan-dense": Case("hunyuan-dense", lambda: transformers.HunYuanDenseV1Config(**SIZES)),
    "ernie4_5": Case("ernie4_5", lambda: transformers.Ernie4_5Config(**SIZES)),
    "arcee": Case("arcee", lambda: transformers.ArceeConfig(**SIZES), {}, turned),
    "command-r": Case(
        "command-r",
        lambda: transformers.CohereConfig(
            **HEADLESS | {"tie_word_embeddings": True}, logit_scale=0.25
        ),
        {**_LAYER_NORM, "logit_scale": 0.25},
    ),
    "command-r with norms of heads": Case(
        "command-r",
        lambda: transformers.CohereConfig(
            **HEADLESS | {"tie_word_embeddings": True}, logit_scale=0.25, use_qk_norm=True
        ),
        {**_LAYER_NORM, "logit_scale": 0.25},
    ),
    "cohere2": Case(
        "cohere2",
        lambda: transformers.Cohere2Config(
            **HEADLESS | {"tie_word_embeddings": True, "num_hidden_layers": 4},
            logit_scale=0.25,
            sliding_window=8,
        ),
        {**_LAYER_NORM, "logit_scale": 0.25, "attention.sliding_window": 8},
    ),
    "starcoder2": Case(
        "starcoder2",
        lambda: transformers.Starcoder2Config(
            **HEADLESS | {"tie_word_embeddings": True}, norm_epsilon=1e-5
        ),
        _LAYER_NORM,
    ),
    "stablelm": Case(
        "stablelm",
        lambda: transformers.StableLmConfig(
            **HEADLESS, use_qkv_bias=True, rope_parameters=dict(_HALF)
        ),
        {**_LAYER_NORM, "rope.dimension_count": 8, "use_parallel_residual": False},
    ),
    "nemotron": Case(
        "nemotron",
        lambda: transformers.NemotronConfig(**SIZES, rope_parameters=dict(_HALF)),
        {**_LAYER_NORM, "rope.dimension_count": 8},
        added,
    ),
}
