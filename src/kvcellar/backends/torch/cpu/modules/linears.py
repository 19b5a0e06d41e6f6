"""Linear layers whose weights the CPU kernel reads: bfloat16 in 12 or 16 bits, int8, int4.

Decoding reads every weight once per step. For few tokens the kernel does that at the memory's
speed; for many, arithmetic is what counts. With a matrix unit the kernel's product is as fast as
torch's, and what is not in 16 bits becomes that on its way there, in a core's cache. Elsewhere
torch's product of bfloat16 is slow unless the processor multiplies it, and the kernel's, in
float32 or with AVX2 in integers of 16 bits, is not. Where torch's is used packed weights are
expanded for it, some millions at a time; where the processor multiplies bytes four at a time
(VNNI), any number of tokens meets them as they are.
"""

from __future__ import annotations

import functools
import math
import platform
import threading

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvcellar.backends.torch.cache.kernel import address_of, dtype_of
from kvcellar.backends.torch.cache.memory import Arena
from kvcellar.kernel import layers, levels
from kvcellar.kernel import linear as native
from kvcellar.models.weights import (
    BLOCK,
    CODED_SAMPLE,
    SHARED,
    are_mostly_coded,
    can_code,
    coded_bytes,
)

FEW_BF16 = 4
"""Tokens up to which reading bfloat16 weights is what they cost; more are for a matrix product."""

FEW_CODED = 64
"""Tokens of a step for which a layer is one call, where the kernel multiplies any number."""

FEW_PACKED = 48
"""Tokens up to which packed weights are multiplied as they are, where torch multiplies more."""

FEW_PACKED_AMX = 32
"""Tokens up to which they are, where the kernel multiplies more, on the matrix unit."""

EXPANDED = 1 << 24
"""Numbers that are expanded at a time, in 32 MiB."""


@functools.cache
def torch_multiplies_bf16() -> bool:
    """Return true if torch's product of bfloat16 is fast here; elsewhere it converts, or is slow.

    Intel's processors without a matrix unit take four times as long for a vector of bfloat16 pairs
    as for one of float32: torch makes 170 GFLOP/s in bfloat16, 300 in float32, the kernel 240.
    """
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return True  # not known: torch's product, as anywhere else
    found = torch.cpu.get_capabilities()
    is_fast = levels.levels()[0] is levels.Level.bf16
    return bool(found.get("amx_bf16") or (found.get("avx512_bf16") and is_fast))


class Expanded:
    """Memory that the layers of a model take turns to expand their weights into."""

    def __init__(self, n_numbers: int) -> None:
        """Allocate so many numbers in bfloat16."""
        self.numbers = torch.empty(n_numbers, dtype=torch.bfloat16)
        self.lock = threading.Lock()


class KernelLinear(nn.Module):
    """``nn.Linear`` for evaluation on a CPU, with weights that the kernel reads."""

    def __init__(
        self,
        linear: nn.Linear,
        bits: int,
        expanded: Expanded | None,
        arena: Arena | None = None,
    ) -> None:
        """Hold a layer's weights as they are (16 bits, or 12), or packed in 8 or 4 and scales.

        Args:
            linear: the layer; in bfloat16 for 16 and 12 bits; but for 16, inputs in whole groups.
            bits: of a weight.
            expanded: for all but 16 bits; None: any number of tokens meets them as they are.
            arena: where weights shall lie; None: packed ones anywhere, others where they are.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits = bits
        self.bias = linear.bias
        self._expanded = expanded
        weight = linear.weight.detach()
        if bits == 16:
            if arena is not None:
                weight = arena.copy(weight)
            self.weight = nn.Parameter(weight, requires_grad=False)
            beside_at = 0
        else:
            held, beside = code(weight, arena) if bits == 12 else pack(weight, bits, arena)
            self.register_buffer("weight", held)
            self.register_buffer("escapes" if bits == 12 else "scales", beside)
            beside_at = address_of(beside)
        self._weights = native.LinearWeights(
            native.format_of(bits),
            self.in_features,
            self.out_features,
            address_of(self.weight),
            beside_at,
        )

    @property
    def few(self) -> int:
        """Tokens up to which the kernel reads the weights."""
        can_multiply = self._weights.can_multiply
        if self.bits >= 12 and (can_multiply or (self.bits == 12 and native.multiplies_pairs())):
            return FEW_CODED
        if self.bits >= 12 and torch_multiplies_bf16():
            return FEW_BF16
        return FEW_PACKED_AMX if can_multiply else FEW_PACKED

    def for_kernel(self) -> layers.LinearLayer:
        """Return what the kernel reads: the weights, and the address of the bias, or 0."""
        bias = 0 if self.bias is None else address_of(self.bias)
        return layers.LinearLayer(self._weights, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[..., in_features] -> [..., out_features]``, in the type of x."""
        n_tokens = x.numel() // self.in_features
        by_matrix = x.dtype == torch.bfloat16 and self._is_for_matrix(n_tokens)
        by_torch = self.bits == 16 and n_tokens > FEW_BF16 and torch_multiplies_bf16()
        if by_torch and not by_matrix:
            return F.linear(x, self.weight, self.bias)
        most = FEW_BF16 if self.bits == 12 else FEW_PACKED
        if n_tokens > most and self._expanded is not None and not by_matrix:
            return self._by_expanding(x, self._expanded)
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.out_features))
        if by_matrix:
            self._weights.multiply(address_of(x), n_tokens, address_of(out))
        else:
            dtype = dtype_of(x.dtype)
            self._weights.linear(address_of(x), n_tokens, dtype, address_of(out), dtype)
        return out if self.bias is None else out.add_(self.bias)

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights of outputs that are there, ``[...] -> [..., in_features]``.

        Of 12 bits in bfloat16; of 8 and 4 bits in that or in float32; of 16 bits not at all.
        """
        outputs = outputs.long().contiguous()
        found = torch.empty(*outputs.shape, self.in_features, dtype=dtype, device=outputs.device)
        number = dtype_of(dtype)
        self._weights.gather(address_of(outputs), outputs.numel(), number, address_of(found))
        return found

    def _is_for_matrix(self, n_tokens: int) -> bool:
        """Return true if so many tokens in bfloat16 are for the kernel's matrix unit."""
        few = FEW_BF16 if self.bits >= 12 else FEW_PACKED_AMX
        return n_tokens > few and self._weights.can_multiply

    def _by_expanding(self, x: Tensor, expanded: Expanded) -> Tensor:
        """Through torch's matrix product, some rows of the weights at a time."""
        blocks = max(1, expanded.numbers.numel() // (BLOCK * self.in_features))
        n_blocks = -(-self.out_features // BLOCK)
        parts = []
        with expanded.lock:
            for first in range(0, n_blocks, blocks):
                stop = min(first + blocks, n_blocks)
                rows = min(stop * BLOCK, self.out_features) - first * BLOCK
                self._weights.unpack(first, stop, address_of(expanded.numbers))
                weight = expanded.numbers[: rows * self.in_features].view(rows, self.in_features)
                parts.append(F.linear(x, weight))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return out if self.bias is None else out.add_(self.bias)


def code(weight: Tensor, arena: Arena | None = None) -> tuple[Tensor, Tensor]:
    """Code bfloat16 weights ``[n_out, n_in]`` in 12 bits: bytes, and those of what does not fit."""
    n_out, n_in = weight.shape
    weight = weight.contiguous()
    n_bytes = coded_bytes(n_out, n_in)
    data = torch.empty(n_bytes, dtype=torch.uint8) if arena is None else arena.take(n_bytes)
    escapes = native.code(address_of(weight), n_in, n_out, address_of(data))
    return data, torch.frombuffer(bytearray(escapes or bytes(8)), dtype=torch.uint8)


def reads_weights() -> bool:
    """Return true if the kernel, which reads such weights, is built on this machine."""
    return levels.is_available()


def codes_weights() -> bool:
    """Return true if the kernel reads bfloat16 weights in 12 bits on this machine."""
    return levels.is_available() and native.reads_coded()


def codes_well(weight: Tensor) -> bool:
    """Return true if weights ``[n_out, n_in]`` are read faster in 12 bits: nearly all fit."""
    if weight.dtype != torch.bfloat16 or not can_code(weight.shape[1]) or not codes_weights():
        return False
    some = weight[:: max(1, weight.shape[0] // CODED_SAMPLE)]
    _, escapes = code(some)
    return are_mostly_coded(escapes.nbytes // 8, some.numel())


def pack(weight: Tensor, bits: int, arena: Arena | None = None) -> tuple[Tensor, Tensor]:
    """Weights ``[n_out, n_in]`` in 8 or 4 bits, as :func:`kvcellar.kernel.linear.pack` says.

    Returns:
        Bytes ``[n_blocks, of a block]``, and float16 scales ``[n_blocks, n_scales, 16]``.
    """
    n_out, n_in = weight.shape
    weight = (weight if weight.dtype == torch.bfloat16 else weight.float()).contiguous()
    shape = -(-n_out // BLOCK), BLOCK * n_in * bits // 8
    of_scales = shape[0], -(-n_in // SHARED[bits]), BLOCK
    if arena is None:
        data = torch.empty(shape, dtype=torch.uint8)
        scales = torch.empty(of_scales, dtype=torch.float16)
    else:
        data = arena.take(math.prod(shape)).view(shape)
        scales = arena.take(2 * math.prod(of_scales)).view(torch.float16).view(of_scales)
    native.pack(
        address_of(weight),
        dtype_of(weight.dtype),
        native.format_of(bits),
        n_in,
        n_out,
        address_of(data),
        address_of(scales),
    )
    return data, scales
