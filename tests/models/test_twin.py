"""Shrunk twins have every kind of layer of the model; tiny checkpoints are transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kvcellar.backends.torch.learn.shrink.checkpoints import (
    default_raw,
    random_network,
    twin_raw,
    write_tiny,
    zoo,
)
from kvcellar.backends.torch.learn.shrink.configs import CHUNK, WINDOW, keep_layers
from kvcellar.backends.torch.load.networks import empty_network
from kvcellar.errors import ModelError
from kvcellar.models.files.configs import config_from_dict


def config_of(model_type: str, **fields: Any) -> Any:
    return config_from_dict(default_raw(model_type, **fields))


def twin_of(model_type: str, **fields: Any) -> Any:
    return config_from_dict(twin_raw(default_raw(model_type, **fields)))


def layer_types(model_type: str) -> tuple[list[str], list[str]]:
    return list(config_of(model_type).layer_types), list(twin_of(model_type).layer_types)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma4_text", "gpt_oss", "qwen3_next"])
def test_every_type_of_layer_is_kept_in_its_order(model_type):
    was, now = layer_types(model_type)
    assert set(now) == set(was)
    assert len(now) <= 6 < len(was)
    firsts = sorted(set(was), key=was.index)
    assert sorted(set(now), key=now.index) == firsts


def test_dense_layers_come_before_those_with_experts_as_in_the_model():
    config = twin_of("deepseek_v3")
    assert 0 < config.first_k_dense_replace < config.num_hidden_layers
    experts = [
        "expert" in repr(layer).lower() for layer in empty_network(config.to_dict()).model.layers
    ]
    assert experts == sorted(experts)
    assert len(set(experts)) == 2


def test_layers_without_rope_and_their_chunks_are_kept():
    config = twin_of("llama4_text")
    assert set(config.no_rope_layers) == {0, 1}
    assert config.attention_chunk_size == CHUNK
    assert {"chunked_attention", "full_attention"} == set(config.layer_types)


def test_layers_that_share_keys_and_values_are_kept_with_those_that_they_share():
    config = twin_of("gemma3n_text")
    shared = config.num_kv_shared_layers
    own = config.layer_types[:-shared]
    assert 0 < shared < config.num_hidden_layers
    assert set(config.layer_types[-shared:]) == set(own) == {"sliding_attention", "full_attention"}


def test_windows_and_ropes_original_lengths_are_shorter_than_a_text_of_40_tokens():
    assert twin_of("mistral", sliding_window=4096).sliding_window == WINDOW
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    small = twin_of("llama", rope_parameters=rope).rope_parameters
    assert small["original_max_position_embeddings"] == CHUNK
    assert small["factor"] == 4.0


def test_longrope_has_a_factor_for_each_pair_of_the_shorter_rows():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "long_factor": [float(i) for i in range(1, 49)],
        "short_factor": [1.0] * 48,
    }
    small = twin_of("phi3", rope_parameters=rope, max_position_embeddings=131072)
    pairs = small.hidden_size // small.num_attention_heads // 2
    factors = small.rope_parameters["long_factor"]
    assert len(factors) == pairs
    assert factors[0] == 1.0
    random_network(small.to_dict())


def test_lengths_of_heads_stay_where_that_is_asked():
    raw = default_raw("gemma4_text")
    before = dict(raw)
    small = config_from_dict(twin_raw(raw, keeps_dims=True))
    assert raw == before
    dims = {config_from_dict(raw).per_layer_config[i].head_dim for i in (0, 5)}
    assert {small.per_layer_config[i].head_dim for i in range(4)} == dims
    assert small.hidden_size < raw["hidden_size"]


def test_a_wrappers_text_part_is_shrunk_and_its_kind_stays():
    raw = default_raw("qwen3_vl")
    small = twin_raw(raw)
    assert small["model_type"] == "qwen3_vl"
    assert small["text_config"]["num_hidden_layers"] == 2 < raw["text_config"]["num_hidden_layers"]
    assert random_network(small).config.model_type == "qwen3_vl_text"


def test_lists_that_name_layers_name_those_that_are_kept():
    fields = {
        "num_hidden_layers": 6,
        "full_attn_idxs": [1, 3, 5],
        "kinds": list("abcdef"),
        "kv_source_layers": [0, 1, 1, 3, 3, 3],
        "per_layer_config": {"3": {"head_dim": 8}, "4": {}},
    }
    assert keep_layers(fields, 6, [0, 3, 5]) == {
        "num_hidden_layers": 3,
        "full_attn_idxs": [1, 2],
        "kinds": ["a", "d", "f"],
        "kv_source_layers": [0, 1, 1],
        "per_layer_config": {"1": {"head_dim": 8}},
    }


def test_a_tiny_checkpoint_is_read_by_transformers_and_says_something(tmp_path):
    folder = write_tiny("qwen3_moe", tmp_path / "tiny")
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The quick brown fox jumps over it.", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = network(ids).logits[0]
    assert logits.std() > 1.0
    assert len(set(logits.argmax(-1).tolist())) > 5


def test_the_zoo_has_what_transformers_can_build():
    families = zoo()
    assert {"llama", "gemma3", "deepseek_v3", "qwen3_vl", "llama4_text"} <= set(families)
    assert len(families) > 200


def test_a_family_that_transformers_does_not_know_is_refused_by_name():
    with pytest.raises(ModelError, match="no config of model type 'no_such'"):
        default_raw("no_such")
