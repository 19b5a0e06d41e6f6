"""Triton's interpreter, several times faster: it prepares its language once and not per call.

Triton 3.6's takes an array of one number for an index, which NumPy refuses since 2.4: here any
version hands on the number.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np


def device() -> Any:
    """Where tensors of a test are: a card where there is one and nothing is interpreted."""
    import torch

    is_card = os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()
    return torch.device("cuda" if is_card else "cpu")


def hasten() -> None:
    """Have calls between kernels' functions go straight on, without checks; NumPy sorts."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    found: Any = interpreter
    if getattr(found.InterpretedFunction.__call__, "is_hastened", False):
        return
    builder = found.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    prepared: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = self.fn.__globals__
        if id(names) not in prepared:
            prepared.add(id(names))
            if not any(value is tl for value in names.values()):  # else its caller has done it
                found._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    patch_tensor = found._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def sort(x: Any) -> Any:  # Triton's own takes seconds: it exclusive-ors element by element
        return tl.tensor(found.TensorHandle(np.sort(x.handle.data), x.handle.dtype), x.type)

    tl.sort = sort
    call.is_hastened = True  # type: ignore[attr-defined]
    found.InterpretedFunction.__call__ = call
    found._patch_lang_tensor = patch
