"""The MLX backend: float and quantised pools on Apple silicon's GPU, and on any CPU."""

from kvcellar.backends.mlx.caches import (
    MlxContiguousCache,
    MlxPagedCache,
    MlxSeqCache,
    MlxTreeCache,
)
from kvcellar.registry import CacheBuilderRegistry

__all__ = ["MlxContiguousCache", "MlxPagedCache", "MlxSeqCache", "MlxTreeCache"]

_builders = CacheBuilderRegistry.instance()
_builders.register_builder("mlx", "contiguous", MlxContiguousCache)
_builders.register_builder("mlx", "seq", MlxSeqCache)
_builders.register_builder("mlx", "paged", MlxPagedCache)
_builders.register_builder("mlx", "tree", MlxTreeCache)
