"""The NumPy backend: slow and obviously right. What the other backends have to agree with.

Imports bookkeeping and NumPy; no kernel and no runtime come in.

Start in ``caches.py``.
"""

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
