"""The PyTorch backend: float and quantised pools and attention on CPU and CUDA."""

from kvcellar.backends.torch.caches import (
    TorchContiguousCache,
    TorchPagedCache,
    TorchSeqCache,
    TorchTreeCache,
)
from kvcellar.backends.torch.eagle3.kernel import make_eagle3_kernel
from kvcellar.backends.torch.fast.hold import hold_weights
from kvcellar.backends.torch.fast.linears import codes_weights, reads_weights
from kvcellar.kernel import levels
from kvcellar.registry import CacheBuilderRegistry

__all__ = [
    "TorchContiguousCache",
    "TorchPagedCache",
    "TorchSeqCache",
    "TorchTreeCache",
    "codes_weights",
    "hold_weights",
    "make_eagle3_kernel",
    "reads_weights",
]

_builders = CacheBuilderRegistry.instance()
_builders.register_builder("torch", "contiguous", TorchContiguousCache)
_builders.register_builder("torch", "seq", TorchSeqCache)
_builders.register_builder("torch", "paged", TorchPagedCache)
_builders.register_builder("torch", "tree", TorchTreeCache)

levels.warn_if_missing()
