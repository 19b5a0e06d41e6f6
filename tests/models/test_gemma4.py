"""Gemma 4 without torch: its published sizes, what its plan says, and what is no plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcellar as kv
from kvcellar.cli.models.planned import show_plan
from kvcellar.kernel import levels
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.models import load_model
from kvcellar.models.plans.plan import ModelPlan
from kvcellar.models.plans.rules import plan_by_rules
from tests.agents.fakes import eager as eager
from tests.models.players import Oracle
from tests.models.test_native import GEMMA4, IDS, SHAPE, logits, write_tiny

pytestmark = pytest.mark.skipif(not levels.is_available(), reason="needs the CPU kernel")

SLIDES, FULL = "sliding_attention", "full_attention"


def published(every: int, **fields: Any) -> dict[str, Any]:
    """Return a config as published ones are: of a wrapper, each so manieth layer sees all."""
    n_layers = fields["num_hidden_layers"]
    kinds = [SLIDES if (at + 1) % every else FULL for at in range(n_layers)]
    text = {
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "layer_types": kinds,
        "max_position_embeddings": 131_072,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            SLIDES: {"rope_theta": 1e4, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        **fields,
    }
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "gemma4_vision"},
        "tie_word_embeddings": True,
    }


E2B = published(
    5,
    num_hidden_layers=35,
    hidden_size=1536,
    intermediate_size=6144,
    num_attention_heads=8,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=256,
    sliding_window=512,
    use_bidirectional_attention=None,
)
A4B = published(
    6,
    num_hidden_layers=30,
    hidden_size=2816,
    intermediate_size=2112,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
    num_kv_shared_layers=0,
    sliding_window=1024,
    use_bidirectional_attention="vision",
    enable_moe_block=True,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=704,
)


def planned(raw: dict[str, Any]) -> ModelPlan:
    """Return the plan of a config."""
    plan = plan_by_rules(raw)
    assert plan is not None and ModelPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    return plan


def told(raw: dict[str, Any], tmp_path: Path, capsys: Any) -> str:
    """Return what ``inspect --plan`` says of a config."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    show_plan(str(path), as_json=False)
    said: str = capsys.readouterr().out
    return said


def with_text(raw: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a wrapper's config with other fields of its text; ``...`` leaves one out."""
    text = {key: one for key, one in {**raw["text_config"], **fields}.items() if one is not ...}
    return {**raw, "text_config": text}


def test_a_tokens_bytes_are_those_of_layers_that_store_rows(tmp_path, capsys):
    plan = planned(A4B)
    sliding, full = plan.facts.params.groups
    assert (len(sliding.layers), sliding.n_kv_heads, sliding.head_dim) == (25, 8, 256)
    assert (full.layers, full.n_kv_heads, full.head_dim) == ((5, 11, 17, 23, 29), 2, 512)
    assert (sliding.window, full.window) == (1024, None)
    one = parse_kv_dtype("bfloat16")
    assert sliding.cell_bytes(one) == 25 * 2 * 8 * 256 * 2
    assert full.cell_bytes(one) == 5 * 2 * 2 * 512 * 2
    assert "16 heads on 2 of 512 numbers, normed, V normed, V made as K" in (
        said := told(A4B, tmp_path, capsys)
    )
    assert "gated MLP and 8 experts of each token, normed apart, with gelu" in said
    assert "64 pairs, 1 to 0.0333762 radians per position; 192 pairs stay" in said


def test_layers_that_read_an_earlier_ones_rows_store_none(tmp_path, capsys):
    plan = planned(E2B)
    params = plan.facts.params
    assert [len(group.layers) for group in params.groups] == [12, 3]
    assert {params.sources[at] for at in range(15, 35)} == {13, 14}
    assert [one.heads[1] for one in plan.layers] == [1] * 15 + [0] * 20
    assert plan.layers[15].qkv.weights == ("model.layers.15.self_attn.q_proj.weight",)
    said = told(E2B, tmp_path, capsys)
    assert "16 layers   8 heads on those of layer 13, of 256 numbers, normed, turned" in said
    assert "own rows    256 numbers in each layer by model.embed_tokens_per_layer.weight" in said


def test_layers_heads_may_be_said_of_each_or_of_all_that_see_all():
    full = [at for at, kind in enumerate(A4B["text_config"]["layer_types"]) if kind == FULL]
    own = {str(at): {"head_dim": 512, "num_key_value_heads": 2} for at in full}
    lacks = {"global_head_dim": ..., "num_global_key_value_heads": ...}
    assert plan_by_rules(with_text(A4B, per_layer_config=own, **lacks)) == planned(A4B)
    # K's heads are the same in all layers of a model whose V has a matrix of its own.
    apart = planned(with_text(A4B, attention_k_eq_v=False))
    assert {group.n_kv_heads for group in apart.facts.params.groups} == {8}
    assert apart.layers[5].qkv.weights[2] == "model.layers.5.self_attn.v_proj.weight"


@pytest.mark.parametrize(
    "fields",
    [
        {"use_bidirectional_attention": "all"},
        {"hidden_activation": "relu"},
        {"num_kv_shared_layers": 34},
        {"num_kv_shared_layers": 36},
        {"vocab_size_per_layer_input": 1000},
        {"per_layer_config": {"3": {"intermediate_size": 12}}},
        {"per_layer_config": {"3": {"head_dim": 128}}},
        {"per_layer_config": {"4": {"num_key_value_heads": 3}}},
        {"rope_parameters": {SLIDES: {"rope_theta": 1e4}}},
        {
            "rope_parameters": {
                SLIDES: {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                FULL: {"rope_type": "proportional", "rope_theta": 1e6},
            }
        },
        {"enable_moe_block": True},
        {"never_seen": 1},
    ],
)
def test_what_no_rule_reads_has_no_plan(fields):
    planned(E2B)
    assert plan_by_rules(with_text(E2B, **fields)) is None


def test_a_plan_whose_parts_do_not_fit_is_none():
    whole = planned(E2B).to_json()

    def changed(change: Callable[[Any], None]) -> str:
        value = json.loads(json.dumps(whole))
        change(value)
        with pytest.raises(ValueError, match="no plan of a model") as caught:
            ModelPlan.from_json(value)
        return str(caught.value)

    assert "no KV heads" in changed(lambda one: one["layers"][20].update(heads=[8, 1, 256]))
    assert "no KV heads" in changed(lambda one: one["layers"][3].update(heads=[8, 0, 256]))
    assert "rows of their own" in changed(lambda one: one["layers"][3].update(own=None))
    assert "rows of their own" in changed(lambda one: one.update(own_rows=None))
    assert "no numbers" in changed(lambda one: one["own_rows"].update(size=0))
    assert "in parts" in changed(lambda one: one["layers"][3].update(is_gated=True))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: Any) -> Callable[..., Path]:
    """Write a tiny checkpoint of a model of the family."""
    made: dict[str, Path] = {}

    def write(name: str, **more: Any) -> Path:
        key = f"{name} {more}"
        if key not in made:
            kind, fields = GEMMA4[name]
            shape = {**SHAPE, "num_hidden_layers": 3, **fields, **more}
            made[key] = write_tiny(kind, tmp_path_factory.mktemp(name), **shape)
        return made[key]

    return write


def test_rows_of_layers_own_are_those_of_transformers(tiny):
    """Compare per-layer rows themselves: their common factor shows in no logit, behind a norm."""
    folder = tiny("gemma-4-own-rows")
    text = Oracle(folder).model.model
    ids = np.array(IDS, np.int64)
    with torch.no_grad():
        given = torch.from_numpy(ids)[None]
        x = text.embed_tokens(given)
        want = text.project_per_layer_inputs(x, text.get_per_layer_inputs(given))
    decoder: Any = load_model(folder, dtype="float32", backend="native").decoder
    got = decoder._own_rows.of(ids, np.ascontiguousarray(x[0].numpy()))
    np.testing.assert_allclose(got, want[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("name", GEMMA4)
def test_in_bfloat16_it_rounds_no_more_than_torchs_path(tiny, name):
    # Where a token has all experts, no rounding decides which.
    folder = tiny(name, **{"top_k_experts": 8} if "experts" in name else {})
    by_torch, ours = (
        logits(load_model(folder, weights="bf16", backend=one), kv_dtype="float32")
        for one in ("torch", "native")
    )
    true = Oracle(folder).logits(IDS)
    off, own = (np.linalg.norm(one - true) / np.linalg.norm(true) for one in (ours, by_torch))
    assert off <= 1.2 * own and own < 0.05, (off, own)


@pytest.mark.parametrize(
    "make", [kv.make_decode_session, kv.make_paged_session, kv.make_tree_session]
)
def test_rows_that_layers_share_are_read_in_any_cache_and_storage_type(tiny, make):
    ours = load_model(tiny("gemma-4-own-rows"), dtype="float32", backend="native")
    want = logits(ours, kv_dtype="float32")
    assert np.abs(logits(ours, make, kv_dtype="float32") - want).max() <= 1e-5
    quantised = logits(ours, make, kv_dtype="int8:first4:last8")
    assert 0 < np.abs(quantised - want).max() <= 0.2 * np.abs(want).max()


def test_a_batch_that_experts_take_in_pieces_says_what_its_sequences_say(tiny):
    ours = load_model(tiny("gemma-4-experts"), dtype="float32", backend="native")
    ids = np.random.default_rng(4).integers(0, 256, (6, 400))
    last = [400 * (seq + 1) - 1 for seq in range(6)]
    with kv.make_seq_session("native", kv.make_config(ours.params, 6000, "float32")) as session:
        runner, cache = ours.bind(session), session.cache
        at = cache.begin_step([(seq, 400) for seq in range(6)])
        together = runner.forward(ids.reshape(-1), at, last)
        for seq in range(6):
            at = cache.begin_step([(6 + seq, 400)])
            alone = runner.forward(ids[seq], at, [399])[0]
            np.testing.assert_allclose(together[seq], alone, atol=2e-5)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["gemma-4-experts", "gemma-4-own-rows"])
def test_agents_sleep_with_torch_and_wake_up_without(tiny, name, tmp_path):
    greedy = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    settings = {"store": tmp_path, "capacity": 512, "weights": "bf16"}
    restored = []
    for backend in ("torch", "native", "torch"):
        with kv.open(tiny(name), backend=backend, **settings) as cellar:
            friend = cellar.agent("friend")
            restored.append(friend.say("Go on: ", **greedy).usage.restored_tokens)
            assert friend.say("Go on: ", **greedy).usage.cached_tokens > 0
    assert restored[0] == 0 and 0 < restored[1] < restored[2]
