"""The MLX backend: float and quantised pools on Apple silicon's GPU, and on any CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcellar.backends.mlx.caches import (
    MlxContiguousCache,
    MlxPagedCache,
    MlxSeqCache,
    MlxTreeCache,
)
from kvcellar.registry import CacheBuilderRegistry

if TYPE_CHECKING:
    from kvcellar.models.loading import LoadedModel

__all__ = [
    "MlxContiguousCache",
    "MlxPagedCache",
    "MlxSeqCache",
    "MlxTreeCache",
    "check_model",
    "load_model",
]

_builders = CacheBuilderRegistry.instance()
_builders.register_builder("mlx", "contiguous", MlxContiguousCache)
_builders.register_builder("mlx", "seq", MlxSeqCache)
_builders.register_builder("mlx", "paged", MlxPagedCache)
_builders.register_builder("mlx", "tree", MlxTreeCache)


def check_model(name_or_path: Any, **options: Any) -> None:
    """Find what is wrong with a model of mlx-lm; see :func:`kvcellar.models.check_model`."""
    from kvcellar.backends.mlx.loading import check_model

    check_model(name_or_path, **options)


def load_model(name_or_path: Any, **options: Any) -> LoadedModel:
    """A model of mlx-lm; see :func:`kvcellar.models.load_model`. Caches alone need no mlx-lm."""
    from kvcellar.backends.mlx.loading import load_model

    return load_model(name_or_path, **options)
