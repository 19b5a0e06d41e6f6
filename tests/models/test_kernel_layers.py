"""Models whose layers are the kernel's: the families that have them, and what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvcellar as kv
from kvcellar.backends import kernels
from kvcellar.backends.torch import layers
from kvcellar.backends.torch.caches import TorchBytes
from kvcellar.backends.torch.layers import KernelLayer
from kvcellar.backends.torch.linears import KernelLinear
from kvcellar.models import load_model
from kvcellar.models.torch_runner import inputs_of, modules_given
from tests.models.players import MAKE_SESSION, Player, text

pytestmark = pytest.mark.skipif(not kernels.is_available(), reason=kernels.why_not())


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
    kinds = [type(module) for module in fast._model.modules()]
    if name in ("llama", "mistral", "qwen2", "qwen3"):
        n_layers = fast.config.num_hidden_layers
        assert kinds.count(KernelLayer) == n_layers
        assert kinds.count(KernelLinear) == 4 * n_layers + 1
    monkeypatch.setattr(layers, "LAYERS", frozenset())
    monkeypatch.setattr(layers, "NORMS", frozenset())
    monkeypatch.setattr(layers, "MLPS", frozenset())
    monkeypatch.setattr(layers, "ATTENTIONS", frozenset())
    plain = load_model(checkpoint(name), weights=weights, dtype=dtype)
    got, want = logits_of(fast), logits_of(plain)
    most = 0.03 if weights == "bf16" else 1e-4
    assert np.abs(got - want).max() <= most * np.abs(want).max()


def test_biases_are_joined_too(checkpoint):
    model = load_model(checkpoint("qwen2"), weights="bf16")
    own = load_model(checkpoint("qwen2"), dtype="bfloat16")._model.model.layers[0]
    attention = model._model.model.layers[0].self_attn
    assert torch.equal(
        attention.qkv_proj.bias,
        torch.cat([getattr(own.self_attn, f"{part}_proj").bias for part in "qkv"]),
    )


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "k8v4", "int8:rot"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_window", "qwen3"])
@pytest.mark.parametrize("kind", list(MAKE_SESSION))
def test_layers_in_one_call_do_what_each_does(checkpoint, monkeypatch, kind, name, kv_dtype):
    model = load_model(checkpoint(name), weights="bf16")
    taken = []

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

    next_by_kernel = TorchBytes.next_by_kernel

    def counted(*arguments):
        found = next_by_kernel(*arguments)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(TorchBytes, "next_by_kernel", counted)
    whole = play()
    assert any(taken) == (kv_dtype != "int8:rot")
    monkeypatch.setattr(TorchBytes, "next_by_kernel", lambda *_: None)
    assert np.array_equal(whole, play())


def test_what_layers_are_given_can_be_seen(checkpoint):
    model = load_model(checkpoint("llama"), weights="bf16")
    modules = modules_given(model._model, range(4))
    with Player(model, "seq") as player:
        player.feed(text(5))
        want = player.feed([3])
        player.cut(5)
        with inputs_of(modules[2:]) as seen:
            got = player.feed([3])
        assert np.array_equal(got, want)
        player.cut(5)
        with inputs_of(modules) as every:
            player.feed([3])
    assert [x.shape for x in every] == [(1, 1, model.config.hidden_size)] * 4
    for some, one in zip(seen, every[2:], strict=True):
        assert torch.equal(some, one)


def test_some_layers_are_layers(checkpoint):
    found = load_model(checkpoint("llama"), weights="bf16")._model.model.layers
    assert len(found) == 3
    assert [type(layer) for layer in found] == [KernelLayer] * 3
    assert list(found[1:]) == [found[1], found[2]]
    assert len(found[:3]) == 1
