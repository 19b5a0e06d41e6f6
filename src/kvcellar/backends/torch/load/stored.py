"""Weights that a checkpoint stores in fewer bits, made plain numbers one tensor at a time.

transformers reads a checkpoint through a dict of tensors that it asks for when their turn has come.
``plain_tensors`` is such a dict over files of any format but MXFP4: at most one file is open, and
nothing of it stays in memory but what was made of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcellar.backends.torch.load.affine import Affine, affine_matrices
from kvcellar.backends.torch.load.files import AT_A_TIME, OpenFiles
from kvcellar.backends.torch.load.mlx_names import for_transformers
from kvcellar.errors import ModelError
from kvcellar.models.files.formats import MLX, WeightFormat

_SCALES = ("_scale_inv", "_scale")
"""Behind the name of a tensor: its scales."""

_BESIDE = (*_SCALES, "_zero_point")
"""Behind the name of a tensor: all that says how it is stored."""

_OF_INPUTS = ("input_scale", "input_zero_point", "output_scale", "activation_scale")
_OF_KV = ("q_scale", "k_scale", "v_scale")
"""Last parts of names of what concerns numbers that pass by, which are not made smaller here."""


class PlainTensor:
    """A tensor of a checkpoint that becomes plain numbers when it is read, each time anew."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        """Know how to make it."""
        self._make = make

    def __getitem__(self, index: Any) -> Tensor:
        """Make the tensor, and return a part of it; ``...``: all."""
        whole = self._make()
        part = whole[index]
        return part if part.numel() == whole.numel() else part.clone()  # let go of the rest

    def get_shape(self) -> list[int]:
        """Make the tensor, and return its shape: whoever wants a part of it asks first."""
        return list(self._make().shape)


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take no memory, for a tensor that is placed later."""
    return torch.zeros((), dtype=dtype).expand(shape)


@contextmanager
def plain_tensors(
    folder: Path,
    format: WeightFormat,
    dtype: torch.dtype,
    network: Any,
    kept: Mapping[str, tuple[int, ...]],
) -> Iterator[dict[str, PlainTensor]]:
    """Yield the tensors of a checkpoint by their plain names; they are read within the block.

    Those that were made smaller come in ``dtype``, others in their own.

    transformers reads them one after the other meanwhile, since reading ahead would hold what it
    is going to merge twice.

    Args:
        folder: the checkpoint.
        format: how it stores weights.
        dtype: that weights are wanted in.
        network: of its config, on the meta device.
        kept: shapes of tensors, by their plain names, that are not read but stood in for.
    """
    files = OpenFiles(folder)
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        makers = dict(_makers(files, format, dtype))
        if format.method == MLX:
            makers = for_transformers(makers, files.shapes, network)
        makers |= {name: partial(stand_in, shape, dtype) for name, shape in kept.items()}
        yield {name: PlainTensor(make) for name, make in makers.items()}
    finally:
        files.close()
        if before is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before


def _makers(
    files: OpenFiles, format: WeightFormat, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield plain names, and what makes each tensor."""
    grouped = affine_matrices(files, format)
    for key, one in grouped.items():
        yield key, partial(_grouped, files, key, one, format, dtype)
    used = {part for one in grouped.values() for part in one.parts}
    for key in files:
        owner = next((key.removesuffix(end) for end in _BESIDE if key.endswith(end)), "")
        if key in used or owner in files:
            continue
        if key.rpartition(".")[2] in (*_OF_INPUTS, *_OF_KV):
            continue
        if any(key + end in files for end in _SCALES):
            yield key, partial(_scaled, files, key, format, dtype)
        else:
            yield key, partial(_copied, files, key)


def _copied(files: OpenFiles, key: str) -> Tensor:
    """Return a tensor that keeps no file open."""
    return files.read(key).clone()


def _scales(files: OpenFiles, key: str) -> Tensor:
    """Return the scales of a tensor as float32."""
    scale = next(files.read(key + end) for end in _SCALES if key + end in files)
    if scale.dtype == torch.uint8:  # the exponent alone
        return (scale.to(torch.float32) - 127.0).exp2()
    return scale.to(torch.float32)


def _scaled(files: OpenFiles, key: str, format: WeightFormat, dtype: torch.dtype) -> Tensor:
    """Return weights ``[..., out, in]`` from bytes that are numbers by themselves."""
    weight = files.read(key)
    joins = [(torch.mul, _scales(files, key))]
    if f"{key}_zero_point" in files:
        joins.insert(0, (torch.sub, files.read(f"{key}_zero_point").to(torch.float32)))

    def write(part: slice, some: Tensor) -> None:
        some.copy_(weight[..., part, :])

    return _by_rows(write, joins, torch.empty(weight.shape, dtype=dtype), files, key, format)


def _grouped(
    files: OpenFiles, key: str, one: Affine, format: WeightFormat, dtype: torch.dtype
) -> Tensor:
    """Return weights ``[..., out, in]`` from numbers of few bits."""
    found = one.read()
    joins = [(torch.mul, found.scales)]
    if found.zeros is not None:
        joins.insert(0, (torch.sub, found.zeros))
    if found.minima is not None:
        joins.append((torch.add, found.minima))
    if found.order is not None:
        order = found.order
        joins = [(join, values[..., order]) for join, values in joins]

    def write(part: slice, some: Tensor) -> None:
        numbers = found.numbers[..., part, :]
        some.copy_(numbers if found.table is None else found.table[numbers.long()])

    return _by_rows(write, joins, torch.empty(one.shape, dtype=dtype), files, key, format)


def _by_rows(
    write: Callable[[slice, Tensor], None],
    joins: list[tuple[Any, Tensor]],
    out: Tensor,
    files: OpenFiles,
    key: str,
    format: WeightFormat,
) -> Tensor:
    """Fill ``out [..., n_out, n_in]`` some rows at a time, so that little is held beside it.

    Args:
        write: writes some of its rows as float32.
        joins: what is done with them then, in place, and with which value for each block.
        out: filled and returned.
        files: of the checkpoint.
        key: its name, for messages.
        format: of the checkpoint.

    Raises:
        ModelError: the values are not of blocks that divide the weights, or that the config names.
    """
    n_out, n_in = out.shape[-2:]
    values = [(join, *_blocks(value, n_out, n_in, key, format)) for join, value in joins]
    high = max(block[0] for _, _, block in values)
    step = high * max(1, AT_A_TIME // (high * max(1, out.numel() // n_out)))
    for start in range(0, n_out, step):
        part = slice(start, min(start + step, n_out))
        some = files.scratch((*out.shape[:-2], part.stop - start, n_in))
        write(part, some)
        for join, value, (tall, wide) in values:
            of = value[..., start // tall : -(-part.stop // tall), :]
            _join(join, some, of, tall, wide)
        out[..., part, :] = some
    return out


def _blocks(
    value: Tensor, n_out: int, n_in: int, key: str, format: WeightFormat
) -> tuple[Tensor, tuple[int, int]]:
    """Return values as ``[..., rows, columns]``, and the rows and columns that share each.

    Raises:
        ModelError: as above.
    """
    if value.numel() == 1:
        return value.reshape(1, 1).expand(n_out, 1), (1, n_in)
    value = value[:, None] if value.dim() < 2 else value
    rows, columns = value.shape[-2:]
    for block in (*format.blocks, (n_out // rows, n_in // columns)):
        if (-(-n_out // block[0]), -(-n_in // block[1])) == (rows, columns):
            return value, block
    raise ModelError(
        f"{key} has weights of {n_out} by {n_in} and scales of {rows} by {columns}, which its "
        f"quantization_config does not explain; copy the checkpoint again"
    )


def _join(join: Any, some: Tensor, of: Tensor, high: int, wide: int) -> None:
    """Join rows with values of their blocks, in place; the last blocks may be cut off."""
    n_rows, n_in = some.shape[-2:]
    if n_in % wide:
        of, wide = of.repeat_interleave(wide, -1)[..., :n_in], 1
    if n_rows % high:
        of, high = of.repeat_interleave(high, -2)[..., :n_rows, :], 1
    whole = some.view(*some.shape[:-2], n_rows // high, high, n_in // wide, wide)
    join(whole, of[..., :, None, :, None], out=whole)
