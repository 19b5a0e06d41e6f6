"""Linear layers and embeddings whose weights stay a file's groups: blocks of GGUF, or affine ones.

Nothing of the weights is lost: they are put in another order, and numbers of 5 and 6 bits get 8.
Inputs are rounded to 8 bits for each 32 of a token, as for other packed weights; so a result is off
by at most half a step of its inputs, which is a 254th of the largest of 32, times the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.cache.kernel import address_of, dtype_of
from kvcellar.backends.torch.cache.memory import Arena
from kvcellar.backends.torch.cpu.modules.linears import FEW_PACKED
from kvcellar.kernel import blocks, layers, levels
from kvcellar.kernel import linear as native
from kvcellar.models.weights import FITTED_INPUTS

_FITTED_BYTES = 144
"""Bytes of a block of Q4_K in a file."""

_ALONE = nullcontext()
"""For whoever reads with nobody beside it."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix in the blocks of a file.

    Attributes:
        type_name: of the blocks, one of ``kernel.blocks.INPUTS``.
        n_out: rows: outputs of a linear layer, or tokens of an embedding.
        n_in: numbers of a row.
        read: returns the bytes, uint8 ``[n_out, bytes of a row]``, contiguous.
    """

    type_name: str
    n_out: int
    n_in: int
    read: Callable[[], Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and numbers of each."""
        return self.n_out, self.n_in


@dataclass(frozen=True, slots=True)
class StoredAffine:
    """A matrix in groups, whose weights are ``scale * number + minimum``.

    Attributes:
        bits: of a number, 4 or 8.
        group: inputs that share a scale and a minimum, a multiple of 32.
        n_out: rows: outputs of a linear layer, or tokens of an embedding.
        n_in: numbers of a row, a multiple of ``group``.
        read: returns the numbers, uint8 ``[n_out, n_in]``, and scales and minima, both float32
            ``[n_out, n_in / group]``; all contiguous.
    """

    bits: int
    group: int
    n_out: int
    n_in: int
    read: Callable[[], tuple[Tensor, Tensor, Tensor]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and numbers of each."""
        return self.n_out, self.n_in


def fitted(weight: Tensor) -> StoredBlocks:
    """Return a matrix that becomes blocks of Q4_K when it is read; see ``kernel.blocks.fit_q4_k``.

    Args:
        weight: ``[n_out, n_in]``, float32 or bfloat16, of whole blocks.
    """
    n_out, n_in = weight.shape

    def read() -> Tensor:
        rows = weight.detach()
        rows = (rows if rows.dtype == torch.bfloat16 else rows.float()).contiguous()
        made = torch.empty(n_out, n_in // FITTED_INPUTS * _FITTED_BYTES, dtype=torch.uint8)
        at = address_of(rows), dtype_of(rows.dtype)
        blocks.fit_q4_k(*at, n_in, n_out, address_of(made))
        return made

    return StoredBlocks("Q4_K", n_out, n_in, read)


Stored: TypeAlias = StoredBlocks | StoredAffine
"""A matrix that is multiplied as a file has it."""

Put: TypeAlias = Callable[..., None]
"""Function that puts a matrix at two addresses, now or later: ``place``, or a placer's ``add``."""


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Matrices of all experts of a mixture, of one form.

    Attributes:
        n_experts: how many.
        of: returns an expert's matrix; where gate and up are one, gate's outputs come first.
        shape: of the parameter, whose last two axes may be the other way round.
        is_by_turns: true if the parameter's outputs are gate's and up's by turns.
    """

    n_experts: int
    of: Callable[[int], Stored]
    shape: tuple[int, ...]
    is_by_turns: bool = False


Kept: TypeAlias = Stored | StoredExperts
"""A parameter that is multiplied as a file has it."""


class Unread(NamedTuple):
    """Parameters of a model that were not read, and what the file has in their place.

    Attributes:
        parameters: kept from being freed: while they are there, nothing has their ids.
        blocks: id of a parameter -> a matrix as it is stored.
        experts: the same, of experts' matrices.
    """

    parameters: list[Tensor]
    blocks: dict[int, Stored]
    experts: dict[int, StoredExperts]


def unread_of(model: nn.Module, kept: Mapping[str, Kept]) -> Unread:
    """Find the parameters of a model, by name, that a file's own forms stand for."""
    unread = Unread([], {}, {})
    for name, one in model.named_parameters():
        form = kept.get(name)
        if form is None:
            continue
        unread.parameters.append(one)
        if isinstance(form, StoredExperts):
            unread.experts[id(one)] = form
        else:
            unread.blocks[id(one)] = form
    return unread


class BlockLinear(nn.Module):
    """``nn.Linear`` for evaluation on a CPU, of matrices in groups, one behind the other."""

    def __init__(
        self,
        stored: Sequence[Stored],
        bias: Tensor | None,
        arena: Arena | None = None,
        placer: Placer | None = None,
    ) -> None:
        """Put the weights where products take them.

        Args:
            stored: matrices of the same inputs; their outputs come one behind the other.
            bias: of all outputs, or None.
            arena: where they shall lie; None: one of their own.
            placer: puts them there later; None: they are there at once.
        """
        super().__init__()
        arena = Arena() if arena is None else arena
        self.in_features = stored[0].n_in
        self.out_features = sum(one.n_out for one in stored)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        put = place if placer is None else placer.add
        self._weights = [self._place(i, one, arena, put) for i, one in enumerate(stored)]
        self._layer = layers.LinearLayer(self._weights[0], 0, self._weights[1:])

    def _place(self, i: int, stored: Stored, arena: Arena, put: Put) -> native.LinearWeights:
        data, beside = (arena.take(n) for n in placed_bytes(stored))
        self.register_buffer(f"blocks_{i}", data, persistent=False)
        self.register_buffer(f"beside_{i}", beside, persistent=False)
        to = address_of(data), address_of(beside)
        put(stored, *to)
        return weights_at(stored, *to)

    @property
    def few(self) -> int:
        """Tokens up to which a layer around it is one call of the kernel."""
        return FEW_PACKED

    def for_kernel(self) -> layers.LinearLayer:
        """Return what the kernel reads: the weights, and the address of the bias, or 0."""
        bias = 0 if self.bias is None else address_of(self.bias)
        return layers.LinearLayer(self._weights[0], bias, self._weights[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[..., in_features] -> [..., out_features]``, in the type of x."""
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.out_features))
        n_tokens = x.numel() // self.in_features
        self._layer.linear(address_of(x), n_tokens, dtype_of(x.dtype), address_of(out))
        return out if self.bias is None else out.add_(self.bias)

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights of outputs of the first matrix, ``[...] -> [..., in_features]``."""
        outputs = outputs.long().contiguous()
        found = torch.empty(*outputs.shape, self.in_features, dtype=dtype)
        to = dtype_of(dtype), address_of(found)
        self._weights[0].gather(address_of(outputs), outputs.numel(), *to)
        return found


def placed_bytes(stored: Kept) -> tuple[int, int]:
    """Return how many bytes a parameter takes as numbers, and beside them."""
    if isinstance(stored, StoredExperts):
        data, beside = placed_bytes(stored.of(0))
        return stored.n_experts * data, stored.n_experts * beside
    shape = stored.n_in, stored.n_out
    if isinstance(stored, StoredAffine):
        return blocks.affine_sizes(stored.bits, stored.group, *shape)
    return blocks.block_sizes(blocks.block_type(stored.type_name), *shape)[1:]


class Placer:
    """Matrices that are to be placed, all at a time: on as many threads as the kernel may use."""

    def __init__(self) -> None:
        """Begin with none."""
        self._jobs: list[tuple[Stored, int, int, Tensor | None]] = []
        self._reading = Lock()

    def add(self, stored: Stored, data: int, beside: int, order: Tensor | None = None) -> None:
        """Have a matrix placed by ``run``; the caller keeps these addresses until then."""
        self._jobs.append((stored, data, beside, order))

    def run(self) -> None:
        """Place all of them, the largest first; each is read when its turn comes, and let go of."""
        jobs, self._jobs = sorted(self._jobs, key=lambda job: -job[0].n_out * job[0].n_in), []
        with ThreadPoolExecutor(max(1, levels.num_threads())) as pool:
            for done in [pool.submit(place, *job, self._reading) for job in jobs]:
                done.result()


def place(
    stored: Stored,
    data: int,
    beside: int,
    order: Tensor | None = None,
    reading: AbstractContextManager[Any] = _ALONE,
) -> None:
    """Put a matrix at these addresses, of as many bytes as :func:`placed_bytes` says.

    Args:
        stored: the matrix; it is read here, and let go of.
        data: address of its numbers.
        beside: address of what stands beside them.
        order: of its outputs; None: as they are stored.
        reading: held while it is read: files are not for several threads at a time.
    """
    shape = stored.n_in, stored.n_out
    if isinstance(stored, StoredAffine):
        with reading:
            parts = [part if order is None else part[order] for part in stored.read()]
        at = [address_of(part) for part in parts]
        blocks.place_affine(stored.bits, stored.group, at[0], at[1], at[2], *shape, data, beside)
        return
    kind = blocks.block_type(stored.type_name)
    with reading:
        rows = stored.read()
    rows = rows if order is None else rows[order]
    assert rows.nbytes == blocks.block_sizes(kind, *shape)[0], "a file's rows are whole blocks"
    blocks.place_blocks(kind, address_of(rows), *shape, data, beside)


def weights_at(stored: Stored, data: int, beside: int) -> native.LinearWeights:
    """Describe a matrix that was placed at these addresses."""
    shape = stored.n_in, stored.n_out
    if isinstance(stored, StoredAffine):
        return blocks.affine_weights(stored.bits, stored.group, *shape, data, beside)
    return blocks.block_weights(blocks.block_type(stored.type_name), *shape, data, beside)
