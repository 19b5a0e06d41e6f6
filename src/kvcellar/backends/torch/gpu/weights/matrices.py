"""Matrices as a card holds them: numbers of 4, 8 or 16 bits, and what stands beside them.

A weight is ``step * (number - zero) + minimum``, and a number is never negative. Numbers of 4 or 8
bits lie in chunks of 16 bytes, which a thread reads at once: four words, of which word m has in its
field j the number of the chunk's input ``4 * j + m``, so that the inputs that meet one field of all
four words are neighbours. Steps and minima are of a group of inputs, float16 or float32, or bytes
that count float16 numbers of several groups, or the exponents of MXFP4. These are the forms that
the CPU kernel has, and the same weights to the last bit; only where the bits lie is another thing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvcellar.backends.torch.cpu.modules.blocks import Stored, StoredAffine
from kvcellar.backends.torch.cpu.modules.experts import ShippedWeights, StoredRows
from kvcellar.kernel.blocks import INPUTS
from kvcellar.models.weights import SHARED

NO_CODES, IQ4, E2M1 = 0, 1, 2
"""Kinds of stored numbers: values themselves, or indexes into 16 values of IQ4 or of MXFP4."""

IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_AT_A_TIME = 1 << 26
"""Numbers of a matrix that are written anew at a time."""


class MatrixForm(NamedTuple):
    """Form of a matrix: bits and group of its numbers, types of its scales and zeros.

    Attributes:
        bits: of a number: 4 or 8; 16 for floats, of any type, that are weights by themselves.
        zero: what is taken from each number.
        codes: ``NO_CODES``, ``IQ4`` or ``E2M1``.
        group: inputs that share a step; 0 for 16 bits.
        top: groups that share a float16 number, which their steps count; 0: there is none.
        has_minima: true if a minimum stands behind each step, and behind each number of ``top``.
        has_exponents: true if steps are powers of two, and their exponents are there.
    """

    bits: int
    zero: int = 0
    codes: int = NO_CODES
    group: int = 0
    top: int = 0
    has_minima: bool = False
    has_exponents: bool = False


FORMS = {
    "Q4_0": MatrixForm(4, 8, group=32),
    "Q4_1": MatrixForm(4, group=32, has_minima=True),
    "Q5_0": MatrixForm(8, 16, group=32),
    "Q5_1": MatrixForm(8, group=32, has_minima=True),
    "Q8_0": MatrixForm(8, 128, group=32),
    "Q4_K": MatrixForm(4, group=32, top=8, has_minima=True),
    "Q5_K": MatrixForm(8, group=32, top=8, has_minima=True),
    "Q6_K": MatrixForm(8, 32, group=16, top=16),
    "IQ4_NL": MatrixForm(4, codes=IQ4, group=32),
    "IQ4_XS": MatrixForm(4, codes=IQ4, group=32, top=8),
    "MXFP4": MatrixForm(4, codes=E2M1, group=32, has_exponents=True),
    "F16": MatrixForm(16),
    "BF16": MatrixForm(16),
}
"""Forms of the blocks of GGUF files, by their types."""

PACKED = {8: MatrixForm(8, 128, group=SHARED[8]), 4: MatrixForm(4, 8, group=SHARED[4])}
"""Forms of weights that are packed here, by their bits."""


class Parts(NamedTuple):
    """Tensors of a matrix, or of one for each expert with an axis before these.

    Attributes:
        numbers: int32 ``[n_out, n_in * bits / 32]``, the words of chunks; or of 16 bits
            ``[n_out, n_in]``, the weights.
        steps: ``[n_out, n_groups, 1]``, of two with minima; empty for 16 bits.
        tops: float16 ``[n_out, n_groups / top, 1]``, of two with minima; empty where there is none.
    """

    numbers: Tensor
    steps: Tensor
    tops: Tensor


@dataclass(frozen=True, slots=True)
class CardMatrices:
    """Matrices of one shape and form on a card: one, or one for each expert.

    Attributes:
        form: of all of them.
        n_in: inputs of each.
        parts: with an axis for experts before the others.
    """

    form: MatrixForm
    n_in: int
    parts: Parts

    @property
    def n_experts(self) -> int:
        """Matrices that there are."""
        return self.parts.numbers.shape[0]

    @property
    def n_out(self) -> int:
        """Outputs of each."""
        return self.parts.numbers.shape[1]

    @property
    def n_weights(self) -> int:
        """Weights of all of them."""
        return self.n_experts * self.n_out * self.n_in


def placed(stored: Stored, device: torch.device) -> CardMatrices:
    """Put a matrix that is stored in groups on a device."""
    return _stacked(stored.n_in, 1, iter([_parts_of(stored, device)]))


def packed(weight: Tensor, bits: int, device: torch.device) -> CardMatrices:
    """Pack weights ``[n_out, n_in]`` in 8 or 4 bits on a device; as the CPU kernel rounds them."""
    return _stacked(weight.shape[1], 1, iter([_packed(weight, device, bits)]))


def floats(weight: Tensor, device: torch.device) -> CardMatrices:
    """Put weights ``[n_out, n_in]`` on a device as they are."""
    return _stacked(weight.shape[1], 1, iter([_floats(weight, device)]))


def joined(matrices: Sequence[CardMatrices]) -> CardMatrices | None:
    """Put the outputs of matrices of the same inputs behind one another; None: forms differ."""
    first = matrices[0]
    kinds = {(one.form, *(part.dtype for part in one.parts)) for one in matrices}
    if len(kinds) > 1:
        return None
    parts = (torch.cat(found, 1) for found in zip(*(one.parts for one in matrices), strict=True))
    return CardMatrices(first.form, first.n_in, Parts(*parts))


def experts_on_card(
    weights: Sequence[Tensor] | ShippedWeights | StoredRows, bits: int, device: torch.device
) -> CardMatrices:
    """Put the matrices of all experts on a device, one at a time.

    Args:
        weights: ``[n_out, n_in]`` of each; or as they were shipped; or as a file has them.
        bits: of a weight of the first kind: 16, 8 or 4.
        device: where they go.
    """
    if isinstance(weights, ShippedWeights):
        n_experts, _, n_in = weights.shape
        made = (_shipped(*weights.of(at), device) for at in range(n_experts))
        return _stacked(n_in, n_experts, made)
    if isinstance(weights, StoredRows):
        made = (_turned(weights, at, device) for at in range(len(weights)))
        return _stacked(weights.shape[2], len(weights), made)
    packing = _floats if bits == 16 else partial(_packed, bits=bits)
    return _stacked(
        weights[0].shape[1], len(weights), (packing(one, device=device) for one in weights)
    )


def _stacked(n_in: int, n: int, made: Iterator[tuple[MatrixForm, Parts]]) -> CardMatrices:
    """Put so many matrices of one form behind one another, as they come."""
    form, first = next(made)
    if n == 1:
        return CardMatrices(form, n_in, Parts(*(part[None] for part in first)))
    whole = Parts(*(part.new_empty((n, *part.shape)) for part in first))
    for at, (_, parts) in enumerate(itertools.chain([(form, first)], made)):
        for to, part in zip(whole, parts, strict=True):
            to[at] = part
    return CardMatrices(form, n_in, whole)


def _turned(weights: StoredRows, expert: int, device: torch.device) -> tuple[MatrixForm, Parts]:
    """Return an expert's matrix, its outputs in the order that is wanted."""
    form, parts = _parts_of(weights.stored.of(expert), device)
    if weights.order is None:
        return form, parts
    order = weights.order.to(device)
    return form, Parts(*(part[order] if part.numel() else part for part in parts))


# What is packed here ------------------------------------------------------------------------------


def _packed(weight: Tensor, device: torch.device, bits: int) -> tuple[MatrixForm, Parts]:
    """Pack weights with a float16 step for each group, some rows at a time."""
    form = PACKED[bits]
    n_in = weight.shape[1]
    numbers, steps = [], []
    for rows in weight.detach().split(max(1, _AT_A_TIME // n_in)):
        grouped = _in_groups(rows.to(device).float(), form.group)
        of_rows = _steps(grouped, bits).to(torch.float16)
        held = of_rows.float()
        inverse = torch.where(held == 0, 0.0, 1.0 / torch.where(held == 0, 1.0, held))
        found = torch.round(grouped * inverse[..., None])
        zero = form.zero
        found = found.clamp(-zero, zero - 1).nan_to_num(-zero).flatten(1)[:, :n_in]
        numbers.append(_in_words((found + zero).byte(), bits))
        steps.append(of_rows[..., None])
    return form, Parts(torch.cat(numbers), torch.cat(steps), _nothing(device))


def _in_groups(rows: Tensor, group: int) -> Tensor:
    """Return rows as ``[n_out, n_groups, group]``; behind the last numbers are zeros."""
    n_in = rows.shape[1]
    padded = torch.nn.functional.pad(rows, (0, -n_in % group))
    return padded.view(len(rows), -1, group)


def _steps(grouped: Tensor, bits: int) -> Tensor:
    """Return float32 steps of groups, NaN for those with numbers that are none or infinite."""
    high, low = grouped.amax(-1).clamp(min=0), (-grouped).amax(-1).clamp(min=0)
    if bits == 8:
        steps = torch.maximum(high, low) / 127.0
    else:
        first = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
        largest = torch.where(high > low, high, torch.where(high < low, -low, first))
        steps = largest / -8.0
    is_finite = torch.isfinite(grouped).all(-1)
    return torch.where(is_finite, steps, torch.nan)


def _floats(weight: Tensor, device: torch.device) -> tuple[MatrixForm, Parts]:
    """Return weights of 16 bits as they are."""
    return MatrixForm(16), Parts(weight.detach().to(device).contiguous(), *[_nothing(device)] * 2)


def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.float16, device=device)


def _in_words(numbers: Tensor, bits: int) -> Tensor:
    """Put numbers ``[n_out, n_in]``, a byte each, in the words of chunks."""
    fields = numbers.unflatten(-1, (-1, 32 // bits, 4)).unbind(-2)
    words: Tensor = fields[0].int()
    for j, field in enumerate(fields[1:], 1):
        words |= field.int() << (bits * j)
    return words.flatten(-2)


# What files have ----------------------------------------------------------------------------------


def _shipped(blocks: Tensor, exponents: Tensor, device: torch.device) -> tuple[MatrixForm, Parts]:
    """Return a matrix of a checkpoint in MXFP4, which has two inputs in a byte, the lower first."""
    pairs, steps = blocks.flatten(1).to(device), exponents[..., None].to(device)
    numbers = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
    return FORMS["MXFP4"], Parts(_in_words(numbers, 4), steps, _nothing(device))


def _parts_of(stored: Stored, device: torch.device) -> tuple[MatrixForm, Parts]:
    """Read a matrix and put it on a device."""
    if isinstance(stored, StoredAffine):
        numbers, scales, minima = (part.to(device) for part in stored.read())
        form = MatrixForm(stored.bits, group=stored.group, has_minima=True)
        return form, Parts(
            _in_words(numbers, stored.bits), torch.stack([scales, minima], -1), _nothing(device)
        )
    form, rows = FORMS[stored.type_name], stored.read().to(device)
    if form.bits == 16:
        dtype = torch.float16 if stored.type_name == "F16" else torch.bfloat16
        return form, Parts(rows.view(dtype), *[_nothing(device)] * 2)
    per_row = stored.n_in // INPUTS[stored.type_name]
    found = []
    for some in rows.split(max(1, _AT_A_TIME // stored.n_in)):
        numbers, steps, tops = _READERS[stored.type_name](some.unflatten(1, (per_row, -1)))
        found.append((_in_words(numbers.flatten(1), form.bits), steps.flatten(1, 2), tops))
    parts = [torch.cat(part) for part in zip(*found, strict=True)]
    return form, Parts(*parts)


Read: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Numbers ``[n_out, n_blocks, n]``, a byte each; steps ``[n_out, n_blocks, groups, 1 or 2]``; tops
``[n_out, n_blocks, 1 or 2]``, or nothing."""


def _halves(packed: Tensor) -> Tensor:
    """Return numbers of bytes, those of their lower halves first: ``[..., n] -> [..., 2 * n]``."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _float16(found: Tensor) -> Tensor:
    """Return numbers of pairs of bytes ``[..., 2 * n] -> [..., n]``."""
    halves: Tensor = found.contiguous().view(torch.float16)
    return halves


def _fifth(found: Tensor) -> Tensor:
    """Return the bits of 4 bytes as 16 and 0: ``[..., 4] -> [..., 32]``."""
    at = torch.arange(8, dtype=torch.uint8, device=found.device)
    return (((found[..., None] >> at) & 1) << 4).flatten(-2)


def _read_simple(blocks: Tensor, n_steps: int, *, fifth: bool) -> Read:
    """Read blocks of 32: their float16 numbers, a bit of each number or none, and half bytes."""
    at = 2 * n_steps
    steps = _float16(blocks[..., :at]).unsqueeze(-2)
    numbers = _halves(blocks[..., at + 4 * fifth :])
    if fifth:
        numbers = numbers | _fifth(blocks[..., at : at + 4])
    return numbers, steps, _nothing(blocks.device)


def _read_q8_0(blocks: Tensor) -> Read:
    numbers = blocks[..., 2:] ^ 128  # of int8: 128 more
    return numbers, _float16(blocks[..., :2]).unsqueeze(-2), _nothing(blocks.device)


def _read_mxfp4(blocks: Tensor) -> Read:
    return _halves(blocks[..., 1:]), blocks[..., :1, None], _nothing(blocks.device)


def _counts(found: Tensor) -> Tensor:
    """Return steps and minima of 6 bits, of 12 bytes for 8 groups: ``[..., 12] -> [..., 8, 2]``."""
    a, b, c = found.unflatten(-1, (3, 4)).unbind(-2)
    steps = torch.cat([a & 63, (c & 15) | ((a >> 2) & 48)], -1)
    minima = torch.cat([b & 63, (c >> 4) | ((b >> 2) & 48)], -1)
    return torch.stack([steps, minima], -1)


def _read_k(blocks: Tensor, *, fifth: bool) -> Read:
    """Read blocks of Q4_K or Q5_K; the minima's number has its sign, since they are taken away."""
    tops = _float16(blocks[..., :4])
    tops = tops * torch.tensor([1, -1], dtype=tops.dtype, device=tops.device)
    low = blocks[..., 48 if fifth else 16 :].unflatten(-1, (4, 32))
    numbers = torch.stack([low & 15, low >> 4], -2).flatten(-3)
    if fifth:
        at = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
        numbers |= (((blocks[..., None, 16:48] >> at) & 1) << 4).flatten(-2)
    return numbers, _counts(blocks[..., 4:16]), tops


def _read_q6_k(blocks: Tensor) -> Read:
    low = blocks[..., :128].unflatten(-1, (2, 64))
    low = torch.cat([low & 15, low >> 4], -1)
    at = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> at) & 3).flatten(-2)
    numbers = (low | (high << 4)).flatten(-2)
    steps = blocks[..., 192:208].contiguous().view(torch.int8)
    return numbers, steps[..., None], _float16(blocks[..., 208:210])


def _read_iq4_xs(blocks: Tensor) -> Read:
    at = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 2:4, None] >> at) & 3).flatten(-2)
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    steps = (low | (high << 4)).to(torch.int8) - 32
    numbers = _halves(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return numbers, steps[..., None], _float16(blocks[..., :2])


_READERS: dict[str, Callable[[Tensor], Read]] = {
    "Q4_0": partial(_read_simple, n_steps=1, fifth=False),
    "Q4_1": partial(_read_simple, n_steps=2, fifth=False),
    "Q5_0": partial(_read_simple, n_steps=1, fifth=True),
    "Q5_1": partial(_read_simple, n_steps=2, fifth=True),
    "Q8_0": _read_q8_0,
    "Q4_K": partial(_read_k, fifth=False),
    "Q5_K": partial(_read_k, fifth=True),
    "Q6_K": _read_q6_k,
    "IQ4_NL": partial(_read_simple, n_steps=1, fifth=False),
    "IQ4_XS": _read_iq4_xs,
    "MXFP4": _read_mxfp4,
}
