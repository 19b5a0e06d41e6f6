"""What is learnt of a model: by its config alone, from its network, and kept for the next time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.masking_utils import create_sliding_window_causal_mask

from kvcellar.backends.torch.learn import probe
from kvcellar.backends.torch.learn.shrink import checkpoints, narrow
from kvcellar.backends.torch.learn.visibility import FARTHEST, read_mask
from kvcellar.backends.torch.loading import model_facts
from kvcellar.errors import ModelError
from kvcellar.metadata import read_kv_cache_metadata, write_kv_cache_metadata
from kvcellar.models import known
from kvcellar.models.facts import LayerFacts, ModelFacts, Rope
from kvcellar.models.files.configs import config_from_dict, positions_of, rope_of
from kvcellar.types import ModelCacheParams
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


def params_from_config(config: Any) -> ModelCacheParams:
    """The facts for a cache that a network of this config is seen to have."""
    return probe.learn_facts(config if isinstance(config, dict) else config.to_dict()).params


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
    assert positions_of(config) == positions


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
    gemma = {"num_hidden_layers": 13, "sliding_window": 8, "head_dim": 16}
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
    group = next(one for one in params_from_config(config).groups if one.window)
    at = np.arange(n_tokens)
    firsts = np.array([group.first_seen(position) for position in range(n_tokens)])
    seen = (at <= at[:, None]) & (at >= firsts[:, None])
    assert np.array_equal(mask[0, 0].numpy() == 0, seen)


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
        ("phi3", "num_hidden_layers"),
        ("olmo2", "num_attention_heads"),
    ],
)
@pytest.mark.parametrize("value", [..., None], ids=["left out", "null"])
def test_a_size_that_the_class_would_make_up_is_named_when_it_is_missing(family, field, value):
    config = raw(family, **{"head_dim": 16} | {field: value})
    with pytest.raises(ModelError, match=f"the {family} config has no {field}"):
        config_from_dict(config)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "has no model_type"),
        (raw("alien"), "architecture 'alien' is unknown to transformers"),
        ({"model_type": "gemma3", "text_config": 3}, "text_config=3, and it must be an object"),
        (raw("llama", num_key_value_heads=3), "num_key_value_heads must divide"),
        (raw("llama", num_hidden_layers="six"), "config cannot be read"),
        (raw("qwen2", layer_types=["full_attention"] * 5), "layer"),
        (raw("gemma3_text", head_dim=16, use_bidirectional_attention=True), "a causal model"),
        (raw("gemma3_text", head_dim=16, attn_logit_softcapping=50.0), "softcapping.*ignores"),
        (raw("bert", vocab_size=99), "a causal model"),
        (raw("falcon"), "not call its attention through the interface"),
        (raw("gpt_neox_japanese"), "not call its attention through the interface"),
        (raw("mamba", state_size=4), "has recurrent layers alone"),
        (raw("bloom"), "takes no position_ids"),
        (raw("diffllama"), "attends more than once in layer 0"),
        (raw("doge"), "a causal model"),
    ],
)
def test_what_no_cache_here_can_serve(config, match):
    with pytest.raises(ModelError, match=match):
        params_from_config(config)


def test_indexed_attention_is_refused_by_name():
    fields = transformers.DeepseekV32Config(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4
    )
    with pytest.raises(ModelError, match="'deepseek_v32' gives the attention of layer 0 indices"):
        params_from_config(fields)


def test_recurrent_layers_name_their_states_and_the_modules_that_ask_for_them():
    config = transformers.Qwen3NextConfig(
        num_hidden_layers=4, hidden_size=64, num_experts=16, moe_intermediate_size=8
    )
    facts = probe.learn_facts(config.to_dict())
    assert not facts.others
    assert [layer.layer for layer in facts.layers] == [3]
    assert [at.layer for at in facts.states] == [0, 1, 2]
    assert facts.states[1].shapes == (("convolution", (8192, 4)), ("recurrent", (32, 128, 128)))
    assert facts.states[1].indices == (0, 0)
    assert facts.states[1].askers == (("model.layers.1.linear_attn", "cache_params"),)
    assert ModelFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_layers_with_attention_are_numbered_without_gaps_for_a_cache():
    config = transformers.NemotronHConfig(
        hidden_size=64, layers_block_type=["mamba", "attention", "mlp", "mamba", "attention"]
    )
    facts = probe.learn_facts(config.to_dict())
    assert facts.n_layers == 5
    assert facts.attention_numbers == {1: 0, 4: 1}
    assert facts.state_numbers == {0: 0, 3: 1}
    params = facts.params
    assert (params.n_layers, params.groups[0].layers) == (2, (0, 1))
    assert params.state is not None
    assert params.state.layers == tuple(at.shapes for at in facts.states)


def test_a_layer_may_have_attention_and_states():
    facts = probe.learn_facts(checkpoints.twin_raw(checkpoints.default_raw("falcon_h1")))
    assert [at.layer for at in facts.layers] == [at.layer for at in facts.states] == [0, 1]


@pytest.mark.parametrize(("family", "by_token"), [("jamba", True), ("zaya", False)])
def test_modules_that_ignore_a_past_where_several_tokens_come_are_found(family, by_token):
    facts = probe.learn_facts(checkpoints.twin_raw(checkpoints.default_raw(family)))
    assert {at.by_token for at in facts.states} == {by_token}


def test_a_model_without_attention_is_refused():
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
    raw = checkpoints.default_raw("granitemoehybrid")
    facts = probe.learn_facts(checkpoints.twin_raw({**raw, **kinds}))
    assert not facts.layers
    with pytest.raises(ModelError, match="has no layer with attention"):
        _ = facts.params


# Families that no table named ---------------------------------------------------------------------


def test_layers_of_one_model_may_differ_in_heads_and_in_their_lengths():
    config = transformers.Gemma4TextConfig(num_hidden_layers=6)
    sliding, full = params_from_config(config).groups
    assert (sliding.head_dim, full.head_dim) == (256, 512)
    assert (sliding.window, full.window) == (512, None)
    assert full.layers == (5,)


def test_values_may_be_shorter_than_keys():
    config = transformers.MiMoV2FlashConfig(
        num_hidden_layers=2, hidden_size=64, layer_types=["full_attention", "sliding_attention"]
    )
    full, sliding = params_from_config(config).groups
    assert (full.head_dim, full.v_head_dim) == (192, 128)
    assert (full.n_kv_heads, sliding.n_kv_heads) == (4, 8)


def test_layers_that_share_k_and_v_name_the_one_that_stores_them():
    config = transformers.Gemma3nTextConfig(
        num_hidden_layers=10, num_kv_shared_layers=4, hidden_size=64
    )
    params = params_from_config(config)
    # Every fifth layer is full: 4 and 9. Of the first six, 5 is the last with a window, 4 is full.
    assert params.shared == ((6, 5), (7, 5), (8, 5), (9, 4))
    assert [group.layers for group in params.groups] == [(0, 1, 2, 3, 5), (4,)]


def test_chunks_are_told_from_windows():
    config = transformers.Llama4TextConfig(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=16, intermediate_size_mlp=16, num_local_experts=2, head_dim=16,
        attention_chunk_size=32,
    )  # fmt: skip
    chunked, full = params_from_config(config).groups
    assert (chunked.layers, chunked.chunk, chunked.window) == ((0, 1, 2), 32, None)
    assert (full.layers, full.is_full) == ((3,), True)


def test_sinks_scales_and_caps_are_noted():
    (layer, *_) = probe.learn_facts(FAMILIES["gpt_oss"]().to_dict()).layers
    assert (layer.has_sinks, layer.softcap) == (True, None)
    (layer, *_) = probe.learn_facts(FAMILIES["gemma2"]().to_dict()).layers
    assert (layer.has_sinks, layer.softcap, layer.scale) == (False, 5.0, 0.25)


def test_a_config_may_hold_floats_that_json_has_not():
    fields = transformers.FalconH1Config(num_hidden_layers=2).to_dict()
    fields["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    assert probe.learn_facts(fields).family == "falcon_h1"


@pytest.mark.parametrize("family", ["jetmoe", "longcat_flash"])
def test_a_small_network_that_does_not_run_without_numbers_is_run_with_some(family):
    small = checkpoints.twin_raw(checkpoints.default_raw(family))
    facts = probe.learn_facts(small)
    assert facts.n_layers == len(facts.layers)


def test_a_large_network_that_reads_numbers_is_learnt_from_narrow_ones():
    factors = {"long_factor": [2.0] * 64, "short_factor": [1.0] * 64}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    raw = checkpoints.default_raw("phimoe", num_hidden_layers=4, max_position_embeddings=131_072)
    plain = probe.learn_facts(raw)
    moving = {**rope, **factors, "long_mscale": 1.2, "short_mscale": 1.2}
    facts = probe.learn_facts({**raw, "rope_parameters": moving})
    assert facts == replace(plain, rope=Rope("longrope", 4096))


def test_a_large_network_that_takes_no_head_dim_is_learnt_with_its_own():
    facts = probe.learn_facts(checkpoints.default_raw("jetmoe"))
    assert (len(facts.layers), facts.hidden_size, facts.vocab_size) == (12, 2048, 32000)
    assert {(at.n_heads, at.head_dim, at.scale) for at in facts.layers} == {(32, 128, 128**-0.5)}


def test_a_large_network_is_refused_where_no_narrow_one_is_like_it(monkeypatch):
    raw = checkpoints.default_raw("jetmoe")
    with monkeypatch.context() as only:
        own = narrow.narrow_raw
        only.setattr(
            narrow, "narrow_raw", lambda raw, width: {**own(raw, width), "kv_channels": 64}
        )
        with pytest.raises(ModelError, match="its own code stopped in"):
            probe.learn_facts(raw)
    with pytest.raises(ModelError, match="its own code stopped in"):
        probe.learn_facts(checkpoints.default_raw("longcat_flash"))  # its heads alone are too large


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [1, 2, 3, 7, 8, 64, 1000, 131_072])
def test_a_mask_is_read_whatever_its_length(span):
    assert read_mask(lambda b, h, q, k: (k <= q) & (k > q - span)) == (span, None)
    if span > 1:
        assert read_mask(lambda b, h, q, k: (k <= q) & (k // span == q // span)) == (None, span)


def test_a_window_past_all_texts_is_all_of_the_history():
    assert read_mask(lambda b, h, q, k: k <= q) == (None, None)
    assert read_mask(lambda b, h, q, k: (k <= q) & (k > q - 2 * FARTHEST)) == (None, None)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: q >= 0,  # both ways
        lambda b, h, q, k: k < q,  # not itself
        lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0),  # every other one
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 4)),  # a window, and the first four
        lambda b, h, q, k: (k <= q) & (k > q - 8 - h),  # by head
        lambda b, h, q, k: abs(q - k) <= 4,
        lambda b, h, q, k: torch.ones(1, 5)[b, k] > 0,  # by what the tokens are
        lambda b, h, q, k: (k <= q) & torch.ones(1, 5, device="meta")[0, 0].bool(),
    ],
)
def test_other_masks_are_none(mask):
    assert read_mask(mask) is None


# RoPE ---------------------------------------------------------------------------------------------


def test_factors_that_depend_on_the_length_are_seen():
    fixed = raw("llama", max_position_embeddings=64)
    assert rope_of(config_from_dict(fixed)) == Rope("fixed")
    dynamic = fixed | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4}}
    assert rope_of(config_from_dict(dynamic)) == Rope("dynamic", 64)
    assert positions_of(config_from_dict(dynamic)) == 256
    dynamic["rope_parameters"]["factor"] = 1.0  # never longer than what it was made for
    assert rope_of(config_from_dict(dynamic)) == Rope("fixed")


def test_a_capacity_chooses_factors():
    assert [Rope("longrope", 64).length_for(n) for n in (1, 64, 65, 999)] == [64, 64, 65, 65]
    assert [Rope("dynamic", 64).length_for(n) for n in (1, 64, 65, 999)] == [64, 64, 65, 999]
    assert [Rope("fixed").length_for(n) for n in (1, 999)] == [0, 0]


# Kept ---------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    return tmp_path


def facts() -> ModelFacts:
    layers = (LayerFacts(0, 4, 2, 16, 8, 0.25, window=8), LayerFacts(1, 4, 2, 16, 8, 0.25))
    return ModelFacts("some", layers, (), 2, 64, 96, 272, 512, Rope("longrope", 64))


def test_facts_survive_being_written():
    assert ModelFacts.from_json(json.loads(json.dumps(facts().to_json()))) == facts()


def test_a_model_is_looked_at_once(home, monkeypatch):
    first = model_facts(raw("llama"))
    monkeypatch.setattr(probe, "learn_facts", lambda raw: pytest.fail("looked at again"))
    assert model_facts(raw("llama") | {"_name_or_path": "x", "use_cache": False}) == first


def test_another_config_or_another_version_is_another_model(home):
    paths = {
        known.known_path(raw("llama"), "transformers 5.23.0"),
        known.known_path(raw("llama"), "transformers 5.24.0"),
        known.known_path(raw("llama", num_key_value_heads=4), "transformers 5.23.0"),
    }
    assert len(paths) == 3


def test_facts_of_another_version_of_this_package_are_learnt_again(home, monkeypatch):
    before = known.known_path(raw("llama"), "me")
    monkeypatch.setattr(known, "__version__", "0.0.0")
    assert known.known_path(raw("llama"), "me") != before


def test_what_is_refused_is_not_kept(home):
    with pytest.raises(ModelError):
        model_facts(raw("doge"))
    assert not list(home.rglob("*.json"))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "null", "\x00\xff", "[" * 100_000],
)
def test_a_damaged_file_is_learnt_again(home, text):
    path = known.known_path(raw("llama"), "me")
    assert known.facts_of(raw("llama"), lambda raw: facts(), "me") == facts()
    path.write_text(text, encoding="latin-1")
    assert known.facts_of(raw("llama"), lambda raw: facts(), "me") == facts()
    assert ModelFacts.from_json(json.loads(path.read_text())) == facts()


@pytest.mark.parametrize(
    "damage",
    [
        {"n_layers": -1},
        {"n_layers": "2"},
        {"layers": []},
        {"others": [[0]]},
        {"rope": {"kind": "fixed"}},
        {"more": 1},
    ],
)
def test_a_file_with_other_fields_is_learnt_again(home, damage):
    path = known.known_path(raw("llama"), "me")
    known.keep(path, facts().to_json() | damage)
    assert known.facts_of(raw("llama"), lambda raw: facts(), "me") == facts()


def test_a_home_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    assert known.facts_of(raw("llama"), lambda raw: facts(), "me") == facts()


def test_an_error_that_nobody_foresaw_is_a_refusal_that_names_the_model(monkeypatch, caplog):
    def stop(network):
        raise KeyError("latent_head")

    monkeypatch.setattr(probe, "find_latents", stop)
    with caplog.at_level("INFO"), pytest.raises(ModelError) as found:
        probe.learn_facts(raw("llama"))
    assert "architecture 'llama' cannot be served" in str(found.value)
    assert "when a few tokens were run" in str(found.value)
    assert "latent_head" not in str(found.value)
    assert isinstance(found.value.__cause__, KeyError)
    assert "latent_head" in caplog.text
