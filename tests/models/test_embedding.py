"""Embeddings: pooled from the hidden states that transformers' own model has."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kvcellar.engine.embedding import Embedder
from kvcellar.models import LoadOptions
from kvcellar.models.pooling import pooling_of
from tests.models.players import text

TEXTS = [text(7), text(1), text(40), text(3)]


def want_of(network, tokens, pooling):
    with torch.inference_mode():
        states = network.base_model(torch.tensor([tokens])).last_hidden_state[0].double().numpy()
    vector = states.mean(0) if pooling == "mean" else states[-1]
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_a_vector_is_pooled_from_what_transformers_makes_logits_of(name, pooling, loaded, oracle):
    model, own = loaded(name), oracle(name).model
    got = Embedder(model, LoadOptions(name)).embed(TEXTS, pooling)
    assert got.shape == (len(TEXTS), own.config.hidden_size) and got.dtype == np.float32
    for vector, tokens in zip(got, TEXTS, strict=True):
        np.testing.assert_allclose(vector, want_of(own, tokens, pooling), atol=2e-6)


@pytest.mark.mlx
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_mlx_has_the_same_vectors(name, loaded, oracle):
    model = loaded(name, "mlx")
    got = Embedder(model, LoadOptions(name, backend="mlx")).embed(TEXTS, "mean")
    for vector, tokens in zip(got, TEXTS, strict=True):
        np.testing.assert_allclose(vector, want_of(oracle(name).model, tokens, "mean"), atol=1e-5)


def test_a_text_in_pieces_has_the_vector_that_it_has_whole(loaded, monkeypatch):
    embedder = Embedder(loaded("llama"), LoadOptions("llama"))
    whole = {pooling: embedder.embed(TEXTS, pooling) for pooling in ("mean", "last")}
    steps = []
    monkeypatch.setattr("kvcellar.engine.embedding.STEP_TOKENS", 6)
    for pooling, want in whole.items():
        got = embedder.embed(TEXTS, pooling, lambda: steps.append(1))
        np.testing.assert_allclose(got, want, atol=2e-6)
    assert len(steps) > 2 * len(TEXTS)


def test_whoever_stops_it_gets_his_own_error(loaded):
    def stop():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Embedder(loaded("llama"), LoadOptions("llama")).embed(TEXTS, "mean", stop)


def test_pooling_is_what_the_checkpoint_says(tmp_path):
    assert pooling_of(tmp_path) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    said = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(said))
    assert pooling_of(tmp_path) == "last"
