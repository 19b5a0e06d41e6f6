"""Sampling defaults of a checkpoint: its ``generation_config.json``, as far as it says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.checkpoint import read_json
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.packaged import PACKAGED

FILE_NAME = "generation_config.json"

_RANGES = {
    "temperature": (0.0, math.inf, "0 or more"),
    "top_p": (0.0, 1.0, "0 to 1"),
    "top_k": (-1, math.inf, "a whole number"),
    "min_p": (0.0, 1.0, "0 to 1"),
    "repetition_penalty": (1e-9, math.inf, "above 0"),
    "frequency_penalty": (-2.0, 2.0, "-2 to 2"),
}
"""Settings that are read -> what they may be."""

_OF_GGUF = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Settings -> their keys in the metadata of a GGUF file."""


def sampling_defaults(folder: Path) -> Mapping[str, float]:
    """Settings of sampling that the checkpoint in a folder names, by the names of ours.

    ``do_sample`` false is a temperature of 0; true without a temperature is 1, as in transformers.
    What the file leaves out is left out here. Of a packaged model they are those that it has here.

    Raises:
        ModelError: the file is no JSON object, or a setting cannot be one.
    """
    path = folder if folder.is_file() else folder / FILE_NAME
    if not path.is_file():
        return {}
    packaged = next((one for one in PACKAGED.values() if one.file == folder), None)
    if packaged is not None:
        raw: Mapping[str, Any] = packaged.sampling
    elif folder.is_file():
        said = read_gguf(folder).metadata
        raw = {name: said[key] for name, key in _OF_GGUF.items() if key in said}
    else:
        raw = read_json(path)
    return checked_settings(raw, path)


def checked_settings(raw: Mapping[str, Any], path: Path) -> Mapping[str, float]:
    """Return settings of sampling, by the names of ours, as a file says them.

    Args:
        raw: what it says; what is no setting is left out.
        path: of the file, for errors.

    Raises:
        ModelError: a setting that cannot be one.
    """
    found: dict[str, float] = {}
    for name, (least, most, wanted) in _RANGES.items():
        value = raw.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or not math.isfinite(value):
            raise ModelError(
                f"{path} has {name}={value!r}; it must be {wanted}; correct the field, or take it "
                f"out of the file"
            )
        found[name] = value
    if "top_k" in found:
        found["top_k"] = max(0, int(found["top_k"]))  # -1 is what others call all of them
    if found.get("top_p") == 0:
        found |= {"top_p": 1.0, "top_k": 1}  # the fewest tokens with no probability are one
    if raw.get("do_sample") is False:
        found["temperature"] = 0.0
    elif raw.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    return found
