"""The native backend: NumPy arrays, written and attended by the CPU kernel.

Imports NumPy and the kernel; no other runtime comes in.

Start in ``loading.py``.
"""

from kvcellar.backends.native.caches import (
    NativeContiguousCache,
    NativePagedCache,
    NativeSeqCache,
    NativeTreeCache,
)
from kvcellar.kernel import levels
from kvcellar.models.model import ModelLoader
from kvcellar.registry import Backend

__all__ = [
    "BACKEND",
    "NativeContiguousCache",
    "NativePagedCache",
    "NativeSeqCache",
    "NativeTreeCache",
]


def _loader() -> ModelLoader:
    from kvcellar.backends.native import loading

    return loading


BACKEND = Backend(
    {
        "contiguous": NativeContiguousCache,
        "seq": NativeSeqCache,
        "paged": NativePagedCache,
        "tree": NativeTreeCache,
    },
    _loader,
)

levels.warn_if_missing()
