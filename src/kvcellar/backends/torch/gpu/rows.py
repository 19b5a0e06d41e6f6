"""Rows of all layers between pools and a buffer, as they are stored: a launch for each part."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from kvcellar.backends.torch.gpu import stores
from kvcellar.backends.torch.gpu.launch import on_device
from kvcellar.backends.torch.gpu.plans import rounded_up

_NUMBERS = {1: (tl.uint8, torch.uint8), 2: (tl.int16, torch.int16), 4: (tl.int32, torch.int32)}
"""Types in which numbers of so many bytes are copied."""


class Parts(NamedTuple):
    """A part of K or V in all layers of a group, as the kernel is told it.

    Attributes:
        table: int64 ``[n_layers, 2]`` on the device: address of each layer's numbers, and how far
            its heads are apart.
        s_cell: how far cells are apart.
        s_block: how far blocks are apart.
        n_heads: of each layer.
        n_bytes: of a number.
        block: cells of a block; 0 for pools of one piece.
    """

    table: Tensor
    s_cell: int
    s_block: int
    n_heads: int
    n_bytes: int
    block: int


def copy(parts: Parts, cells: Tensor, staged: Tensor, *, step: int, at: int, is_read: bool) -> None:
    """Copy rows of all layers; one launch.

    Args:
        parts: of the pools.
        cells: ``[n]``.
        staged: ``[n_layers, n_heads, n, width]``, contiguous, in numbers of as many bytes.
        step: every so many-th number of a pool's row,
        at: from this one on.
        is_read: true from the pools to ``staged``, false back.
    """
    n_layers, n_heads, n_tokens, width = staged.shape
    if not n_tokens:
        return
    kind, same = _NUMBERS[parts.n_bytes]
    with on_device(staged.device):
        stores.copy_rows[(n_tokens, n_layers)](
            parts.table, cells, staged.view(same), n_tokens, parts.s_cell, parts.s_block,
            kind, n_heads, rounded_up(n_heads), width, rounded_up(width), step, at, parts.block,
            is_read,
        )  # fmt: skip
