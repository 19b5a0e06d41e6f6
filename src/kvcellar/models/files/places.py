"""Models that are on this machine already: whose folders they lie in, and what they are called.

Four programs keep models in folders of their own: the Hugging Face library (its cache), LM Studio,
Ollama, and kvcellar. They are read where they lie; nothing is copied. Only configs and file sizes
are looked at, so listing is quick.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.home import default_models
from kvcellar.models.files import ollama
from kvcellar.models.files.ollama import listed
from kvcellar.models.files.packaged import NAMES, PACKAGED, remove_packaged
from kvcellar.models.gguf.described import quantisation_of
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.valid import nearest

HUGGING_FACE, LM_STUDIO, OLLAMA, OWN = "hugging face", "lm studio", "ollama", "kvcellar"

_PREFIXES = OLLAMA_PREFIX, LM_STUDIO_PREFIX = ollama.PREFIX, "lmstudio:"
"""Beginnings of names of models that lie in another program's folder."""

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
_QUANT = re.compile(r"(?i)(?:^|[-._])((?:IQ|Q|TQ)\d\w*|MXFP4\w*|BF16|F16|F32)$")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on this machine.

    Attributes:
        name: what a command takes as MODEL to mean it.
        place: whose folder it lies in: ``hugging face``, ``lm studio``, ``ollama``, ``kvcellar``.
        path: the folder of a checkpoint, or a GGUF file (of several, the first).
        format: ``safetensors``, ``mlx`` or ``gguf``.
        family: the config's ``model_type``; None where there is no config.
        stored: how its weights are stored, where the config says it: ``4-bit``, ``fp8``.
        size_bytes: of its files.
        lacks: files that a download which was broken off has not brought; empty where it is whole.
    """

    name: str
    place: str
    path: Path
    format: str
    family: str | None
    size_bytes: int
    lacks: tuple[str, ...] = ()
    stored: str | None = None


def say_near(name: str, otherwise: str) -> str:
    """Return what to give in place of a model's name that means none, for the end of a message.

    Names of all models that are here come near by the whole of what commands take, or by what
    people call them: without the program, the publisher and the tag.

    Args:
        name: what was said.
        otherwise: what to say where nothing comes near.
    """
    called: dict[str, str] = {}
    for full in (*NAMES, *(one.name for one in found_models())):
        bare = full.removeprefix(OLLAMA_PREFIX).removeprefix(LM_STUDIO_PREFIX)
        short = bare.rpartition("/")[2]
        for one in (full, bare, short, short.partition(":")[0]):
            called.setdefault(one.lower(), full)
    program, is_program, own = name.partition(":")
    said = (name, own) if is_program and f"{program}:" in _PREFIXES else (name,)
    near = dict.fromkeys(called[one.lower()] for each in said for one in nearest(each, called))
    return f"did you mean {' or '.join(map(repr, list(near)[:3]))}?" if near else otherwise


def full_path(model: str) -> str:
    """Return a model's folder or file by its full path, so that an agent finds it from anywhere."""
    path = Path(model).expanduser()
    return str(path.resolve()) if model not in NAMES and path.exists() else model


def found_models() -> list[FoundModel]:
    """Return all models on this machine, by place and name."""
    found = [*_of_hugging_face(), *_of_lm_studio(), *_of_ollama(), *_of_own()]
    return sorted(found, key=lambda one: (one.place, one.name.lower()))


def find_in_place(name: str) -> Path | None:
    """Return where a model of another program lies; None where the name means none of theirs.

    Args:
        name: ``ollama:NAME``, ``ollama:NAME:TAG`` or ``lmstudio:PUBLISHER/MODEL``, with ``:QUANT``
            where it has several files.

    Raises:
        ModelError: that program has no such model here; the message names those that it has.
    """
    if name.startswith(OLLAMA_PREFIX):
        return ollama.named(name).file()
    if not name.startswith(LM_STUDIO_PREFIX):
        return None
    there = {one.name: one for one in _of_lm_studio()}
    match = [there[name]] if name in there else _quants_of(name, there.values())
    if len(match) != 1:
        raise ModelError(_not_in_lm_studio(name, [one.name for one in match or there.values()]))
    if match[0].lacks:
        raise ModelError(
            f"{name} is half here: {match[0].path.parent} lacks {', '.join(match[0].lacks[:3])}; "
            f"download it again in LM Studio"
        )
    return match[0].path


def _quants_of(name: str, models: Iterable[FoundModel]) -> list[FoundModel]:
    return [one for one in models if one.name.startswith(f"{name}:")]


def _not_in_lm_studio(name: str, names: list[str]) -> str:
    if names:
        return f"LM Studio has no model {name!r} on this machine; there are: {listed(name, names)}"
    folders = [str(one) for one in dict.fromkeys(_lm_studio_folders())]
    return (
        f"LM Studio has no model {name!r} on this machine, and no other: nothing is in "
        f"{', '.join(folders)}; download it in LM Studio, or get one with: kvcellar models pull "
        f"smollm2"
    )


# The folders of each program ---------------------------------------------------------------------


def _of_hugging_face() -> Iterator[FoundModel]:
    """Yield the models in the Hugging Face cache: the newest revision of each repository."""
    with contextlib.suppress(ModuleNotFoundError, OSError):
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        with contextlib.suppress(CacheNotFound):
            for repo in scan_cache_dir().repos:
                if repo.repo_type == "model" and repo.revisions:
                    newest = repo.refs.get("main") or max(
                        repo.revisions, key=lambda one: one.last_modified
                    )
                    yield from models_in(newest.snapshot_path, repo.repo_id, HUGGING_FACE)


def _of_lm_studio() -> Iterator[FoundModel]:
    """Yield the models in LM Studio's folder: ``PUBLISHER/MODEL``."""
    for folder in dict.fromkeys(_lm_studio_folders()):
        for model in sorted(folder.glob("*/*")):
            if model.is_dir():
                name = f"{LM_STUDIO_PREFIX}{model.relative_to(folder).as_posix()}"
                yield from models_in(model, name, LM_STUDIO)


def _lm_studio_folders() -> Iterator[Path]:
    home = Path.home() / ".lmstudio"
    value = _json(home / "settings.json").get("downloadsFolder")
    if isinstance(value, str):
        yield Path(value).expanduser()
    yield home / "models"
    yield Path.home() / ".cache" / "lm-studio" / "models"


def _of_ollama() -> Iterator[FoundModel]:
    """Yield the models of Ollama that are GGUF files, those whose file is missing too."""
    for one in ollama.ollama_models():
        blob = one.layers.get("model")
        if blob is not None:
            is_there = blob.is_file()
            size_bytes = blob.stat().st_size if is_there else 0
            lacks = () if is_there else (blob.name,)
            yield FoundModel(one.name, OLLAMA, blob, "gguf", None, size_bytes, lacks)


def _of_own() -> Iterator[FoundModel]:
    """Yield the models in kvcellar's folder; but for packaged ones, their paths are their names."""
    folder, packaged = default_models(), {one.file: one for one in PACKAGED.values()}
    if not folder.is_dir():
        return
    own = [one for one in models_in(folder, str(folder), OWN) if one.path.parent == folder]
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        own += models_in(model, str(model), OWN)
    for one in own:
        known = packaged.get(one.path)
        if known is None:
            yield one
        else:
            lacks = () if known.is_whole() else (one.path.name,)
            yield replace(one, name=known.name, lacks=lacks)


def models_in(folder: Path, name: str, place: str) -> Iterator[FoundModel]:
    """Yield the models that lie in one folder: a checkpoint, and each quantisation in GGUF.

    Args:
        folder: looked at, with the folders in it that hold parts of GGUF files.
        name: what the folder's model is called.
        place: whose folder it is.
    """
    config = _json(folder / "config.json")
    weights = sorted(folder.glob("*.safetensors"))
    if config and weights:
        text = config.get("text_config")
        family = config.get("model_type") or (text or {}).get("model_type")
        kind = "mlx" if "quantization" in config else "safetensors"
        size_bytes = sum(path.stat().st_size for path in weights)
        lacks, stored = _lacking(folder), _stored_by(config)
        yield FoundModel(name, place, folder, kind, family, size_bytes, lacks, stored)
    ggufs = sorted({*folder.glob("*.gguf"), *folder.glob("*/*.gguf")})
    for first in ggufs:
        shard = _SHARD.search(first.stem)
        if (shard and int(shard[1]) > 1) or "mmproj" in first.name.lower():
            continue
        parts = _parts(first)
        there = [part for part in parts if part.is_file()]
        size_bytes = sum(part.stat().st_size for part in there)
        lacks = tuple(part.name for part in parts if part not in there)
        shown = str(first) if place == OWN else f"{name}:{quant_of(first)}"
        yield FoundModel(shown, place, first, "gguf", None, size_bytes, lacks)


def _stored_by(config: Mapping[str, Any]) -> str | None:
    """Return how a config says that weights are stored; None: as plain numbers."""
    for key in ("quantization", "quantization_config"):
        said = config.get(key)
        if isinstance(said, dict):
            bits, method = said.get("bits"), said.get("quant_method")
            words = [str(method)] if method else []
            return " ".join([*words, f"{bits}-bit"] if isinstance(bits, int) else words) or None
    return None


def described(model: FoundModel) -> FoundModel:
    """Return a model with the family and the kind of blocks that its GGUF file says; for a list.

    A file that cannot be read is left as it is: whoever loads it is told.
    """
    if model.format != "gguf" or model.lacks:
        return model
    with contextlib.suppress(ModelError):
        file = read_gguf(model.path)
        return replace(model, family=file.architecture or None, stored=quantisation_of(model.path))
    return model


def quant_of(file: Path) -> str:
    """Return the quantisation that a GGUF file's name ends with, or its whole stem."""
    stem = _SHARD.sub("", file.stem)
    found = _QUANT.search(stem)
    return found[1].upper() if found else stem


def _parts(first: Path) -> list[Path]:
    """Return all files of a GGUF model that may be split, from its first."""
    shard = _SHARD.search(first.stem)
    if shard is None:
        return [first]
    base = _SHARD.sub("", first.stem)
    return [
        first.with_name(f"{base}-{n:05}-of-{shard[2]}.gguf") for n in range(1, int(shard[2]) + 1)
    ]


def _lacking(folder: Path) -> tuple[str, ...]:
    """Return the files that a checkpoint's index names and that are not there."""
    names = _json(folder / "model.safetensors.index.json").get("weight_map")
    wanted = {name for name in names.values() if isinstance(name, str)} if names else set()
    return tuple(sorted(name for name in wanted if not (folder / name).is_file()))


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty where there is none, since a listing goes on."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    return {}


def is_gguf(file: Path) -> bool:
    """Return true if a file is GGUF by its name, or by its first bytes, as Ollama's blobs are."""
    if file.suffix == ".gguf":
        return True
    with contextlib.suppress(OSError), file.open("rb") as opened:
        return opened.read(4) == b"GGUF"
    return False


def remove(model: FoundModel) -> int:
    """Delete the files of a model that lies in the Hugging Face cache or in kvcellar's folder.

    Returns:
        Bytes that were freed.

    Raises:
        ModelError: it lies in another program's folder, or cannot be deleted.
    """
    if model.place not in (HUGGING_FACE, OWN):
        raise ModelError(f"{model.name} is kept by {model.place}, in {model.path}; delete it there")
    try:
        if model.name in PACKAGED:
            return remove_packaged(model.name)
        if model.format == "gguf":
            return sum(_unlinked(part) for part in _parts(model.path) if part.is_file())
        if model.place == OWN:
            shutil.rmtree(model.path)
            return model.size_bytes
        return _forgotten(model.name)
    except OSError as error:
        raise ModelError(f"{model.name} cannot be deleted: {error}") from error


def _unlinked(file: Path) -> int:
    """Delete a file, and the one that it is a link to; return its bytes."""
    size_bytes, blob = file.stat().st_size, file.resolve()
    file.unlink()
    blob.unlink(missing_ok=True)
    return size_bytes


def _forgotten(repo_id: str) -> int:
    """Delete a repository from the Hugging Face cache; return its bytes."""
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir()
    revisions = [
        revision.commit_hash
        for repo in cache.repos
        if repo.repo_type == "model" and repo.repo_id == repo_id
        for revision in repo.revisions
    ]
    strategy = cache.delete_revisions(*revisions)
    strategy.execute()
    return int(strategy.expected_freed_size)
