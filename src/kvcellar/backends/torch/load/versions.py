"""Versions that a verdict on a model depends on."""

from __future__ import annotations

import torch
import transformers

from kvcellar.models.check import VERSION
from kvcellar.version import __version__


def versions() -> dict[str, str]:
    """Return the versions that a verdict on a model depends on."""
    return {
        "kvcellar": __version__,
        "check": str(VERSION),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
