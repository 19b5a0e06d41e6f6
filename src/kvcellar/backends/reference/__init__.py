"""The NumPy backend: slow, obviously right. What the other backends have to agree with."""

from kvcellar.backends.reference.attend import attend, visible
from kvcellar.backends.reference.caches import (
    ReferenceCache,
    ReferenceContiguousCache,
    ReferencePagedCache,
    ReferenceSeqCache,
    ReferenceTreeCache,
    Segment,
)
from kvcellar.backends.reference.pools import Pool
from kvcellar.registry import Backend

__all__ = [
    "Pool",
    "ReferenceCache",
    "ReferenceContiguousCache",
    "ReferencePagedCache",
    "ReferenceSeqCache",
    "ReferenceTreeCache",
    "Segment",
    "attend",
    "visible",
]

BACKEND = Backend(
    {
        "contiguous": ReferenceContiguousCache,
        "seq": ReferenceSeqCache,
        "paged": ReferencePagedCache,
        "tree": ReferenceTreeCache,
    },
)
