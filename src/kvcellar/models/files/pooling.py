"""Pooling of an embedding model, as its files say it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvcellar.errors import ModelError
from kvcellar.models.files.checkpoint import read_json

Pooling = Literal["mean", "last", "cls"]

_MODES: dict[str, Pooling] = {
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
    "cls_token": "cls",
    "cls": "cls",
}


def pooling_of(folder: Path) -> Pooling:
    """Return how a checkpoint's vectors are pooled, as sentence-transformers writes it; else mean.

    Raises:
        ModelError: the file that says it cannot be read, or says another way.
    """
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return "mean"
    said = read_json(file)
    prefix = "pooling_mode_"
    wanted = [key.removeprefix(prefix) for key in said if said[key] is True and prefix in key]
    if isinstance(said.get("pooling_mode"), str):
        wanted = [said["pooling_mode"]]
    if len(wanted) != 1 or wanted[0] not in _MODES:
        raise ModelError(f"{file} wants {wanted}; known is one of {', '.join(_MODES)}")
    return _MODES[wanted[0]]
