"""The NumPy backend: slow, obviously right. What the other backends have to agree with."""

from kvcellar.backends.reference.attend import attend, visible
from kvcellar.backends.reference.caches import (
    ReferenceBytes,
    ReferenceContiguousCache,
    ReferencePagedCache,
    ReferenceSeqCache,
    ReferenceTreeCache,
    Segment,
)
from kvcellar.backends.reference.pools import Pool
from kvcellar.registry import CacheBuilderRegistry

__all__ = [
    "Pool",
    "ReferenceBytes",
    "ReferenceContiguousCache",
    "ReferencePagedCache",
    "ReferenceSeqCache",
    "ReferenceTreeCache",
    "Segment",
    "attend",
    "visible",
]

_builders = CacheBuilderRegistry.instance()
_builders.register_builder("reference", "contiguous", ReferenceContiguousCache)
_builders.register_builder("reference", "seq", ReferenceSeqCache)
_builders.register_builder("reference", "paged", ReferencePagedCache)
_builders.register_builder("reference", "tree", ReferenceTreeCache)
