"""Experts of a mixture as the CPU kernel reads them: of each step those that its tokens chose.

transformers keeps a mixture's experts as parameters of three dimensions and asks a function, which
a config names, to run them. Here that function is the kernel's: one call for a layer, which reads
each chosen expert once for all tokens that chose it. What lies between the two products is found by
trying (:mod:`kvcellar.backends.torch.cpu.modules.mixtures`); what is none of the kernel's gates
stays torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvcellar.backends.torch.cache.kernel import address_of, dtype_of
from kvcellar.backends.torch.cache.memory import Arena
from kvcellar.backends.torch.cpu.modules.blocks import (
    Placer,
    StoredExperts,
    place,
    placed_bytes,
    weights_at,
)
from kvcellar.backends.torch.cpu.modules.linears import FEW_BF16, torch_multiplies_bf16
from kvcellar.kernel import experts as native
from kvcellar.kernel import linear
from kvcellar.models.weights import BLOCK, GROUP, SHARED, coded_bytes

MXFP4 = 4.25
"""Bits of a weight that is held as a checkpoint in MXFP4 has it, with its share of an exponent."""

STORED = 0.0
"""Bits of a weight that is held as a file has it, whatever these are."""

_NAMES = {16: "bf16", 12: "coded", 8: "int8", 4: "int4", MXFP4: "mxfp4"}
"""Names of the kernel's formats, by the bits of a weight."""

PAIRS = 4096
"""Tokens times experts of each that are computed together: their rows lie in memory meanwhile."""

Rows = Callable[[Tensor], Tensor]

_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Numbers that the 16 codes of MXFP4 (E2M1) stand for, in the order of the codes."""


@dataclass(frozen=True)
class ShippedWeights:
    """Weights as a checkpoint in MXFP4 has them, of all experts.

    Attributes:
        blocks: bytes ``[n_experts, n_out, n_in / 32, 16]``.
        exponents: bytes ``[n_experts, n_out, n_in / 32]``.
        order: in which outputs are wanted; None: as they lie.
    """

    blocks: Tensor
    exponents: Tensor
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs."""
        n_experts, n_out, n_groups, _ = self.blocks.shape
        return n_experts, n_out, n_groups * GROUP

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return blocks and exponents of one expert, in the order that is wanted."""
        parts = self.blocks[expert], self.exponents[expert]
        if self.order is not None:
            parts = parts[0][self.order], parts[1][self.order]
        return parts[0].contiguous(), parts[1].contiguous()

    def __getitem__(self, expert: int) -> Tensor:
        """Return the numbers of one expert, float32 ``[n_out, n_in]``."""
        blocks, exponents = self.of(expert)
        halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1).long()
        steps = torch.exp2(exponents.float() - 127)
        groups = _NUMBERS[halves].view(*steps.shape, GROUP)
        return (groups * steps[..., None]).flatten(1)


class StoredRows:
    """Weights that a file has in blocks or groups, of all experts, in the order that is wanted."""

    def __init__(self, stored: StoredExperts, order: Tensor | None) -> None:
        """Look at weights that are read when they are asked for.

        Args:
            stored: them.
            order: in which outputs of the parameter are wanted; None: as it has them.
        """
        self.stored = stored
        self._one = one = stored.of(0)
        self.shape = stored.n_experts, one.n_out, one.n_in
        at = torch.arange(one.n_out)
        at = at.view(2, -1).T.flatten() if stored.is_by_turns else at
        at = at if order is None else at[order]
        self.order = None if torch.equal(at, torch.arange(one.n_out)) else at
        """Outputs of the file's matrices in the order that is wanted; None: as they are."""

    def place(self, arena: Arena) -> tuple[Tensor, Tensor, linear.LinearWeights]:
        """Put all experts one behind the other; return numbers, what is beside them, the first."""
        sizes = placed_bytes(self._one)
        data, beside = (arena.take(len(self) * n).view(len(self), n) for n in sizes)
        placer = Placer()
        for expert in range(len(self)):
            to = address_of(data[expert]), address_of(beside[expert])
            placer.add(self.stored.of(expert), *to, self.order)
        placer.run()
        return data, beside, weights_at(self._one, address_of(data), address_of(beside))

    def __len__(self) -> int:
        """Return how many experts there are."""
        return self.shape[0]

    def __getitem__(self, expert: int) -> Tensor:
        """Return the numbers of one expert, float32 ``[n_out, n_in]``."""
        one, (_, n_out, n_in) = self.stored.of(expert), self.shape
        parts = [torch.empty(n, dtype=torch.uint8) for n in placed_bytes(one)]
        to = address_of(parts[0]), address_of(parts[1])
        place(one, *to, self.order)
        outputs, found = torch.arange(n_out), torch.empty(n_out, n_in)
        at = address_of(outputs), n_out, dtype_of(found.dtype), address_of(found)
        weights_at(one, *to).gather(*at)
        return found


class ExpertWeights(nn.Module):
    """A linear layer of all experts, with weights that the kernel reads."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weights: Sequence[Tensor] | ShippedWeights | StoredRows,
        bias: Tensor | None,
        bits: float,
        arena: Arena,
    ) -> None:
        """Write weights anew.

        Args:
            weights: ``[n_out, n_in]`` of each expert, one at a time; or as they were shipped; or as
                a file has them.
            bias: ``[n_experts, n_out]``, in the type of the rows; or none.
            bits: of a weight: 16, 12, 8, 4, ``MXFP4`` or ``STORED``; in bfloat16 for 16 and 12.
            arena: where they shall lie.
        """
        super().__init__()
        if isinstance(weights, (ShippedWeights, StoredRows)):
            self.n_experts, self.out_features, self.in_features = weights.shape
        else:
            self.n_experts = len(weights)
            self.out_features, self.in_features = weights[0].shape
        self.bits = bits
        beside: Tensor | None
        if isinstance(weights, StoredRows):
            held, beside, first = weights.place(arena)
        else:
            held, beside = _written(weights, bits, arena)
            at = address_of(held), 0 if beside is None else address_of(beside)
            form = linear.WeightFormat[_NAMES[bits]]
            first = linear.LinearWeights(form, self.in_features, self.out_features, *at)
        self.register_buffer("weight", held)
        if beside is not None:
            self.register_buffer("escapes" if bits == 12 else "scales", beside)
        bias = None if bias is None else arena.copy(bias.contiguous())
        self.register_buffer("bias", bias)
        at_bias = 0 if bias is None else address_of(bias)
        self.native = native.ExpertLayer(first, self.n_experts, at_bias)

    def rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Multiply each row by the experts that it chose.

        Args:
            x: ``[n_rows, in_features]``, contiguous.
            chosen: int64 ``[n_rows, n_each]``, contiguous.

        Returns:
            ``[n_rows, n_each, out_features]``.
        """
        out = x.new_empty((*chosen.shape, self.out_features))
        at = address_of(x), x.shape[0], address_of(chosen), chosen.shape[1]
        self.native.linear(*at, dtype_of(x.dtype), address_of(out))
        return out


class HeldExperts(nn.Module):
    """Experts that run in the place of a mixture's own."""

    n_experts: int
    n_weights: int
    """Numbers of all experts' weights."""
    skips_rows = False
    """True if a row whose expert is not there costs next to nothing."""

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Sum what the experts that each token chose make of it, times their shares.

        Args:
            x: ``[n_tokens, hidden]``.
            chosen: integers ``[n_tokens, n_chosen]``; an expert that is not there adds nothing.
            shares: ``[n_tokens, n_chosen]``.
        """
        raise NotImplementedError


class KernelExperts(HeldExperts):
    """All experts of a mixture, run by the kernel."""

    def __init__(
        self,
        up: ExpertWeights,
        down: ExpertWeights,
        gate: native.Gate | None,
        between: Rows,
        after: Rows | None,
    ) -> None:
        """Put the parts together.

        Args:
            up: the first product; gate and up joined, where ``gate`` is given.
            down: the second.
            gate: what the kernel computes between them; None: that is ``between``'s.
            between: the same by torch, ``[n, up's outputs] -> [n, down's inputs]``.
            after: what becomes of each expert's result before it is weighed, if anything.
        """
        super().__init__()
        self.up, self.down = up, down
        self.n_experts = up.n_experts
        self.n_weights = sum(
            part.n_experts * part.out_features * part.in_features for part in (up, down)
        )
        self._between, self._after = between, after
        self._native: native.Experts | None = None
        if gate is not None and after is None:
            self._native = native.Experts(up.native, down.native, gate)

    @property
    def native(self) -> native.Experts | None:
        """All of it as one call of the kernel; None where some of it is torch's."""
        return self._native

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Run the kernel on at most ``PAIRS`` at a time; see :class:`HeldExperts`."""
        x, chosen = x.contiguous(), chosen.long().contiguous()
        shares = shares.float().contiguous()
        n = max(1, PAIRS // chosen.shape[1])
        if x.shape[0] <= n:
            return self._some(x, chosen, shares)
        parts = zip(x.split(n), chosen.split(n), shares.split(n), strict=True)
        return torch.cat([self._some(*part) for part in parts])

    def _some(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Compute at most ``PAIRS``."""
        if self._is_for_torch(chosen.numel(), x.dtype):
            return self._by_torch(x, chosen, shares)
        if self._native is None:
            gated = self._between(self.up.rows(x, chosen).flatten(0, 1)).contiguous()
            rows = self.down.rows(gated, chosen.view(-1, 1))[:, 0]
            found = rows if self._after is None else self._after(rows)
            return weighed(found.view(*chosen.shape, -1), shares, x.dtype)
        out = torch.empty_like(x)
        self._native.run(
            address_of(x),
            x.shape[0],
            address_of(chosen),
            address_of(shares),
            chosen.shape[1],
            dtype_of(x.dtype),
            address_of(out),
        )
        return out

    def _is_for_torch(self, n_pairs: int, dtype: torch.dtype) -> bool:
        """Return true where torch multiplies so many rows by weights in 16 bits faster."""
        is_plain = self.up.bits == self.down.bits == 16 and dtype == torch.bfloat16
        return is_plain and n_pairs > FEW_BF16 * self.up.n_experts and torch_multiplies_bf16()

    def _by_torch(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Expert by expert through torch's product."""
        flat = chosen.flatten()
        out = x.new_zeros((flat.numel(), self.down.out_features))
        for expert in torch.unique(flat).tolist():
            if not 0 <= expert < self.up.n_experts:
                continue
            where = (flat == expert).nonzero()[:, 0]
            rows = self._linear(self.up, expert, x[where // chosen.shape[1]])
            rows = self._linear(self.down, expert, self._between(rows))
            out[where] = rows if self._after is None else self._after(rows)
        return weighed(out.view(*chosen.shape, -1), shares, x.dtype)

    @staticmethod
    def _linear(layer: ExpertWeights, expert: int, x: Tensor) -> Tensor:
        bias = None if layer.bias is None else layer.bias[expert]
        return F.linear(x, layer.weight[expert], bias)


def weighed(rows: Tensor, shares: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum ``[n_tokens, n_chosen, hidden]`` by their shares."""
    return torch.einsum("tch,tc->th", rows.float(), shares).to(dtype)


def _written(
    weights: Sequence[Tensor] | ShippedWeights, bits: float, arena: Arena
) -> tuple[Tensor, Tensor | None]:
    """Write all experts' weights one behind the other, and what lies beside them."""
    if isinstance(weights, ShippedWeights):
        return _placed(weights, arena)
    n_experts, (n_out, n_in) = len(weights), weights[0].shape
    if bits == 16:
        held = arena.take(2 * n_experts * n_out * n_in).view(torch.bfloat16)
        held = held.view(n_experts, n_out, n_in)
        for expert, weight in enumerate(weights):
            held[expert].copy_(weight)
        return held, None
    if bits == 12:
        return _coded(weights, arena)
    n_rows = -(-n_out // BLOCK) * BLOCK
    data = arena.take(n_experts * n_rows * n_in * int(bits) // 8).view(n_experts, -1)
    n_scales = n_rows * -(-n_in // SHARED[int(bits)])
    scales = arena.take(2 * n_experts * n_scales).view(torch.float16).view(n_experts, n_scales)
    form = linear.format_of(int(bits))
    for expert, weight in enumerate(weights):
        weight = (weight if weight.dtype == torch.bfloat16 else weight.float()).contiguous()
        at = address_of(weight), dtype_of(weight.dtype), form, n_in, n_out
        linear.pack(*at, address_of(data[expert]), address_of(scales[expert]))
    return data, scales


def _coded(weights: Sequence[Tensor], arena: Arena) -> tuple[Tensor, Tensor]:
    n_out, n_in = weights[0].shape
    n_bytes = coded_bytes(n_out, n_in)
    whole = arena.take(len(weights) * n_bytes).view(len(weights), n_bytes)
    escapes = bytearray()
    for expert, weight in enumerate(weights):
        at = address_of(whole[expert])
        weight = weight.contiguous()
        escapes += linear.code(address_of(weight), n_in, n_out, at, len(escapes) // 8)
    return whole, torch.frombuffer(escapes or bytearray(8), dtype=torch.uint8)


def _placed(shipped: ShippedWeights, arena: Arena) -> tuple[Tensor, Tensor]:
    n_experts, n_out, n_in = shipped.shape
    rows = -(-n_out // BLOCK) * BLOCK
    data = arena.take(n_experts * rows * n_in // 2).view(n_experts, -1)
    exponents = arena.take(n_experts * rows * n_in // GROUP).view(n_experts, -1)
    for expert in range(n_experts):
        blocks, steps = shipped.of(expert)
        to = address_of(data[expert]), address_of(exponents[expert])
        linear.place_mxfp4(address_of(blocks), address_of(steps), n_in, n_out, *to)
    return data, exponents
