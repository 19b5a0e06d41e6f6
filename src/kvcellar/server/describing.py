"""Descriptions of models for whoever lists them: sizes, of a model's files alone."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from kvcellar.agents import ModelHost
from kvcellar.engine.embedding import TextEmbedder
from kvcellar.errors import KVCellarError
from kvcellar.models.infill import fill_tokens
from kvcellar.models.sizing import size_model
from kvcellar.server.dialects import dialect_of

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


def capabilities_of(host: ModelHost) -> list[str]:
    """Return what a model in memory can, in Ollama's words.

    A template that knows no tools is told of them in a system message, so any will do.
    """
    found = ["completion"]
    if host.tokenizer is not None and fill_tokens(host.tokenizer) is not None:
        found.append("insert")
    if getattr(host.tokenizer, "chat_template", None):
        found.append("tools")
    if host.embedder is not None:
        found.append("embedding")
    if dialect_of(host).thinks:
        found.append("thinking")
    return found


def described_beside(name: str, model: TextEmbedder) -> Description:
    """Describe a model that makes vectors alone."""
    n_bytes = model.size_bytes
    return Description(
        name, model.family, "safetensors", "float32", n_bytes, n_bytes // 4, 0, model.size
    )
