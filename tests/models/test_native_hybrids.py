"""Models that run layer by layer natively: trees, drops, agents, and files of wrappers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

import kvcellar as kv
from kvcellar.backends.torch.learn.shrink.checkpoints import (
    default_raw,
    make_tokenizer,
    random_network,
)
from kvcellar.cli.models.planned import show_plan
from kvcellar.errors import ModelError
from kvcellar.kernel import levels
from kvcellar.models import LoadedModel, LoadOptions, backend_choice, load_model
from kvcellar.models.backend_choice import choose_backend
from kvcellar.models.files.checkpoint import read_config
from kvcellar.models.files.configs import whole_config
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.plans.hybrids import text_of
from kvcellar.models.plans.plan import ModelPlan, kept_plan
from kvcellar.models.plans.rules import plan_by_rules
from kvcellar.models.sizes.sizing import size_model
from tests.agents.fakes import eager as eager
from tests.models.gguf.families import CASES
from tests.models.hybrid_checkpoints import write_hybrid
from tests.models.players import Oracle
from tests.models.test_native import (
    IDS,
    OTHERS,
    SHAPE,
    WITHOUT_TORCH,
    home,
    is_as_learnt,
    logits,
    other,
)
from tests.models.tiny_checkpoints import rewrite
from tests.models.tiny_wrappers import make_wrapper, save_wrapper
from tests.stretches import stretches

__all__ = ["eager", "home", "other"]
"""Fixtures of others."""

pytestmark = pytest.mark.skipif(not levels.is_available(), reason="needs the CPU kernel")

HYBRIDS = (
    "short-convolutions",
    "delta-net",
    "delta-net-by-key-heads",
    "delta-net-in-parts",
    "scan",
)
LATENTS = ("latents-in-pairs", "latents-parted", "latents-multiplied", "latents-and-groups")
OTHERWISE = ("pairs-that-turn", "queries-that-grow")
NEAR = {"atol": 2e-4, "rtol": 0}

Loaded = Callable[[str], tuple[Oracle, LoadedModel]]


@pytest.fixture(scope="module")
def both(other: Any) -> Loaded:
    """Load a family by transformers, and natively in float32."""
    made: dict[str, tuple[Oracle, LoadedModel]] = {}

    def load(family: str) -> tuple[Oracle, LoadedModel]:
        if family not in made:
            folder = other(family)
            made[family] = Oracle(folder), load_model(folder, backend="native", dtype="float32")
        return made[family]

    return load


@pytest.mark.parametrize("family", (*HYBRIDS, *LATENTS, *OTHERWISE))
def test_the_nodes_of_a_tree_go_on_from_their_parents(both, family):
    oracle, ours = both(family)
    config = kv.make_config(ours.params, 64, "float32")
    with kv.make_tree_session("native", config) as session:
        runner, cache = ours.bind(session), session.cache
        prompt = IDS[:5]
        runner.forward(prompt, cache.begin_step([(0, 5)]))
        tokens, parents = [9, 2, 6, 5, 3], [-1, -1, 0, 2, 2]
        got = runner.forward(tokens, cache.propose(parents), range(5))
        chains = [[9], [2], [9, 6], [9, 6, 5], [9, 6, 3]]
        for row, chain in zip(got, chains, strict=True):
            np.testing.assert_allclose(row, oracle.logits((*prompt, *chain))[-1], **NEAR)
        cache.commit([0, 2, 4])
        got = runner.forward([7], cache.begin_step([(0, 1)]))[0]
        np.testing.assert_allclose(got, oracle.logits((*prompt, 9, 6, 3, 7))[-1], **NEAR)


@pytest.mark.parametrize("family", (*HYBRIDS, *LATENTS, *OTHERWISE))
def test_a_forward_that_is_taken_back_leaves_the_states_as_they_were(both, family):
    oracle, ours = both(family)
    config = kv.make_config(ours.params, 64, "float32")
    with kv.make_seq_session("native", config) as session:
        runner, cache = ours.bind(session), session.cache
        runner.forward(IDS[:3], cache.begin_step([(0, 3)]))
        runner.forward([8], cache.begin_step([(0, 1)]))
        cache.cancel_step()
        got = runner.forward(IDS[3:5], cache.begin_step([(0, 2)]), range(2))
        np.testing.assert_allclose(got, oracle.logits(IDS[:5])[3:], **NEAR)


@pytest.mark.parametrize("family", (*HYBRIDS, *LATENTS, *OTHERWISE))
def test_tokens_of_one_sequence_may_be_spread_over_a_batch(both, family):
    oracle, ours = both(family)
    config = kv.make_config(ours.params, 64, "float32")
    with kv.make_seq_session("native", config) as session:
        runner, cache = ours.bind(session), session.cache
        seq_ids, tokens = [0, 0, 1, 0, 1], [3, 1, 2, 4, 7]
        got = runner.forward(tokens, cache.begin_step(stretches(seq_ids)), range(5))
        np.testing.assert_allclose(got[[0, 1, 3]], oracle.logits((3, 1, 4)), **NEAR)
        np.testing.assert_allclose(got[[2, 4]], oracle.logits((2, 7)), **NEAR)


@pytest.mark.parametrize("family", (*HYBRIDS, *LATENTS, *OTHERWISE))
@pytest.mark.parametrize(
    "make", [kv.make_decode_session, kv.make_paged_session, kv.make_tree_session]
)
def test_any_cache_stands_behind_it(both, make, family):
    oracle, ours = both(family)
    got = logits(ours, make, kv_dtype="float32")
    np.testing.assert_allclose(got, oracle.logits(IDS), **NEAR)
    if family in LATENTS:
        return  # those of tiny models are of no whole groups
    quantised = logits(ours, make, kv_dtype="int8:first4:last64")
    assert np.abs(quantised - got).max() <= 0.2 * np.abs(got).max()


@pytest.mark.parametrize("family", (*HYBRIDS, *LATENTS, *OTHERWISE))
def test_inputs_of_layers_are_had_with_wanted_rows_alone(both, family):
    oracle, ours = both(family)
    with kv.make_seq_session("native", kv.make_config(ours.params, 64, "float32")) as session:
        runner: Any = ours.bind(session, feature_layers=(0, 1))
        at = session.cache.begin_step([(0, 9)])
        none, features = runner.forward_with_features(IDS[:9], at, [])
    with torch.no_grad():
        said = oracle.model(torch.tensor([IDS[:9]]), output_hidden_states=True).hidden_states
    assert none.shape == (0, ours.vocab_size)
    np.testing.assert_allclose(features, torch.cat(said[:2], -1)[0].numpy(), **NEAR)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("family", (*HYBRIDS, *LATENTS, *OTHERWISE))
def test_agents_that_fork_go_back_and_sleep_say_what_a_straight_run_says(other, tmp_path, family):
    folder, texts = other(family), ("One line.", "Another.", "And a last one.")
    greedy: Any = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def opened(backend: str, store: str) -> Any:
        settings: Any = {"capacity": 512, "weights": "none", "dtype": "float32"}
        return kv.open(folder, backend=backend, store=tmp_path / store, **settings)

    with opened("torch", "straight") as cellar:
        one = cellar.agent("one")
        want = [one.say(text, **greedy).text for text in texts]
    with opened("native", "winding") as cellar:
        one = cellar.agent("one")
        assert one.say(texts[0], **greedy).text == want[0]
        twin = one.fork("twin")
        one.say("Something else.", **greedy)
        one.rewind(1)
        assert one.say(texts[1], **greedy).text == want[1]
        assert twin.say(texts[1], **greedy).text == want[1]
    with opened("native", "winding") as cellar:
        for name in ("one", "twin"):
            end = cellar.agent(name).say(texts[2], **greedy)
            assert end.text == want[2], "the last turn"
            if family == "delta-net-in-parts":
                continue  # what it says is read again as other tokens, before which is no state
            assert end.usage.restored_tokens > 0 if name == "one" else end.usage.cached_tokens > 0
    with opened("torch", "winding") as cellar:
        end = cellar.agent("one").say("Go on.", **greedy)
        assert end.usage.restored_tokens > 0, "torch goes on from what native has saved"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl", "gemma3", "mistral3"])
def test_text_of_a_multimodal_model_is_planned_and_read(home, tmp_path, monkeypatch, family):
    monkeypatch.delenv(backend_choice.PREFERENCE, raising=False)
    whole = make_wrapper(family, is_tied=False)
    folder = save_wrapper(whole, tmp_path)
    by_torch = load_model(folder, weights="bf16", backend="torch")
    raw = read_config(folder)
    assert raw["text_config"] and is_as_learnt(raw)
    ours = load_model(folder, dtype="float32", backend="native")
    want = logits(load_model(folder, dtype="float32", backend="torch"), kv_dtype="float32")
    np.testing.assert_allclose(logits(ours, kv_dtype="float32"), want, **NEAR)
    assert by_torch.params == ours.params
    assert choose_backend(LoadOptions(folder, weights="int8")).backend == "native"
    other_head = raw["text_config"] | {"tie_word_embeddings": not raw.get("tie_word_embeddings")}
    assert plan_by_rules(raw | {"text_config": other_head}) is None, "it is said in two ways"
    assert text_of(raw | {"text_config": "none"})["model_type"] == family
    packed = {"quantization_config": {"quant_method": "fp8"}}
    assert plan_by_rules(raw | packed) is None
    assert plan_by_rules(raw | {"architectures": ["Qwen3_5ForSequenceClassification"]}) is None


SAYS = {
    "short-convolutions": "2 layers    convolution of 3 tokens in 64 channels, gated MLP",
    "delta-net": "delta rule of 4 heads on 2 of 16 x 16 numbers normed with eps 1e-06, with a gate",
    "delta-net-in-parts": "delta rule of 4 heads on 2 of 16 x 16 numbers normed with eps 1e-05",
    "delta-net-by-key-heads": "scale 0.25, with a gate, gated MLP with silu",
    "scan": "scan of 8 heads in 2 groups of 16 x 8 numbers",
}


def test_latents_are_cached_in_eight_bits_beside_exact_ones(home, tmp_path):
    fields = {**OTHERS["latents-parted"][1], "kv_lora_rank": 64, "qk_rope_head_dim": 32}
    fields |= {"head_dim": 32, "q_lora_rank": 64, "v_head_dim": 32}
    random_network(default_raw("deepseek_v3", **SHAPE | fields)).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    true = Oracle(tmp_path).logits(IDS)
    ours = load_model(tmp_path, backend="native", dtype="float32")
    for make in (kv.make_seq_session, kv.make_paged_session):
        off = np.abs(logits(ours, make, kv_dtype="int8:g32") - true).max()
        exact = np.abs(logits(ours, make, kv_dtype="int8:g32:first4:last64") - true).max()
        assert exact < 2e-4 < off < 0.05 * np.abs(true).max(), "all tokens have exact cells"
    for weights in ("bf16", "int8", "int4"):
        by_torch, ours = (
            load_model(tmp_path, weights=weights, backend=backend)
            for backend in ("torch", "native")
        )
        want, got = logits(by_torch, kv_dtype="float32"), logits(ours, kv_dtype="float32")
        own = np.abs(want - true).max()
        assert np.abs(got - true).max() <= 1.3 * own and np.abs(got - want).max() <= own
        spec = size_model(LoadOptions(tmp_path, backend="native", weights=weights))
        assert ours.size_bytes == pytest.approx(spec.weight_bytes, rel=0.02)


@pytest.mark.parametrize("family", LATENTS)
def test_a_plan_says_how_it_attends_over_latents(other, family, capsys):
    folder = other(family)
    show_plan(str(folder), as_json=False)
    assert "4 heads on latents of 24 and 8 numbers" in capsys.readouterr().out
    plan = plan_by_rules(read_config(folder))
    assert plan is not None and ModelPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    for where, what in (("turned", "otherwise"), ("q_size", 7 - 7 * (family != LATENTS[0]))):
        told = plan.to_json()
        told["layers"][1]["latent"][where] = what
        with pytest.raises(ValueError, match="latents"):
            ModelPlan.from_json(told)
    told = plan.to_json()
    told["layers"][1]["latent"] = None
    with pytest.raises(ValueError, match="other layers attend over latents"):
        ModelPlan.from_json(told)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("latents-in-pairs", {"topk_method": "noaux_tc"}),
        ("latents-in-pairs", {"num_key_value_heads": 2}),
        ("latents-in-pairs", {"first_k_dense_replace": None}),
        ("latents-parted", {"n_group": None}),
        ("latents-and-groups", {"n_group": 3}),
        ("latents-and-groups", {"n_group": 16}),
        ("latents-and-groups", {"topk_group": 5}),
        ("latents-and-groups", {"n_group": 8, "topk_group": 1}),
        ("latents-parted", {"qk_rope_head_dim": 7}),
        ("latents-parted", {"q_lora_rank": 0}),
        ("latents-parted", {"norm_topk_prob": None}),
        ("latents-by-kinds", {"partial_rotary_factor": 0.5}),
        ("latents-multiplied", {"scale_depth": None}),
        ("short-convolutions", {"conv_L_cache": 9}),
        ("short-convolutions", {"conv_L_cache": "3"}),
        ("short-convolutions", {"layer_types": ["conv", "conv", "conv"]}),
        ("short-convolutions", {"block_use_swiglu": False}),
        ("short-convolutions", {"hidden_act": "gelu_pytorch_tanh"}),
        ("delta-net", {"hidden_act": "gelu_pytorch_tanh"}),
        ("scan", {"hidden_act": "gelu_pytorch_tanh"}),
        ("delta-net", {"linear_num_key_heads": 3}),
        ("delta-net", {"linear_key_head_dim": 1024}),
        ("delta-net", {"attn_output_gate": False}),
        ("delta-net", {"layer_types": ["linear_attention", "full_attention"]}),
        ("scan", {"time_step_limit": [0.0, 1.0]}),
        ("scan", {"mamba_d_head": 8}),
        ("scan", {"mamba_n_groups": 0}),
        ("scan", {"position_embedding_type": "rope", "rope_parameters": None}),
    ],
)
def test_a_config_of_what_no_rule_knows_has_no_plan(other, family, fields):
    raw = read_config(other(family))
    assert plan_by_rules(raw) is not None and plan_by_rules({**raw, **fields}) is None


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_plan_says_which_layers_keep_states(other, family, capsys):
    folder = other(family)
    show_plan(str(folder), as_json=False)
    assert SAYS[family] in capsys.readouterr().out
    plan = plan_by_rules(read_config(folder))
    assert plan is not None and ModelPlan.from_json(plan.to_json()) == plan
    assert [one.recurrent is not None for one in plan.layers] == [True, False, True]
    assert list(plan.facts.state_numbers) == [0, 2] and plan.is_hybrid
    told = plan.to_json()
    told["facts"]["states"] = told["facts"]["states"][:1]
    with pytest.raises(ValueError, match="other layers are recurrent"):
        ModelPlan.from_json(told)
    told = plan.to_json()
    told["layers"][0]["recurrent"]["at"] = (0,)
    with pytest.raises(ValueError, match="a kind that no rule here knows"):
        ModelPlan.from_json(told)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_keys_and_values_may_have_heads_of_other_sizes(home, tmp_path, family):
    write_hybrid(family, tmp_path)
    load_model(tmp_path, weights="bf16", backend="torch")
    plan = kept_plan(read_config(tmp_path))
    assert plan is not None and plan.layers[0].recurrent is not None
    assert plan.layers[0].recurrent.heads == (4, 2, 16, 24)
    ours = load_model(tmp_path, dtype="float32", backend="native")
    want = Oracle(tmp_path).logits(IDS)
    np.testing.assert_allclose(logits(ours, kv_dtype="float32"), want, **NEAR)


def test_what_torch_alone_runs_has_no_plan(home, tmp_path, monkeypatch):
    monkeypatch.delenv(backend_choice.PREFERENCE, raising=False)
    write_hybrid("kimi_linear", tmp_path)
    load_model(tmp_path, weights="int8", backend="torch")
    raw = read_config(tmp_path)
    assert kept_plan(raw) is None and plan_by_rules(raw) is None
    choice = choose_backend(LoadOptions(tmp_path, weights="int8"))
    assert choice.backend == "torch" and "has no plan yet" in choice.why


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "qwen35moe"])
def test_what_is_read_of_a_gguf_file_is_what_transformers_reads(tmp_path, name):
    path = tmp_path / "model.gguf"
    CASES[name].write(path, kind=gguf.GGMLQuantizationType.BF16)
    file = read_gguf(path)
    plain = {
        key: getattr(value, "tolist", lambda v=value: v)()
        for key, value in file.metadata.items()
        if not key.startswith("tokenizer.")
    }
    theirs = GGUF_CONFIG_ARCHS[name]({"tokenizer.ggml.tokens": 272, **plain}, tuple(file.tensors))
    ours = read_config(path)
    assert theirs["rope_parameters"].items() <= ours["rope_parameters"].items()
    beside = {"architectures", "full_attention_interval", "vocab_size", "rope_parameters"}
    tokens = {key for key in theirs if key.endswith("_token_id")}
    told = {key: theirs[key] for key in theirs.keys() - beside - tokens}
    assert told.items() <= ours.items() and plan_by_rules(ours) == plan_by_rules(
        {**theirs, "vocab_size": ours["vocab_size"]}
    )


@pytest.mark.parametrize("name", ["short-convolutions", "scan", "qwen35"])
def test_a_hybrid_runs_where_there_is_no_torch(other, tmp_path, monkeypatch, name):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    path = tmp_path / "model.gguf" if name in CASES else other(name)
    if name in CASES:
        CASES[name].write(path, kind=gguf.GGMLQuantizationType.Q8_0)
    asked = (
        "--raw",
        "-p",
        "import ",
        "--temperature",
        "0",
        "--alone",
        "--json",
        "--capacity",
        "64",
    )
    weights = () if name in CASES else ("--weights", "int8")
    said = ("generate", str(path), *asked, *weights, "--max-tokens", "8")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *said], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["token_ids"]
    ours: Any = load_model(path, backend="native", weights=None if name in CASES else "int8")
    tokens = list(ours.tokenizer("import ")["input_ids"])
    with kv.make_seq_session("native", kv.make_config(ours.params, 64)) as session:
        runner, n_prompt, fed = ours.bind(session), len(tokens), 0
        for _ in range(8):
            new, at = tokens[fed:], session.cache.begin_step([(0, len(tokens) - fed)])
            fed += len(new)
            tokens.append(int(runner.forward(new, at)[0].argmax()))
    assert len(found) > 1 and found == tokens[n_prompt : n_prompt + len(found)]


def test_what_a_class_takes_where_a_config_says_nothing_is_taken(other):
    raw = read_config(other("delta-net"))
    assert "head_dim" in raw
    plan = plan_by_rules({key: value for key, value in raw.items() if key != "head_dim"})
    assert plan is not None and plan.layers[1].heads[2] == 256
    experts = read_config(other("delta-net-and-experts"))
    plan = plan_by_rules({key: experts[key] for key in experts if key != "intermediate_size"})
    assert plan is not None and all(one.mixture is not None for one in plan.layers)
    lfm2 = read_config(other("short-convolutions"))
    for said in (True, False):
        plan = plan_by_rules({**lfm2, "tie_embedding": said, "tie_word_embeddings": not said})
        assert plan is not None and (plan.head.weights[0] == plan.embedding) is said


def test_a_plan_whose_sizes_do_not_fit_each_other_is_none(other):
    plan = plan_by_rules(read_config(other("delta-net")))
    assert plan is not None
    for change in (
        {"at": (10**12, 0, 0, 0)},
        {"heads": (4, 2, 512, 16)},
        {"group": 7},
        {"conv_shape": (64, 4)},
    ):
        told = plan.to_json()
        told["layers"][0]["recurrent"] |= change
        with pytest.raises(ValueError, match="recurrent"):
            ModelPlan.from_json(told)
    told = plan.to_json()
    told["facts"]["states"][0]["shapes"] = told["facts"]["states"][0]["shapes"][:1]
    with pytest.raises(ValueError, match="states"):
        ModelPlan.from_json(told)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("family", (*HYBRIDS, *LATENTS, *OTHERWISE))
def test_an_agent_goes_from_native_to_torch_and_back(other, tmp_path, family):
    folder = other(family)
    texts = [f"{text} of which some blocks of tokens are made." for text in ("One", "Two", "Ten")]
    greedy: Any = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def say(backend: str, store: str, text: str) -> Any:
        settings: Any = {"capacity": 512, "weights": "none", "dtype": "float32"}
        with kv.open(folder, backend=backend, store=tmp_path / store, **settings) as cellar:
            return cellar.agent("one").say(text, **greedy)

    want = [say("torch", "straight", text).text for text in texts]
    ways = zip(("native", "torch", "native"), texts, strict=True)
    said = [say(backend, "wandering", text) for backend, text in ways]
    assert [one.text for one in said] == want
    if family in LATENTS:  # those of a tiny model's words are others, before which no state is
        assert all(one.usage.restored_tokens > 0 for one in said[1:])


@pytest.mark.parametrize(
    ("family", "more", "less"),
    [
        ("delta-net", "layers.1.self_attn.k_proj", "layers.1.self_attn.q_proj"),
        ("delta-net", "layers.0.linear_attn.in_proj_z", "layers.0.linear_attn.in_proj_qkv"),
        (
            "delta-net-by-key-heads",
            "layers.0.linear_attn.in_proj_ba",
            "layers.0.linear_attn.in_proj_qkvz",
        ),
        ("latents-in-pairs", "layers.0.self_attn.kv_a_proj_with_mqa", "layers.0.self_attn.q_proj"),
    ],
)
def test_rows_of_one_matrix_that_are_anothers_are_refused_by_name(
    other, tmp_path, family, more, less
):
    folder = shutil.copytree(other(family), tmp_path / "moved")
    wider, narrower = (f"model.{one}.weight" for one in (more, less))

    def move(tensors: dict[str, Any]) -> None:
        rows = tensors[narrower]
        tensors[wider] = torch.cat((tensors[wider], rows[-8:])).clone()
        tensors[narrower] = rows[:-8].clone()

    rewrite(folder / "model.safetensors", move)
    with pytest.raises(ModelError, match=r"is \[\d+, \d+\]( and \[\d+, \d+\])+, .* asks for "):
        load_model(folder, dtype="float32", backend="native")


def test_what_a_file_of_gemma_3_leaves_to_its_class_is_taken():
    said = json.loads((Path(__file__).parent / "configs" / "gemma-3-12b-it.json").read_text())
    text = whole_config(said).get_text_config(decoder=True)
    whole = {**text.to_dict(), "model_type": text.model_type}
    spare = {"chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id"}
    spare |= {"output_attentions", "output_hidden_states", "problem_type", "return_dict"}
    plan = plan_by_rules({key: one for key, one in whole.items() if key not in spare})
    assert plan is not None and plan == plan_by_rules(said)
    assert "tie_word_embeddings" not in said and plan.head.weights == (plan.embedding,)
    assert len(plan.layers) == 48 and plan.layers[0].heads == (16, 8, 256)


def test_whether_the_head_of_mistral_3_is_its_embedding_has_to_be_said(tmp_path):
    raw = read_config(save_wrapper(make_wrapper("mistral3", is_tied=False), tmp_path))
    assert plan_by_rules(raw) is not None
    text = {key: raw["text_config"][key] for key in raw["text_config"] if "tie_word" not in key}
    del raw["tie_word_embeddings"]
    assert plan_by_rules({**raw, "text_config": text}) is None
