"""Matrices of numbers of few bits, as MLX, AWQ, GPTQ and compressed-tensors store them.

A weight is ``(number - zero) * scale``, or ``number * scale + minimum``, where some of a row
have the scale, and the zero or the minimum, in common. Numbers lie one behind another in words of
32 bits, the lowest bits first: along the inputs of a layer, or in AWQ along its outputs, by turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcellar.backends.torch.load.files import OpenFiles
from kvcellar.errors import ModelError
from kvcellar.models.files.formats import AWQ, COMPRESSED, GPTQ, GROUPED, MLX, WeightFormat

_AWQ_TURNS = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place of each of eight outputs in one of AWQ's words."""

_MXFP4_TABLE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes that the lower three bits of MXFP4's numbers stand for; the fourth is the sign."""

_FIRST = {MLX: ".weight", AWQ: ".qweight", GPTQ: ".qweight", COMPRESSED: ".weight_packed"}
"""Behind a layer's name: its numbers, by method."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A matrix as it is stored.

    Attributes:
        numbers: uint8 ``[..., n_out, n_in]``.
        scales: float32 ``[..., n_out, n_groups]``.
        zeros: float32 numbers that stand for 0, as the scales; None: 0 does.
        minima: float32 that are added, as the scales; None: nothing is.
        order: the group of each input; None: groups come one behind the other.
        table: what each number stands for; None: for itself.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None
    order: Tensor | None = None
    table: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix of a checkpoint that is read when it is wanted.

    Attributes:
        parts: names of the tensors that it is made of.
        shape: ``[n_out, n_in]``, behind the number of experts where it is of several.
        bits: of a number.
        n_groups: groups of a row.
        has_order: true where inputs of a group do not lie one behind the other.
        has_table: true where numbers stand for others.
        read: reads it.
        expert: returns the matrix of one expert; None: it is not of several.
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    bits: int
    n_groups: int
    has_order: bool
    has_table: bool
    read: Callable[[], Numbers]
    expert: Callable[[int], Affine] | None = None


def affine_matrices(files: OpenFiles, format: WeightFormat) -> dict[str, Affine]:
    """Return the matrices of a checkpoint that are stored so, by their plain names.

    Raises:
        ModelError: tensors are missing, or of shapes that do not fit one another.
    """
    if format.method not in GROUPED:
        return {}
    first = _FIRST[format.method]
    make = {MLX: _of_mlx, AWQ: _of_awq, GPTQ: _of_gptq, COMPRESSED: _of_compressed}[format.method]
    return {
        f"{base}.weight": make(files, base, format)
        for base in (key.removesuffix(first) for key in files if key.endswith(first))
        if format.method != MLX or files.place(base + first).dtype == "U32"
    }


def unpacked(words: Tensor, bits: int, n: int) -> Tensor:
    """Return the first numbers of each row's words of 32 bits, uint8 ``[..., n]``.

    Args:
        words: ``[..., n_words]``; a number's bits may lie in two of them.
        bits: of a number.
        n: numbers of a row.
    """
    of_words = words.contiguous().view(torch.uint8)
    each = 8 // math.gcd(bits, 8)  # so many numbers end where a byte ends
    wide = each * bits // 8
    parts = of_words[..., : -(-n // each) * wide].unflatten(-1, (-1, wide))
    out = torch.empty((*parts.shape[:-1], each), dtype=torch.uint8)
    for at in range(each):
        byte, shift = divmod(at * bits, 8)
        number = parts[..., byte] >> shift
        if shift + bits > 8:
            number = number | (parts[..., byte + 1] << (8 - shift))
        out[..., at] = number & ((1 << bits) - 1)
    return out.flatten(-2)[..., :n]


def _demand(files: OpenFiles, base: str, **shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Refuse a layer some of whose tensors have other shapes than they must have.

    Args:
        files: of the checkpoint.
        base: name of the layer.
        shapes: by the last parts of names: what a tensor has, and what it must have.

    Raises:
        ModelError: so it is.
    """
    for name, (found, wanted) in shapes.items():
        if found != wanted:
            raise ModelError(
                f"{files.folder} has {base}.{name} as {list(found)}, which must be {list(wanted)} "
                f"by its other tensors and its config; the config is of another checkpoint or a "
                f"file is damaged, copy both again"
            )


def _divides(files: OpenFiles, base: str, n_in: int, n_groups: int) -> None:
    """Refuse groups that do not make a row.

    Raises:
        ModelError: so they are.
    """
    if n_groups < 1 or n_in < 1 or n_in % n_groups:
        raise ModelError(
            f"{files.folder} has {n_groups} groups for the {n_in} inputs of {base}, which they do "
            f"not divide; copy the checkpoint again"
        )


def _of_mlx(files: OpenFiles, base: str, format: WeightFormat) -> Affine:
    """Return a matrix that MLX's own functions quantised; ``[..., n_out, words]``, along inputs."""
    grouping = format.groupings.get(base, format.grouping)
    assert grouping is not None, "the config says one for all"
    words, scales = (files.place(f"{base}.{end}").shape for end in ("weight", "scales"))
    n_in = scales[-1] * grouping.group if scales else 0
    _divides(files, base, n_in, scales[-1] if scales else 0)
    n_words = n_in * grouping.bits // 32
    _demand(files, base, weight=(words, (*scales[:-1], n_words)))
    parts = [f"{base}.weight", f"{base}.scales"]
    if grouping.mode == "affine":
        parts.append(f"{base}.biases")
        _demand(files, base, biases=(files.place(parts[2]).shape, scales))

    is_affine = grouping.mode == "affine"

    def read(at: Any = ...) -> Numbers:
        numbers = unpacked(files.read(parts[0])[at], grouping.bits, n_in)
        if is_affine:
            steps, minima = (files.read(one)[at].to(torch.float32) for one in parts[1:])
            return Numbers(numbers, steps, minima=minima)
        steps = (files.read(parts[1])[at].to(torch.float32) - 127.0).exp2()
        table = torch.tensor([*_MXFP4_TABLE, *(-one for one in _MXFP4_TABLE)])
        return Numbers(numbers, steps, table=table)

    shape = (*scales[:-1], n_in)
    one = Affine(tuple(parts), shape, grouping.bits, scales[-1], False, not is_affine, read)

    def expert(at: int) -> Affine:
        return replace(one, shape=shape[1:], read=partial(read, at))

    return replace(one, expert=expert) if len(shape) == 3 else one


def _of_awq(files: OpenFiles, base: str, format: WeightFormat) -> Affine:
    """Return a matrix of AWQ: ``[n_in, n_out / 8]``, along outputs and by turns."""
    parts = [f"{base}.{end}" for end in ("qweight", "scales", "qzeros")]
    words, scales, zeros = (files.place(one).shape for one in parts)
    n_in, n_out, n_groups = words[0], 8 * words[-1], scales[0]
    _demand(files, base, scales=(scales, (n_groups, n_out)), qzeros=(zeros, (n_groups, words[-1])))
    _divides(files, base, n_in, n_groups)

    def spread(key: str) -> Tensor:
        by_words = unpacked(files.read(key), 4, n_out).view(-1, n_out // 8, 8)
        return by_words[..., _AWQ_TURNS].flatten(-2).t()

    def read() -> Numbers:
        steps = files.read(parts[1]).to(torch.float32).t()
        return Numbers(spread(parts[0]), steps, zeros=spread(parts[2]).to(torch.float32))

    return Affine(tuple(parts), (n_out, n_in), 4, n_groups, False, False, read)


def _of_gptq(files: OpenFiles, base: str, format: WeightFormat) -> Affine:
    """Return a matrix of GPTQ: ``[n_in * bits / 32, n_out]``, along inputs."""
    parts = [f"{base}.{end}" for end in ("qweight", "scales", "qzeros")]
    words, scales, zeros = (files.place(one).shape for one in parts)
    has_groups = f"{base}.g_idx" in files
    n_in = (
        files.place(f"{base}.g_idx").shape[0] if has_groups else 32 * words[0] // format.stored_bits
    )
    bits, n_out, n_groups = 32 * words[0] // max(1, n_in), words[-1], scales[0]
    _divides(files, base, n_in, n_groups)
    if bits not in (2, 3, 4, 8):
        raise ModelError(
            f"{files.folder} has {base} in {32 * words[0]} bits for {n_in} inputs, which is no "
            f"packing of GPTQ that is read here; copy the checkpoint again"
        )
    _demand(
        files,
        base,
        qweight=(words, (n_in * bits // 32, n_out)),
        scales=(scales, (n_groups, n_out)),
        qzeros=(zeros, (n_groups, -(-n_out * bits // 32))),
    )
    order = _order(files, f"{base}.g_idx", n_in, n_groups) if has_groups else None

    def read() -> Numbers:
        numbers = unpacked(files.read(parts[0]).t(), bits, n_in)
        steps = files.read(parts[1]).to(torch.float32).t()
        zero = _gptq_zeros(files.read(parts[2]), bits, n_out, format.zeros_short).t()
        return Numbers(numbers, steps, zeros=zero.to(torch.float32), order=order)

    used = (*parts, f"{base}.g_idx") if has_groups else tuple(parts)
    return Affine(used, (n_out, n_in), bits, n_groups, order is not None, False, read)


def _gptq_zeros(words: Tensor, bits: int, n_out: int, short: int) -> Tensor:
    """Return zeros ``[n_groups, n_out]`` of words, which the first version stores one too small.

    Its writers take one off each of a word's numbers by one subtraction, so that a zero of 0
    borrows from the next number; the same addition gives it back. Numbers of 3 bits lie across
    words, and have it taken off each by itself.
    """
    if not short or bits == 3:
        return (unpacked(words, bits, n_out) + short) & ((1 << bits) - 1)
    ones = sum(1 << at for at in range(0, 32, bits))
    return unpacked((words.long() + ones).to(torch.int32), bits, n_out)


def _of_compressed(files: OpenFiles, base: str, format: WeightFormat) -> Affine:
    """Return a matrix of compressed-tensors, ``[n_out, words]``, along inputs."""
    key = f"{base}.weight"
    parts = [f"{key}_packed", f"{key}_scale", f"{key}_shape"]
    words, scales, _ = (files.place(one).shape for one in parts)
    n_out, n_in = (int(n) for n in files.read(parts[2]).tolist())
    bits = next((n for n in (4, 8) if words == (n_out, -(-n_in * n // 32))), 0)
    n_groups = math.prod(scales) // n_out if math.prod(scales) > 1 else 1
    _divides(files, base, n_in, n_groups)
    _demand(files, base, weight_packed=(words, (n_out, -(-n_in * (bits or 4) // 32))))
    has_zeros = f"{key}_zero_point" in files
    order = None
    if f"{key}_g_idx" in files:
        order = _order(files, f"{key}_g_idx", n_in, n_groups)

    def read() -> Numbers:
        numbers = unpacked(files.read(parts[0]), bits, n_in)
        steps = files.read(parts[1]).to(torch.float32)
        steps = steps.reshape(-1, n_groups).expand(n_out, n_groups)
        if has_zeros:
            zero = unpacked(files.read(f"{key}_zero_point").t(), bits, n_out).t()
        else:
            zero = torch.tensor(1 << (bits - 1)).expand(n_out, n_groups)
        return Numbers(numbers, steps, zeros=zero.to(torch.float32), order=order)

    ends = ("_zero_point", "_g_idx")
    used = (*parts, *(key + end for end in ends if key + end in files))
    return Affine(used, (n_out, n_in), bits, n_groups, order is not None, False, read)


def _order(files: OpenFiles, key: str, n_in: int, n_groups: int) -> Tensor | None:
    """Return the group of each input; None where groups come one behind the other.

    Raises:
        ModelError: inputs of groups that are not there.
    """
    order = files.read(key).long()
    if (order < 0).all():
        return None
    if order.shape != (n_in,) or order.max() >= n_groups or order.min() < 0:
        raise ModelError(
            f"{files.folder} has {key} of groups {int(order.min())} to {int(order.max())} for "
            f"{order.numel()} inputs, and its layer has {n_in} in {n_groups}; copy the checkpoint "
            f"again"
        )
    plain = torch.arange(n_in) // (n_in // n_groups)
    return None if (order == plain).all() else order.clone()
