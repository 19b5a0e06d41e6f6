"""Weights that stay a GGUF file's blocks: what they compute, and that nothing of them is lost."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from kvcellar.backends.torch.cpu.modules import mixtures
from kvcellar.backends.torch.cpu.modules.blocks import BlockLinear, StoredAffine, StoredBlocks
from kvcellar.backends.torch.cpu.modules.experts import KernelExperts
from kvcellar.backends.torch.load.gguf import other_types
from kvcellar.errors import ConfigError
from kvcellar.kernel import levels
from kvcellar.models import load_model
from kvcellar.models.gguf.reader import GgufFile, GgufTensor
from tests.models.gguf.families import CASES
from tests.models.players import Player

pytestmark = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())

IDS = [1, 40, 7, 99, 258, 3, 120, 45, 6, 7, 8, 200, 10, 11, 12, 13, 77, 15, 16]


def stored_rows(kind: gguf.GGMLQuantizationType, n_out: int, n_in: int) -> np.ndarray:
    """Random blocks whose scales are small numbers."""
    size, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    rows = rng.integers(0, 256, (n_out, n_in // size, n_bytes), np.uint8)
    at = [208] if kind.name == "Q6_K" else [0, 2]
    for first in at:
        halves = rng.normal(0, 1e-3, rows.shape[:2]).astype(np.float16)
        rows[..., first : first + 2] = halves[..., None].view(np.uint8)
    return rows.reshape(n_out, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_of_several_types_are_one_layer(dtype: torch.dtype) -> None:
    """So are q, k and v of a file whose v has more bits, and others beside them."""
    stored, plain = [], []
    for kind, n_out in (("Q4_K", 48), ("Q4_K", 16), ("Q6_K", 24)):
        number = gguf.GGMLQuantizationType[kind]
        rows = stored_rows(number, n_out, 512)
        plain.append(torch.from_numpy(gguf.dequantize(rows, number)))
        stored.append(StoredBlocks(kind, n_out, 512, lambda rows=rows: torch.from_numpy(rows)))
    for kind, made in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        halves = (1e-3 * torch.randn(8, 512, generator=torch.Generator().manual_seed(4))).to(made)
        plain.append(halves.float())
        stored.append(StoredBlocks(kind, 8, 512, lambda halves=halves: halves.view(torch.uint8)))
    random = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 16, (32, 512), generator=random, dtype=torch.uint8)
    scales, minima = (1e-3 * torch.randn(32, 4, generator=random) for _ in range(2))
    plain.append(numbers * scales.repeat_interleave(128, -1) + minima.repeat_interleave(128, -1))
    stored.append(StoredAffine(4, 128, 32, 512, lambda: (numbers, scales, minima)))
    bias = torch.randn(136, generator=torch.Generator().manual_seed(1)).to(dtype)
    layer = BlockLinear(stored, bias)
    x = torch.randn(1, 5, 512, generator=torch.Generator().manual_seed(2)).to(dtype)
    want = F.linear(x.float(), torch.cat(plain), bias.float())
    got = layer(x)
    assert got.dtype == dtype and layer.out_features == 136
    assert (got.float() - want).norm() < 0.01 * want.norm()
    found = layer.rows(torch.tensor([47, 0]), torch.float32)
    assert torch.equal(found, plain[0][[47, 0]])


def held_by(module: torch.nn.Module, name: str) -> bool:
    """Return true if a module holds blocks: the CPU's one of a name, or a card's."""
    return type(module).__name__ in (name, name.replace("Block", "Card").replace("Kernel", "Card"))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.card
def test_a_file_runs_on_its_blocks(name: str, kind: str, tmp_path) -> None:
    path = tmp_path / "model.gguf"
    CASES[name].write(path, kind=gguf.GGMLQuantizationType[kind])
    found = {}
    for weights in ("none", "file"):
        model = load_model(path, weights=weights, dtype="float32", is_unchecked=True)
        with Player(model, "contiguous") as player:
            rows = [*player.feed(IDS), *player.feed([5]), *player.feed([9])]
        found[weights] = torch.from_numpy(np.stack(rows)), model
    (want, plain), (got, held) = found["none"], found["file"]
    assert (got - want).norm() < 0.05 * want.norm()
    modules = list(held.network.modules())
    assert any(held_by(one, "BlockLinear") for one in modules)
    assert not any(type(one) is torch.nn.Linear for one in modules)
    embedding = held.network.get_input_embeddings()
    assert held_by(embedding, "KernelEmbedding")
    assert torch.equal(embedding.weight, plain.network.get_input_embeddings().weight)
    # What a store keeps of one is not taken for the other's.
    assert held.fingerprint() != plain.fingerprint()


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_matrices_of_16_bits_lose_nothing(kind: str, tmp_path: Path) -> None:
    """They stay so where it is asked for; else they are numbers as of any checkpoint."""
    path = tmp_path / "model.gguf"
    CASES["qwen3"].write(path, kind=gguf.GGMLQuantizationType[kind])
    found = []
    for weights in ("none", "file"):
        model = load_model(path, weights=weights, dtype="float32", is_unchecked=True)
        with Player(model, "contiguous", kv_dtype="float32") as player:
            found.append(torch.from_numpy(np.stack([*player.feed(IDS), *player.feed([5])])))
    assert any(isinstance(one, BlockLinear) for one in model.network.modules())
    assert (found[1] - found[0]).norm() < 1e-5 * found[0].norm()
    asked_for_nothing = load_model(path, is_unchecked=True)
    assert not any(isinstance(one, BlockLinear) for one in asked_for_nothing.network.modules())


MIXTURES = ["mixtral", "qwen3moe", "gpt-oss", "lfm2moe"]
"""Experts of gate and up one behind the other, by turns and turned over with biases, and others."""


def run(path: Path, weights: str) -> tuple[torch.Tensor, list[torch.nn.Module]]:
    """Return the logits of a few tokens, and the experts that are held."""
    model = load_model(path, weights=weights, dtype="float32", is_unchecked=True)
    with Player(model, "contiguous") as player:
        rows = [*player.feed(IDS), *player.feed([5])]
    held = [one for one in model.network.modules() if held_by(one, "KernelExperts")]
    return torch.from_numpy(np.stack(rows)), held


@pytest.mark.card
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_run_on_their_blocks(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    CASES[name].write(path, kind=gguf.GGMLQuantizationType.Q8_0)
    want, plain = run(path, "none")
    got, held = run(path, "file")
    assert held and not any(isinstance(one, KernelExperts) for one in plain)
    for experts in held:
        if not isinstance(experts, KernelExperts):
            numbers = [experts.get_buffer(f"{name}_numbers") for name in ("up", "down")]
            assert sum(one.nbytes for one in numbers) == experts.n_weights
            continue
        assert experts.native is not None
        for part in (experts.up, experts.down):
            n_weights = part.n_experts * part.out_features * part.in_features
            assert part.weight.nbytes == n_weights and part.scales.nbytes == n_weights // 16
    assert (got - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_experts_that_were_not_understood_are_the_files_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    CASES[name].write(path, kind=gguf.GGMLQuantizationType.Q8_0)
    plain = load_model(path, weights="none", dtype="float32", is_unchecked=True)
    monkeypatch.setattr(mixtures, "_is_understood", lambda *args: False)
    held = load_model(path, weights="file", dtype="float32", is_unchecked=True)
    both = [list(mixtures.mixtures(one.network)) for one in (plain, held)]
    assert both[0]
    for want, got in zip(*both, strict=True):
        for name, weight in want.named_parameters():
            assert torch.equal(got.get_parameter(name), weight)


def test_a_recurrent_layer_reads_blocks_beside_matrices_that_are_plain(tmp_path) -> None:
    """In Qwen3.5 the last one's columns change places, and two are too narrow for the kernel."""
    path = tmp_path / "model.gguf"
    CASES["qwen35"].write(path, kind=gguf.GGMLQuantizationType.Q8_0)
    found = []
    for weights in ("none", "file"):
        model = load_model(path, weights=weights, dtype="float32", is_unchecked=True)
        with Player(model, "contiguous") as player:
            found.append(np.stack([*player.feed(IDS, rows="all"), *player.feed([5])]))
    want, got = found
    assert np.linalg.norm(got - want) < 0.06 * np.linalg.norm(want)


def test_types_that_become_plain_numbers_are_named(tmp_path: Path) -> None:
    kinds = ("Q3_K", "Q4_K", "F32", "Q3_K", "F16")
    tensors = {
        str(i): GgufTensor(tmp_path, (2, 256), int(gguf.GGMLQuantizationType[kind]), 0, 100 + i)
        for i, kind in enumerate(kinds)
    }
    assert other_types(GgufFile(tmp_path, (tmp_path,), {}, tensors)) == {"Q3_K": 203}


def test_blocks_are_asked_of_a_gguf_file_alone() -> None:
    with pytest.raises(ConfigError, match="GGUF"):
        load_model("demo", weights="file")
