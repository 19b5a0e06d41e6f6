"""The PyTorch backend: float and quantised pools and attention, on CPU and CUDA.

Imports torch, transformers and the kernel; no engine and no agent come in.

Start in ``loading.py``.
"""

from kvcellar.backends.torch.cache.caches import (
    TorchContiguousCache,
    TorchPagedCache,
    TorchSeqCache,
    TorchTreeCache,
)
from kvcellar.kernel import levels
from kvcellar.models.model import ModelLoader
from kvcellar.registry import Backend

__all__ = [
    "BACKEND",
    "TorchContiguousCache",
    "TorchPagedCache",
    "TorchSeqCache",
    "TorchTreeCache",
]


def _loader() -> ModelLoader:
    from kvcellar.backends.torch import loading

    return loading


BACKEND = Backend(
    {
        "contiguous": TorchContiguousCache,
        "seq": TorchSeqCache,
        "paged": TorchPagedCache,
        "tree": TorchTreeCache,
    },
    _loader,
    has_adapters=True,
    has_ranks=True,
)

levels.warn_if_missing()
