"""Models whose layers are the kernel's: the families that have them, and what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvcellar as kv
from kvcellar.backends import kernels
from kvcellar.backends.torch import layers
from kvcellar.backends.torch.layers import KernelLayer
from kvcellar.backends.torch.linears import KernelLinear
from kvcellar.models import load_model

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
