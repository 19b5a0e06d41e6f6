"""The PyTorch backend: float pools and attention on CPU and CUDA."""

from kvcellar.backends.torch.caches import (
    TorchContiguousCache,
    TorchPagedCache,
    TorchSeqCache,
    TorchTreeCache,
)
from kvcellar.registry import CacheBuilderRegistry

__all__ = ["TorchContiguousCache", "TorchPagedCache", "TorchSeqCache", "TorchTreeCache"]

_builders = CacheBuilderRegistry.instance()
_builders.register_builder("torch", "contiguous", TorchContiguousCache)
_builders.register_builder("torch", "seq", TorchSeqCache)
_builders.register_builder("torch", "paged", TorchPagedCache)
_builders.register_builder("torch", "tree", TorchTreeCache)
