"""EAGLE-3 heads: loaded from the published format, run on our caches, compared with a dense one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import kvcellar as kv
from kvcellar.backends.torch.eagle3.loading import load_eagle3
from kvcellar.errors import ConfigError, ModelError, StepError
from kvcellar.models.eagle3.config import default_feature_layers
from tests.models.eagle3_heads import DenseHead, head_config, head_tensors, write_head
from tests.models.players import text

N_FEATURES = 192


def write(tmp_path, changes=(), tensors=None):
    config = head_config(**dict(changes))
    tensors = head_tensors(config) if tensors is None else tensors
    return write_head(tmp_path / "head", config, tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 24, "attention_bias": True},
        {"norm_before_residual": True, "num_key_value_heads": 4},
        {"draft_vocab_size": 272},
    ],
    ids=["published", "bias", "normed residual", "whole vocabulary"],
)
def test_a_tree_of_guesses_is_what_the_dense_network_says_along_each_path(
    changes, tmp_path, loaded
):
    target = loaded("llama")
    config = head_config(**changes)
    tensors = head_tensors(config)
    stored = dict(tensors)
    if config["draft_vocab_size"] == 272:  # published without the maps
        del stored["d2t"], stored["t2d"]
        tensors["d2t"] = torch.zeros(272, dtype=torch.int64)
    head = load_eagle3(write_head(tmp_path / "head", config, stored), target)
    dense = DenseHead(config, tensors, target.network.get_input_embeddings().weight.detach())
    drawn = torch.Generator().manual_seed(1)
    known = {0: list(text(9, 1)), 3: list(text(5, 2))}
    features = {s: torch.randn(len(t), N_FEATURES, generator=drawn) for s, t in known.items()}

    def check(guesses, row, seq_id, path):
        hidden, probabilities = dense.path(known[seq_id], features[seq_id], path)
        best = probabilities.topk(guesses.beliefs.shape[1])
        np.testing.assert_allclose(guesses.beliefs[row], best.values, atol=1e-5)
        wanted = best.indices + tensors["d2t"][best.indices]
        assert guesses.tokens[row].tolist() == wanted.tolist()
        np.testing.assert_allclose(guesses.hidden[row], hidden, rtol=1e-3, atol=1e-4)

    with kv.make_tree_session("torch", kv.make_config(head.params, 64)) as session:
        runner, cache = head.bind(session), session.cache
        joined = {s: runner.join([rows.numpy()]) for s, rows in features.items()}
        # The last pairs of both in one forward, what comes before in another.
        at = cache.begin_step([(0, 6), (3, 1)])
        runner.read(known[0][:6] + known[3][:1], [joined[0][:6], joined[3][:1]], at, [], 1)
        at = cache.begin_step([(3, 4), (0, 3)])
        fresh = [joined[3][1:], joined[0][6:]]
        first = runner.read(known[3][1:] + known[0][6:], fresh, at, [3, 6], 3)
        check(first, 0, 3, [])
        check(first, 1, 0, [])
        # Two guesses behind one sequence, one behind the other; then some behind those.
        a, b, c = (int(first.tokens[i, j]) for i, j in ((0, 0), (0, 2), (1, 1)))
        cache.propose([-1, -1], 3)
        cache.propose([-1], 0)
        at = cache.begin_step([(3, 2), (0, 1)])
        second = runner.go_on([a, b, c], first, [0, 0, 1], at, 2)
        for row, (seq_id, path) in enumerate(((3, [a]), (3, [b]), (0, [c]))):
            check(second, row, seq_id, path)
        d, e = int(second.tokens[1, 1]), int(second.tokens[0, 0])
        cache.propose([1, 0], 3)
        third = runner.go_on([d, e], second, [1, 0], cache.begin_step([(3, 2)]), 2)
        check(third, 0, 3, [b, d])
        check(third, 1, 3, [a, e])


def test_a_forward_that_fails_leaves_no_cell_claimed(tmp_path, loaded):
    head = load_eagle3(write(tmp_path), loaded("llama"))
    with kv.make_tree_session("torch", kv.make_config(head.params, 64)) as session:
        runner = head.bind(session)
        joined = runner.join([np.zeros((2, N_FEATURES), np.float32)])
        session.cache.begin_step([(0, 1)])
        with pytest.raises(StepError):
            runner.read([1, 2], [joined], [0, 1], [1], 1)
        assert not session.cache.has_seq(0)
        assert session.cache.usage().groups[0].live == 0


def test_layers_are_those_of_the_published_code_where_a_model_has_them():
    assert default_feature_layers(32) == (2, 16, 29)
    assert default_feature_layers(8) == (2, 4, 5)
    assert default_feature_layers(6) == (2, 4, 6)
    assert default_feature_layers(3) == (1, 2, 3)


def test_layers_that_the_config_names_count_wherever_they_stand(tmp_path, loaded):
    target = loaded("llama")
    assert load_eagle3(write(tmp_path / "a"), target).feature_layers == (1, 2, 3)
    named = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    assert load_eagle3(write(tmp_path / "b", named), target).feature_layers == (0, 1, 3)
    nested = {"eagle_config": {**named, "use_aux_hidden_state": True}}
    assert load_eagle3(write(tmp_path / "c", nested), target).feature_layers == (0, 1, 3)


def test_a_head_may_bring_an_embedding_and_names_of_other_trainers(tmp_path, loaded):
    target = loaded("llama")
    tensors = head_tensors(head_config())
    tensors["embed_tokens.weight"] = torch.randn(272, 64)
    own = load_eagle3(write(tmp_path / "a", tensors=tensors), target)
    assert torch.equal(own.embedding, tensors["embed_tokens.weight"])
    renamed = {f"model.{k}".replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    other = load_eagle3(write(tmp_path / "b", tensors=renamed), target)
    assert torch.equal(own.qkv, other.qkv) and torch.equal(own.embedding, other.embedding)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 32, "num_attention_heads": 2},
            "hidden states of 32 numbers, which has 64",
        ),
        ({"target_hidden_size": 128}, "hidden states of 128 numbers, which has 64"),
        ({"vocab_size": 512}, "512 tokens, which has 272"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
            r"layers \[2, 16, 29\], which has 0 to 3",
        ),
    ],
)
def test_a_head_of_another_model_is_refused(changes, message, tmp_path, loaded):
    folder = write(tmp_path, changes)
    with pytest.raises(ConfigError, match=message):
        load_eagle3(folder, loaded("llama"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "has 2 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE 1 and 2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "reads three"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_a_config_of_another_kind_is_refused(changes, message, tmp_path, loaded):
    folder = write(tmp_path)
    (folder / "config.json").write_text(json.dumps(head_config(**changes)))
    with pytest.raises(ModelError, match=message):
        load_eagle3(folder, loaded("llama"))


def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path, loaded):
    target = loaded("llama")
    whole = head_tensors(head_config())
    for changed, message in (
        ({k: v for k, v in whole.items() if k != "fc.weight"}, "lacks 1 tensors.*fc.weight"),
        ({k: v for k, v in whole.items() if k != "d2t"}, "lacks 1 tensors.*d2t"),
        (whole | {"midlayer.extra.weight": torch.zeros(1)}, "does not know: midlayer.extra"),
        (whole | {"fc.weight": torch.zeros(64, 64)}, r"fc.weight is \[64, 64\]"),
        (whole | {"d2t": whole["d2t"] + 200}, "d2t names tokens"),
    ):
        folder = write(tmp_path, tensors=changed)
        with pytest.raises(ModelError, match=message):
            load_eagle3(folder, target)


def test_a_pickle_is_refused_by_its_name(tmp_path, loaded):
    folder = write(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle"):
        load_eagle3(folder, loaded("llama"))


def test_only_the_bundled_model_brings_a_head(loaded):
    with pytest.raises(ConfigError, match="eagle3:PATH"):
        load_eagle3(None, loaded("llama"))


def test_weights_in_several_files_are_read_by_their_index(tmp_path, loaded):
    folder = write(tmp_path)
    whole = head_tensors(head_config())
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    for i, part in enumerate((names[:5], names[5:])):
        save_file({k: whole[k].contiguous() for k in part}, folder / f"model-{i}.safetensors")
    where = {name: f"model-{int(name not in names[:5])}.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert load_eagle3(folder, loaded("llama")).config.draft_vocab_size == 100
