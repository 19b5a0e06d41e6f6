"""Choice between Triton's kernels and torch's operations; imports no Triton to make it."""

from __future__ import annotations

import functools
import importlib.util
from typing import TypeGuard

import torch
from torch import Tensor

from kvcellar.backends.torch.cache.exact import LayerPool, PoolBeside
from kvcellar.backends.torch.cache.pools import BlockFirstPool, Pool

ON_CPU = False
"""Tests set it, where Triton interprets its kernels (TRITON_INTERPRET=1): a CPU is a GPU then."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LONGEST_ROW = 576
"""Numbers of the longest rows, latent ones with their rotary part, that a tile has room for."""


def takes(device: torch.device, q: Tensor) -> bool:
    """Return true if Triton's kernels write and attend in place of torch's operations.

    Not for queries of other types, nor for very long rows.

    Args:
        device: of K and V.
        q: ``[1, n_heads, T, q_dim]``.
    """
    return is_gpu(device) and q.dtype in DTYPES and q.shape[3] <= LONGEST_ROW


def has_cells(pool: LayerPool, device: torch.device) -> TypeGuard[Pool | BlockFirstPool]:
    """Return true if all of a pool's cells lie in one place on a GPU: graphs and moves want that.

    Exact cells and those of a frozen prefix are attended beside others, launch by launch.
    """
    return is_gpu(device) and not isinstance(pool, PoolBeside)


def is_gpu(device: torch.device) -> bool:
    """Return true if Triton's kernels run on a device."""
    return ON_CPU if device.type == "cpu" else device.type in ("cuda", "xpu") and has_triton()


def has_graphs(device: torch.device) -> bool:
    """Return true if small forwards on a device are recorded as graphs."""
    return device.type == "cuda" and has_triton()


@functools.cache
def has_triton() -> bool:
    """Return true if Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None
