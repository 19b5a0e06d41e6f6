"""A flat batch as a cache begins a step with it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def stretches(seq_ids: Iterable[int]) -> list[tuple[int, int]]:
    """(seq_id, n_tokens) of each stretch, of whose token each is."""
    return [(seq_id, len([*same])) for seq_id, same in groupby(seq_ids)]
