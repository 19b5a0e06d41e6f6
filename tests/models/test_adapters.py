"""LoRA adapters beside a model: the logits of merged weights, alone and mixed in one batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvcellar import make_decode_session, make_seq_session
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.errors import ConfigError, ModelError, StepError
from kvcellar.kernel import levels
from kvcellar.models import LoadedModel, LoadOptions, adapters, check_model, load_model
from kvcellar.models.adapter_targets import Targets, of_pattern
from kvcellar.models.adapters import read_adapter
from tests.models.adapters import ATTENTION, logits_of, merged, write_adapter
from tests.stretches import stretches

MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("base") / "llama")


def mixed_logits(model: LoadedModel, texts: list[tuple[str, list[int]]]) -> list[np.ndarray]:
    """Logits of several texts, each with an adapter or none, a few tokens of each in every step."""
    config = LoadOptions().config_for(model.params, 256, n_running=len(texts))
    found: list[list[np.ndarray]] = [[] for _ in texts]
    with make_seq_session("torch", config) as session:
        runner: Any = model.bind(session)
        while any(len(said) < len(ids) for said, (_, ids) in zip(found, texts, strict=True)):
            parts = []
            for i, (name, ids) in enumerate(texts):
                at = len(found[i])
                n = min(len(ids) - at, 3 if at == 0 else 1 + i % 2)
                parts += [(i, name, ids[at : at + n])] if n else []
            seq_ids = [i for i, _, tokens in parts for _ in tokens]
            positions = session.cache.begin_step(stretches(seq_ids))
            tokens = [token for _, _, some in parts for token in some]
            with runner.adapting([(name, len(some)) for _, name, some in parts]):
                rows = runner.forward(tokens, positions, range(len(tokens)))
            session.cache.end_step()
            for i, row in zip(seq_ids, rows, strict=True):
                found[i].append(row)
    return [np.array(rows) for rows in found]


def apart(found: np.ndarray, want: np.ndarray) -> float:
    """How far logits are from others, as a share of their length."""
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


def some_texts(*names: str) -> list[tuple[str, list[int]]]:
    rng = np.random.default_rng(3)
    texts = [(name, rng.integers(3, 200, 9 + 2 * i).tolist()) for i, name in enumerate(names)]
    return [*texts, (names[-1], texts[0][1]), (names[0], texts[-1][1])]


@pytest.mark.parametrize(
    "family, targets",
    [
        ("llama", (*ATTENTION, *MLP, "lm_head")),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("gemma3_text", (*ATTENTION, *MLP)),
        ("lfm2", ("in_proj", "out_proj", "w1", "w2", "w3", *ATTENTION)),
        ("qwen3_5_text", ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "o_proj", "q_proj")),
    ],
)
def test_a_mixed_batch_gives_each_text_the_logits_of_its_own_merged_weights(
    family, targets, tmp_path
):
    folder = write_tiny(family, tmp_path / family)
    paths = {
        "one": write_adapter(tmp_path / "one", folder, targets, seed=1),
        "two": write_adapter(tmp_path / "two", folder, targets[:2], seed=2, r=7, use_rslora=True),
    }
    model = load_model(folder, adapters=paths, dtype="float32")
    texts = some_texts("", "one", "two")
    oracles = {name: merged(folder, paths.get(name)) for name in ("", "one", "two")}
    for (name, ids), found in zip(texts, mixed_logits(model, texts), strict=True):
        want = logits_of(oracles[name], ids)
        assert apart(found, want) < 1e-3
        if name:
            assert apart(want, logits_of(oracles[""], ids)) > 0.1


@pytest.mark.card
@pytest.mark.skipif(not levels.is_available(), reason="the kernel is not built")
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_layers_that_the_kernel_holds_are_updated_beside_it(family, weights, tmp_path):
    folder = write_tiny(family, tmp_path / family)
    targets = (*ATTENTION, *MLP, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    path = write_adapter(tmp_path / "one", folder, targets, lora_alpha=2)
    model: Any = load_model(folder, adapters={"one": path}, weights=weights)
    texts = [("one", list(range(5, 25))), ("", list(range(5, 25)))]
    found = mixed_logits(model, texts)
    wants = [logits_of(merged(folder, one), texts[0][1]) for one in (path, None)]
    errors = [apart(a, b) for a, b in zip(found, wants, strict=True)]
    assert apart(*wants) > 0.2
    assert errors[0] < max(0.1, 2 * errors[1])  # what fewer bits cost, and no more


@pytest.mark.card
def test_one_adapter_runs_a_whole_session_where_it_is_bound(base, tmp_path):
    path = write_adapter(tmp_path / "one", base)
    model = load_model(base, adapters={"one": path}, dtype="float32")
    ids = list(range(3, 20))
    config = LoadOptions().config_for(model.params, 64)
    with make_decode_session("torch", config) as session:
        runner = model.bind(session, adapter="one")
        found = runner.forward(ids, range(len(ids)), range(len(ids)))
        with pytest.raises(ConfigError, match="no adapter 'two' beside it; there are: one"):
            model.bind(session, adapter="two")
    assert np.abs(found - logits_of(merged(base, path), ids)).max() < 1e-3


def test_ranks_and_alphas_of_patterns_count_as_peft_has_them(base, tmp_path):
    path = write_adapter(
        tmp_path / "one",
        base,
        r".*layers\.1\.(self_attn\.[qv]|mlp\.down)_proj",
        ranks={"q_proj": 2},
        alpha_pattern={"layers.1.self_attn.v_proj": 3},
    )
    layer = "model.layers.1.self_attn.v_proj"
    model = load_model(base, adapters={"one": path}, dtype="float32")
    ids = list(range(7, 20))
    found = mixed_logits(model, [("one", ids)])[0]
    assert np.abs(found - logits_of(merged(base, path, {layer: 3}), ids)).max() < 1e-3
    assert {one.rank for one in read_adapter("one", path).updates.values()} == {2, 4}


def test_weights_in_bfloat16_are_read_too(base, tmp_path):
    path = write_adapter(tmp_path / "one", base, dtype=torch.bfloat16)
    model = load_model(base, adapters={"one": path}, dtype="float32")
    found = mixed_logits(model, [("one", [5, 6, 7, 8])])[0]
    assert np.abs(found - logits_of(merged(base, path), [5, 6, 7, 8])).max() < 1e-3


@pytest.mark.parametrize(
    "config, said",
    [
        ({"peft_type": "IA3"}, "of type 'IA3'"),
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"target_parameters": ["x"]}, "target_parameters is set"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"kasa_config": {"x": 1}}, "kasa_config is set, which is not known here"),
        ({"r": 5}, "its rank is said to be 5"),
        ({"lora_alpha": float("inf")}, "which is no number"),
        ({"target_modules": ["q_proj"]}, "which its target_modules do not name"),
        ({"target_modules": []}, "names no layers"),
        ({"target_modules": "("}, "missing"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(config, said, base, tmp_path):
    path = write_adapter(tmp_path / "one", base)
    whole = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**whole, **config}))
    with pytest.raises(ModelError, match=said) as refused:
        read_adapter("one", path)
    assert "adapter 'one' in" in str(refused.value)


def rewritten(path: Path, change: Any) -> Path:
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop(FIRST), "not its other half"),
        (lambda t: t.update({FIRST: torch.zeros(4)}), "updates are matrices"),
        (lambda t: t.update({FIRST: t[FIRST].int()}), "is I32"),
        (lambda t: t.update({"x.lora_embedding_A": torch.zeros(2, 2)}), "no part of a linear"),
        (lambda t: t.update({"x.lora_magnitude_vector": torch.zeros(2)}), "merge_and_unload"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(2, 2)}), "save_embedding_layers=False"),
        (lambda t: t.clear(), "it updates nothing"),
    ],
)
def test_tensors_that_are_no_updates_are_refused_by_name(change, said, base, tmp_path):
    path = rewritten(write_adapter(tmp_path / "one", base), change)
    with pytest.raises(ModelError, match=said):
        read_adapter("one", path)


def test_a_folder_that_holds_no_adapter_is_refused(base, tmp_path):
    with pytest.raises(ModelError, match=r"has no adapter_config\.json; give the folder"):
        read_adapter("one", tmp_path)
    path = write_adapter(tmp_path / "one", base)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickles"):
        read_adapter("one", path)


def test_an_adapter_of_another_model_is_refused_before_a_weight_is_read(base, tmp_path):
    other = write_tiny("llama", tmp_path / "other", num_key_value_heads=1, num_attention_heads=4)
    path = write_adapter(tmp_path / "one", other)
    with pytest.raises(ModelError, match=r"of \d+ inputs and \d+ outputs; this model's has"):
        check_model(LoadOptions(base, adapters={"one": path}))
    strange = write_adapter(tmp_path / "two", write_tiny("phi3", tmp_path / "phi3"), ("qkv_proj",))
    with pytest.raises(ModelError, match="qkv_proj, which is no linear layer of this model"):
        check_model(LoadOptions(base, adapters={"one": strange}))
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    lost = write_adapter(tmp_path / "three", base)
    rewritten(lost, lambda t: [t.pop(f"{first}{half}.weight") for half in "AB"])
    with pytest.raises(ModelError, match=r"has no weights for model\.layers\.0\.self_attn\.q_proj"):
        check_model(LoadOptions(base, adapters={"one": lost}))


def test_a_layer_whose_weights_are_read_otherwise_is_refused(tmp_path):
    folder = write_tiny("deepseek_v3", tmp_path / "base")
    path = write_adapter(tmp_path / "one", folder, ("kv_b_proj",))
    with pytest.raises(ModelError, match="kv_b_proj, which this model does not run as a linear"):
        load_model(folder, adapters={"one": path}, dtype="float32")


@pytest.mark.parametrize("backend", ["mlx", "executorch", "reference"])
def test_other_backends_refuse_adapters_by_name(backend, base, tmp_path):
    path = write_adapter(tmp_path / "one", base)
    options = LoadOptions(base, backend=backend, adapters={"one": path})
    for call in (check_model, load_model):
        with pytest.raises(ConfigError, match=r"adapters \(one\) are loaded beside .* torch"):
            call(options)


def test_a_name_that_no_request_could_ask_for_is_refused():
    for name in ("", "a:b", "a+b", "../x", "x" * 65):
        with pytest.raises(ConfigError, match="cannot be the name of an adapter"):
            LoadOptions(adapters={name: "x"})


def test_digests_differ_with_numbers_and_with_scales(base, tmp_path):
    made = [
        write_adapter(tmp_path / "a", base),
        write_adapter(tmp_path / "b", base, seed=1),
        write_adapter(tmp_path / "c", base, lora_alpha=9),
    ]
    assert len({read_adapter("one", path).digest for path in made}) == 3
    assert read_adapter("x", made[0]).digest == read_adapter("y", made[0]).digest


def test_layers_are_named_by_the_rules_of_peft():
    some = Targets.of({"target_modules": ["q_proj", "model.head"], "layers_to_transform": [1, 3]})
    assert some.has("model.layers.1.self_attn.q_proj")
    assert not some.has("model.layers.2.self_attn.q_proj")
    assert not some.has("model.layers.1.self_attn.xq_proj")
    assert some.has("model.head")  # a whole name is no layer's
    named = Targets.of(
        {"target_modules": ["q"], "layers_to_transform": 0, "layers_pattern": "blocks"}
    )
    assert named.has("x.blocks.0.q") and not named.has("x.layers.0.q")
    every = Targets.of({"target_modules": "all-linear", "exclude_modules": ["up"]})
    assert every.has("a.b") and not every.has("a.up") and not every.has("head", is_head=True)
    assert of_pattern({"q": 1, r"layers\.0\..*": 2}, "m.layers.0.v", 3) == 2
    assert of_pattern({"q": 1}, "m.layers.0.xq", 3) == 3


def test_tokens_of_adapters_are_counted(base, tmp_path):
    model = load_model(base, adapters={"one": write_adapter(tmp_path / "one", base)})
    config = LoadOptions().config_for(model.params, 64)
    with make_decode_session("torch", config) as session:
        runner: Any = model.bind(session)
        refused = pytest.raises(ConfigError, match="'two' is not loaded; there are: one")
        with refused, runner.adapting([("two", 1)]):
            runner.forward([3], [0])
        refused = pytest.raises(StepError, match="adapters were said of 2 tokens")
        with refused, runner.adapting([("one", 2)]):
            runner.forward([3], [0])
        assert runner.forward([3], [0]).shape[0] == 1


SETTINGS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["q_proj", "all-linear", "LORA", ".*", "(", ""]),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=6), one, max_size=2),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def saved_adapter(base, tmp_path_factory):
    """The folder of an adapter, its settings and its tensors' file, as they were written."""
    path = write_adapter(tmp_path_factory.mktemp("whole") / "one", base)
    tensors = (path / "adapter_model.safetensors").read_bytes()
    return path, json.loads((path / "adapter_config.json").read_text()), tensors


@given(data=st.data())
def test_whatever_the_files_of_an_adapter_say_it_is_read_or_refused(saved_adapter, data):
    path, config, tensors = saved_adapter
    named = st.sampled_from([*config, *adapters._OTHER, "use_rslora", "eva_config"])
    config = config | data.draw(st.dictionaries(named, SETTINGS, max_size=3))
    for name in data.draw(st.sets(st.sampled_from(sorted(config)), max_size=1)):
        del config[name]
    if data.draw(st.booleans()):  # the head of the file, which says where each tensor lies
        at = data.draw(st.integers(0, int.from_bytes(tensors[:8], "little") + 7))
        tensors = tensors[:at] + data.draw(st.binary(min_size=1, max_size=9)) + tensors[at + 1 :]
    (path / "adapter_config.json").write_text(json.dumps(config))
    (path / "adapter_model.safetensors").write_bytes(tensors)
    try:
        found = read_adapter("one", path)
    except ModelError as refused:
        assert "adapter 'one' in" in str(refused)
    else:
        assert found.updates and found.size_bytes < 2 * len(tensors)
