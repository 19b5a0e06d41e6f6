"""LoRA adapters as PEFT saves them: what a folder says, looked at before a number of it is read.

An adapter adds ``scale * B @ A`` to the weights of some linear layers. Whatever else its settings
ask for changes the model in another way; it is refused by name, since a model that is adapted in
part is neither one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.adapter_targets import Targets, of_pattern
from kvcellar.models.files.checkpoint import few, read_header, read_json
from kvcellar.models.fingerprint import digest_of, digest_of_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "bias",
    "init_lora_weights",
}
"""Settings that are read here."""

_FREE = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",  # of the base's own weights
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
"""Settings of training, and names: they change nothing of what is computed afterwards."""

_OTHER = {
    "use_dora": "DoRA scales the weights' columns",
    "modules_to_save": "whole modules were trained beside it",
    "trainable_token_indices": "rows of the embedding were trained beside it",
    "target_parameters": "parameters were adapted that belong to no linear layer",
    "layer_replication": "layers are repeated",
    "lora_bias": "its updates have biases",
    "alora_invocation_tokens": "it begins in the middle of a text",
}
"""Settings by which more than linear layers is changed, and what they ask for."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways of initialising after which the base's weights are others than those of its checkpoint."""

_TYPES = ("F32", "BF16", "F16")
_PREFIX = "base_model.model."
_ENDS = {".lora_A.weight": 0, ".lora_B.weight": 1}


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """Low-rank update of one linear layer.

    Attributes:
        rank: rows of A, and columns of B.
        n_in: inputs of the layer.
        n_out: outputs of the layer.
        scale: factor on ``B @ A``.
        keys: names of A and B in the file.
    """

    rank: int
    n_in: int
    n_out: int
    scale: float
    keys: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that can be loaded beside a model.

    Attributes:
        name: what it is asked for by.
        folder: where PEFT saved it.
        updates: by the name of the layer, in the model that it was trained on.
        targets: the layers that its settings name.
    """

    name: str
    folder: Path
    updates: Mapping[str, AdapterUpdate] = field(repr=False)
    targets: Targets

    @property
    def digest(self) -> str:
        """A text that differs wherever it may compute something else; its file is read for it.

        Raises:
            OSError: it cannot be.
        """
        scales = {layer: one.scale for layer, one in sorted(self.updates.items())}
        return digest_of(digest_of_file(self.folder / WEIGHTS) + json.dumps(scales))

    @property
    def size_bytes(self) -> int:
        """Bytes of all A and B in float32, as they are held."""
        return sum(4 * one.rank * (one.n_in + one.n_out) for one in self.updates.values())


def read_adapter(name: str, path: str | Path) -> Adapter:
    """Look at the folder of an adapter; its numbers are not read, but for their digest.

    Raises:
        ModelError: it is none, is damaged, or does more than update linear layers.
    """
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"adapter {name!r}: {folder} has no {CONFIG}; give the folder that PEFT saved it to"
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelError(
            f"adapter {name!r}: {folder} has no {WEIGHTS}; save it with safe_serialization=True, "
            f"since pickles (.bin) can run code and are not loaded"
        )
    said = read_json(folder / CONFIG)
    try:
        targets = _checked(said)
        updates = dict(_updates(said, read_header(folder / WEIGHTS)))
        _check_targets(updates, targets)
    except (ModelError, re.error, TypeError, ValueError) as error:
        raise ModelError(f"adapter {name!r} in {folder}: {error}") from error
    return Adapter(name, folder.resolve(), updates, targets)


def adapters_bytes(adapters: Mapping[str, str | Path]) -> int:
    """Return what adapters take in memory beside a model.

    Raises:
        ModelError: as ``read_adapter``.
    """
    return sum(read_adapter(name, path).size_bytes for name, path in adapters.items())


def _checked(said: Mapping[str, Any]) -> Targets:
    """Return the layers that settings name, once nothing else is in them.

    Raises:
        ModelError: something else is.
    """
    if said.get("peft_type") != "LORA":
        raise ModelError(f"it is of type {said.get('peft_type')!r}, and LORA is what is read here")
    for key, what in _OTHER.items():
        if said.get(key):
            raise ModelError(
                f"{key} is set: {what}, which an adapter here cannot; merge it into the model with "
                f"PEFT's merge_and_unload, and load what that saves"
            )
    if said.get("bias", "none") != "none":
        raise ModelError(
            f"bias is {said['bias']!r}: biases of the model were trained, and every request would "
            f"have them; train with 'none', or merge it into the model"
        )
    start = said.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"init_lora_weights is {start!r}, so it belongs to weights that are not those of the "
            f"checkpoint; save it with PEFT's path_initial_model_for_weight_conversion"
        )
    others = [key for key, value in said.items() if value and key not in _READ | _FREE]
    if others:
        raise ModelError(f"{few(others)} is set, which is not known here; leave it out if it may")
    return Targets.of(said)


def _updates(
    said: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, AdapterUpdate]]:
    """Yield layers and their updates.

    Raises:
        ModelError: a tensor is none of an update's, or its shape is none.
    """
    pairs: dict[str, list[str]] = {}
    for key, tensor in tensors.items():
        end = next((end for end in _ENDS if key.endswith(end)), None)
        if end is None:
            raise ModelError(f"{key} is no part of a linear layer's update; {_way_out(key)}")
        if tensor["dtype"] not in _TYPES or len(tensor["shape"]) != 2:
            raise ModelError(
                f"{key} is {tensor['dtype']} of shape {tensor['shape']}; updates are matrices in "
                f"{', '.join(_TYPES)}"
            )
        layer = key.removesuffix(end).removeprefix(_PREFIX)
        pairs.setdefault(layer, ["", ""])[_ENDS[end]] = key
    if not pairs:
        raise ModelError("it updates nothing")
    for layer, (a, b) in pairs.items():
        if not a or not b:
            raise ModelError(f"{layer} has {a or b} and not its other half")
        shapes = tuple(tensors[a]["shape"]), tuple(tensors[b]["shape"])
        yield layer, _update(said, layer, shapes, (a, b))


def _way_out(key: str) -> str:
    if "lora_" in key:
        return "merge the adapter into the model with PEFT's merge_and_unload, and load that"
    return (
        "where these are the model's own weights, save the adapter with PEFT's "
        "save_embedding_layers=False; else merge it into the model"
    )


def _update(
    said: Mapping[str, Any],
    layer: str,
    shapes: tuple[tuple[int, int], tuple[int, int]],
    keys: tuple[str, str],
) -> AdapterUpdate:
    """Return the update of a layer.

    Raises:
        ModelError: shapes do not fit each other, or the rank that settings name.
    """
    rank = of_pattern(said.get("rank_pattern"), layer, said.get("r", 8))
    alpha = of_pattern(said.get("alpha_pattern"), layer, said.get("lora_alpha", 8))
    (rows, n_in), (n_out, columns) = shapes
    if rows != rank or columns != rank or type(rank) is not int or rank < 1:
        raise ModelError(
            f"{layer} has A {list(shapes[0])} and B {list(shapes[1])}, and its rank is said to be "
            f"{rank}: these are not of one training"
        )
    scale = float(alpha) / (math.sqrt(rank) if said.get("use_rslora") else rank)
    if not math.isfinite(scale):
        raise ModelError(f"lora_alpha of {layer} is {alpha}, which is no number")
    return AdapterUpdate(rank, n_in, n_out, scale, keys)


def _check_targets(updates: Mapping[str, AdapterUpdate], targets: Targets) -> None:
    """Make sure that settings name every layer that has an update.

    Raises:
        ModelError: they do not: PEFT would leave its update out.
    """
    others = [layer for layer in updates if not targets.has(layer)]
    if others:
        raise ModelError(
            f"it has weights for {few(others)}, which its target_modules do not name; settings and "
            f"weights are not of one training"
        )
