"""Descriptions of models for whoever lists them: sizes, of a model's files alone."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcellar.dialects import dialect_for
from kvcellar.engine.embedding import TextEmbedder
from kvcellar.errors import KVCellarError
from kvcellar.models.files.hub import find_checkpoint
from kvcellar.models.options import no_progress
from kvcellar.models.runner import HiddenRunner
from kvcellar.models.sizes.sizing import size_model
from kvcellar.models.text.infill import fill_tokens
from kvcellar.models.text.templates import templates_of
from kvcellar.models.text.tokenizer import load_tokenizer
from kvcellar.server.state.models import ServedModels

_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True, slots=True)
class Description:
    """Facts of a model that its files say; empty, and 0, where they do not.

    Attributes:
        name: what the registry calls it.
        family: ``model_type``.
        format: ``gguf`` or ``safetensors``.
        quantisation: of its weights, by the name that people know it by.
        size_bytes: of its weights as they are stored.
        n_parameters: numbers in its weights.
        n_layers: all of them.
        hidden_size: numbers per token between layers.
    """

    name: str
    family: str = ""
    format: str = ""
    quantisation: str = ""
    size_bytes: int = 0
    n_parameters: int = 0
    n_layers: int = 0
    hidden_size: int = 0

    @property
    def parameter_size(self) -> str:
        """The number of parameters as people say it, such as ``135M``."""
        for unit, letter in _UNITS:
            if self.n_parameters >= unit:
                return f"{self.n_parameters / unit:.1f}{letter}"
        return str(self.n_parameters or "")

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that differ where the name or a size does."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


@functools.cache
def describe(path: str) -> Description:
    """Describe a model by its files, which are read: not for an event loop."""
    try:
        spec = size_model(path)
    except KVCellarError:
        return Description(path)
    return Description(
        path,
        spec.family,
        "gguf" if spec.stored_types else "safetensors",
        spec.quantisation or spec.dtype,
        spec.stored_bytes,
        spec.n_parameters,
        spec.params.n_layers,
        spec.hidden_size,
    )


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities of a model, as its files or its host tell them.

    Attributes:
        templates: its chat templates by name, the one for all conversations first.
        context: the longest conversation that it takes, in tokens; None: not known.
        parameters: its own settings of sampling.
        capabilities: in Ollama's words.
    """

    templates: Mapping[str, str]
    context: int | None
    parameters: Mapping[str, float]
    capabilities: tuple[str, ...]


def abilities_of(models: ServedModels, path: str) -> Abilities:
    """Return what a model can do; one that is not in memory is not loaded for it.

    May read files: not for an event loop.
    """
    host = models.registry.host(path)
    if host is None:
        context = (models.context(path) or (None, None))[0]
        return replace(_abilities_of_files(models.files_of(path)), context=context)
    can_embed = host.embedder is not None and isinstance(host.engine.runner, HiddenRunner)
    words = _capabilities(host.tokenizer, can_embed=can_embed, can_see=host.reads_pictures)
    return Abilities(templates_of(host.tokenizer), host.context, host.sampling, words)


@functools.cache
def _abilities_of_files(path: str) -> Abilities:
    tokenizer = None
    with contextlib.suppress(KVCellarError):
        tokenizer = load_tokenizer(find_checkpoint(path, no_progress))
    return Abilities(templates_of(tokenizer), None, {}, _capabilities(tokenizer, can_embed=True))


def _capabilities(tokenizer: Any, *, can_embed: bool, can_see: bool = False) -> tuple[str, ...]:
    """Return what a model can in Ollama's words.

    A template that knows no tools is told of them in a system message, so any will do.
    """
    found = {
        "vision": can_see,
        "insert": tokenizer is not None and fill_tokens(tokenizer) is not None,
        "tools": bool(templates_of(tokenizer)),
        "embedding": can_embed,
        "thinking": dialect_for(tokenizer).thinks,
    }
    return ("completion", *(word for word, is_so in found.items() if is_so))


def described_beside(name: str, model: TextEmbedder) -> Description:
    """Describe a model that makes vectors alone."""
    n_bytes = model.size_bytes
    return Description(
        name, model.family, "safetensors", "float32", n_bytes, n_bytes // 4, 0, model.size
    )
