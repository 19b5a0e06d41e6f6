"""Space of a history: what besides its tokens decides about its K and V, and who shares them."""

from __future__ import annotations

from typing import NamedTuple

LONG = "long"
"""Texts beyond the length for which a model's RoPE was made, where that changes its factors."""


class Space(NamedTuple):
    """Histories of one space share K and V where their tokens are the same; others never do.

    Attributes:
        adapter: name of the adapter that computes them; empty: the model's own weights do.
        salt: a text that only those who may share know; empty: everybody may.
        rope: ``LONG`` where positions are turned by the factors of long texts; else empty.
    """

    adapter: str = ""
    salt: str = ""
    rope: str = ""


SHARED = Space()
"""The space of a model's own weights, for everybody."""
