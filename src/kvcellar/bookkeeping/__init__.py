"""Bookkeeping of cells and tokens: integers, written once, shared by every backend.

Imports types and settings; no bytes, no tensors and no text come in.

Start in ``face.py`` for the verbs, in ``steps.py`` for the life of one forward.
"""

from kvcellar.bookkeeping.cells.pool import BlockPool
from kvcellar.bookkeeping.cells.spans import Span
from kvcellar.bookkeeping.contiguous import OneSequence
from kvcellar.bookkeeping.layouts.drafts import DraftTree
from kvcellar.bookkeeping.layouts.layout import Bytes, Layout, NoBytes, SharedLayout
from kvcellar.bookkeeping.sequences import Sequences
from kvcellar.bookkeeping.steps import Steps
from kvcellar.bookkeeping.trees import TreeSequences

__all__ = [
    "BlockPool",
    "Bytes",
    "DraftTree",
    "Layout",
    "NoBytes",
    "OneSequence",
    "Sequences",
    "SharedLayout",
    "Span",
    "Steps",
    "TreeSequences",
]
