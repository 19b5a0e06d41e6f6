"""Common prefixes of texts, messages and digests; for tokens see ``kvcellar.history``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def n_alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many items two sequences begin with in common."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
