"""Weights in other formats: what is loaded, what it is called, what it takes, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import kvcellar as kv
from kvcellar.backends import kernels
from kvcellar.errors import BackendError, ConfigError
from kvcellar.models import load_model
from kvcellar.models.sizing import size_model

needs_kernel = pytest.mark.skipif(not kernels.is_available(), reason=kernels.why_not())
TOKENS = [5, 9, 200, 31, 7, 7, 64, 3]


def logits_of(model):
    with kv.make_decode_session(model.backend, kv.make_config(model.params, 64)) as session:
        return model.bind(session).forward(TOKENS, range(len(TOKENS)), rows=range(len(TOKENS)))


@needs_kernel
@pytest.mark.parametrize(("weights", "most"), [("bf16", 0.03), ("int8", 0.04), ("int4", 0.3)])
def test_logits_are_near_those_of_the_model_s_own_weights(weights, most):
    want = logits_of(load_model("demo"))
    got = logits_of(load_model("demo", weights=weights))
    assert 0 < np.abs(got - want).max() < most * np.abs(want).max()


@needs_kernel
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt_oss"])
def test_every_family_holds_what_was_counted_before(checkpoint, name):
    for weights in ("int8", "int4"):
        model = load_model(checkpoint(name), weights=weights)
        assert model.weights == weights
        spec = size_model(checkpoint(name), weights=weights)
        buffers = sum(b.nbytes for n, b in model._model.named_buffers() if "rotary" in n)
        scale = sum(b.nbytes for n, b in model._model.named_buffers() if n.endswith("embed_scale"))
        assert model.size_bytes - buffers - scale == spec.weight_bytes
        assert model.touch_weights() >= spec.weight_bytes
        assert np.isfinite(logits_of(model)).all()


@needs_kernel
@pytest.mark.parametrize("name", ["llama", "qwen2", "demo"])
@pytest.mark.parametrize("is_coded", [True, False])
def test_bfloat16_takes_what_was_counted_before(checkpoint, monkeypatch, name, is_coded):
    monkeypatch.setattr(kernels, "reads_coded", lambda: is_coded)
    folder = "demo" if name == "demo" else checkpoint(name)
    model = load_model(folder, weights="bf16")
    spec = size_model(folder, weights="bf16")
    buffers = dict(model._model.named_buffers())
    beside = sum(b.nbytes for n, b in buffers.items() if "rotary" in n or n.endswith("escapes"))
    if name == "demo":  # the others have no layer of 128 inputs
        assert any(n.endswith("escapes") for n in buffers) == is_coded
    assert ("12 bits" in spec.counted) == is_coded
    assert model.size_bytes - beside == spec.weight_bytes


@needs_kernel
def test_the_store_tells_packed_weights_apart():
    found = [
        load_model("demo", weights=weights).fingerprint() for weights in (None, "int8", "int4")
    ]
    assert found[0].differences(found[1].value) == ["dtype"]
    assert len({one.value for one in found}) == 3
    in_bfloat16 = load_model("demo", dtype="bfloat16").fingerprint()
    assert load_model("demo", weights="bf16").fingerprint() == in_bfloat16


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"weights": "int3"}, "choose one of bf16, int8, int4"),
        ({"weights": "8da4w"}, "with the backend executorch"),
        ({"weights": "bf16", "dtype": "float32"}, "dtype bfloat16"),
        ({"weights": "int8", "dtype": "float16"}, "bfloat16 or float32"),
    ],
)
def test_what_does_not_go_together_is_refused(asked, said):
    with pytest.raises(ConfigError, match=said):
        load_model("demo", **asked)
    with pytest.raises(ConfigError, match=said):
        size_model("demo", **asked)


def test_without_the_kernel_it_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setattr(kernels, "_reason", "it is not built here; build it")
    with pytest.raises(BackendError, match="build it"):
        load_model("demo", weights="int8")
