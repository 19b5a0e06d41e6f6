"""Embedding models beside the others: transformers' own states, pooled as their files say."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from kvcellar.backends.torch.learn.shrink.checkpoints import make_tokenizer
from kvcellar.backends.torch.run.embedding import load_embedding_model
from kvcellar.errors import ModelError

TEXTS = ["hello", "a", "def add(a, b): return a + b", "x = 1"]

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def write(folder, config, pooling, dense=False):
    torch.manual_seed(0)
    network = transformers.AutoModel.from_config(config).eval()
    network.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    said = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({**said, f"pooling_mode_{pooling}": True})
    )
    kinds = ["Transformer", "Pooling", *["Dense"] * dense, "Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}" if i else ""}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    weight = torch.randn(8, 32)
    if dense:
        (folder / "2_Dense").mkdir()
        save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
        activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(activation))
    return network, weight


@pytest.mark.parametrize(
    ("config", "pooling", "dense"),
    [
        (transformers.BertConfig(**SMALL), "cls_token", False),
        (transformers.BertConfig(**SMALL), "mean_tokens", True),
        (transformers.Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=16), "lasttoken", False),
    ],
    ids=["bert", "dense", "decoder"],
)
def test_vectors_are_transformers_own_states_pooled_as_the_files_say(
    config, pooling, dense, tmp_path
):
    network, weight = write(tmp_path, config, pooling, dense)
    model = load_embedding_model(str(tmp_path), lambda part, what: None)
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    got = model.embed(ids, model.pooling)
    assert got.shape == (len(TEXTS), model.size) == (len(TEXTS), 8 if dense else 32)
    for vector, tokens in zip(got, ids, strict=True):
        with torch.inference_mode():
            states = network(torch.tensor([tokens])).last_hidden_state[0]
            want = {"cls_token": states[0], "mean_tokens": states.mean(0), "lasttoken": states[-1]}
            one = want[pooling]
            one = torch.tanh(weight @ one) if dense else one
        np.testing.assert_allclose(vector, (one / one.norm()).numpy(), atol=1e-5)


def test_what_is_behind_a_network_and_not_known_is_refused(tmp_path):
    write(tmp_path, transformers.BertConfig(**SMALL), "cls_token")
    modules = [{"type": "sentence_transformers.models.WordWeights", "path": ""}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="WordWeights"):
        load_embedding_model(str(tmp_path), lambda part, what: None)
    said = {"pooling_mode_max_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match="max_tokens"):
        load_embedding_model(str(tmp_path), lambda part, what: None)
