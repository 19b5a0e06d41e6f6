"""Where the store is when nobody says."""

from __future__ import annotations

from pathlib import Path

from kvcellar.home import default_home

__all__ = ["default_home", "default_store"]


def default_store() -> Path:
    """Return the folder of the store: ``store`` in :func:`default_home`."""
    return default_home() / "store"
