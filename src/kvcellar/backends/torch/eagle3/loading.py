"""An EAGLE-3 head from a folder: found, compared with its target, loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvcellar.backends.torch.eagle3.head import Eagle3Head
from kvcellar.backends.torch.eagle3.network import Eagle3Network
from kvcellar.backends.torch.load.weights import DTYPES
from kvcellar.backends.torch.run.model import TorchModel
from kvcellar.errors import ConfigError, ModelError
from kvcellar.models.eagle3.config import (
    Eagle3Config,
    default_feature_layers,
    read_eagle3_config,
)
from kvcellar.models.eagle3.finding import DEMO_HEAD_FOLDER, find_head
from kvcellar.models.files.checkpoint import check_weights, few, read_config, read_json
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.models.model import LoadedModel

_EMBEDDING = "embed_tokens.weight"
_TARGET_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
_OTHER_NAMES = (("model.", ""), ("layers.0.", "midlayer."))
"""Beginnings of names that other trainers of such heads write -> those of the authors."""


def load_eagle3(name_or_path: str | Path | None, target: LoadedModel) -> Eagle3Head:
    """Load a head for a model, in the type and on the device of its weights.

    Args:
        name_or_path: a folder in the published format (``config.json`` and safetensors), or a name
            on the Hugging Face hub; None: the head that is bundled with the bundled model.
        target: the model whose tokens it guesses.

    Raises:
        ConfigError: it was made for another model.
        ModelError: no such head, or one that is incomplete, damaged, a pickle or of another kind.
    """
    folder = find_head(name_or_path, target.name)
    config = read_eagle3_config(read_config(folder), folder)
    check_weights(folder)
    layers = config.feature_layers or default_feature_layers(target.n_layers)
    _check_target(config, layers, folder, target)
    tensors = _read_tensors(folder)
    if _EMBEDDING not in tensors:
        tensors[_EMBEDDING] = _target_embedding(config, folder, target)
    dtype = DTYPES.get(target.dtype, torch.float32)
    where = target.network.device if isinstance(target, TorchModel) else torch.device("cpu")
    network = _network(config, folder, tensors, dtype, where)
    return Eagle3Head(network, layers)


def _check_target(
    config: Eagle3Config, layers: tuple[int, ...], folder: Path, target: LoadedModel
) -> None:
    """Refuse a head that was made for another model."""
    wrong = []
    hidden = target.config.hidden_size
    if config.target_hidden_size != hidden:
        wrong.append(f"hidden states of {config.target_hidden_size} numbers, which has {hidden}")
    if config.vocab_size != target.vocab_size:
        wrong.append(f"{config.vocab_size} tokens, which has {target.vocab_size}")
    if not 0 <= min(layers) <= max(layers) <= target.n_layers:
        wrong.append(f"layers {list(layers)}, which has 0 to {target.n_layers}")
    if wrong:
        raise ConfigError(
            f"the head in {folder} was made for another model than {target.name!r}: for "
            f"{'; for '.join(wrong)}; choose the head that was trained for it"
        )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors, by the authors' names."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        files = sorted(set(read_json(index)["weight_map"].values()))
    tensors = {}
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                ours = key
                for theirs, own in _OTHER_NAMES:
                    if ours.startswith(theirs):
                        ours = own + ours.removeprefix(theirs)
                tensors[ours] = file.get_tensor(key)
    return tensors


def _target_embedding(config: Eagle3Config, folder: Path, target: LoadedModel) -> Tensor:
    """Return the embedding that a head without one shares with its target."""
    if config.hidden_size != target.config.hidden_size:
        raise ModelError(
            f"{folder} lacks {_EMBEDDING}, and its {config.hidden_size} numbers per token are not "
            f"those of {target.name!r} ({target.config.hidden_size}), so it cannot share the "
            f"model's; it is half copied, copy it again"
        )
    if isinstance(target, TorchModel):
        weight: Tensor = target.network.get_input_embeddings().weight.detach()
        return weight
    source = DEMO_FOLDER if folder == DEMO_HEAD_FOLDER else target.path
    if source.is_dir():
        for path in sorted(source.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                held = set(file.keys())
                for name in _TARGET_EMBEDDINGS:
                    if name in held:
                        found: Tensor = file.get_tensor(name)
                        if found.is_floating_point():
                            return found
    raise ModelError(
        f"{folder} shares its model's embedding, and {source} holds none to read it from; add "
        f"{_EMBEDDING} to the head's safetensors"
    )


def _network(
    config: Eagle3Config,
    folder: Path,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Eagle3Network:
    """Make a network of these tensors.

    Raises:
        ModelError: some are missing, too many, or of another shape.
    """
    with torch.device("meta"):
        network = Eagle3Network(config, has_rotary=False)
    wanted: dict[str, Any] = dict(network.state_dict())
    if config.draft_vocab_size == config.vocab_size:
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
    tensors.setdefault("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
    missing = sorted(set(wanted) - set(tensors))
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} tensors that an EAGLE-3 head has: {few(missing)}; it "
            f"is half copied or of another kind"
        )
    strangers = sorted(set(tensors) - set(wanted))
    if strangers:
        raise ModelError(
            f"{folder} has {len(strangers)} tensors that an EAGLE-3 head does not know: "
            f"{few(strangers)}; it is of another kind"
        )
    for name, tensor in wanted.items():
        if tensors[name].shape != tensor.shape:
            raise ModelError(
                f"{folder}: {name} is {list(tensors[name].shape)} and its config.json makes it "
                f"{list(tensor.shape)}; the two are not of one head, copy it again"
            )
    target_ids = tensors["d2t"].long() + torch.arange(config.draft_vocab_size)
    if not 0 <= int(target_ids.min()) <= int(target_ids.max()) < config.vocab_size:
        raise ModelError(
            f"{folder}: d2t names tokens {int(target_ids.min())} to {int(target_ids.max())} and "
            f"the vocabulary has 0 to {config.vocab_size - 1}; copy the head again"
        )
    for name, tensor in tensors.items():
        kind = dtype if wanted[name].is_floating_point() else wanted[name].dtype
        tensors[name] = tensor.to(device=device, dtype=kind)
    network.load_state_dict(tensors, assign=True)
    network.make_rotary(device)
    return network.eval()
