"""Embeddings through OpenAI's and Ollama's own clients."""

from __future__ import annotations

import numpy as np
import ollama
import openai
import pytest
import torch
import transformers

from kvcellar.backends.torch.learn.shrink.checkpoints import make_tokenizer
from kvcellar.backends.torch.run.embedding import load_embedding_model
from kvcellar.models.files.hub import DEMO_FOLDER
from tests.server.live import serving

TEXTS = ["def add(a, b):", "hello", "x = 1 # é😀"]


@pytest.fixture(scope="module")
def want():
    """transformers' mean of the hidden states of each text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)

    def pooled(text):
        with torch.inference_mode():
            ids = torch.tensor([tokenizer.encode(text)])
            vector = model.base_model(ids).last_hidden_state[0].double().mean(0).numpy()
        return vector / np.linalg.norm(vector)

    return np.array([pooled(text) for text in TEXTS])


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openais_client_gets_the_models_vectors_in_both_encodings(client, want):
    for form in ({}, {"encoding_format": "float"}):  # its own default is base64
        found = client.embeddings.create(model="demo", input=TEXTS, **form)
        got = np.array([one.embedding for one in found.data])
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert found.usage.prompt_tokens == found.usage.total_tokens > len(TEXTS)


def test_tokens_and_one_text_are_taken_too(client, live, want):
    ids = live.post("/tokenize", {"prompt": TEXTS[1]})["tokens"]
    for given in (TEXTS[1], ids, [ids]):
        (one,) = client.embeddings.create(model="demo", input=given).data
        np.testing.assert_allclose(one.embedding, want[1], atol=1e-5)


def test_fewer_dimensions_are_the_first_ones_of_length_one(client, want):
    (one,) = client.embeddings.create(model="demo", input=TEXTS[0], dimensions=8).data
    np.testing.assert_allclose(one.embedding, want[0][:8] / np.linalg.norm(want[0][:8]), atol=1e-5)


def test_pooling_may_be_asked_for(live):
    one = {"model": "demo", "input": TEXTS[0]}
    mean, last = (
        live.post("/v1/embeddings", {**one, "pooling": how})["data"][0]["embedding"]
        for how in ("mean", "last")
    )
    assert not np.allclose(mean, last, atol=1e-3)


def test_ollamas_client_gets_the_same_vectors(live, want):
    made = ollama.Client(live.url)
    found = made.embed("demo", TEXTS)
    np.testing.assert_allclose(np.array(found.embeddings), want, atol=1e-5)
    old = made.embeddings("demo", TEXTS[1])
    np.testing.assert_allclose(np.array(old.embedding), want[1], atol=1e-5)
    pinned = [{"type": "text", "text": "y = 2\n" * 400, "cache_control": {"type": "ephemeral"}}]
    live.post("/v1/messages", {"messages": [{"role": "user", "content": pinned}], "max_tokens": 1})
    assert live.service.pins.n_tokens > 600
    long = "x = 1\n" * 5000
    (context,) = {m["context_length"] for m in live.get("/v1/models")["data"]}
    assert made.embed("demo", long).prompt_eval_count == context
    with pytest.raises(ollama.ResponseError, match="context"):
        made.embed("demo", long, truncate=False)
    assert "embedding" in made.show("demo").capabilities
    made._client.close()


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "empty"),
        ({"input": [10**6]}, "no token"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "temperature": 0.5}, "temperature"),
        ({"input": "a b " * 30000}, "context"),
    ],
)
def test_what_cannot_be_is_refused(live, body, word):
    response = live.http.post("/v1/embeddings", json=body)
    assert response.status_code == 400 and word in response.json()["error"]["message"]


def test_a_model_beside_the_others_makes_the_vectors_where_none_is_named(tmp_path):
    folder = tmp_path / "model"
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    beside = load_embedding_model(str(folder), lambda part, what: None)
    with serving(tmp_path / "store", models={"embedding_models": {"small": beside}}) as live:
        assert [one["id"] for one in live.get("/v1/models")["data"]] == ["demo", "small"]
        assert live.get("/v1/models/small")["max_model_len"] == 64
        found = live.post("/v1/embeddings", {"input": TEXTS[0]})
        same = live.post("/v1/embeddings", {"model": "small", "input": TEXTS[0]})
        assert found == same and found["model"] == "small"
        assert len(found["data"][0]["embedding"]) == 32
        assert live.service.models.hosts() == []  # nobody asked for an answer
        made = ollama.Client(live.url)
        assert made.show("small:latest").capabilities == ["embedding"]
        assert [one.model for one in made.list().models] == ["demo", "small"]
        assert made.embed("small", "x" * 500).prompt_eval_count == 64
        made._client.close()
