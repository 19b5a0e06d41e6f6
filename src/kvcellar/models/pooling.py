"""Pooling of an embedding model, as its files say it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvcellar.models.checkpoint import read_json


def pooling_of(path: Path) -> Literal["mean", "last"]:
    """Return how a checkpoint's vectors are pooled, as sentence-transformers writes it; else mean.

    Raises:
        ModelError: the file that says it cannot be read.
    """
    file = path / "1_Pooling" / "config.json"
    said = read_json(file) if file.is_file() else {}
    return "last" if said.get("pooling_mode_lasttoken") else "mean"
