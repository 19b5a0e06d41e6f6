"""Tiny checkpoints of wrappers, towers included, saved as transformers saves published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.tiny_checkpoints import COMMON, make_tokenizer, randomize

_TEXT: dict[str, Any] = {**COMMON, "num_hidden_layers": 2, "head_dim": 16}
_IMAGE = {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, **_IMAGE}
_QWEN_TOWER = {
    "depth": 1,
    "num_heads": 2,
    "patch_size": 14,
    "hidden_size": 32,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}

WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**_TEXT, "sliding_window": 8}, "vision_config": _TOWER},
    "gemma4": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 272,
            "sliding_window": 8,
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 64,
        },
        "audio_config": None,
    },
    "glm4v": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": _QWEN_TOWER,
    },
    "internvl": {
        "text_config": {"model_type": "qwen3", **_TEXT},
        "vision_config": {**_TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3", **_TEXT, **_MLA},
        "vision_config": {**_TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
        },
        "vision_config": {
            **_TOWER,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    },
    "llava": {"text_config": {"model_type": "llama", **_TEXT}, "vision_config": _TOWER},
    "ministral3": {
        "model_type": "mistral3",
        "text_config": {"model_type": "ministral3", **_TEXT},
        "vision_config": {**_TOWER, "head_dim": 16},
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
        "vision_config": {**_TOWER, "head_dim": 16},
    },
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": _QWEN_TOWER,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": {**_TEXT, **_EXPERTS, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "vision_config": _QWEN_TOWER,
    },
}
"""Name of a checkpoint -> its config.json, without what says that head and embedding are one."""


def make_wrapper(name: str, *, is_tied: bool) -> Any:
    """A wrapper with random weights, the same each time."""
    fields = json.loads(json.dumps(WRAPPERS[name]))
    config = transformers.CONFIG_MAPPING[fields.pop("model_type", name)](**fields)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = is_tied
    auto: Any = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model)
    return model


def save_wrapper(model: Any, folder: Path, **options: Any) -> Path:
    """Save a wrapper and the tiny tokenizer."""
    model.save_pretrained(folder, **options)
    make_tokenizer().save_pretrained(folder)
    return folder
