"""The vision part of a wrapper: its own class with the language model taken away."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.load.gguf import makers_of
from kvcellar.backends.torch.load.networks import NetworkClasses, text_part, without
from kvcellar.backends.torch.load.recurrent_kernels import choose_by_device
from kvcellar.backends.torch.load.weights import read_weights
from kvcellar.errors import ModelError
from kvcellar.models.files.formats import format_of, without_format
from kvcellar.models.gguf.reader import GgufFile
from kvcellar.models.text.tokenizer import quiet

_OTHERS = ("audio", "speech", "sound")
"""Words in the names of what a wrapper has besides, and no picture needs."""


class NoPicturesError(ModelError):
    """A model of a family that reads no pictures."""


class VisionClass:
    """Maker of the vision part of one checkpoint; it has no weights.

    Attributes:
        config: of the whole checkpoint, with little of its text.
        n_numbers: of the vision part.
        takes: names of what it is given of a picture.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """Find out of what a checkpoint's vision part consists.

        Args:
            raw: its ``config.json``.

        Raises:
            NoPicturesError: its family reads none.
            ModelError: it cannot be made here.
        """
        self._raw = raw
        classes = NetworkClasses.of(without_format(raw))
        if classes.text is classes.config or not hasattr(classes.whole, "get_image_features"):
            raise NoPicturesError(f"models of type {classes.config.model_type!r} read no pictures")
        self.takes = frozenset(inspect.signature(classes.whole.get_image_features).parameters)
        for config in _smaller(classes.config):
            self.config, self._reader = config, _reader(classes, config)
            try:
                with torch.device("meta"):
                    part = self._reader(copy.deepcopy(config))
                break
            except Exception as error:  # whatever its layers do not like, or a missing package
                last = error
        else:
            raise ModelError(
                f"the vision part of {classes.config.model_type} cannot be made: {last}"
            ) from last
        self.n_numbers = sum(parameter.numel() for parameter in part.parameters())

    def check(self, file: GgufFile) -> None:
        """Hold a vision part in GGUF against the network that its metadata says; nothing is read.

        Raises:
            ModelError: its tensors are others.
        """
        with torch.device("meta"):
            makers_of(file, self._reader(copy.deepcopy(self.config)), torch.float32)

    def read(self, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
        """Read the weights of the vision part; return its module.

        Args:
            folder: the checkpoint, or a vision part in GGUF.
            dtype: type of the weights in memory.
            device: where to put them.

        Raises:
            ModelError: they are not whole, or not this architecture's.
        """
        with quiet(lambda part: None):
            part = read_weights(
                folder,
                copy.deepcopy(self.config),
                self._reader,
                format=None if folder.is_file() else format_of(self._raw, folder),
                dtype=dtype,
                attention=None,
                kept={},
            )
        choose_by_device(map(type, part.modules()))
        return part.to(device).eval()


def run(part: Any, given: Mapping[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run the vision part on one picture.

    Returns:
        Rows ``[n, hidden_size]``, and those of the same shape for the first layers, if there are.
    """
    weight = next(part.parameters())
    moved = {
        name: one.to(weight.device, weight.dtype if one.is_floating_point() else None)
        for name, one in given.items()
    }
    with torch.inference_mode():
        found = part.get_image_features(**moved, return_dict=True)
        deep = getattr(found, "deepstack_features", None) or ()
        return _rows(found.pooler_output), tuple(_rows(one) for one in deep)


def _rows(found: Any) -> Tensor:
    """Return rows of a picture, ``[n, hidden_size]``, whatever they were put in."""
    parts = [found] if isinstance(found, Tensor) else list(found)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _smaller(config: Any) -> list[Any]:
    """Return copies of a wrapper's config to try in turn: with one layer of text, and with all."""
    small, same = copy.deepcopy(config), copy.deepcopy(config)
    for one in (small, same):
        one.tie_word_embeddings = one.get_text_config(decoder=True).tie_word_embeddings = False
    small.get_text_config(decoder=True).num_hidden_layers = 1
    return [small, same]


def _reader(classes: NetworkClasses, config: Any) -> type[Any]:
    """Return the class that reads a vision part: the whole's own, without language model and head.

    It has the name and the module of the whole's, by which transformers finds how to convert names.
    """
    whole = classes.whole

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        owner, decoder = text_part(self, config.get_text_config(decoder=True))
        others = [module for name, module in self.named_modules() if _is_other(name)]
        without(self, [decoder, owner.get_output_embeddings(), *others])
        if hasattr(config, "vision_feature_layer"):
            _without_last_norm(self)
        self.all_tied_weights_keys = {}
        # transformers asks for both when it has read the weights, to tie them.
        self.get_input_embeddings = self.get_output_embeddings = lambda: None

    own = {
        "__init__": build,
        "__module__": whole.__module__,
        "__qualname__": whole.__qualname__,
        "tie_weights": lambda self, *args, **kwargs: None,
    }
    return type(whole.__name__, (whole,), own)


def _without_last_norm(reader: nn.Module) -> None:
    """Take away what is behind the last layer, where rows are those of layers; GGUF has it not."""
    for owner in reader.modules():
        if isinstance(getattr(owner, "post_layernorm", None), nn.Module):
            owner.post_layernorm = nn.Identity()


def _is_other(name: str) -> bool:
    return any(word in name.rpartition(".")[2] for word in _OTHERS)
