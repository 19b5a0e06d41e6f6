"""Weights in other formats: what is loaded, what it is called, what it takes, what is refused."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import kvcellar as kv
from kvcellar.backends.torch.cpu.decoder import KernelDecoder
from kvcellar.backends.torch.cpu.modules.layers import KernelEmbedding
from kvcellar.backends.torch.eagle3.loading import load_eagle3
from kvcellar.errors import BackendError, ConfigError
from kvcellar.kernel import levels, linear
from kvcellar.models import load_model
from kvcellar.models.sizes.sizing import size_model
from tests.models.fingerprints import differences
from tests.models.tiny_checkpoints import COMMON, randomize, save

needs_kernel = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
TOKENS = [5, 9, 200, 31, 7, 7, 64, 3]


def logits_of(model):
    with kv.make_decode_session(model.backend, kv.make_config(model.params, 64)) as session:
        return model.bind(session).forward(TOKENS, range(len(TOKENS)), rows=range(len(TOKENS)))


@needs_kernel
@pytest.mark.card
@pytest.mark.parametrize(("weights", "most"), [("bf16", 0.03), ("int8", 0.04), ("int4", 0.3)])
def test_logits_are_near_those_of_the_model_s_own_weights(weights, most):
    want = logits_of(load_model("demo"))
    got = logits_of(load_model("demo", weights=weights))
    assert 0 < np.abs(got - want).max() < most * np.abs(want).max()


@needs_kernel
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_bfloat16_is_read_by_the_kernel_where_nothing_else_is_asked_for(tmp_path, stored):
    """float16 becomes bfloat16 on a CPU, as it always has."""
    config = transformers.LlamaConfig(**COMMON | {"dtype": stored}, num_hidden_layers=2)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, stored))
    randomize(made)
    save(made, tmp_path)
    chosen, asked = load_model(tmp_path), load_model(tmp_path, weights="bf16")
    plain = load_model(tmp_path, weights="none")
    assert (chosen.weights, asked.weights, plain.weights) == ("bf16", "bf16", None)
    assert {m.dtype for m in (chosen, asked, plain)} == {"bfloat16"}
    assert np.array_equal(logits_of(chosen), logits_of(asked))
    assert (
        np.abs(logits_of(chosen) - logits_of(plain)).max() < 0.05 * np.abs(logits_of(plain)).max()
    )
    assert chosen.fingerprint().value == plain.fingerprint().value, "nothing is lost"
    sizes = {w: size_model(tmp_path, weights=w).weight_bytes for w in (None, "bf16", "none")}
    assert sizes[None] == sizes["bf16"]
    assert load_model(tmp_path, dtype="bfloat16").weights == "bf16"
    assert load_model(tmp_path, dtype="float32").weights is None


def test_float32_stays_as_it_is_since_it_would_be_rounded(checkpoint):
    model = load_model(checkpoint("llama"))
    assert (model.dtype, model.weights) == ("float32", None)
    assert load_model("demo").weights is None


def test_without_the_kernel_the_default_is_torchs_own_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(levels, "is_available", lambda: False)
    save_tied(tmp_path)
    assert load_model(tmp_path).weights is None
    with pytest.raises(BackendError, match="read by the CPU kernel"):
        load_model(tmp_path, weights="bf16")


@needs_kernel
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt_oss"])
def test_every_family_holds_what_was_counted_before(checkpoint, name):
    for weights in ("int8", "int4"):
        model = load_model(checkpoint(name), weights=weights)
        assert model.weights == weights
        spec = size_model(checkpoint(name), weights=weights)
        buffers = sum(b.nbytes for n, b in model.network.named_buffers() if "rotary" in n)
        scale = sum(b.nbytes for n, b in model.network.named_buffers() if n.endswith("embed_scale"))
        assert model.size_bytes - buffers - scale == spec.weight_bytes
        assert model.touch_weights() >= spec.weight_bytes
        assert np.isfinite(logits_of(model)).all()


@needs_kernel
@pytest.mark.parametrize("name", ["llama", "qwen2", "demo"])
@pytest.mark.parametrize("is_coded", [True, False])
def test_bfloat16_takes_what_was_counted_before(checkpoint, monkeypatch, name, is_coded):
    monkeypatch.setattr(linear, "reads_coded", lambda: is_coded)
    folder = "demo" if name == "demo" else checkpoint(name)
    model = load_model(folder, weights="bf16")
    spec = size_model(folder, weights="bf16")
    buffers = dict(model.network.named_buffers())
    beside = sum(b.nbytes for n, b in buffers.items() if "rotary" in n or n.endswith("escapes"))
    if name == "demo":  # the others have no layer of 128 inputs
        assert any(n.endswith("escapes") for n in buffers) == is_coded
    assert ("12 bits" in spec.counted) == is_coded
    assert model.size_bytes - beside == spec.weight_bytes


@needs_kernel
@pytest.mark.parametrize("name", ["demo", "qwen2_window", "gemma3"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tied_embedding_is_the_packed_last_layer_s(checkpoint, monkeypatch, name, weights, dtype):
    folder = "demo" if name == "demo" else checkpoint(name)
    own = load_model(folder, weights="none", dtype=dtype).network.get_input_embeddings()
    rows = reads_rows_of_its_head(
        load_model(folder, weights=weights, dtype=dtype), own, monkeypatch
    )
    assert (rows.double() - own.weight.double()).norm() < 0.01 * own.weight.double().norm()


@needs_kernel
@pytest.mark.skipif(not linear.reads_coded(), reason="last layers stay in 16 bits here")
def test_a_tied_embedding_is_the_last_layer_s_in_12_bits(tmp_path, monkeypatch):
    save_tied(tmp_path)
    model = load_model(tmp_path, weights="bf16")
    buffers = model.network.named_buffers()
    beside = sum(b.nbytes for n, b in buffers if "rotary" in n or n.endswith("escapes"))
    assert model.size_bytes - beside == size_model(tmp_path, weights="bf16").weight_bytes
    own = load_model(tmp_path, weights="none").network.get_input_embeddings()
    assert torch.equal(reads_rows_of_its_head(model, own, monkeypatch), own.weight)


def save_tied(folder):
    """A checkpoint in bfloat16 whose layers can be written in 12 bits."""
    config = transformers.LlamaConfig(
        **COMMON | {"hidden_size": 128, "dtype": "bfloat16", "tie_word_embeddings": True},
        num_hidden_layers=2,
    )
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomize(made)
    save(made, folder)


def reads_rows_of_its_head(model, own, monkeypatch):
    """The rows: held once, and in one call as in modules what an embedding of them would say."""
    inner = model.network
    embedding = inner.get_input_embeddings()
    assert isinstance(embedding, KernelEmbedding) and embedding.held is inner.lm_head
    assert not any(p.shape[0] == model.vocab_size for p in inner.parameters())
    rows, unscaled = embedding.weight, own.weight.clone()
    own.weight.data.copy_(rows)
    ids = torch.tensor([[5, 0, model.vocab_size - 1]])
    assert torch.equal(embedding(ids), own(ids))
    got = logits_of(model)
    monkeypatch.setattr(KernelDecoder, "forward", lambda *_: None)
    assert np.array_equal(logits_of(model), got)
    inner.set_input_embeddings(own)
    assert np.array_equal(logits_of(model), got)
    own.weight.data.copy_(unscaled)
    return rows


@needs_kernel
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.slow
def test_no_file_stays_mapped(tmp_path, weights):
    def is_mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text("utf-8")

    save_tied(tmp_path)
    gc.disable()
    try:
        model = load_model(tmp_path, weights="none")
        assert is_mapped()
        del model
        gc.collect()
        model = load_model(tmp_path, weights=weights)
        assert not is_mapped()
    finally:
        gc.enable()
    assert np.isfinite(logits_of(model)).all()


@needs_kernel
@pytest.mark.parametrize("ids", [[-1], [3, 4096]])
def test_an_id_that_no_tied_embedding_has_is_refused(ids):
    rows = load_model("demo", weights="int8").network.get_input_embeddings()
    assert rows(torch.empty(1, 0, dtype=torch.long)).shape == (1, 0, 320)
    with pytest.raises(IndexError, match="4096 rows"):
        rows(torch.tensor(ids))


@needs_kernel
def test_a_head_reads_a_tied_embedding():
    """What guesses has no embedding of its own; its target's is the last layer's."""
    target = load_model("demo", weights="int8")
    embedding = target.network.get_input_embeddings()
    assert torch.equal(load_eagle3(None, target).embedding, embedding.weight)


@needs_kernel
def test_the_store_tells_packed_weights_apart():
    found = [
        load_model("demo", weights=weights).fingerprint() for weights in (None, "int8", "int4")
    ]
    assert differences(found[0], found[1]) == ["dtype"]
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
    monkeypatch.setattr(levels, "_reason", "it is not built here; build it")
    with pytest.raises(BackendError, match="build it"):
        load_model("demo", weights="int8")
