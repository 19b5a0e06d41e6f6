"""Checks of a config for what would run wrongly, and what it says of how weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError


def check_architecture(raw: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint whose weights are stored in a way that nobody here reads.

    Raises:
        ModelError: its quantisation is not supported.
    """
    quantization = raw.get("quantization_config")
    if is_quantised_for_mlx(raw):
        raise ModelError(f"{folder} is quantised for MLX; load it with the backend mlx")
    if quantization and quantization.get("quant_method") != "mxfp4":
        raise ModelError(
            f"{folder} is quantised with {quantization.get('quant_method')!r}, which is not "
            f"supported; choose a checkpoint in bfloat16, float16 or float32"
        )


def is_quantised_for_mlx(raw: Mapping[str, Any]) -> bool:
    """Return true if a checkpoint's config says that only MLX's own functions read its weights."""
    return "quantization" in raw


def is_mxfp4(raw: Mapping[str, Any]) -> bool:
    """Return true if a checkpoint's config says that its experts are in MXFP4."""
    found = raw.get("quantization_config")
    return isinstance(found, Mapping) and found.get("quant_method") == "mxfp4"


def without_quantisation(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's config without what it says of how its weights are stored."""
    return {k: v for k, v in raw.items() if k not in ("quantization", "quantization_config")}
