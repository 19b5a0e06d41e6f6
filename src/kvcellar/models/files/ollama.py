"""Models of Ollama, read in place: manifests, the GGUF file of each, and what is said beside it.

A manifest lists layers by media type: the model, and its sampling, a system prompt and a template
in Go's language where it has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.files.checkpoint import read_json
from kvcellar.models.files.generation import checked_settings
from kvcellar.sampler_settings import SAMPLER_SETTINGS
from kvcellar.valid import nearest

PREFIX = "ollama:"

_KIND = "application/vnd.ollama.image."
_LIBRARY = ("registry.ollama.ai", "library")
_SPELLINGS = {other: name for name, one in SAMPLER_SETTINGS.items() for other in one.names}
_OURS = ("num_ctx", "num_keep", "num_batch", "num_gpu", "num_thread", "seed", "num_predict")
"""Parameters that are about the run and not about the model: options of commands here."""


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model in Ollama's folder.

    Attributes:
        name: ``ollama:NAME:TAG``.
        manifest: the file that lists its layers.
        layers: files by the last word of their media types; they need not be there.
    """

    name: str
    manifest: Path
    layers: Mapping[str, Path] = field(repr=False)

    def file(self) -> Path:
        """Return its GGUF file.

        Raises:
            ModelError: there is none, it is not there, or it is half a model.
        """
        if "adapter" in self.layers:
            raise ModelError(
                f"{self.name} has an adapter (LoRA) over its model, which is not read here; merge "
                f"it into the model and take that"
            )
        blob = self.layers.get("model")
        if blob is None:
            kinds = ", ".join(sorted(self.layers)) or "none"
            raise ModelError(
                f"{self.name} has no GGUF file: {self.manifest} lists layers of the kinds {kinds}; "
                f"pull a tag of it that is GGUF"
            )
        if not blob.is_file():
            raise ModelError(
                f"{self.name} is half here: {self.manifest} names {blob.name}, and there is no "
                f"such file in {blob.parent}; run: ollama pull {self.name.removeprefix(PREFIX)}"
            )
        return blob

    def sampling(self) -> Mapping[str, float]:
        """Return the settings of sampling that it says.

        Raises:
            ModelError: they cannot be settings.
        """
        path = self.layers.get("params")
        if path is None or not path.is_file():
            return {}
        said = {_SPELLINGS.get(key, key): value for key, value in read_json(path).items()}
        return checked_settings({key: said[key] for key in SAMPLER_SETTINGS if key in said}, path)

    def left_out(self, ends: frozenset[str], *, has_template: bool) -> list[str]:
        """Return what it says that is not taken over, with the way to have it, for people.

        Args:
            ends: texts that end an answer in any case.
            has_template: true if the GGUF file has a chat template, which is used then.
        """
        path = self.layers.get("params")
        said = read_json(path) if path is not None and path.is_file() else {}
        stops = [one for one in said.get("stop") or () if one not in ends]
        known = {*SAMPLER_SETTINGS, *_SPELLINGS, *_OURS, "stop"}
        others = sorted(said.keys() - known)
        system = self.layers.get("system")
        found = []
        if system is not None and system.is_file() and system.read_text("utf-8", "replace").strip():
            found.append("its system prompt (give one with each conversation)")
        if stops:
            found.append(
                f"the stop words {', '.join(map(repr, stops[:4]))} (give them with requests)"
            )
        if others:
            found.append(f"the parameters {', '.join(others[:6])}")
        if "template" in self.layers and not has_template:
            found.append("its template in Go's language (give one in Jinja: --chat-template)")
        return found


def ollama_models() -> Iterator[OllamaModel]:
    """Yield the models whose manifests are in Ollama's folder, by name."""
    folder = _folder()
    manifests = folder / "manifests"
    for path in sorted(path for path in manifests.rglob("*") if path.is_file()):
        parts = path.relative_to(manifests).parts
        layers = _layers(path, folder / "blobs") if len(parts) > 2 else None
        if layers is not None:
            *place, model, tag = parts
            prefix = "" if tuple(place) == _LIBRARY else "/".join([*place, ""])
            yield OllamaModel(f"{PREFIX}{prefix}{model}:{tag}", path, layers)


def _folder() -> Path:
    said = os.environ.get("OLLAMA_MODELS")
    return Path(said).expanduser() if said else Path.home() / ".ollama" / "models"


def _layers(manifest: Path, blobs: Path) -> dict[str, Path] | None:
    """Return the files of a manifest's layers; None where it is no manifest."""
    try:
        listed = read_json(manifest).get("layers")
    except ModelError:
        return None
    found: dict[str, Path] = {}
    for layer in listed if isinstance(listed, list) else ():
        kind: Any = layer.get("mediaType") if isinstance(layer, dict) else None
        if isinstance(kind, str) and kind.startswith(_KIND):
            digest = str(layer.get("digest")).replace(":", "-")
            if digest == Path(digest).name:
                found.setdefault(kind.removeprefix(_KIND), blobs / digest)
    return found


def named(name: str) -> OllamaModel:
    """Return the model that a name means; without a tag, ``latest``.

    Raises:
        ModelError: Ollama has none of that name here; the message names those that it has.
    """
    there = {one.name: one for one in ollama_models()}
    last = name.rpartition("/")[2].removeprefix(PREFIX)
    found = there.get(name if ":" in last else f"{name}:latest")
    tags = [one for one in there if one.startswith(f"{name}:")]
    if found is None and len(tags) == 1:
        found = there[tags[0]]
    if found is None:
        said = f"Ollama has no model {name!r} on this machine"
        if there:
            raise ModelError(f"{said}; there are: {listed(name, tags or list(there))}")
        where = _folder()
        what = f"nothing is in {where}" if where.is_dir() else f"there is no folder {where}"
        raise ModelError(
            f"{said}, and no other: {what}; get it with: ollama pull {name.removeprefix(PREFIX)}, "
            f"or set OLLAMA_MODELS to the folder where Ollama keeps its models"
        )
    return found


def listed(name: str, names: Sequence[str], most: int = 8) -> str:
    """Write names of models for a message: those that come near ``name`` first, the rest counted.

    Args:
        name: what was asked for.
        names: what there is.
        most: so many are written.
    """
    shown = list(dict.fromkeys([*nearest(name, names), *names]))
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
