"""A model's cache facts, from what the model's own files say."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.masking_utils import create_sliding_window_causal_mask

from kvcellar.bookkeeping.reads import position_mask
from kvcellar.errors import ConfigError, ModelError
from kvcellar.metadata import read_kv_cache_metadata, write_kv_cache_metadata
from kvcellar.spec import config_from_dict, params_from_config, positions_from_config
from tests.models.tiny_checkpoints import FAMILIES, WINDOW

SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def raw(model_type: str, **fields: Any) -> dict[str, Any]:
    """A ``config.json``; ``...`` leaves a field out."""
    return {k: v for k, v in ({"model_type": model_type} | SIZES | fields).items() if v is not ...}


def windows(config: Any) -> list[int | None]:
    """The window of every layer."""
    params = params_from_config(config)
    of_layer = {layer: group.window for group in params.groups for layer in group.layers}
    return [of_layer[layer] for layer in range(params.n_layers)]


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 40_960),
        ({"rope_type": "default", "rope_theta": 10000.0}, 40_960),
        # As Qwen's pages say to switch it on: the other number stays as it was.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"rope_type": "yarn", "factor": 1.25, "original_max_position_embeddings": 32_768}, 40_960),
        ({"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 32_768}, 40_960),
        ({"rope_type": "linear", "factor": 4.0}, 40_960),  # has it counted in already
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
            | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            40_960,
        ),
    ],
)
def test_the_context_is_the_models_positions_as_far_as_its_rope_is_stretched(rope, positions):
    fields = {} if rope is None else {"rope_scaling": rope}
    config = config_from_dict(raw("llama", max_position_embeddings=40_960, **fields))
    assert positions_from_config(config) == positions


def test_the_sizes_are_the_configs_own():
    params = params_from_config(raw("llama"))
    assert (params.n_layers, params.n_kv_heads) == (6, 2)
    assert (params.head_dim, params.v_head_dim) == (16, 16)
    assert len(params.groups) == 1
    assert params.groups[0].softcap is None


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt_oss", "gemma2"])
def test_head_dim_is_a_field_of_its_own(family):
    assert params_from_config(raw(family, head_dim=40)).head_dim == 40


def test_an_old_llama_has_one_kv_head_per_query_head():
    assert params_from_config(raw("llama", num_key_value_heads=...)).n_kv_heads == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_an_object_a_file_and_the_loaded_model_agree(family, checkpoint, loaded):
    from_object = params_from_config(FAMILIES[family]())
    from_file = params_from_config(json.loads((checkpoint(family) / "config.json").read_text()))
    assert from_object == from_file == loaded(family).params


@pytest.mark.parametrize("family", FAMILIES)
def test_the_facts_survive_being_written_into_a_program(family):
    params = params_from_config(FAMILIES[family]())
    sizes = {"n_layers": params.n_layers, "n_kv_heads": params.n_kv_heads}
    facts = write_kv_cache_metadata({}, **sizes, head_dim=params.head_dim, groups=params.groups)
    assert read_kv_cache_metadata(facts) == params


# Windows ------------------------------------------------------------------------------------------


def test_llama_has_no_windows_whatever_its_config_says():
    assert windows(raw("llama", sliding_window=8)) == [None] * 6


def test_mistral_has_its_window_in_every_layer_or_in_none():
    assert windows(raw("mistral", sliding_window=8)) == [8] * 6
    assert windows(raw("mistral", sliding_window=None)) == [None] * 6


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_has_windows_from_max_window_layers_on_where_they_are_switched_on(family):
    fields = {"head_dim": 16, "sliding_window": 8, "max_window_layers": 4}
    assert windows(raw(family, **fields)) == [None] * 6
    assert windows(raw(family, **fields, use_sliding_window=True)) == [None] * 4 + [8] * 2


def test_gemma_3_has_full_attention_in_every_sixth_layer_unless_it_says_otherwise():
    gemma = {"num_hidden_layers": 13, "sliding_window": 8}
    assert windows(raw("gemma3_text", **gemma)) == ([8] * 5 + [None]) * 2 + [8]
    thirds = raw("gemma3_text", **gemma, sliding_window_pattern=3)
    assert windows(thirds) == ([8] * 2 + [None]) * 4 + [8]
    kinds = ["full_attention"] + ["sliding_attention"] * 12
    assert windows(raw("gemma3_text", **gemma, layer_types=kinds)) == [None] + [8] * 12


def test_the_text_part_of_a_multimodal_config_counts():
    whole = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {"num_hidden_layers": 27},
    }
    params = params_from_config(whole)  # as google/gemma-3-4b-it is published
    assert (params.n_layers, params.n_kv_heads, params.head_dim) == (34, 4, 256)
    assert windows(whole) == (([1024] * 5 + [None]) * 6)[:34]
    fields = {k: v for k, v in whole.items() if k != "model_type"}
    assert params_from_config(transformers.Gemma3Config(**fields)) == params


def test_gpt_oss_alternates_and_starts_with_a_window():
    config = raw("gpt_oss", head_dim=16, sliding_window=128)
    assert windows(config) == [128, None] * 3
    assert [group.window for group in params_from_config(config).groups] == [128, None]


def test_gemma_2_caps_its_logits_in_every_group():
    config = raw("gemma2", head_dim=16, attn_logit_softcapping=30.0)
    assert [group.softcap for group in params_from_config(config).groups] == [30.0, 30.0]


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if WINDOW in windows(FAMILIES[name]())]
)
def test_a_window_sees_what_the_mask_of_transformers_shows(family):
    config = FAMILIES[family]()
    config._attn_implementation = "eager"
    n_tokens = 3 * WINDOW
    mask = create_sliding_window_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(1, n_tokens, 1),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(n_tokens)[None],
    )
    positions = np.arange(n_tokens)
    assert np.array_equal(mask[0, 0].numpy() == 0, position_mask(positions, positions, WINDOW))


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("llama", "num_hidden_layers"),
        ("llama", "hidden_size"),
        ("llama", "num_attention_heads"),
        ("mistral", "num_key_value_heads"),
        ("qwen2", "num_key_value_heads"),
        ("qwen3", "head_dim"),
        ("gemma2", "head_dim"),
        ("gemma3_text", "num_hidden_layers"),
        ("gpt_oss", "head_dim"),
    ],
)
@pytest.mark.parametrize("value", [..., None], ids=["left out", "null"])
def test_a_field_that_is_needed_is_named_when_it_is_missing(family, field, value):
    config = raw(family, **{"head_dim": 16} | {field: value})
    with pytest.raises(ModelError, match=f"the {family} config has no {field}"):
        params_from_config(config)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_key_value_heads", "hidden_size"])
def test_an_object_that_lacks_a_field_is_refused_by_its_name(field):
    class Config:
        model_type = "llama"

    for name, value in SIZES.items():
        setattr(Config, name, value)
    delattr(Config, field)
    with pytest.raises(ModelError, match=field):
        params_from_config(Config())


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "has no model_type"),
        (raw("mamba2"), "architecture 'mamba2' is not supported; there are: llama, mistral"),
        ({"model_type": "llava", "text_config": raw("phi")}, "'phi' is not supported"),
        ({"model_type": "gemma3", "text_config": 3}, "text_config is int"),
        (raw("llama", num_key_value_heads=3), "4 query heads and 3 KV heads"),
        (raw("llama", num_hidden_layers=0), "num_hidden_layers=0"),
        (raw("llama", num_hidden_layers="six"), "config cannot be read"),
        (raw("mistral", sliding_window=0), "window"),
        (raw("mistral", sliding_window=8, layer_types=["full_attention"] * 6), "another family"),
        (raw("llama", layer_types=["sliding_attention"] * 6), "another family"),
        (raw("qwen2", layer_types=["sliding_attention"] * 6), "no sliding_window"),
        (raw("qwen2", layer_types=["full_attention"] * 5), "layer_types"),
        (raw("qwen2", layer_types=["chunked_attention"] * 6), "layers of chunked_attention"),
        (raw("qwen2", num_kv_shared_layers=2), "shares K and V among 2 layers"),
        (raw("gemma3_text", use_bidirectional_attention=True), "bidirectional attention"),
    ],
)
def test_what_no_cache_here_can_serve(config, match):
    with pytest.raises(ModelError, match=match):
        params_from_config(config)


def test_a_config_that_was_cut_short_by_hand_needs_its_layer_types_cut_too():
    config = FAMILIES["gpt_oss"]()
    config.num_hidden_layers = 2
    with pytest.raises(ModelError, match="2 layers and 4 layer_types"):
        params_from_config(config)
    config.layer_types = config.layer_types[:2]
    assert params_from_config(config).n_layers == 2


def test_the_cause_of_an_impossible_window_is_kept():
    with pytest.raises(ModelError) as caught:
        params_from_config(raw("mistral", sliding_window=-1))
    assert isinstance(caught.value.__cause__, ConfigError)
