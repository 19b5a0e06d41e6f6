"""Checkpoints that are quantised already: read number by number as their writers read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.backends.torch.load.affine import unpacked
from kvcellar.backends.torch.load.networks import load_network
from kvcellar.errors import ModelError
from kvcellar.models import load_model
from kvcellar.models.files.checkpoint import read_config
from tests.models.hybrid_checkpoints import write_hybrid
from tests.models.players import Player, text
from tests.models.quantised import awq, gptq, mlx_folder, store, words
from tests.models.tiny_checkpoints import COMMON, make_checkpoint, randomize, save


def weights(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint as they come into memory, by name."""
    network = load_network(
        folder, read_config(folder), dtype=dtype, device=torch.device("cpu"), attention="eager"
    )
    return dict(network.state_dict())


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Compare weights bit for bit."""
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor.to(got[key].dtype), rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_numbers_of_any_bits_come_out_of_words(bits: int) -> None:
    numbers = torch.randint(0, 1 << bits, (3, 96))
    assert (unpacked(words(numbers, bits), bits, 96) == numbers).all()


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def test_awq(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    want = store(tmp_path, AWQ, awq(32))
    same(weights(tmp_path), want)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_gptq(bits: int, is_symmetric: bool, tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path)
    said = GPTQ | {"bits": bits, "sym": is_symmetric}
    want = store(tmp_path, said, gptq(bits, 32, is_symmetric=is_symmetric))
    same(weights(tmp_path), want)


@pytest.mark.parametrize("is_first", [True, False])
def test_gptq_of_both_versions_whose_inputs_are_in_no_order(is_first: bool, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    said = GPTQ | {"desc_act": True, "checkpoint_format": "gptq" if is_first else "gptq_v2"}
    want = store(tmp_path, said, gptq(4, 16, is_first=is_first, shuffled=3))
    same(weights(tmp_path), want)


def test_experts_that_are_packed_one_by_one(tmp_path: Path) -> None:
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = transformers.Qwen3MoeConfig(**COMMON, **fields, num_hidden_layers=2, head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model)
    save(model, tmp_path)
    want = store(tmp_path, AWQ, awq(16))
    got = weights(tmp_path)
    experts = got["model.layers.1.mlp.experts.gate_up_proj"]
    one = [want[f"model.layers.1.mlp.experts.3.{name}_proj.weight"] for name in ("gate", "up")]
    torch.testing.assert_close(experts[3], torch.cat(one), rtol=0, atol=0)


def logits(folder: Path, backend: str, **how: Any) -> Any:
    """Return the logits of a text behind a cache."""
    with Player(load_model(folder, backend=backend, dtype="float32", **how), "seq") as player:
        return player.feed(text(20), rows="all")


mlx = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("mlx_lm"), reason="needs mlx-lm"
)


@mlx
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_numbers_are_mlx_own_bit_for_bit(checkpoint: Any, bits: int, tmp_path: Path) -> None:
    import mlx.core as mx

    folder = mlx_folder(tmp_path / "q", checkpoint("qwen2_window"), group_size=32, bits=bits)
    stored = mx.load(str(folder / "model.safetensors"))
    got, n = weights(folder), 0
    for key, value in stored.items():
        if key.endswith(".weight") and f"{key[:-7]}.scales" in stored:
            parts = (stored[f"{key[:-7]}.{end}"] for end in ("scales", "biases"))
            want = mx.dequantize(value, *parts, group_size=32, bits=bits)
            assert (got[key].numpy() == np.array(want)).all(), key
            n += 1
    assert n == 29 and "model.embed_tokens.scales" in stored


def agree(folder: Path) -> None:
    """Compare the logits of torch with those of mlx-lm's own model."""
    want = logits(folder, "mlx")
    assert np.abs(logits(folder, "torch") - want).max() < 1e-3 * np.abs(want).max()


@mlx
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_mlx_checkpoints_say_what_mlx_lm_says(checkpoint: Any, family: str, tmp_path: Path) -> None:
    agree(mlx_folder(tmp_path / "q", checkpoint(family), group_size=32, bits=8))


@mlx
@pytest.mark.parametrize("family", ["qwen3_moe", "mistral3"])
def test_stacked_experts_and_wrappers_by_mlx_lms_names(family: str, tmp_path: Path) -> None:
    write_tiny(family, tmp_path / "plain")
    agree(mlx_folder(tmp_path / "q", tmp_path / "plain", group_size=32, bits=4))


@mlx
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2_moe", "olmo_hybrid"])
def test_what_mlx_lm_stores_otherwise_is_put_back(family: str, tmp_path: Path) -> None:
    """Norms with 1 added, axes of convolutions in another order, names of layers."""
    write_hybrid(family, tmp_path / "plain")
    agree(mlx_folder(tmp_path / "q", tmp_path / "plain", group_size=32, bits=8))


@mlx
def test_mlx_layers_with_bits_of_their_own_and_mxfp4(checkpoint: Any, tmp_path: Path) -> None:
    def choose(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or path.endswith("layers.1.mlp.up_proj"):
            return False
        special = {"group_size": 64, "bits": 5} if "q_proj" in path else None
        return special or {"group_size": 32, "bits": 4, "mode": "mxfp4"}

    folder = mlx_folder(
        tmp_path / "q", checkpoint("qwen3"), group_size=32, bits=6, quant_predicate=choose
    )
    agree(folder)


@mlx
def test_weights_that_mlx_lm_multiplied_are_refused(tmp_path: Path) -> None:
    write_hybrid("falcon_h1", tmp_path / "plain")
    folder = mlx_folder(tmp_path / "q", tmp_path / "plain", group_size=32, bits=8)
    with pytest.raises(ModelError, match=r"falcon_h1 were multiplied .* load .* backend mlx"):
        weights(folder)


@mlx
def test_what_mlx_lm_stores_in_forms_that_are_not_read_says_the_way_out(tmp_path: Path) -> None:
    write_tiny("deepseek_v3", tmp_path / "plain")
    folder = mlx_folder(tmp_path / "q", tmp_path / "plain", group_size=32, bits=8)
    with pytest.raises(ModelError, match=r"lacks 4 tensors .*kv_b_proj.* load it with the backend"):
        weights(folder)


def damaged(folder: Path, change: Any) -> None:
    """Change the tensors of a checkpoint's file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


BASE = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.pop(f"{BASE}.scales"), "lacks .*up_proj.scales, without which .* copy it"),
        (lambda t: t.pop(f"{BASE}.qzeros"), "lacks .*up_proj.qzeros"),
        (
            lambda t: t.update({f"{BASE}.scales": t[f"{BASE}.scales"][:, :8].contiguous()}),
            r"up_proj.scales as \[2, 8\], which must be \[2, 96\]",
        ),
        (
            lambda t: t.update({f"{BASE}.qweight": t[f"{BASE}.qweight"][:5].contiguous()}),
            r"up_proj.qweight as \[5, 96\], which must be \[4, 96\]",
        ),
        (
            lambda t: t.update({f"{BASE}.g_idx": t[f"{BASE}.g_idx"] + 1}),
            r"g_idx of groups 1 to 2 for 64 inputs, and its layer has 64 in 2",
        ),
    ],
    ids=["no scales", "no zeros", "scales", "words", "groups"],
)
def test_gptq_tensors_that_do_not_fit_are_refused(change: Any, what: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    store(tmp_path, GPTQ, gptq(4, 32))
    damaged(tmp_path, change)
    with pytest.raises(ModelError, match=what):
        weights(tmp_path)
