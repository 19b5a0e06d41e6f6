"""Matrices of quantised checkpoints that stay as they are stored, where the CPU kernel is built."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcellar.backends.torch.cpu.modules.blocks import BlockLinear
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.backends.torch.load.networks import load_network
from kvcellar.errors import ConfigError
from kvcellar.kernel import levels
from kvcellar.models import load_model
from kvcellar.models.files.checkpoint import read_config
from kvcellar.models.sizes.sizing import size_model
from tests.models.players import Player, text
from tests.models.quantised import awq, gptq, mlx_folder, store
from tests.models.tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(not levels.is_available(), reason="the kernel is not built")
mlx = pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="needs mlx-lm")

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 32}


def logits(model: Any) -> Any:
    """Return the logits of a text behind a cache in float32."""
    with Player(model, "seq") as player:
        return player.feed(text(20), rows="all")


def held_rows(model: Any) -> dict[str, torch.Tensor]:
    """Return the rows of every first matrix that is held as it is stored, in float32."""
    return {
        name: one.rows(torch.arange(one.out_features), torch.float32)
        for name, one in model.network.named_modules()
        if isinstance(one, BlockLinear)
    }


def check(folder: Path, share: float, apart: float = 0.06) -> Any:
    """Check a checkpoint that is held as it is stored against its plain numbers; return it."""
    model, plain = load_model(folder), load_model(folder, dtype="float32")
    assert model.weights == "file" and plain.weights is None
    assert model.size_bytes < share * plain.size_bytes
    spec = size_model(folder)
    assert 0 <= model.size_bytes - spec.weight_bytes < 8192
    assert "are multiplied as the blocks that the file has" in spec.counted
    want, got = logits(plain), logits(model)
    assert 0 < np.linalg.norm(got - want) < apart * np.linalg.norm(want)
    head, rows = (one.network.get_output_embeddings() for one in (plain, model))
    torch.testing.assert_close(
        rows.rows(torch.arange(272), torch.float32), head.weight[:272], rtol=1e-6, atol=1e-7
    )
    return model


@mlx
@pytest.mark.parametrize("bits", [3, 4, 6])
@pytest.mark.parametrize("family", ["llama", "qwen2_window"])
def test_mlx_matrices_stay_as_they_are(
    checkpoint: Any, family: str, bits: int, tmp_path: Path
) -> None:
    """With embeddings and heads, tied ones too."""
    folder = mlx_folder(tmp_path / "q", checkpoint(family), group_size=32, bits=bits)
    model = check(folder, 0.6)
    assert size_model(folder).held_in == f"MLX in {bits} bits"
    assert all(type(one) is not torch.nn.Linear for one in model.network.modules())


@mlx
def test_wrappers_and_mxfp4_stay_as_they_are(tmp_path: Path) -> None:
    write_tiny("mistral3", tmp_path / "plain")
    folder = mlx_folder(tmp_path / "q", tmp_path / "plain", group_size=32, bits=4, mode="mxfp4")
    check(folder, 0.6)


@mlx
@pytest.mark.parametrize(("family", "mode"), [("qwen3_moe", "affine"), ("gpt_oss", "mxfp4")])
def test_experts_stay_as_they_are(family: str, mode: str, checkpoint: Any, tmp_path: Path) -> None:
    if family == "qwen3_moe":
        write_tiny(family, tmp_path / "plain")
    source = checkpoint(family) if family == "gpt_oss" else tmp_path / "plain"
    folder = mlx_folder(tmp_path / "q", source, group_size=32, bits=4, mode=mode)
    model = check(folder, 0.45, apart=0.12)  # what is rounded chooses other experts at times
    assert not any(one.dim() == 3 for one in model.network.parameters())


@pytest.mark.parametrize(("said", "quantise"), [(AWQ, awq(32)), (GPTQ, gptq(8, 32))])
def test_awq_and_gptq_are_what_the_file_says_bit_for_bit(
    said: Any, quantise: Any, tmp_path: Path
) -> None:
    make_checkpoint("qwen3", tmp_path)
    want = store(tmp_path, said, quantise)
    model = load_model(tmp_path, weights="file")
    rows = held_rows(model)
    assert len(rows) >= 9 and logits(model).shape == (20, 272)
    for name, got in rows.items():
        layer = name.split("layers.")[1].split(".")[0]
        ours = [one for key, one in want.items() if f"layers.{layer}." in key]
        alike = [one for one in ours if one.shape[-1:] == got.shape[-1:] and one.dim() == 2]
        assert any((one == got[: len(one)]).all() for one in alike), name


def test_groups_in_no_order_are_plain_and_said_to_be(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    store(tmp_path, GPTQ, gptq(8, 32, shuffled=3))
    said = []
    model = load_model(tmp_path, progress=lambda part, what: said.append(what))
    assert model.weights is None
    assert said[-1] == "ready: GPTQ in 8 bits is float32 in memory"
    with pytest.raises(ConfigError, match=r"file were asked for, and no matrix of .* int8 or int4"):
        load_model(tmp_path, weights="file")


def test_nothing_of_what_stays_is_made_plain(tmp_path: Path, monkeypatch: Any) -> None:
    make_checkpoint("llama", tmp_path)
    store(tmp_path, AWQ, awq(32))
    load_model(tmp_path)  # its parts are found once
    model = load_model(tmp_path, weights="file")
    zeros = [name for name, one in model.network.named_parameters() if 0 in one.stride()]
    assert not zeros
    raw = read_config(tmp_path)
    kept = {"model.layers.0.mlp.up_proj.weight": (96, 64)}
    network = load_network(
        tmp_path, raw, dtype=torch.float32, device=torch.device("cpu"), kept=kept
    )
    assert not network.model.layers[0].mlp.up_proj.weight.any()
    assert network.model.layers[0].mlp.gate_proj.weight.any()
