"""Matrices of quantised checkpoints that the kernel multiplies as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcellar.backends.torch.cpu.modules.blocks import (
    Kept,
    Stored,
    StoredAffine,
    StoredBlocks,
    StoredExperts,
)
from kvcellar.backends.torch.load.affine import Affine, affine_matrices
from kvcellar.backends.torch.load.files import OpenFiles
from kvcellar.backends.torch.load.mlx_names import name_of, stacks_of
from kvcellar.models.files.formats import MLX, WeightFormat
from kvcellar.models.weights import GROUP


class StoredMatrix(NamedTuple):
    """A matrix that stays as it is stored.

    Attributes:
        key: its plain name in the checkpoint.
        kept: what the kernel holds.
    """

    key: str
    kept: Kept


def kept_of(folder: Path, format: WeightFormat, whole: Any) -> dict[str, StoredMatrix]:
    """Return the matrices that the kernel multiplies as a checkpoint has them, by parameter.

    Args:
        folder: the checkpoint.
        format: how it stores weights.
        whole: what reads the checkpoint, on the meta device; names are those of its parameters.

    Raises:
        ModelError: tensors are missing, or of shapes that do not fit one another.
    """
    shapes = {name: tuple(one.shape) for name, one in whole.named_parameters()}
    matrices = affine_matrices(OpenFiles(folder), format)
    stored = {}
    for name, one in matrices.items():
        key = name_of(name, shapes) if format.method == MLX else name
        made = _stored(one)
        if made is not None:
            stored[key] = made
    found = {
        name: StoredMatrix(key, stored[key])
        for key, name in _parameters(stored, whole)
        if shapes.get(name) == stored[key].shape
    }
    return found | (_experts(matrices, whole) if format.method == MLX else {})


def _experts(matrices: Mapping[str, Affine], whole: Any) -> dict[str, StoredMatrix]:
    """Return the parameters of mixtures as MLX has them; of each module all, or none."""
    found: dict[str, StoredMatrix] = {}
    for (name, _), keys in stacks_of(matrices, whole).items():
        module = whole.get_submodule(name)
        stacks = {"down_proj": ("down",), "gate_up_proj": ("gate", "up")}
        if keys.keys() != {"gate", "up", "down"}:
            continue
        kept = {}
        for parameter, parts in stacks.items():
            of: Any = partial(_expert, [matrices[keys[part]] for part in parts])
            shape = tuple(getattr(module, parameter).shape)
            n_experts, *axes = shape
            n_out, n_in = reversed(axes) if module.is_transposed else axes
            first = of(0)
            if first is not None and first.shape == (n_out, n_in):
                by_turns = len(parts) > 1 and not module.is_concatenated
                full = f"{name}.{parameter}"
                kept[full] = StoredMatrix(full, StoredExperts(n_experts, of, shape, by_turns))
        found |= kept if len(kept) == len(stacks) else {}
    return found


def _expert(stacks: Sequence[Affine], at: int) -> Stored | None:
    """Return an expert's matrix, of one stack's outputs behind the other's; None: it cannot be."""
    found = [None if one.expert is None else _stored(one.expert(at)) for one in stacks]
    if all(isinstance(one, StoredBlocks) for one in found):
        rows = [one for one in found if isinstance(one, StoredBlocks)]
        n_out, read = sum(one.n_out for one in rows), [one.read for one in rows]
        return StoredBlocks("MXFP4", n_out, rows[0].n_in, lambda: torch.cat([f() for f in read]))
    alike = [one for one in found if isinstance(one, StoredAffine)]
    if len(alike) < len(found) or len({(one.bits, one.group, one.n_in) for one in alike}) > 1:
        return None

    def read_all() -> tuple[Tensor, Tensor, Tensor]:
        numbers, scales, minima = zip(*(one.read() for one in alike), strict=True)
        return torch.cat(numbers), torch.cat(scales), torch.cat(minima)

    return replace(alike[0], n_out=sum(one.n_out for one in alike), read=read_all)


def _parameters(keys: Iterable[str], whole: Any) -> list[tuple[str, str]]:
    """Return names of a checkpoint and of the parameters that transformers makes of each alone."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping = get_model_conversion_mapping(whole)
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    renamings: list[Any] = [one for one in mapping if not isinstance(one, WeightConverter)]
    state = whole.state_dict()
    found = []
    for key in keys:
        name, pattern = rename_source_key(
            key, renamings, converters, whole.base_model_prefix, state
        )
        if name not in state and key in state:
            name, pattern = key, None
        if pattern is None:
            found.append((key, name))
    return found


def _stored(one: Affine) -> Stored | None:
    """Return a matrix as the kernel holds it; None: it cannot."""
    if len(one.shape) != 2 or one.has_order:
        return None
    n_out, n_in = one.shape
    group = n_in // one.n_groups
    if group % GROUP:
        return None
    if one.has_table:
        return StoredBlocks("MXFP4", n_out, n_in, partial(_mxfp4_blocks, one))
    return StoredAffine(4 if one.bits <= 4 else 8, group, n_out, n_in, partial(_groups, one))


def _groups(one: Affine) -> tuple[Tensor, Tensor, Tensor]:
    """Read numbers, scales and minima."""
    found = one.read()
    minima = found.minima
    if minima is None:
        assert found.zeros is not None, "one of the two is there"
        minima = -found.zeros * found.scales
    return found.numbers.contiguous(), found.scales.contiguous(), minima.contiguous()


def _mxfp4_blocks(one: Affine) -> Tensor:
    """Read MLX's MXFP4 as GGUF's blocks: an exponent, and numbers 16 apart in one byte."""
    found = one.read()
    exponents = (found.scales.log2() + 127.0).to(torch.uint8)
    numbers = found.numbers.unflatten(-1, (-1, GROUP))
    both = numbers[..., : GROUP // 2] | (numbers[..., GROUP // 2 :] << 4)
    return torch.cat((exponents[..., None], both), -1).flatten(1)
