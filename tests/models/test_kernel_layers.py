"""Models whose layers are the kernel's: the families that have them, and what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvcellar as kv
from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.backends.torch.cpu.decoder import KernelDecoder
from kvcellar.backends.torch.cpu.find import finding
from kvcellar.backends.torch.cpu.modules.layers import KernelLayer
from kvcellar.backends.torch.cpu.modules.linears import KernelLinear
from kvcellar.backends.torch.cpu.modules.rotations import Rotations
from kvcellar.errors import PositionError
from kvcellar.kernel import levels
from kvcellar.models import load_model
from tests.models.players import MAKE_SESSION, Player, text

pytestmark = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_a_model_says_the_same_with_and_without_joined_layers(
    checkpoint, monkeypatch, name, weights
):
    tokens = [5, 9, 31, 7, 7, 6, 3]

    def logits_of(model):
        config = kv.make_config(model.params, 64, "float32")
        with kv.make_decode_session(model.backend, config) as session:
            runner = model.bind(session)
            found = [runner.forward(tokens, range(len(tokens)), rows=range(len(tokens)))]
            for position in range(7, 12):
                token = int(found[-1][-1].argmax())
                found.append(runner.forward([token], [position]))
        return np.concatenate(found)

    dtype = "bfloat16" if weights == "bf16" else "float32"
    fast = load_model(checkpoint(name), weights=weights, dtype=dtype)
    kinds = [type(module) for module in fast.network.modules()]
    if name in ("llama", "mistral", "qwen2", "qwen3"):
        n_layers = fast.config.num_hidden_layers
        assert kinds.count(KernelLayer) == n_layers
        assert kinds.count(KernelLinear) == 4 * n_layers + 1 + (weights == "int8")
    monkeypatch.setattr(finding.PartFinder, "find", lambda finder: None)
    plain = load_model(checkpoint(name), weights=weights, dtype=dtype)
    got, want = logits_of(fast), logits_of(plain)
    most = 0.03 if weights == "bf16" else 1e-4
    assert np.abs(got - want).max() <= most * np.abs(want).max()


def test_biases_are_joined_too(checkpoint):
    model = load_model(checkpoint("qwen2"), weights="bf16")
    own = load_model(checkpoint("qwen2"), weights="none", dtype="bfloat16").network.model.layers[0]
    attention = model.network.model.layers[0].self_attn
    assert torch.equal(
        attention.qkv_proj.bias,
        torch.cat([getattr(own.self_attn, f"{part}_proj").bias for part in "qkv"]),
    )


def counted(monkeypatch):
    """Collect, for each forward from here on, whether it was one call."""
    taken = []
    forward = KernelDecoder.forward

    def noted(*arguments):
        found = forward(*arguments)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(KernelDecoder, "forward", noted)
    return taken


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "k8v4", "int8:first4:last16", "int8:rot"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_window", "qwen3"])
@pytest.mark.parametrize("kind", list(MAKE_SESSION))
def test_a_model_in_one_call_does_what_its_modules_do(
    checkpoint, monkeypatch, kind, name, kv_dtype
):
    model = load_model(checkpoint(name), weights="bf16")

    def play():
        with Player(model, kind, kv_dtype=kv_dtype) as player:
            found = [player.feed(text(20)), player.feed(text(3, 1), rows="all")]
            steps = [[(0, 7)], [(0, 8), (0, 9)]]
            if kind != "contiguous":
                player.cache.seq_cp(0, 1)
                steps.append([(0, 5), (1, 6), (1, 7)])
            found += [player.batch(step, rows="all") for step in steps for _ in "two"]
            player.cut(21)
            found.append(player.feed([3]))
        return np.concatenate(found)

    taken = counted(monkeypatch)
    whole = play()
    assert any(taken) == (kv_dtype != "int8:rot")
    assert taken[-1] == taken[-3]
    monkeypatch.setattr(KernelDecoder, "forward", lambda *_: None)
    assert np.array_equal(whole, play())


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_what_layers_are_given_comes_from_one_call_too(checkpoint, monkeypatch, weights):
    model = load_model(checkpoint("llama"), weights=weights, dtype="bfloat16")
    n_layers = model.config.num_hidden_layers
    wanted = [0, 2, n_layers]

    def play():
        config = kv.make_config(model.params, 64, "bfloat16")
        with kv.make_seq_session(model.backend, config) as session:
            runner = model.bind(session, feature_layers=wanted)
            session.cache.begin_step([(0, 3)])
            first = runner.forward_with_features([5, 9, 31], range(3), [2, 0])
            session.cache.begin_step([(0, 1)])
            second = runner.forward_with_features([7], [3])
        return first, second

    taken = counted(monkeypatch)
    found = play()
    assert taken == [True, True]
    hidden = model.config.hidden_size
    assert [x.shape for x in found[0]] == [(2, model.vocab_size), (3, 3 * hidden)]
    embedding = model.network.get_input_embeddings().weight.detach().float()
    assert np.array_equal(found[0][1][:, :hidden], embedding[[5, 9, 31]])
    monkeypatch.setattr(KernelDecoder, "forward", lambda *_: None)
    for one, other in zip(found, play(), strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])


def test_a_step_in_one_call_passes_by_the_op(checkpoint, monkeypatch):
    model = load_model(checkpoint("llama"), weights="bf16")
    layers, attend = [], TorchCache.update_and_attend

    def noted(cache, q, k, v, position, layer_id, *rest):
        layers.append(layer_id)
        return attend(cache, q, k, v, position, layer_id, *rest)

    monkeypatch.setattr(TorchCache, "update_and_attend", noted)
    taken = counted(monkeypatch)
    with Player(model, "seq") as player:
        n_long = player.runner._decoder.few + 1
        player.feed([5] * n_long)
        assert taken == [False] and layers == [*range(model.config.num_hidden_layers)]
        player.feed([7])
        assert taken == [False, True] and len(layers) == model.config.num_hidden_layers
        assert player.cache.seq_len(0) == n_long + 1


def test_nothing_is_said_of_no_rows(checkpoint):
    model = load_model(checkpoint("llama"), weights="bf16")
    with Player(model, "seq") as player:
        player.cache.begin_step([(0, 1)])
        assert player.runner.forward([5], [0], rows=[]).shape == (0, model.vocab_size)
        assert player.cache.seq_len(0) == 1


def test_rotations_are_those_of_the_model(checkpoint):
    rotary = load_model(
        checkpoint("llama"), weights="none", dtype="bfloat16"
    ).network.model.rotary_emb
    found = Rotations(rotary, torch.bfloat16)
    like = torch.empty(0, dtype=torch.bfloat16)
    for positions in ([0], [255], [256], [3, 9000, 3, 511, 512], [131071]):
        want = rotary(like, torch.tensor([positions]))
        assert torch.equal(found.of(np.array(positions)), torch.cat(want))


def test_a_plan_that_is_not_the_forwards_leaves_nothing(checkpoint):
    model = load_model(checkpoint("llama"), weights="bf16")
    with Player(model, "seq") as player:
        player.feed(text(5))
        player.cache.begin_step([(0, 1)])
        with pytest.raises(PositionError, match="claimed"):
            player.runner.forward([5], [9])
        assert player.cache.seq_len(0) == 5
        assert player.feed([3]).shape == (1, model.vocab_size)
