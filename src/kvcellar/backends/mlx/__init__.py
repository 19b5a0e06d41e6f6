"""The MLX backend: caches in MLX, and models of mlx-lm on them; Apple's GPUs, and any CPU.

Imports MLX and mlx-lm; nothing of torch comes in.

Start in ``cache/caches.py`` for a cache, in ``loading.py`` for a model.
"""

from __future__ import annotations

from kvcellar.backends.mlx.cache.caches import (
    MlxContiguousCache,
    MlxPagedCache,
    MlxSeqCache,
    MlxTreeCache,
)
from kvcellar.models.model import ModelLoader
from kvcellar.registry import Backend

__all__ = [
    "BACKEND",
    "MlxContiguousCache",
    "MlxPagedCache",
    "MlxSeqCache",
    "MlxTreeCache",
]


def _loader() -> ModelLoader:
    from kvcellar.backends.mlx import loading

    return loading


BACKEND = Backend(
    {
        "contiguous": MlxContiguousCache,
        "seq": MlxSeqCache,
        "paged": MlxPagedCache,
        "tree": MlxTreeCache,
    },
    _loader,
)
