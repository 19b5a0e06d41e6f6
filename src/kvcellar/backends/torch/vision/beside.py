"""Models in GGUF with their vision parts: what both are together, for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcellar.backends.torch.vision.part import VisionClass
from kvcellar.errors import ModelError
from kvcellar.models.gguf.mmproj import Mmproj, mmproj_beside
from kvcellar.models.text.tokenizer import quiet


def seen_beside(path: Path) -> tuple[Mmproj | None, str]:
    """Return the vision part that lies beside a model in GGUF, which can be made and read.

    Args:
        path: the model.

    Returns:
        None, and why, where there is none; without a reason where no file is named as one.
    """
    seen, why = mmproj_beside(path)
    if seen is None:
        return None, why
    try:
        with quiet(lambda part: None):
            VisionClass(seen.config).check(seen.file)
    except ModelError as error:
        said, name = str(error), str(seen.file.path)
        return None, said if name in said else f"{name} cannot be read: {said}"
    return seen, ""


def seeing_config(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model in GGUF with its vision part; its own where it has none."""
    seen, _ = seen_beside(path)
    return raw if seen is None else seen.config
