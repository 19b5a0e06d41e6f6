"""Which cells hold which tokens: integers, written once, shared by every backend."""

from kvcellar.bookkeeping.cells import CellPool
from kvcellar.bookkeeping.contiguous import ContiguousBookkeeping
from kvcellar.bookkeeping.pages import PagedBookkeeping, PagePool
from kvcellar.bookkeeping.sequences import SeqBookkeeping
from kvcellar.bookkeeping.spans import Span
from kvcellar.bookkeeping.tree import DraftTree, TreeBookkeeping

__all__ = [
    "CellPool",
    "ContiguousBookkeeping",
    "DraftTree",
    "PagePool",
    "PagedBookkeeping",
    "SeqBookkeeping",
    "Span",
    "TreeBookkeeping",
]
