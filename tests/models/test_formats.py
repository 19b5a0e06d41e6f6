"""Checkpoints that store weights in fewer bits: read exactly, or refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.backends.torch.load.networks import load_network
from kvcellar.errors import ModelError
from kvcellar.models import load_model
from kvcellar.models.files.checkpoint import read_config
from kvcellar.models.files.formats import format_of
from kvcellar.models.sizes.sizing import size_model
from tests.models.players import Player, text
from tests.models.tiny_checkpoints import COMMON, make_checkpoint, randomize, save
from tests.models.tiny_wrappers import make_wrapper, save_wrapper

FP8 = torch.float8_e4m3fn


def weights(folder, dtype=torch.float32):
    """The weights of a checkpoint as they come into memory, by name."""
    network = load_network(
        folder, read_config(folder), dtype=dtype, device=torch.device("cpu"), attention="eager"
    )
    return dict(network.state_dict())


def mixture(folder):
    """A checkpoint whose experts are stored one by one, and held together in memory."""
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = transformers.Qwen3MoeConfig(**COMMON, **fields, num_hidden_layers=2, head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model)
    save(model, folder)
    return folder


def store(folder, said, quantise, n_dims=2):
    """Store the matrices of a checkpoint's layers otherwise; return the plain numbers of each.

    Args:
        folder: the checkpoint; its file is written anew.
        said: its quantization_config.
        quantise: from a matrix to plain numbers, and the tensors by the ends of their names.
        n_dims: of the parameters that are stored so.
    """
    path, plain, stored = folder / "model.safetensors", {}, {}
    for key, tensor in load_file(path).items():
        if tensor.dim() == n_dims and ".layers." in key:
            plain[key], parts = quantise(tensor)
            stored |= {key + end: part.contiguous() for end, part in parts.items()}
        else:
            plain[key] = stored[key] = tensor
    save_file(plain, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    want = weights(folder)
    save_file(stored, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return want


def blocks(high, wide):
    """FP8 with a scale for each block, computed block after block; the last ones are cut off."""

    def quantise(matrix):
        plain, small = torch.empty_like(matrix), matrix.to(FP8)
        n_rows, n_columns = -(-matrix.shape[0] // high), -(-matrix.shape[1] // wide)
        scales = torch.rand(n_rows, n_columns) + 0.5
        for row in range(n_rows):
            for column in range(n_columns):
                part = (
                    slice(row * high, (row + 1) * high),
                    slice(column * wide, (column + 1) * wide),
                )
                plain[part] = small[part].float() * scales[row, column]
        return plain, {"": small, "_scale_inv": scales}

    return quantise


def same(got, want):
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, rtol=0, atol=0, msg=key)


FP8_SAID = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}


@pytest.mark.parametrize("make", [mixture, lambda folder: make_checkpoint("llama", folder)])
def test_fp8_in_blocks(make, tmp_path):
    """Matrices of 96 by 64 are whole blocks; some of a mixture end within one."""
    make(tmp_path)
    want = store(tmp_path, FP8_SAID, blocks(16, 32))
    same(weights(tmp_path), want)


@pytest.mark.parametrize("high", [16, 20, 36])
def test_fp8_in_blocks_that_do_not_divide_a_matrix(high, tmp_path):
    mixture(tmp_path)
    want = store(tmp_path, FP8_SAID | {"weight_block_size": [high, 24]}, blocks(high, 24))
    same(weights(tmp_path), want)


def test_fp8_of_a_wrapper_whose_text_part_says_so(tmp_path):
    save_wrapper(make_wrapper("mistral3", is_tied=False), tmp_path)
    want = store(tmp_path, {}, blocks(16, 32))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    config["text_config"]["quantization_config"] = FP8_SAID
    (tmp_path / "config.json").write_text(json.dumps(config))
    same(weights(tmp_path), want)


def test_fp8_of_experts_that_are_stored_together(tmp_path):
    """Three dimensions, an expert's blocks and scales one behind the other's."""
    write_tiny("llama4_text", tmp_path)

    def of_experts(tensor):
        each = [blocks(16, 32)(matrix) for matrix in tensor]
        ends = each[0][1]
        together = {end: torch.stack([parts[end] for _, parts in each]) for end in ends}
        return torch.stack([plain for plain, _ in each]), together

    want = store(tmp_path, FP8_SAID, of_experts, n_dims=3)
    assert [key for key in want if "experts.gate_up_proj" in key]
    same(weights(tmp_path), want)


def by_one(matrix):
    """FP8 with one scale, and one for inputs that is of no use here."""
    small, scale = matrix.to(FP8), torch.tensor(0.37)
    return small.float() * scale, {"": small, "_scale_inv": scale}


def test_fp8_with_one_scale_for_a_matrix(tmp_path):
    make_checkpoint("qwen3", tmp_path)
    want = store(tmp_path, {"quant_method": "fp8", "activation_scheme": "static"}, by_one)
    path = tmp_path / "model.safetensors"
    inputs = {"model.layers.0.mlp.up_proj.activation_scale": torch.tensor(3.0)}
    save_file(load_file(path) | inputs, path, {"format": "pt"})
    same(weights(tmp_path), want)


def compressed(bits, kind="int", form="pack-quantized", **more):
    group = {"weights": {"num_bits": bits, "type": kind} | more, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}


def rows(small, zero=None):
    """Eight bits and a scale for each row, and a zero point where there is one."""

    def quantise(matrix):
        scale = torch.rand(matrix.shape[0], 1) + 0.1
        q = (matrix * 50).clamp(-127, 127).to(small)
        parts = {"": q, "_scale": scale}
        if zero is None:
            return q.float() * scale, parts
        points = torch.randint(-9, 9, scale.shape, dtype=torch.int8)
        return (q.float() - points) * scale, parts | {"_zero_point": points}

    return quantise


@pytest.mark.parametrize(
    ("said", "quantise"),
    [
        (compressed(8, "float", "float-quantized"), rows(FP8)),
        (compressed(8, form="int-quantized"), rows(torch.int8)),
        (compressed(8, form="naive-quantized"), rows(torch.int8, zero=True)),
    ],
    ids=["fp8", "int8", "int8 with zero points"],
)
def test_compressed_tensors_of_eight_bits(said, quantise, tmp_path):
    mixture(tmp_path)
    want = store(tmp_path, said, quantise)
    same(weights(tmp_path), want)


def pack(numbers, bits):
    """Integers ``[rows, n]`` as words of 32 bits, the first number lowest."""
    words = []
    for row in numbers.tolist():
        packed = [0] * -(-len(row) * bits // 32)
        for i, number in enumerate(row):
            at, shift = divmod(i * bits, 32)
            packed[at] |= (number + (1 << (bits - 1))) << shift
        words.append([word - (1 << 32) if word >> 31 else word for word in packed])
    return torch.tensor(words, dtype=torch.int32)


def groups(bits, size, *, has_zero=False, is_shuffled=False):
    """A scale for each group of a row's numbers, several of which are in a word."""

    def quantise(matrix):
        n_out, n_in = matrix.shape
        most = 1 << (bits - 1)
        q = (matrix * most).round().clamp(-most, most - 1).to(torch.int32)
        scale = torch.rand(n_out, n_in // size) + 0.1
        zero = torch.randint(-3, 3, scale.shape, dtype=torch.int32) * has_zero
        of = torch.arange(n_in) // size
        of = of[torch.randperm(n_in)] if is_shuffled else of
        plain = (q - zero[:, of]).float() * scale[:, of]
        parts = {
            "_packed": pack(q, bits),
            "_scale": scale,
            "_shape": torch.tensor([n_out, n_in]),
        }
        if has_zero:
            parts["_zero_point"] = pack(zero.t(), bits).t()
        if is_shuffled:
            parts["_g_idx"] = of.to(torch.int32)
        return plain, parts

    return quantise


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_compressed_tensors_of_packed_integers(bits, has_zero, is_shuffled, tmp_path):
    make_checkpoint("llama", tmp_path)
    want = store(
        tmp_path,
        compressed(bits),
        groups(bits, 16, has_zero=has_zero, is_shuffled=is_shuffled),
    )
    same(weights(tmp_path), want)


def test_a_model_whose_file_is_in_fp8_is_the_one_of_its_plain_numbers(tmp_path):
    plain, small = tmp_path / "plain", tmp_path / "small"
    mixture(small)
    said = FP8_SAID | {"weight_block_size": [20, 24]}
    store(small, said, blocks(20, 24))
    config = json.loads((small / "config.json").read_text())
    mixture(plain)
    with torch.no_grad():
        network = transformers.AutoModelForCausalLM.from_pretrained(plain)
        network.load_state_dict(weights(small))
        network.save_pretrained(plain)
    want, got = load_model(plain), load_model(small)
    assert config["quantization_config"] == said and got.dtype == "float32"
    with Player(want, "seq") as one, Player(got, "seq") as other:
        assert (one.feed(text(20), rows="all") == other.feed(text(20), rows="all")).all()
    spec = size_model(small)
    assert 0 <= got.size_bytes - spec.weight_bytes < 256
    assert "FP8 is expanded to float32 when it is loaded" in spec.counted


def test_scales_that_fit_no_blocks_are_refused(tmp_path):
    make_checkpoint("llama", tmp_path)
    store(tmp_path, FP8_SAID | {"weight_block_size": [16, 16]}, blocks(20, 24))
    with pytest.raises(ModelError, match=r"has weights of \d+ by \d+ and scales of"):
        weights(tmp_path)


def test_reading_changes_nothing_of_the_environment(tmp_path, monkeypatch):
    make_checkpoint("llama", tmp_path)
    store(tmp_path, FP8_SAID, blocks(16, 32))
    for value in (None, "0"):
        if value is not None:
            monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", value)
        weights(tmp_path)
        assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == value


MLX_SAID = {"bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"quant_method": method}, f"stores its weights by '{method}'.* download the same model")
        for method in ("bitsandbytes", "modelopt", "eetq", "hqq", "torchao", "quark")
    ]
    + [
        ({"quant_method": "awq", "version": "gemv"}, "by 'awq' packed as 'gemv' in 4 bits, which"),
        ({"quant_method": "awq", "w_bit": 3}, "by 'awq' packed as 'gemm' in 3 bits.* in GGUF or"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "by 'gptq' packed as 'marlin'"),
        ({"quant_method": "gptq", "bits": 5}, "by 'gptq' packed as 'gptq' in 5 bits"),
        (MLX_SAID | {"bits": 7}, "its layers quantised by MLX in mode 'affine' with 7 bits"),
        (MLX_SAID | {"mode": "nvfp4"}, "mode 'nvfp4' with 4 bits and groups of 64.* backend mlx"),
        (MLX_SAID | {"group_size": -1}, "groups of -1, which is not read here"),
        (MLX_SAID | {"model.a": {"bits": 4, "group_size": "x"}}, "model.a quantised by MLX in"),
        ({"bits": 4}, "by 'a way that it does not name'"),
        (compressed(4, "float", "nvfp4-pack-quantized"), "with nvfp4-pack-quantized, which is not"),
        (compressed(3), "with 3 bits, which is not read here; download the same model in bfl"),
        (compressed(8) | {"transform_config": {"config_groups": {"u": {}}}}, "rotated weights"),
        (compressed(8) | {"sparsity_config": {"format": "sparse-24"}}, "sparse weights"),
        (FP8_SAID | {"weight_block_size": 128}, "blocks of 128 in its quantization_config"),
        ("awq", "has quantization_config='awq', and it must be an object"),
    ],
)
def test_what_is_not_read_is_refused_with_what_to_take_in_its_place(said, what):
    with pytest.raises(ModelError, match=what):
        format_of({"model_type": "llama", "quantization_config": said}, Path("here"))


_MEASURE = """
import json, sys, torch
from pathlib import Path
from kvcellar.backends.torch.load.networks import load_network
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.models.text.tokenizer import quiet

def load(folder):
    raw = json.loads((Path(folder) / "config.json").read_text())
    with quiet(lambda part: None):
        return load_network(Path(folder), raw, dtype=torch.bfloat16, device=torch.device("cpu"))

def memory(name):
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status[name].split()[0])

load(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
network = load(sys.argv[2])
size = sum(parameter.nbytes for parameter in network.parameters())
print(json.dumps({"more": memory("VmHWM") - before, "size": size}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not say")
def test_loading_takes_the_weights_and_one_file_at_most(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    make_checkpoint("llama", small)
    store(small, FP8_SAID, blocks(16, 32))
    config = transformers.LlamaConfig(
        **COMMON | {"hidden_size": 1024, "intermediate_size": 2560},
        num_hidden_layers=8,
        head_dim=256,
    )
    shards = fp8_shards(config, large)
    command = [sys.executable, "-c", _MEASURE, str(small), str(large)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert found["size"] > 140e6
    assert found["more"] <= found["size"] + shards + 16e6


def fp8_shards(config, folder):
    """Write a model of any numbers in four files; return the bytes of the largest."""
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    folder.mkdir()
    files, index = [{} for _ in range(4)], {}
    for i, (key, tensor) in enumerate(shapes.items()):
        parts = {key: torch.zeros(tensor.shape)}
        if tensor.dim() == 2 and ".layers." in key:
            scales = [-(-n // 128) for n in tensor.shape]
            parts = {key: torch.zeros(tensor.shape).to(FP8), key + "_scale_inv": torch.ones(scales)}
        at = 4 * i // len(shapes)
        files[at] |= parts
        index |= dict.fromkeys(parts, f"{at}.safetensors")
    for at, tensors in enumerate(files):
        save_file(tensors, folder / f"{at}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    said = FP8_SAID | {"weight_block_size": [128, 128]}
    fields = config.to_dict() | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(fields))
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))
