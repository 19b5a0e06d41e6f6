"""Checkpoints that are quantised already, written as those who publish them write them.

Words are filled number by number, by the loops of AutoAWQ, AutoGPTQ and compressed-tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output that each of a word's eight numbers is of."""

Quantise = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


def mlx_folder(folder: Path, source: Path, **how: Any) -> Path:
    """Write what ``mlx_lm.convert -q`` writes, by mlx-lm's own functions."""
    from mlx_lm.utils import quantize_model, save_config
    from mlx_lm.utils import save_model as save_weights

    from kvcellar.backends.mlx.loading import load_weights
    from kvcellar.models.files.checkpoint import read_config
    from kvcellar.models.files.configs import config_from_dict

    raw = read_config(source)
    model = load_weights(source, raw, config_from_dict(raw))
    model, config = quantize_model(model, dict(raw), **how)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_weights(folder, model)
    save_config(config, folder / "config.json")
    return folder


def store(folder: Path, said: dict[str, Any], quantise: Quantise) -> dict[str, Tensor]:
    """Store the matrices of a checkpoint's layers quantised; return the plain weights of all.

    Args:
        folder: the checkpoint; its file and its config are written anew.
        said: its quantization_config.
        quantise: from a matrix to plain numbers, and its tensors by the last parts of their names.
    """
    path, plain, stored = folder / "model.safetensors", {}, {}
    for key, tensor in load_file(path).items():
        plain[key] = stored[key] = tensor
        if tensor.dim() == 2 and ".layers." in key and not key.endswith("mlp.gate.weight"):
            plain[key], parts = quantise(tensor)
            base = key.removesuffix("weight")
            stored |= {f"{base}{end}": part.contiguous() for end, part in parts.items()}
            del stored[key]
    save_file(stored, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return plain


def rounded(matrix: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round ``[n_out, n_in]`` to whole numbers; return these, and float16 scales and zeros."""
    groups = matrix.unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    most = (1 << bits) - 1
    scales = ((high - low) / most).half()
    zeros = (-low / scales).round().clamp(0, most)
    numbers = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return numbers.flatten(1).int(), scales, zeros.int()


def plain(numbers: Tensor, scales: Tensor, zeros: Tensor, order: Tensor) -> Tensor:
    """Make numbers ``[n_out, n_in]`` plain, whose inputs are of these groups."""
    return (numbers - zeros[:, order]).float() * scales[:, order].float()


def words(numbers: Tensor, bits: int) -> Tensor:
    """Pack whole numbers ``[rows, n]`` into words of 32 bits, the first lowest."""
    rows = []
    for row in numbers.tolist():
        whole = sum(number << (bits * at) for at, number in enumerate(row))
        n_words = -(-len(row) * bits // 32)
        packed = [(whole >> (32 * at)) & 0xFFFFFFFF for at in range(n_words)]
        rows.append([word - (1 << 32) if word >> 31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32)


def awq(group: int) -> Quantise:
    """AutoAWQ's packing for its products of matrices (``gemm``)."""

    def quantise(matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        numbers, scales, zeros = rounded(matrix, 4, group)

        def packed(of_outputs: Tensor) -> Tensor:  # [n, n_out]
            by_words = of_outputs.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)]
            return words(by_words.flatten(1), 4)

        order = torch.arange(matrix.shape[1]) // group
        parts = {"qweight": packed(numbers.t()), "qzeros": packed(zeros.t()), "scales": scales.t()}
        return plain(numbers, scales, zeros, order), parts

    return quantise


def gptq(
    bits: int, group: int, *, is_first: bool = True, is_symmetric: bool = False, shuffled: int = 0
) -> Quantise:
    """AutoGPTQ's packing.

    Args:
        bits: of a number.
        group: inputs that share a scale.
        is_first: true for the first version, whose zeros are one too small.
        is_symmetric: true for one zero in the middle.
        shuffled: seed of an order of inputs; 0: groups come one behind the other.
    """

    def quantise(matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        n_in = matrix.shape[1]
        turns = torch.arange(n_in)
        if shuffled:
            turns = torch.randperm(n_in, generator=torch.Generator().manual_seed(shuffled))
        numbers, scales, zeros = rounded(matrix[:, turns], bits, group)
        zeros = torch.full_like(zeros, 1 << (bits - 1)) if is_symmetric else zeros.clamp(min=1)
        back = turns.argsort()
        numbers, order = numbers[:, back], (torch.arange(n_in) // group)[back]
        parts = {
            "qweight": words(numbers.t().t(), bits).t(),
            "qzeros": words(zeros.t() - int(is_first), bits),
            "scales": scales.t(),
            "g_idx": order.int(),
        }
        return plain(numbers, scales, zeros, order), parts

    return quantise
