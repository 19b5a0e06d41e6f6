"""kvcellar: KV caches for local models and agents. One model, swappable caches.

Importing this package needs NumPy alone; a backend's runtime is imported when a session or a model
of that backend is made.
"""

from kvcellar.cache import Cache, DecodeCache, SeqCache, TreeCache, TreeSeqCache
from kvcellar.cache_config import CacheConfig, SharedPrefix, make_config
from kvcellar.errors import KVCellarError
from kvcellar.metadata import read_kv_cache_metadata, write_kv_cache_metadata
from kvcellar.registry import (
    Backend,
    CacheRegistry,
    CacheSession,
    backend_names,
    freeze_prefix,
    make_decode_session,
    make_paged_session,
    make_seq_session,
    make_tree_session,
    register_backend,
)
from kvcellar.types import AttendKind, AttendSpec, LayerGroup, ModelCacheParams, Run, StepPlan

__version__ = "0.1.0"

__all__ = [
    "AttendKind",
    "AttendSpec",
    "Backend",
    "Cache",
    "CacheConfig",
    "CacheRegistry",
    "CacheSession",
    "DecodeCache",
    "KVCellarError",
    "LayerGroup",
    "ModelCacheParams",
    "Run",
    "SeqCache",
    "SharedPrefix",
    "StepPlan",
    "TreeCache",
    "TreeSeqCache",
    "__version__",
    "backend_names",
    "freeze_prefix",
    "make_config",
    "make_decode_session",
    "make_paged_session",
    "make_seq_session",
    "make_tree_session",
    "read_kv_cache_metadata",
    "register_backend",
    "write_kv_cache_metadata",
]
