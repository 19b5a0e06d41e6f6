"""Linear layers, norms, embeddings and experts on a card, of weights in the forms of matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor, nn

from kvcellar.backends.torch.cpu.modules.experts import HeldExperts, Rows, weighed
from kvcellar.backends.torch.cpu.modules.layers import HeldEmbedding
from kvcellar.backends.torch.gpu.attend.launch import is_interpreted, on_device
from kvcellar.backends.torch.gpu.attend.plans import rounded_up
from kvcellar.backends.torch.gpu.weights import between, multiply
from kvcellar.backends.torch.gpu.weights.matrices import CardMatrices, joined
from kvcellar.backends.torch.gpu.weights.ways import (
    PLAIN,
    PROGRAMS,
    SIZES,
    TILES,
    TORCH,
    Product,
    Way,
    Ways,
)

PAIRS = 16_384
"""Tokens times experts of each that are computed together: their rows lie in memory meanwhile."""


class CardNorm(nn.Module):
    """RMSNorm over the last dimension, one launch."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Take a weight, which stays shared, and what is added to the mean of squares."""
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.eps = eps

    @property
    def of_inputs(self) -> multiply.Norm:
        """Norm of the inputs of a product, as that is told it."""
        return multiply.Norm(self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[B, T, dim]`` or ``[B, T, rows, dim]``, in the weight's type."""
        dim = x.shape[-1]
        flat = x.reshape(-1, *x.shape[2:]) if x.dim() == 4 else x.reshape(-1, 1, dim)
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        n_tokens, n_each, _ = flat.shape
        kind = torch.float32 if is_interpreted() else self.weight.dtype
        out = torch.empty(x.shape, dtype=kind, device=x.device)
        with on_device(x.device):
            between.norm_rows[(n_tokens * n_each,)](
                flat, out, self.weight, self.eps, dim, n_each, flat.stride(0), flat.stride(1),
                triton.next_power_of_2(dim), num_warps=8 if dim > 2048 else 4,
            )  # fmt: skip
        return out.to(self.weight.dtype)


class CardLinear(nn.Module):
    """``nn.Linear`` for evaluation on a card, of matrices one behind the other."""

    def __init__(self, matrices: Sequence[CardMatrices], bias: Tensor | None) -> None:
        """Take matrices of the same inputs; those of one form that are neighbours become one."""
        super().__init__()
        self._matrices = _merged(matrices)
        self.in_features = matrices[0].n_in
        self.out_features = sum(one.n_out for one in matrices)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        for i, one in enumerate(self._matrices):
            _register(self, f"matrix_{i}", one)
        form = re.sub("(-0)+$", "", "-".join(str(int(one)) for one in self._matrices[0].form))
        has = " bias" if bias is not None else ""
        self._shape = f"{self.in_features} to {self.out_features} of {form}{has}"
        self.ways = Ways()

    def forward(self, x: Tensor, add: Tensor | None = None, norm: CardNorm | None = None) -> Tensor:
        """Multiply ``[..., in_features] -> [..., out_features]``, in the type of x.

        Args:
            x: inputs.
            add: ``[..., out_features]``, of the type of x, that is added to the result.
            norm: of the inputs, or None.
        """
        flat = x.reshape(-1, self.in_features)
        also = None if add is None else add.reshape(-1, self.out_features)
        what = _normed(norm) + (" add" if add is not None else "")
        out = self._by_way(flat, what, lambda way: self._rows(flat, also, norm, way))
        return out.view(*x.shape[:-1], self.out_features)

    def gated(self, x: Tensor, norm: CardNorm | None = None) -> Tensor:
        """Return the silu of the first half of the outputs times the second half."""
        flat, n = x.reshape(-1, self.in_features), self.out_features // 2

        def product(way: Way) -> Tensor:
            if len(self._matrices) > 1 or not _is_whole(flat, way):
                return gate(self._rows(flat, None, norm, way))
            first, of_inputs = self._matrices[0], None if norm is None else norm.of_inputs
            return multiply.multiply(first, flat, self.bias, norm=of_inputs, is_gated=True, way=way)

        out = self._by_way(flat, _normed(norm) + " gate", product)
        return out.view(*x.shape[:-1], n)

    def turned(
        self,
        x: Tensor,
        norm: CardNorm | None,
        turn: multiply.HeadTurn,
        after: Callable[[Tensor], None],
    ) -> Tensor | None:
        """Return the outputs of few rows with heads rotated; None: that takes another launch.

        Args:
            x: inputs.
            norm: of the inputs, or None.
            turn: the rotation.
            after: rotates the outputs ``[..., out_features]`` in place, in a launch of its own.
        """
        flat, first = x.reshape(-1, self.in_features), self._matrices[0]
        if len(self._matrices) > 1 or first.form.bits != 16 or len(flat) > multiply.FEW:
            return None
        shape = (*x.shape[:-1], self.out_features)

        def product(way: Way) -> Tensor:
            if _is_whole(flat, way):
                of_inputs = None if norm is None else norm.of_inputs
                return multiply.multiply(
                    first, flat, self.bias, norm=of_inputs, turn=turn, way=way
                ).view(shape)
            out = self._rows(flat, None, norm, way).view(shape)
            after(out)
            return out

        return self._by_way(flat, _normed(norm) + " turn", product)

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights of outputs of the first matrix, ``[...] -> [..., in_features]``."""
        found = multiply.take(self._matrices[0], outputs.reshape(-1), dtype)
        return found.view(*outputs.shape, self.in_features)

    def _by_way(self, x: Tensor, what: str, product: Product) -> Tensor:
        """Return a product of rows, in the way that is chosen for so many where they are few."""
        if not 0 < len(x) <= multiply.FEW:
            return product(PLAIN)
        first, n_rows = self._matrices[0], rounded_up(len(x))
        ways = [PLAIN]
        if len(self._matrices) == 1 and x.dtype != torch.float32:
            ways += [*(SIZES if n_rows == 1 else ()), Way(TILES)]
            ways += [Way(TORCH)] if first.parts.numbers.dtype == x.dtype else []
        dtype = str(x.dtype).removeprefix("torch.")
        asked = f"{n_rows} x {self._shape} in {dtype}{what}"
        return product(self.ways.of(asked, ways, product))

    def _rows(self, x: Tensor, add: Tensor | None, norm: CardNorm | None, way: Way) -> Tensor:
        of_inputs = None
        if norm is not None and _is_whole(x, way):
            of_inputs = norm.of_inputs
        elif norm is not None:
            x = norm(x[None])[0]
        first = self._matrices[0]
        if len(self._matrices) == 1:
            return multiply.multiply(first, x, self.bias, add, norm=of_inputs, way=way)
        out, at = x.new_empty((len(x), self.out_features)), 0
        for one in self._matrices:
            part = slice(at, at + one.n_out)
            bias = None if self.bias is None else self.bias[part]
            also = None if add is None else add[:, part]
            multiply.multiply(one, x, bias, also, out[:, part], norm=of_inputs)
            at += one.n_out
        return out


class CardEmbedding(HeldEmbedding):
    """An embedding on a card, for which nothing waits: ids are taken as they are."""

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        assert isinstance(self.held, nn.Module)
        return next(self.held.buffers()).device


class CardExperts(HeldExperts):
    """All experts of a mixture on a card: two launches for a step's products, however many."""

    skips_rows = True
    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self,
        matrices: tuple[CardMatrices, CardMatrices],
        biases: tuple[Tensor | None, Tensor | None],
        between: Rows,
        after: Rows | None,
        *,
        is_silu: bool = False,
    ) -> None:
        """Put the parts together.

        Args:
            matrices: of both products; of the first gate and up joined, where there is a gate.
            biases: of both, ``[n_experts, n_out]``, or None.
            between: ``[n, first's outputs] -> [n, second's inputs]``.
            after: what becomes of each expert's result before it is weighed, if anything.
            is_silu: true if what is between is the silu of one half times the other.
        """
        super().__init__()
        self.n_experts = matrices[0].n_experts
        self.n_weights = sum(one.n_weights for one in matrices)
        self._up, self._down = matrices
        for name, one, bias in zip(("up", "down"), matrices, biases, strict=True):
            _register(self, name, one)
            self.register_buffer(f"{name}_bias", bias, persistent=False)
        self._between, self._after, self._is_silu = between, after, is_silu

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Run at most ``PAIRS`` at a time; see :class:`HeldExperts`."""
        n = max(1, PAIRS // chosen.shape[1])
        if len(x) <= n:
            return self._some(x, chosen, shares)
        parts = zip(x.split(n), chosen.split(n), shares.split(n), strict=True)
        return torch.cat([self._some(*part) for part in parts])

    def _some(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        flat = chosen.reshape(-1).long()
        rows = None
        if len(flat) > multiply.FEW_PAIRS:
            rows = multiply.sorted_rows(flat, self.n_experts, x)
        is_gated = rows is None and self._is_silu
        inner = multiply.multiply_chosen(self._up, x, flat, self.up_bias, rows, is_gated=is_gated)
        if not is_gated:
            inner = gate(inner) if self._is_silu else self._between(inner)
        found = multiply.multiply_chosen(self._down, inner, flat, self.down_bias, rows)
        found = found if self._after is None else self._after(found)
        found = found.view(*chosen.shape, found.shape[1])
        return weighed(found, self._shares(chosen, shares), x.dtype)

    def _shares(self, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return shares in float32, none for an expert that is not there."""
        is_there = (chosen >= 0) & (chosen < self.n_experts)
        return torch.where(is_there, shares.float(), 0.0)


def gate(both: Tensor) -> Tensor:
    """Multiply the silu of the first half of rows ``[n_rows, 2 * n]`` with the second half."""
    n_rows, n = len(both), both.shape[1] // 2
    dtype = torch.float32 if is_interpreted() else both.dtype
    out, size = both.new_empty((n_rows, n), dtype=dtype), min(1024, triton.next_power_of_2(n))
    with on_device(both.device):
        between.gate_rows[(n_rows, triton.cdiv(n, size))](both, out, n, size)
    return out.to(both.dtype)


def _is_whole(x: Tensor, way: Way) -> bool:
    """Return true if a product has in it what is done before and behind it."""
    return len(x) <= multiply.FEW and way.by == PROGRAMS


def _normed(norm: CardNorm | None) -> str:
    return "" if norm is None else " norm"


def _merged(matrices: Sequence[CardMatrices]) -> list[CardMatrices]:
    """Return matrices with neighbours of one form joined."""
    found = [matrices[0]]
    for one in matrices[1:]:
        both = joined([found[-1], one])
        if both is None:
            found.append(one)
        else:
            found[-1] = both
    return found


def _register(module: nn.Module, name: str, matrices: CardMatrices) -> None:
    """Have a module count the tensors of matrices as its own."""
    for part, tensor in zip(matrices.parts._fields, matrices.parts, strict=True):
        module.register_buffer(f"{name}_{part}", tensor, persistent=False)
