"""Sampling defaults of a checkpoint: its ``generation_config.json``, as far as it says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.files.checkpoint import read_json
from kvcellar.models.files.packaged import PACKAGED
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.sampler_settings import SAMPLER_SETTINGS

FILE_NAME = "generation_config.json"


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
        keys = {name: setting.gguf for name, setting in SAMPLER_SETTINGS.items() if setting.gguf}
        raw = {name: said[key] for name, key in keys.items() if key in said}
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
    for name, setting in SAMPLER_SETTINGS.items():
        said = raw.get(name)
        if said is None:
            continue
        is_number = isinstance(said, int | float) and not isinstance(said, bool)
        value = setting.meant(said) if is_number else math.nan
        if not math.isfinite(value) or not setting.is_valid(value):
            raise ModelError(
                f"{path} has {name}={said!r}; it must be {setting.wanted}; correct the field, or "
                f"take it out of the file"
            )
        found[name] = int(value) if setting.is_whole else value
    if raw.get("do_sample") is False:
        found["temperature"] = 0.0
    elif raw.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    return found
