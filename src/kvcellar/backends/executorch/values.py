"""Inputs and outputs of programs: torch's tensors and Python's numbers as C structures."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvcellar.backends.executorch import native
from kvcellar.errors import StepError


def put_value(value: native.Value, given: Any) -> Any:
    """Describe an input; what is returned has to live until the run is over."""
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu" or given.dtype not in native.DTYPES or given.dim() > 8:
            raise StepError(
                f"programs take tensors of the CPU with up to 8 dims, got {given.dtype} "
                f"{tuple(given.shape)} on {given.device}"
            )
        given = given.contiguous()
        value.tag, value.dtype, value.n_dims = (
            native.TENSOR,
            native.DTYPES[given.dtype],
            given.dim(),
        )
        value.sizes[: given.dim()] = given.shape
        value.data = given.data_ptr()
    elif isinstance(given, bool):
        value.tag, value.number = native.BOOL, given
    elif isinstance(given, int):
        value.tag, value.number = native.INT, given
    elif isinstance(given, float):
        value.tag, value.real = native.DOUBLE, given
    else:
        raise StepError(f"programs take tensors and numbers, got {type(given).__name__}")
    return given


def take_value(value: native.Value) -> Any:
    """Copy an output."""
    if value.tag == native.TENSOR:
        out = torch.empty(
            tuple(value.sizes[: value.n_dims]), dtype=native.TORCH_DTYPES[value.dtype]
        )
        if value.n_bytes:
            ctypes.memmove(out.data_ptr(), value.data, value.n_bytes)
        return out
    if value.tag == native.TEXT:
        return ctypes.string_at(value.data, value.n_bytes).decode()
    if value.tag == native.DOUBLE:
        return value.real
    if value.tag == native.BOOL:
        return bool(value.number)
    return int(value.number) if value.tag == native.INT else None
