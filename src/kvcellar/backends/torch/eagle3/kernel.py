"""Levels of an EAGLE-3 head by the CPU kernel: one call each, its matrices in 8 bits.

A level of a few guesses is some thirty small operators in torch, and what they take besides their
arithmetic is most of it. Guesses are verified, so what 8 bits round away costs nothing but a guess
now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.backends.torch.cache.forward import can_plan, compiled_steps, pools_of
from kvcellar.backends.torch.cache.kernel import address_of
from kvcellar.backends.torch.cpu.modules.linears import pack
from kvcellar.backends.torch.eagle3.weights import Eagle3Weights
from kvcellar.kernel import attend, layers, levels, linear
from kvcellar.models.weights import can_pack

MOST_TOKENS = 32
"""Tokens of one level at most; torch's matrix products are faster for more."""


class Eagle3Kernel:
    """The weights of a head as the kernel reads them. Shared, and never changed."""

    def __init__(self, head: Eagle3Weights) -> None:
        """Pack the matrices of a head for which :func:`make_eagle3_kernel` found it possible."""
        config = head.config
        self._head = head
        self.size_bytes = 0
        """Bytes of the matrices, held besides the head's own."""
        self._held: list[Tensor] = []
        self._fc = self._packed(head.fc)
        self._level = layers.Eagle3Weights(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            n_vocab=len(head.embedding),
            n_said=config.draft_vocab_size,
            eps=config.rms_norm_eps,
            qkv=self._packed(head.qkv),
            o=self._packed(head.o),
            gate_up=self._packed(head.gate_up),
            down=self._packed(head.down),
            lm_head=self._packed(head.lm_head),
            embedding=self._address(head.embedding),
            qkv_bias=self._address(head.qkv_bias),
            residual_scale=self._address(head.residual_scale),
        )

    def takes(self, cache: object, n_tokens: int) -> TypeGuard[TorchCache]:
        """Return true if a level of so many tokens over this cache is the kernel's."""
        return n_tokens <= MOST_TOKENS and can_plan(cache)

    def join(self, features: Tensor) -> Tensor:
        """Project features, ``[T, n_features] -> [T, hidden]`` in float32, for a few tokens."""
        out = torch.empty(len(features), self._head.config.hidden_size)
        features = features.contiguous()
        dtype = attend.Dtype.float32
        self._fc.linear(address_of(features), len(features), dtype, address_of(out), dtype)
        return out if self._head.fc_bias is None else out.add_(self._head.fc_bias)

    def level(
        self,
        cache: TorchCache,
        tokens: Sequence[int],
        hidden: Tensor,
        above: Sequence[int],
        positions: Sequence[int],
        rows: Sequence[int],
        k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one pass of the head.

        Args:
            cache: one that it ``takes``; the step is complete afterwards.
            tokens: ``[T]``.
            hidden: ``[n, hidden]``, in float32.
            above: ``[T]``: which of its rows each token goes on from.
            positions: ``[T]``.
            rows: ``[R]``: the tokens behind which to guess.
            k: guesses for each.

        Returns:
            Hidden states ``[R, hidden]``, the head's ids ``[R, k]`` and beliefs ``[R, k]``.

        Raises:
            StepError, PositionError: as ``plan``; the step stays open.
        """
        (step,) = compiled_steps(cache, len(tokens), positions)
        ((pool, exact),) = pools_of(cache)
        rope = self._head.rope_table(max(positions) + 1)
        out = torch.empty(len(rows), self._head.config.hidden_size)
        ids = torch.empty(len(rows), k, dtype=torch.int64)
        beliefs = torch.empty(len(rows), k)
        hidden = hidden.contiguous()
        self._level.level(
            step.plan,
            pool,
            step.to_exact,
            exact,
            address_of(rope),
            rope.shape[1],
            tokens,
            positions,
            address_of(hidden),
            len(hidden),
            above,
            rows,
            k,
            address_of(out),
            address_of(ids),
            address_of(beliefs),
        )
        cache.steps.wrote_all()
        return out, ids, beliefs

    def _packed(self, matrix: Tensor) -> linear.LinearWeights:
        """Pack a matrix ``[in, out]`` in 8 bits, and keep it."""
        n_in, n_out = matrix.shape
        packed, scales = pack(matrix.t(), 8)
        self._held += (packed, scales)
        self.size_bytes += packed.nbytes + scales.nbytes
        return linear.LinearWeights(
            linear.WeightFormat.int8, n_in, n_out, address_of(packed), address_of(scales)
        )

    def _address(self, tensor: Tensor | None) -> int:
        """Keep a tensor without gaps; return its address, or 0 where there is none."""
        if tensor is None:
            return 0
        tensor = tensor.contiguous()
        self._held.append(tensor)
        return address_of(tensor)


def make_eagle3_kernel(head: Eagle3Weights) -> Eagle3Kernel | None:
    """Pack a head's matrices for the kernel; None for a head that torch alone runs.

    The kernel takes heads in float32 on a CPU whose matrices have inputs in whole groups.
    """
    is_usual = head.fc.is_cpu and head.fc.dtype == torch.float32
    is_packable = all(can_pack(matrix.shape[0]) for matrix in head.matrices)
    if is_usual and is_packable and levels.is_available():
        return Eagle3Kernel(head)
    return None
