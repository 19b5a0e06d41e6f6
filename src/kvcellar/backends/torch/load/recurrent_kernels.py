"""Kernels of other packages that transformers calls for recurrent layers, on cards alone.

transformers takes flash-linear-attention, mamba-ssm or causal-conv1d in place of its own functions
wherever they can be imported, whatever device a model is on. Their kernels run on cards; a model on
a CPU beside them, and the trials by which a model is learnt, would fail.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_KERNEL_DEVICES = ("cuda", "xpu")
_TUNED = ("fla", "mamba_ssm", "causal_conv1d")
"""Packages whose kernels Triton compiles, and tunes by measuring them."""

MOST_TUNED = 6
"""Settings of a kernel that are measured."""

_DTYPES = (torch.bfloat16, torch.float16)
"""Types that the packages' kernels are for: float32 is wanted exactly, and is transformers'."""


def choose_by_device(classes: Iterable[type[Any]]) -> None:
    """Have the modules that classes of transformers are defined in choose by their tensors.

    Where a function of transformers' was replaced by a package's, the package's is called with
    tensors of 16 bits on a card, and transformers' own with all others. Nothing is changed where
    no package is there, nor a second time.

    Args:
        classes: of networks.
    """
    for name in {kind.__module__ for kind in classes}:
        module = sys.modules[name]
        for key, value in list(vars(module).items()):
            own = _replaced(value)
            if own is not None:
                setattr(module, key, _chosen(value, own))
    bound_tuning()


def bound_tuning() -> None:
    """Have kernels of other packages choose between few settings, spread over those they offer.

    Each is compiled and measured when a kernel first runs: all of them took a minute of silence.
    """
    loaded = [one for name, one in list(sys.modules.items()) if name.split(".")[0] in _TUNED]
    if not loaded:
        return
    from triton.runtime import Autotuner, KernelInterface  # Triton is there where these are

    for kernel in [value for module in loaded for value in vars(module).values()]:
        while isinstance(kernel, KernelInterface):
            if isinstance(kernel, Autotuner) and len(kernel.configs) > MOST_TUNED:
                n, last = len(kernel.configs), MOST_TUNED - 1
                kernel.configs = [kernel.configs[i * (n - 1) // last] for i in range(MOST_TUNED)]
            kernel = getattr(kernel, "fn", None)


def _replaced(function: Any) -> Callable[..., Any] | None:
    """Return transformers' own function, where a package's stands in for it; else None."""
    if not inspect.isfunction(function) or not hasattr(function, "__wrapped__"):
        return None
    found = inspect.getclosurevars(function).nonlocals
    own: Callable[..., Any] | None = found.get("torch_function")
    return own if found.get("is_new_implementation") is True else None


def _chosen(kernel: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls one of two by its first tensor."""
    parameters = inspect.signature(own).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    @functools.wraps(own)
    def choose(*given: Any, **named: Any) -> Any:
        first = next(one for one in (*given, *named.values()) if isinstance(one, Tensor))
        if first.device.type in _KERNEL_DEVICES and first.dtype in _DTYPES:
            return kernel(*given, **named)
        if not takes_all:
            named = {name: value for name, value in named.items() if name in parameters}
        return own(*given, **named)

    return choose
