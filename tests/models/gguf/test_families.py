"""GGUF files of every architecture that is read compute what the models did they were made of."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

from kvcellar.backends.torch.load.networks import load_network
from kvcellar.errors import ModelError
from kvcellar.models import load_model
from kvcellar.models.files.checkpoint import read_config
from kvcellar.models.gguf.configs import config_of
from kvcellar.models.gguf.families import FAMILIES
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.gguf.tokens import tokenizer_of
from tests.models.gguf.families import CASES
from tests.models.gguf.writing import SPECIALS
from tests.models.players import Player

CPU = torch.device("cpu")
TEXT = torch.tensor([[1, 40, 7, 99, 258, 3, 120, 45, 6, 7, 8, 200, 10, 11, 12, 13, 77, 15, 16]])


def read(path, dtype=torch.float32):
    return load_network(path, read_config(path), dtype=dtype, device=CPU, attention="eager")


def logits(network):
    with torch.inference_mode():
        return network(input_ids=TEXT, use_cache=False).logits


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_logits_of_the_model_that_it_was_made_of(name, tmp_path):
    path = tmp_path / "model.gguf"
    want = CASES[name].write(path)
    network = read(path)
    assert type(network).__name__ == (CASES[name].read_as or type(want).__name__)
    torch.testing.assert_close(logits(network), logits(want), rtol=1e-4, atol=1e-4)


def test_every_architecture_that_is_read_has_a_case():
    assert {case.architecture for case in CASES.values()} == {*FAMILIES, *GGUF_ARCHS}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_are_made_plain_in_the_type_that_is_asked_for(dtype, tmp_path):
    path = tmp_path / "model.gguf"
    kind = gguf.GGMLQuantizationType.Q8_0
    want = CASES["qwen3moe"].write(path, kind=kind)
    network = read(path, dtype)
    assert {weight.dtype for weight in network.parameters()} == {dtype}
    for name, weight in network.named_parameters():
        plain = dict(want.named_parameters())[name].detach()
        if plain.dim() > 1:
            stored = gguf.quantize(plain.numpy(), kind)
            plain = torch.from_numpy(gguf.dequantize(stored, kind))
        assert torch.equal(weight, plain.to(dtype)), name


def test_files_that_a_model_was_split_into_are_one_model(tmp_path):
    want = CASES["llama"].write(tmp_path / "Tiny.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    assert torch.allclose(logits(read(parts[0])), logits(want), atol=1e-4)
    model = load_model(tmp_path, is_unchecked=True)
    assert model.path == parts[0]
    with pytest.raises(ModelError, match=r"one of several files; give the first, Tiny-00001-of"):
        read(parts[1])
    before = model.fingerprint().parts["weights"]
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    assert load_model(tmp_path, is_unchecked=True).fingerprint().parts["weights"] != before
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"Tiny-00002-of-00003.gguf is not beside it"):
        read(parts[0])


def test_a_file_is_a_whole_model(tmp_path):
    path = tmp_path / "model.gguf"
    CASES["llama"].write(path)
    model = load_model(path)
    tokenizer = model.tokenizer
    assert model.eos_token_ids == {261, 263}, "the file's end, and the end of a turn by its text"
    assert tokenizer("the 12", add_special_tokens=True)["input_ids"] == [257, 32 + 188, 16, 17]
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "in"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|im_start|>user\nin<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(asked)["input_ids"]
    assert ids[0] == 262 and 263 in ids and 259 in ids
    assert tokenizer.decode(ids) == asked
    for special in SPECIALS:
        assert len(tokenizer(special)["input_ids"]) == 1


def test_what_a_family_has_no_place_for_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    case = CASES["qwen2"]
    case.metadata = {"logit_scale": 0.5}
    try:
        case.write(path)
    finally:
        case.metadata = {}
    with pytest.raises(ModelError, match=r"qwen2.logit_scale=0.5, which qwen2 .* does not do"):
        read_config(path)


def test_halves_of_a_matrix_that_is_there_as_a_whole_are_left_alone(tmp_path):
    path = tmp_path / "model.gguf"
    case = CASES["deepseek2 as older files have it"]
    halves = {"k_b": np.zeros((4, 32, 16), np.float32), "v_b": np.zeros((4, 24, 32), np.float32)}
    extra = {f"blk.0.attn_{half}.weight": values for half, values in halves.items()}
    want = replace(case, extra=extra).write(path)
    torch.testing.assert_close(logits(read(path)), logits(want), rtol=1e-4, atol=1e-4)


IMPOSSIBLE = [
    ("llama", "rope.freq_base", -1.0),
    ("llama", "nextn_predict_layers", 2),
    ("llama-3", "attention.key_length", 2**31 - 1),
    ("qwen3next", "block_count", 2**31 - 1),
    ("gemma4", "attention.key_length_swa", None),
    ("gemma4", "attention.head_count_kv", np.array([2, 1], np.int32)),
    ("gemma4 with shared layers", "feed_forward_length", np.array([1, 2, 3, 4, 5, 6], np.int32)),
    ("gemma3n", "activation_sparsity_scale", np.array([0.5], np.float32)),
    ("deepseek2", "attention.kv_lora_rank", None),
    ("deepseek2", "rope.dimension_count", 24),
    ("glm4moe", "expert_gating_func", 1),
    ("qwen3moe", "expert_gating_func", 2),
    ("granitehybrid", "ssm.inner_size", 100),
    ("glm4", "rope.dimension_sections", np.array([4, 2, 2, 0], np.int32)),
]


@pytest.mark.parametrize(("name", "key", "value"), IMPOSSIBLE, ids=lambda one: str(one)[:24])
def test_metadata_that_cannot_be_or_is_not_understood_is_refused(name, key, value, tmp_path):
    path, architecture = tmp_path / "model.gguf", CASES[name].architecture
    CASES[name].write(path)
    file = read_gguf(path)
    config_of(file)
    metadata = {**file.metadata, f"{architecture}.{key}": value}
    if value is None:
        del metadata[f"{architecture}.{key}"]
    with pytest.raises(ModelError):
        config_of(replace(file, metadata=metadata))


@pytest.mark.kernel
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_are_packed_as_those_of_other_checkpoints(weights, tmp_path):
    case = CASES["llama"]
    network = case.write(tmp_path / "model.gguf")
    network.save_pretrained(tmp_path / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert not (tmp_path / "plain" / name).exists()
    load_model(tmp_path / "model.gguf").tokenizer.save_pretrained(tmp_path / "plain")
    found = []
    for path in (tmp_path / "model.gguf", tmp_path / "plain"):
        model = load_model(path, dtype="float32", weights=weights)
        assert model.weights == weights
        with Player(model, "contiguous") as player:
            found.append(player.feed(TEXT[0].tolist(), rows="all"))
    assert np.array_equal(*found)


SAID = [
    ("llama", "rope.freq_base", 0.0, r"has llama\.rope\.freq_base=0\.0"),
    ("qwen3moe", "rope.freq_base", 0.0, r"has qwen3moe\.rope\.freq_base=0\.0"),
    ("gemma4", "rope.freq_base_swa", 0.0, r"has gemma4\.rope\.freq_base_swa=0\.0"),
    ("llama", "block_count", None, r"llama without its block_count"),
]


@pytest.mark.parametrize(("name", "key", "value", "said"), SAID)
def test_metadata_that_cannot_be_is_named(name, key, value, said, tmp_path):
    path, architecture = tmp_path / "model.gguf", CASES[name].architecture
    CASES[name].write(path)
    file = read_gguf(path)
    metadata = {k: v for k, v in file.metadata.items() if k != f"{architecture}.{key}"}
    if value is not None:
        metadata[f"{architecture}.{key}"] = value
    with pytest.raises(ModelError, match=said):
        config_of(replace(file, metadata=metadata))


def test_an_architecture_that_is_not_read_is_named_before_what_it_lacks(tmp_path):
    CASES["llama"].write(tmp_path / "model.gguf")
    file = read_gguf(tmp_path / "model.gguf")
    metadata = {k: v for k, v in file.metadata.items() if not k.startswith("llama.")}
    metadata["general.architecture"] = "frobnicator"
    with pytest.raises(ModelError, match="has the architecture 'frobnicator' of GGUF"):
        config_of(replace(file, metadata=metadata))


@pytest.mark.parametrize("merge", ["a", "a b c", "zz qq", ""])
def test_a_merge_that_cannot_be_is_named(merge, tmp_path):
    CASES["qwen3moe"].write(tmp_path / "model.gguf")
    file = read_gguf(tmp_path / "model.gguf")
    metadata = {**file.metadata, "tokenizer.ggml.merges": [merge]}
    with pytest.raises(ModelError, match=f"has the merge {merge!r}, which is not of two tokens"):
        tokenizer_of(replace(file, metadata=metadata))
