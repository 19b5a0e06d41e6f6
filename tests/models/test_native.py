"""The native backend: planned models without torch, held to torch's path on the same weights."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

import kvcellar as kv
from kvcellar.backends.torch.learn.shrink.checkpoints import (
    default_raw,
    make_tokenizer,
    random_network,
    write_tiny,
)
from kvcellar.cli.models.planned import show_plan
from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.kernel import levels
from kvcellar.kernel import linear as products
from kvcellar.models import LoadedModel, LoadOptions, load_model
from kvcellar.models.files.checkpoint import read_config
from kvcellar.models.loading import check_model
from kvcellar.models.plans.plan import ModelPlan, kept_plan, plan_path
from kvcellar.models.plans.rules import plan_by_rules
from kvcellar.models.sizes.sizing import size_model
from tests.agents.fakes import eager as eager
from tests.models.gguf.families import CASES
from tests.models.players import Oracle
from tests.models.tiny_checkpoints import rewrite
from tests.real_models import SMOLLM2

pytestmark = pytest.mark.skipif(not levels.is_available(), reason="needs the CPU kernel")

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FAMILIES = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("qwen2", {"layer_types": ["full_attention"] * 2}),
    "norms-of-heads": ("qwen3", {"layer_types": ["full_attention"] * 2}),
    "window": ("mistral", {"sliding_window": 6}),
}
SLIDES, FULL = "sliding_attention", "full_attention"
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", FULL, "linear_attention"],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 12.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}
ROUTED_HEADS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
OLMO_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OTHERS = {
    "gemma-3": ("gemma3_text", {"layer_types": [SLIDES, FULL, SLIDES], "sliding_window": 12}),
    "gemma-2": (
        "gemma2",
        {
            "layer_types": [SLIDES, FULL, SLIDES],
            "sliding_window": 12,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "hidden_size": 80,
        },
    ),
    "layers-not-turned": ("smollm3", {"layer_types": [FULL] * 3, "no_rope_layers": [1, 0, 1]}),
    "joined": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
            "sliding_window": 12,
        },
    ),
    "multiplied": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
        },
    ),
    "norms-behind": ("olmo2", {}),
    "window-in-all": ("ministral", {"layer_types": [SLIDES] * 3, "sliding_window": 12}),
    "biases-before-attention": ("seed_oss", {}),
    "biases-everywhere": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "turned-within-windows": (
        "exaone4",
        {"layer_types": [SLIDES, FULL, SLIDES], "sliding_window": 12},
    ),
    "norms-behind-and-windows": (
        "olmo3",
        {
            "layer_types": [SLIDES, FULL, SLIDES],
            "sliding_window": 12,
            "rope_parameters": {
                SLIDES: {"rope_type": "default", "rope_theta": 1e4},
                FULL: {**OLMO_YARN, "rope_theta": 1e4},
            },
        },
    ),
    "first-gemma": ("gemma", {}),
    "mixtral": ("mixtral", {"sliding_window": 12}),
    "shared-expert": ("qwen2_moe", {"layer_types": [FULL] * 3, "mlp_only_layers": [1]}),
    "shares-normalised": ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "shares-as-they-are": ("olmoe", {}),
    "packed-experts": (
        "granitemoe",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    "corrected-experts": (
        "glm4_moe",
        {**ROUTED_HEADS, "use_qk_norm": True, "attention_bias": True, "n_group": 2},
    ),
    "corrected-experts-and-windows": (
        "dots1",
        {
            **ROUTED_HEADS,
            "layer_types": [FULL, SLIDES, FULL],
            "sliding_window": 12,
            "routed_scaling_factor": 2.5,
        },
    ),
    "crossed-experts": ("gpt_oss", {"layer_types": [SLIDES, FULL, SLIDES], "sliding_window": 12}),
    "short-convolutions": ("lfm2", {"layer_types": ["conv", FULL, "conv"], "conv_bias": True}),
    "short-convolutions-and-experts": (
        "lfm2_moe",
        {
            "layer_types": ["conv", FULL, "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "delta-net": ("qwen3_5_text", DELTA),
    "delta-net-in-parts": ("olmo_hybrid", {**DELTA, "rope_parameters": None}),
    "delta-net-in-parts-and-turned": (
        "olmo_hybrid",
        {**DELTA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "delta-net-by-key-heads": ("qwen3_next", {**DELTA, "mlp_only_layers": [1]}),
    "delta-net-and-experts": ("qwen3_5_moe_text", DELTA),
    "scan": ("granitemoehybrid", {**MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0}),
    "scan-and-experts": ("granitemoehybrid", {**MAMBA, "position_embedding_type": "rope"}),
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
ROUTED = {
    **LATENT,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
GROUPED = {"n_routed_experts": 16, "num_experts_per_tok": 3}
LATENT_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.9}
LATENT_YARN |= {"mscale_all_dim": 0.6, "original_max_position_embeddings": 32}
LATENTS = {
    "latents-in-pairs": (
        "deepseek_v2",
        {
            **ROUTED,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": LATENT_YARN,
        },
    ),
    "latents-parted": (
        "deepseek_v3",
        {
            **ROUTED,
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rope_parameters": LATENT_YARN,
        },
    ),
    "latents-in-halves": (
        "deepseek_v3",
        {**ROUTED, "first_k_dense_replace": 0, "rope_interleave": False, "q_lora_rank": None},
    ),
    "latents-without-experts": ("youtu", LATENT),
    "latents-and-groups": (
        "deepseek_v3",
        {**ROUTED, **GROUPED, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "latents-and-groups-by-their-best": (
        "deepseek_v2",
        {
            **ROUTED,
            **GROUPED,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "latents-by-kinds": ("glm4_moe_lite", ROUTED),
    "latents-multiplied": ("minicpm3", {**LATENT, "attention_bias": True, "dim_model_base": 32}),
}
OTHERS |= LATENTS
_GEMMA4 = {
    "layer_types": [SLIDES, SLIDES, FULL],
    "sliding_window": 12,
    "per_layer_config": {2: {"head_dim": 32, "num_key_value_heads": 1}},
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
GEMMA4 = {
    "gemma-4": ("gemma4_text", _GEMMA4),
    "gemma-4-12b": (
        "gemma4_unified_text",
        {name: one for name, one in _GEMMA4.items() if name != "hidden_size_per_layer_input"},
    ),
    "gemma-4-experts": (
        "gemma4_text",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma-4-own-rows": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "layer_types": [SLIDES, FULL] * 3,
            "sliding_window": 12,
            "per_layer_config": {number: {"head_dim": 32} for number in (1, 3, 5)},
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
        },
    ),
}
RULED = {
    **GEMMA4,
    "queries-that-grow": (
        "ministral3",
        {
            "rope_parameters": {
                **OLMO_YARN,
                "rope_theta": 1e4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "max_position_embeddings": 512,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    "pairs-that-turn": ("glm4", {"attention_bias": True}),
    "pairs-that-turn-in-part": ("glm", {"attention_bias": False}),
    "pairs-that-turn-everywhere": ("ernie4_5", {"use_bias": True}),
}
"""Families whose plan no network is read off: rules say it alone."""
OTHERS |= RULED
FORMATS = ("bf16", "int8", "int4")
IDS = tuple(b"def first(items):\n    return items[0]\n")


@pytest.fixture(scope="module")
def home(tmp_path_factory: Any) -> Iterator[Path]:
    """A folder of its own for what is learnt."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCELLAR_HOME", str(folder))
        yield folder


Pair = tuple[Path, LoadedModel, LoadedModel]


@pytest.fixture(scope="module")
def pair(home: Path, tmp_path_factory: Any) -> Callable[[str, str], Pair]:
    """Make a checkpoint of a family, and load it by torch, which learns its plan, and natively."""
    made: dict[tuple[str, str], Pair] = {}

    def load(family: str, weights: str) -> Pair:
        if (family, weights) not in made:
            kind, fields = FAMILIES[family]
            folder = tmp_path_factory.mktemp(family)
            write_tiny(kind, folder, **{**SHAPE, **fields})
            by_torch = load_model(folder, weights=weights)
            made[family, weights] = (
                folder,
                by_torch,
                load_model(folder, weights=weights, backend="native"),
            )
        return made[family, weights]

    return load


def logits(model: LoadedModel, make: Any = kv.make_seq_session, **config: Any) -> np.ndarray:
    """Run a prompt in two chunks and some tokens one by one, ``[len(IDS), vocab]``."""
    with make(model.backend, kv.make_config(model.params, 256, **config)) as session:
        runner, cache, out = model.bind(session), session.cache, []
        for start, stop in ((0, 9), (9, 20), *((at, at + 1) for at in range(20, len(IDS)))):
            if hasattr(cache, "begin_step"):
                cache.begin_step([(0, stop - start)])
            at = list(range(start, stop))
            out.append(runner.forward(IDS[start:stop], at, list(range(stop - start))))
    return np.concatenate(out)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", FORMATS)
def test_logits_are_those_of_torchs_path(pair, family, weights):
    folder, by_torch, ours = pair(family, weights)
    want, got = logits(by_torch, kv_dtype="float32"), logits(ours, kv_dtype="float32")
    assert got.shape == want.shape and np.isfinite(got).all()
    # Both round in bfloat16, and what they are meant to compute is transformers' in float32.
    true = Oracle(folder).logits(IDS)
    off, own = np.abs(got - true).max(), np.abs(want - true).max()
    assert off <= 1.5 * own + 1e-3 and np.abs(got - want).max() <= 1.5 * own + 1e-3
    # One token attends itself alone: where products are the same, so is all of it.
    assert np.abs(got[0] - want[0]).max() <= own


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(("hidden", "inner"), [(80, 144), (112, 128), (80, 256)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_no_whole_groups_stay_in_the_models_type(
    home, tmp_path, weights, hidden, inner, dtype
):
    sizes = {**SHAPE, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": 288}
    raw = default_raw("llama", **sizes, rms_norm_eps=1e-5, tie_word_embeddings=inner == 128)
    random_network(raw).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    by_torch = load_model(tmp_path, weights=weights, dtype=dtype, backend="torch")
    ours = load_model(tmp_path, weights=weights, dtype=dtype, backend="native")
    want, got = logits(by_torch, kv_dtype="float32"), logits(ours, kv_dtype="float32")
    true = Oracle(tmp_path).logits(IDS)
    off, own = np.abs(got - true).max(), np.abs(want - true).max()
    assert off <= 1.3 * own + 1e-5
    if dtype == "float32":  # inputs of what is packed may be rounded the other way
        assert np.abs(got - want).max() <= 0.1 * own + 1e-5
    spec = size_model(LoadOptions(tmp_path, backend="native", weights=weights, dtype=dtype))
    assert spec.weight_bytes == pytest.approx(ours.size_bytes, rel=0.02)


@pytest.mark.skipif(not products.reads_coded(), reason="weights in 12 bits are not read faster")
@pytest.mark.parametrize(("family", "is_tied"), [("llama", True), ("llama", False), ("mixtral", 0)])
def test_weights_in_bfloat16_are_held_in_12_bits_as_by_torch(home, tmp_path, family, is_tied):
    sizes = {**SHAPE, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 2048}
    network = random_network(default_raw(family, **sizes, tie_word_embeddings=bool(is_tied)))
    seeded = torch.Generator().manual_seed(7)
    for one in network.parameters():  # some numbers have no code, and are kept beside the others
        with torch.no_grad():
            one.mul_(1 + 60.0 * (torch.rand(one.shape, generator=seeded) < 5e-4))
    network.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    by_torch = load_model(tmp_path, weights="bf16", backend="torch")
    ours = load_model(tmp_path, weights="bf16", backend="native")
    want, got = logits(by_torch, kv_dtype="float32"), logits(ours, kv_dtype="float32")
    own = np.abs(want - Oracle(tmp_path).logits(IDS)).max()
    assert np.abs(got - want).max() <= own and np.abs(got[0] - want[0]).max() <= own / 2
    n = sum(one.numel() for one in network.parameters())
    assert 1.4 * n < ours.size_bytes < 1.7 * n
    spec = size_model(LoadOptions(tmp_path, backend="native", weights="bf16"))
    assert ours.size_bytes <= spec.weight_bytes * 1.02


def states(model: LoadedModel) -> np.ndarray:
    """Run the text in one step; return what logits would be made of."""
    config = kv.make_config(model.params, 64, "float32")
    with kv.make_seq_session(model.backend, config) as session:
        runner: Any = model.bind(session)
        at = session.cache.begin_step([(0, len(IDS))])
        found = runner.forward_hidden(IDS, at)
        assert not session.cache.is_step_open, "the step is complete"
        return found


@pytest.fixture(scope="module")
def other(home: Path, tmp_path_factory: Any) -> Callable[[str], Path]:
    """Write a checkpoint of three layers of a family, whose plan torch learns with no other."""
    made: dict[str, Path] = {}

    def write(family: str) -> Path:
        if family not in made:
            kind, fields = OTHERS[family]
            folder = tmp_path_factory.mktemp(family)
            shape = {**SHAPE, "num_hidden_layers": 3, "num_key_value_heads": 2, **fields}
            made[family] = write_tiny(kind, folder, **shape)
        return made[family]

    return write


@pytest.mark.parametrize("family", OTHERS)
def test_in_float32_logits_are_transformers(other, family):
    folder = other(family)
    oracle, ours = Oracle(folder), load_model(folder, backend="native", dtype="float32")
    assert ours.weights is None and plan_by_rules(read_config(folder)) is not None
    near = {"atol": 2e-4, "rtol": 0}
    np.testing.assert_allclose(logits(ours, kv_dtype="float32"), oracle.logits(IDS), **near)
    np.testing.assert_allclose(states(ours), oracle.hidden(IDS), **near)
    config = kv.make_config(ours.params, 256, kv_dtype="float32")
    with kv.make_seq_session("native", config) as session:
        runner, cache = ours.bind(session), session.cache
        cache.begin_step([(0, 30)])
        runner.forward(IDS[:30], range(30), [])
        cache.seq_cp(0, 1)
        others = (*IDS[:30], 65, 66)
        cache.begin_step([(0, 1), (1, 1)])
        runner.forward([IDS[30], 65], [30, 30], [0, 1])
        cache.keep_point(1, 31)
        cache.begin_step([(0, 1), (1, 1)])
        both = runner.forward([IDS[31], 66], [31, 31], [0, 1])
        np.testing.assert_allclose(both[0], oracle.logits(IDS[:32])[31], **near)
        np.testing.assert_allclose(both[1], oracle.logits(others)[31], **near)
        cache.seq_rm(1, 31)
        cache.begin_step([(1, 1)])
        again = runner.forward([IDS[0]], [31])[0]
        np.testing.assert_allclose(again, oracle.logits((*others[:31], IDS[0]))[31], **near)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_learnt_as_their_rules_say_and_say_what_torch_says(other, family):
    folder = other(family)
    by_torch = load_model(folder, weights="int8", backend="torch")
    raw = read_config(folder)
    assert kept_plan(raw) is None if family in RULED else is_as_learnt(raw)
    ours = load_model(folder, weights="int8", backend="native")
    want, got = logits(by_torch, kv_dtype="float32"), logits(ours, kv_dtype="float32")
    off = np.abs(want - Oracle(folder).logits(IDS)).max()
    assert np.abs(got - want).max() <= 0.5 * off
    assert (got.argmax(-1) == want.argmax(-1)).all()


@pytest.mark.parametrize(
    "make", [kv.make_decode_session, kv.make_paged_session, kv.make_tree_session]
)
def test_any_cache_stands_behind_it(pair, make):
    _, _, ours = pair("llama", "bf16")
    want = logits(ours, kv_dtype="bfloat16")
    assert np.abs(logits(ours, make, kv_dtype="bfloat16") - want).max() <= 2e-2
    quantised = logits(ours, make, kv_dtype="int8:first4:last64")
    assert np.abs(quantised - want).max() <= 0.2 * np.abs(want).max()


@pytest.mark.parametrize(("family", "weights"), [("llama", "bf16"), ("biases", "int8")])
def test_hidden_states_are_those_of_torchs_path(pair, family, weights):
    _, by_torch, ours = pair(family, weights)

    want, got = states(by_torch), states(ours)
    assert got.shape == want.shape == (len(IDS), SHAPE["hidden_size"])
    assert got.dtype == np.float32 and np.abs(want).max() > 0.5
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()
    assert (got[0] == want[0]).all(), "one token attends itself alone: nothing differs"


def test_forks_and_wanted_rows(pair):
    _, _, ours = pair("llama", "int8")
    with kv.make_seq_session("native", kv.make_config(ours.params, 256)) as session:
        runner, cache = ours.bind(session, feature_layers=(0, 2)), session.cache
        cache.begin_step([(0, 20)])
        none, features = runner.forward_with_features(IDS[:20], range(20), [])
        assert none.shape == (0, ours.vocab_size) and features.shape == (20, 2 * 64)
        cache.seq_cp(0, 1)
        cache.begin_step([(1, 1), (0, 1)])
        both = runner.forward([IDS[20], 65], [20, 20], [0, 1])
        cache.seq_rm(1)
        cache.seq_cp(0, 1, 0, 20)
        cache.begin_step([(1, 1)])
        again = runner.forward([IDS[20]], [20])
    assert np.abs(both[0] - again[0]).max() <= 2e-2 and np.abs(both[0] - both[1]).max() > 0.1


def test_a_plan_is_a_value_that_is_kept(pair):
    folder, _, _ = pair("norms-of-heads", "bf16")
    raw = read_config(folder)
    plan = kept_plan(raw)
    assert plan is not None and ModelPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert len(plan.layers) == 2 and plan.layers[0].heads == (4, 2, 16)
    assert plan.layers[1].q_norm is not None and len(plan.ropes[0].frequencies) == 8
    path = plan_path(raw)
    whole = path.read_bytes()
    for damaged in (b"{}", whole[: len(whole) // 2], b"[" * 100_000, whole.replace(b"eps", b"epS")):
        path.write_bytes(damaged)
        assert kept_plan(raw) is None
    path.write_bytes(whole)
    assert kept_plan(raw) == plan


ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 128}
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


def is_as_learnt(raw: Any) -> bool:
    """Return true if the rules say what was learnt, but for the last bit of a frequency."""
    ruled, learnt = plan_by_rules(raw), kept_plan(raw)
    assert ruled is not None and learnt is not None
    assert len(ruled.ropes) == len(learnt.ropes)
    for one, other in zip(ruled.ropes, learnt.ropes, strict=True):
        np.testing.assert_allclose(one.frequencies, other.frequencies, rtol=2e-7)
        assert one.scale == pytest.approx(other.scale, rel=1e-7)
    return replace(ruled, ropes=learnt.ropes) == learnt


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_say_of_a_config_what_is_learnt_of_its_network(pair, family):
    folder, _, _ = pair(family, "bf16")
    assert is_as_learnt(read_config(folder))


@pytest.mark.parametrize(
    "fields",
    [{"rope_parameters": ROPE}, {"rope_parameters": YARN}, BIASES],
    ids=["llama3", "yarn", "biases"],
)
def test_rules_know_the_ropes_and_biases_of_llama(home, tmp_path, fields):
    folder = write_tiny("llama", tmp_path / "llama", **{**SHAPE, **fields})
    load_model(folder, weights="bf16")
    raw = read_config(folder)
    assert is_as_learnt(raw)
    odd: dict[str, Any] = {
        "model_type": "gemma",
        "hidden_act": "gelu",
        "num_key_value_heads": 0,
        "head_dim": 15,
        "rope_parameters": {**raw["rope_parameters"], "rope_type": "longrope"},
        "quantization_config": {"bits": 4},
        "layer_types": ["full_attention", "sliding_attention"],
        "never_seen": 1,
    }
    assert [name for name, value in odd.items() if plan_by_rules({**raw, name: value})] == []
    needed = ("rms_norm_eps", "vocab_size", "num_key_value_heads", "tie_word_embeddings")
    assert [name for name in needed if plan_by_rules({**raw, name: None})] == []


WITHOUT_TORCH = (
    "import sys\n"
    "sys.modules['torch'] = sys.modules['transformers'] = None\n"
    "from kvcellar.cli import main\n"
    "sys.argv = ['kvcellar', *sys.argv[1:]]\n"
    "main()\n"
)
"""A command, where neither torch nor transformers can be imported."""


def test_a_model_that_torch_has_never_seen_runs_where_there_is_no_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    program = WITHOUT_TORCH
    asked = ("--backend", "native", "--weights", "bf16", "--max-tokens", "8", "--capacity", "256")
    said = ("generate", "demo", "-p", "import ", "--temperature", "0", "--alone", "--json", *asked)
    done = subprocess.run(
        [sys.executable, "-c", program, *said], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 8
    assert not list(tmp_path.rglob("*.plan.json")), "no plan was learnt"
    shown = ("inspect", "demo", "--plan")
    done = subprocess.run(
        [sys.executable, "-c", program, *shown], capture_output=True, text=True, check=True
    )
    assert "by its config alone" in done.stdout and "model.embed_tokens.weight" in done.stdout


@pytest.mark.parametrize(
    ("name", "kind", "most"),
    [
        ("llama", "Q8_0", 0.02),
        ("qwen3", "Q4_1", 0.02),
        ("llama", "BF16", 1e-5),
        ("gemma2", "BF16", 1e-5),
        ("gemma3", "BF16", 1e-5),
        ("gemma4", "BF16", 1e-5),
        ("gemma4", "Q8_0", 0.02),
        ("gemma4 with experts", "BF16", 1e-5),
        ("gemma4 with experts", "Q8_0", 0.02),
        ("gemma4 with shared layers", "BF16", 1e-5),
        ("gemma4 with shared layers", "Q8_0", 0.02),
        ("granite", "BF16", 1e-5),
        ("smollm3", "BF16", 1e-5),
        ("olmo2", "BF16", 1e-5),
        ("mixtral", "Q8_0", 1e-5),
        ("qwen2moe", "BF16", 1e-5),
        ("qwen3moe", "Q4_1", 1e-5),
        ("olmoe", "MXFP4", 1e-5),
        ("granitemoe", "Q8_0", 1e-5),
        ("gpt-oss", "BF16", 1e-5),
        ("lfm2", "BF16", 1e-5),
        ("lfm2", "Q8_0", 0.02),
        ("lfm2moe", "BF16", 1e-5),
        ("lfm2moe", "Q8_0", 0.02),
        ("granitehybrid", "BF16", 1e-5),
        ("qwen35", "BF16", 1e-5),
        ("qwen35", "Q8_0", 0.04),
        ("qwen35moe", "BF16", 1e-5),
        ("qwen3next", "BF16", 1e-5),
        ("qwen3next", "Q8_0", 0.04),
        ("mistral3", "BF16", 1e-5),
        ("mistral3", "Q8_0", 0.02),
        ("glm4", "BF16", 1e-5),
        ("ernie4_5", "BF16", 1e-5),
        ("glm4moe", "BF16", 1e-5),
        ("glm4moe", "Q8_0", 0.02),
        ("deepseek2", "BF16", 1e-5),
        ("olmo3", "BF16", 1e-5),
        ("exaone4", "BF16", 1e-5),
        ("seed_oss", "BF16", 1e-5),
        ("gemma", "BF16", 1e-5),
        ("granitehybrid without experts", "BF16", 1e-5),
        ("deepseek2 of GLM", "BF16", 1e-5),
        ("deepseek2 of GLM", "Q4_1", 1e-5),
        ("deepseek2 as older files have it", "Q8_0", 1e-5),
    ],
)
def test_a_gguf_file_runs_on_its_blocks(home, tmp_path, name, kind, most):
    path = tmp_path / "model.gguf"
    CASES[name].write(path, kind=gguf.GGMLQuantizationType[kind])
    assert plan_by_rules(read_config(path)) is not None, "torch need not have seen it"
    by_torch = load_model(path, weights="file", dtype="float32")
    ours = load_model(path, weights="file", dtype="float32", backend="native")
    want, got = logits(by_torch, kv_dtype="float32"), logits(ours, kv_dtype="float32")
    assert np.linalg.norm(got - want) < most * np.linalg.norm(want)
    assert by_torch.fingerprint() == ours.fingerprint()
    spec = size_model(LoadOptions(path, backend="native", weights="file", dtype="float32"))
    assert spec.weight_bytes == pytest.approx(ours.size_bytes, rel=0.02)


def test_a_mixture_is_shown_and_refused_where_its_parts_do_not_fit(other, tmp_path, capsys):
    folder = shutil.copytree(other("mixtral"), tmp_path / "cut")
    show_plan(str(other("shared-expert")), as_json=False)
    shown = capsys.readouterr().out
    assert "gated MLP and 2 experts of each token with silu" in shown
    assert "gated MLP with silu" in shown, "one layer has no experts"

    def cut(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("block_sparse_moe.gate.weight")]:
            tensors[name] = tensors[name][:-1].clone()

    rewrite(folder / "model.safetensors", cut)
    with pytest.raises(ModelError, match="not matrices of the 7 experts"):
        load_model(folder, weights="bf16", backend="native")


@pytest.mark.parametrize(
    "family",
    [
        "gemma-3",
        "gemma-4",
        "gemma-4-experts",
        "gemma-4-own-rows",
        "mixtral",
        "shared-expert",
        "crossed-experts",
        "short-convolutions",
        "delta-net",
        "delta-net-by-key-heads",
        "scan",
        "latents-in-pairs",
        "latents-parted",
        "short-convolutions-and-experts",
        "delta-net-in-parts",
    ],
)
@pytest.mark.parametrize("axis", [0, -1])
def test_no_tensor_of_another_size_reaches_the_kernel(other, tmp_path, family, axis):
    folder = shutil.copytree(other(family), tmp_path / "wide")
    file = folder / "model.safetensors"
    whole = safetensors.torch.load_file(file)
    seen = [name for name in whole if ".layers." not in name or re.search(r"layers\.[01]\.", name)]
    assert len(seen) > 10
    for name in seen:
        if axis == 0 and name == "model.embed_tokens.weight" and "lm_head.weight" in whole:
            continue  # rows beyond the vocabulary may be there, unless they are a head's
        wide = torch.cat([whole[name]] * 2, axis)
        safetensors.torch.save_file({**whole, name: wide}, file, metadata={"format": "pt"})
        with pytest.raises(ModelError):
            load_model(folder, dtype="float32", backend="native")


@pytest.mark.parametrize("fields", [{"num_local_experts": ...}, {"num_experts_per_tok": 2.0}])
def test_a_config_that_does_not_say_its_experts_has_no_plan_by_rules(other, fields):
    raw = dict(read_config(other("mixtral")))
    for name, value in fields.items():
        raw.pop(name)
        raw |= {} if value is ... else {name: value}
    assert plan_by_rules(raw) is None
    assert (
        plan_by_rules(read_config(other("crossed-experts")) | {"quantization_config": "x"}) is None
    )


def test_gguf_files_that_are_read_otherwise_are_refused_by_name(home, tmp_path):
    path = tmp_path / "model.gguf"
    CASES["gpt-oss"].write(path, kind=gguf.GGMLQuantizationType.Q8_0)  # its biases, too
    with pytest.raises(ModelError, match=r"gate_up_proj_bias in Q8_0, where numbers are expected"):
        load_model(path, weights="file", backend="native")


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_behind_its_window_gemma_3_is_as_near_to_its_weights_as_torchs_path(home, tmp_path, kind):
    path = tmp_path / "model.gguf"
    CASES["gemma3"].write(path, kind=gguf.GGMLQuantizationType[kind])
    of_file, as_network = {"weights": "file"}, {"weights": "none", "backend": "torch"}
    exact, by_torch, ours = (
        logits(load_model(path, dtype="float32", **fields), kv_dtype="float32")
        for fields in (as_network, of_file | {"backend": "torch"}, of_file | {"backend": "native"})
    )
    off, own = (np.linalg.norm(one - exact, axis=-1)[8:].mean() for one in (ours, by_torch))
    size = np.linalg.norm(exact, axis=-1)[8:].mean()
    assert off <= 1.1 * own + 1e-5 * size
    assert own < (1e-5 if kind == "F16" else 0.04) * size, "inputs are rounded to 8 bits, or not"


def test_no_plan_is_kept_of_a_model_that_nobody_checked(home, tmp_path):
    folder = write_tiny("llama", tmp_path / "llama", **{**SHAPE, "rms_norm_eps": 3e-6})
    load_model(folder, weights="bf16", is_unchecked=True)
    assert kept_plan(read_config(folder)) is None


def test_what_it_cannot_run_is_refused_by_name(home, pair, tmp_path):
    other = write_tiny("cohere", tmp_path / "cohere", **SHAPE)  # norms of another kind
    load_model(other, weights="bf16")
    with pytest.raises(BackendError, match=r"has no plan yet.*load it once with torch"):
        load_model(other, backend="native", weights="bf16")
    folder, _, ours = pair("llama", "bf16")
    with pytest.raises(ConfigError, match="would compute in bfloat16 with plain weights"):
        load_model(folder, backend="native", weights="none", dtype="bfloat16")
    with pytest.raises(ConfigError, match="device 'cuda' was asked for"):
        check_model(LoadOptions(folder, backend="native", weights="bf16", device="cuda"))
    with pytest.raises(ConfigError, match="K and V in fp8 are not read by the CPU kernel"):
        kv.make_seq_session("native", kv.make_config(ours.params, 64, "fp8"))
    rotated = kv.make_config(ours.params, 64, "int8:rot")
    stored_rotated = pytest.raises(ConfigError, match="stores K rotated")
    with kv.make_seq_session("native", rotated) as session, stored_rotated:
        ours.bind(session)
    elsewhere = pytest.raises(BackendError, match="was loaded for 'native'")
    with kv.make_seq_session("torch", kv.make_config(ours.params, 64)) as session, elsewhere:
        ours.bind(session)


def test_its_size_is_told_before_it_is_loaded(pair):
    folder, _, ours = pair("llama", "int8")
    spec = size_model(LoadOptions(folder, backend="native", weights="int8"))
    assert spec.params.groups == ours.params.groups
    assert spec.weight_bytes == pytest.approx(ours.size_bytes, rel=0.02)


@pytest.mark.usefixtures("eager")
def test_agents_sleep_with_torch_and_wake_up_without(pair, tmp_path):
    folder, _, _ = pair("llama", "bf16")
    greedy = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    settings = {"store": tmp_path, "capacity": 512, "weights": "bf16"}
    restored = []
    for backend in ("torch", "native", "torch"):
        with kv.open(folder, backend=backend, **settings) as cellar:
            friend = cellar.agent("friend")
            restored.append(friend.say("Go on: ", **greedy).usage.restored_tokens)
            assert friend.say("Go on: ", **greedy).usage.cached_tokens > 0
    assert restored[0] == 0 and 0 < restored[1] < restored[2]


@pytest.mark.slow
def test_a_real_model_answers_and_nothing_imports_torch(home):
    model = SMOLLM2.found()
    load_model(model)  # it learns the plan
    program = (
        "import runpy, sys\n"
        "sys.argv = ['kvcellar', *sys.argv[1:]]\n"
        "try:\n"
        "    runpy.run_module('kvcellar', run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    prompt = ("generate", str(model), "--raw", "-p", "The capital of France is", "--alone")
    more = ("--backend", "native", "--max-tokens", "6", "--temperature", "0", "--capacity", "256")
    done = subprocess.run(
        [sys.executable, "-c", program, *prompt, *more], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
