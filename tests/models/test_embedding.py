"""Embeddings: pooled from the hidden states that transformers' own model has."""

from __future__ import annotations

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import transformers

from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.engine import Engine, EngineService, Request, SamplingParams
from kvcellar.engine.embedding import Embedder
from kvcellar.errors import CacheFullError
from kvcellar.history import History
from kvcellar.models import LoadOptions, load_model
from kvcellar.models.files.pooling import pooling_of
from kvcellar.registry import make_seq_session
from tests.models.players import text

TEXTS = [text(7), text(1), text(40), text(3)]


def want_of(network, tokens, pooling):
    with torch.inference_mode():
        states = network.base_model(torch.tensor([tokens])).last_hidden_state[0].double().numpy()
    vector = states.mean(0) if pooling == "mean" else states[-1]
    return vector / np.linalg.norm(vector)


@contextmanager
def embedding(model, capacity=512):
    """An embedder of a model, and the engine that it uses."""
    config = LoadOptions(model.name).config_for(model.params, capacity)
    with make_seq_session(model.backend, config) as session:
        engine = Engine(model.bind(session), session.cache, max_positions=model.max_positions)
        with EngineService(engine) as service:
            yield Embedder(service, model.config.hidden_size), engine


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_a_vector_is_pooled_from_what_transformers_makes_logits_of(name, pooling, loaded, oracle):
    own = oracle(name).model
    with embedding(loaded(name)) as (embedder, _):
        got = embedder.embed(TEXTS, pooling)
    assert got.shape == (len(TEXTS), own.config.hidden_size) and got.dtype == np.float32
    for vector, tokens in zip(got, TEXTS, strict=True):
        np.testing.assert_allclose(vector, want_of(own, tokens, pooling), atol=2e-6)


@pytest.mark.mlx
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_mlx_has_the_same_vectors(name, loaded, oracle):
    with embedding(loaded(name, "mlx")) as (embedder, _):
        got = embedder.embed(TEXTS, "mean")
    for vector, tokens in zip(got, TEXTS, strict=True):
        np.testing.assert_allclose(vector, want_of(oracle(name).model, tokens, "mean"), atol=1e-5)


def test_a_text_in_pieces_has_the_vector_that_it_has_whole(loaded, monkeypatch):
    steps = []
    with embedding(loaded("llama")) as (embedder, _):
        whole = {pooling: embedder.embed(TEXTS, pooling) for pooling in ("mean", "last", "cls")}
        monkeypatch.setattr("kvcellar.engine.embedding.STEP_TOKENS", 6)
        for pooling, want in whole.items():
            got = embedder.embed(TEXTS, pooling, lambda: steps.append(1))
            np.testing.assert_allclose(got, want, atol=2e-6)
    assert len(steps) > 3 * len(TEXTS)


def test_whoever_stops_it_gets_his_own_error_and_nothing_stays(loaded):
    def stop():
        raise InterruptedError

    with embedding(loaded("llama")) as (embedder, engine):
        before = engine.cache.n_free
        with pytest.raises(InterruptedError):
            embedder.embed(TEXTS, "mean", stop)
        embedder.embed(TEXTS, "mean")
        assert engine.cache.n_free == before and engine.cache.seq_ids() == []


def test_what_is_kept_for_later_gives_way_and_what_runs_does_not(loaded):
    with embedding(loaded("llama"), capacity=64) as (embedder, _):
        kept = Request(History(text(50)), SamplingParams(max_tokens=1))
        done = embedder._service.run(lambda engine: engine.generate(kept)).result()
        assert done.reason == "length"
        assert embedder.embed([text(60)], "mean").shape[0] == 1
        running = Request(History(text(30)), SamplingParams(max_tokens=30, ignore_eos=True))

        def begin(engine):
            engine.submit(running)
            engine.step()

        embedder._service.run(begin).result()
        with pytest.raises(CacheFullError, match="answers that run"):
            embedder.embed([text(60)], "mean")


def test_a_hybrid_models_texts_go_one_by_one(tmp_path):
    folder = write_tiny("qwen3_next", tmp_path)
    model = load_model(folder, dtype="float32")
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with embedding(model) as (embedder, _):
        got = embedder.embed(TEXTS, "mean")
    for vector, tokens in zip(got, TEXTS, strict=True):
        np.testing.assert_allclose(vector, want_of(own, tokens, "mean"), atol=1e-4)


def test_pooling_is_what_the_checkpoint_says(tmp_path):
    assert pooling_of(tmp_path) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    said = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(said))
    assert pooling_of(tmp_path) == "last"
