"""Space of a history: what besides its tokens decides about its K and V, and who shares them."""

from __future__ import annotations

from typing import NamedTuple


class Space(NamedTuple):
    """Histories of one space share K and V where their tokens are the same; others never do.

    Attributes:
        adapter: name of the adapter that computes them; empty: the model's own weights do.
        salt: a text that only those who may share know; empty: everybody may.
    """

    adapter: str = ""
    salt: str = ""


SHARED = Space()
"""The space of a model's own weights, for everybody."""
