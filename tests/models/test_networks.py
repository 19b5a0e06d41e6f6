"""Networks that run a checkpoint's text: whole models, and the text parts of wrappers."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvcellar.backends.torch.load.networks import NetworkClasses, empty_network, load_network
from kvcellar.errors import ModelError
from kvcellar.models.files.checkpoint import read_config
from tests.models.tiny_checkpoints import FAMILIES, make_checkpoint, randomize
from tests.models.tiny_wrappers import WRAPPERS, make_wrapper, save_wrapper

IDS = torch.randint(0, 250, (1, 23), generator=torch.Generator().manual_seed(5))
CPU = torch.device("cpu")
LLAMA = transformers.LlamaConfig().to_dict()


def load(folder, **options):
    return load_network(
        folder, read_config(folder), dtype=torch.float32, device=CPU, attention="eager", **options
    )


def logits(network, keep=0):
    positions = torch.arange(IDS.shape[1])[None]
    with torch.no_grad():
        return network(
            input_ids=IDS, position_ids=positions, use_cache=False, logits_to_keep=keep
        ).logits


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_part_of_a_wrapper_gives_its_logits(name, is_tied, tmp_path):
    wrapper = make_wrapper(name, is_tied=is_tied)
    save_wrapper(wrapper, tmp_path)
    with torch.no_grad():
        want = wrapper(input_ids=IDS, use_cache=False).logits
    network = load(tmp_path)
    torch.testing.assert_close(logits(network), want, rtol=0, atol=1e-4)
    some = torch.tensor([2, 22])
    torch.testing.assert_close(logits(network, some), want[:, some], rtol=0, atol=1e-4)
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    assert (head.weight is embedding.weight) == is_tied
    text = read_config(tmp_path)["text_config"]
    assert network.config.num_hidden_layers == text["num_hidden_layers"]
    held = sum(parameter.numel() for parameter in network.parameters())
    assert held < sum(parameter.numel() for parameter in wrapper.parameters())
    assert not [n for n, _ in network.named_parameters() if "vis" in n or "audio" in n or "mm" in n]


@pytest.mark.parametrize("name", [*FAMILIES, *WRAPPERS])
def test_an_empty_network_has_the_shapes_of_the_loaded_one(name, tmp_path):
    if name in WRAPPERS:
        save_wrapper(make_wrapper(name, is_tied=True), tmp_path)
    else:
        make_checkpoint(name, tmp_path)
    empty, full = empty_network(read_config(tmp_path), attention="eager"), load(tmp_path)
    shapes = {key: tensor.shape for key, tensor in empty.named_parameters()}
    assert shapes == {key: tensor.shape for key, tensor in full.named_parameters()}
    assert all(tensor.is_meta for tensor in empty.parameters())
    assert type(empty) is type(full)


def test_no_package_is_needed_for_a_tower(tmp_path):
    """Gemma 3n sees with a network of timm, which is not installed here."""
    text = transformers.Gemma3nTextConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=272,
        vocab_size_per_layer_input=272,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        num_kv_shared_layers=1,
        layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    )
    alone = transformers.Gemma3nForCausalLM(text).eval()
    randomize(alone)
    tensors = {
        key.replace("model.", "model.language_model.", 1): tensor
        for key, tensor in alone.state_dict().items()
        if not key.startswith("lm_head")
    }
    tensors["model.vision_tower.timm_model.stem.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    transformers.Gemma3nConfig(text_config=text.to_dict()).save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load(tmp_path)), logits(alone))


def test_a_wrapper_that_was_published_with_names_of_long_ago(tmp_path):
    wrapper = make_wrapper("qwen2_vl", is_tied=False)
    save_wrapper(wrapper, tmp_path)
    path = tmp_path / "model.safetensors"
    names = {
        key.replace("model.visual.", "visual.").replace("language_model.", ""): tensor
        for key, tensor in load_file(path).items()
    }
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert any(key.startswith("visual.") for key in names)
    save_file(names, path, {"format": "pt"})
    with torch.no_grad():
        want = wrapper(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits(load(tmp_path)), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_a_head_that_only_the_whole_config_says_is_tied(name, tmp_path):
    wrapper = make_wrapper(name, is_tied=True)
    save_wrapper(wrapper, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    network = load(tmp_path)
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
    assert network.config.tie_word_embeddings is True
    with torch.no_grad():
        want = wrapper(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits(network), want, rtol=0, atol=1e-4)


def change(folder, **tensors):
    """Rewrite a checkpoint's only file; None takes a tensor away."""
    path = folder / "model.safetensors"
    found = {**load_file(path), **tensors}
    save_file({k: v for k, v in found.items() if v is not None}, path, {"format": "pt"})


def test_tensors_of_the_text_that_are_missing_or_unknown_are_refused(tmp_path):
    save_wrapper(make_wrapper("qwen3_vl", is_tied=False), tmp_path)
    layer = "model.language_model.layers.1.self_attn."
    change(tmp_path, **{layer + "gate.weight": torch.ones(3)})
    with pytest.raises(ModelError, match=r"1 tensors that a Qwen3VLFor\w+ does not know: .*gate"):
        load(tmp_path)
    change(tmp_path, **{layer + "gate.weight": None, layer + "q_norm.weight": None})
    with pytest.raises(ModelError, match=r"lacks 1 tensors that a Qwen3VLFor\w+ has: .*q_norm"):
        load(tmp_path)


def test_towers_may_be_missing(tmp_path):
    save_wrapper(make_wrapper("mistral3", is_tied=False), tmp_path)
    want = logits(load(tmp_path))
    towers = [key for key in load_file(tmp_path / "model.safetensors") if "language" not in key]
    change(tmp_path, **dict.fromkeys(key for key in towers if "lm_head" not in key))
    torch.testing.assert_close(logits(load(tmp_path)), want)


def test_a_float_that_json_has_no_word_for():
    raw = transformers.MistralConfig(num_hidden_layers=1).to_dict()
    raw["initializer_range"] = {"__float__": "Infinity"}
    assert NetworkClasses.of(raw).config.initializer_range == float("inf")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"model_type": "alien"}, "architecture 'alien' is unknown to transformers"),
        ({}, "config has no model_type"),
        ({"model_type": ["llama"]}, "is unknown"),
        ({"model_type": "t5gemma"}, "reads with an encoder"),
        (transformers.SiglipVisionConfig().to_dict(), "generates no text with a config of type"),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
            "is a LlamaForSequenceClassification; to generate text it must be a LlamaForCausalLM",
        ),
        (LLAMA | {"hidden_size": "wide"}, "the llama config cannot be read"),
        (
            {"model_type": "qwen3_vl", "text_config": {"intermediate_size": -4}},
            "the qwen3_vl config makes no model",
        ),
        (
            LLAMA | {"text_config": 5},
            "the llama config has text_config=5, and it must be an object",
        ),
        (
            transformers.Gemma3nTextConfig(num_kv_shared_layers=-1).to_dict(),
            r"makes no model: .* \(it has num_kv_shared_layers=-1\); check the file",
        ),
        (transformers.GPTJConfig().to_dict(), "'gptj' does not call its attention through"),
    ],
)
def test_a_config_that_makes_no_network_is_refused_by_name(raw, said):
    with pytest.raises(ModelError, match=said):
        empty_network(raw)
