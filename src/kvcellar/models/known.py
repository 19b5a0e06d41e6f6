"""Facts of models that were learnt before, kept in the user's own folder.

They are found by the digest of a model's config, of whose rules they were learnt by, and of the
version of this package. What else takes long to find out lies beside them. A file that is damaged,
or that cannot be written, costs the time to learn them again, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from kvcellar.home import default_home, open_own
from kvcellar.models.facts import VERSION, ModelFacts
from kvcellar.models.fingerprint import VOLATILE
from kvcellar.version import __version__

Learn = Callable[[Mapping[str, Any]], ModelFacts]
"""Learns the facts of a model by its ``config.json``."""


def facts_of(raw: Mapping[str, Any], learn: Learn, by: str) -> ModelFacts:
    """Return the facts of a model, which are learnt and kept where they are not known.

    Args:
        raw: its ``config.json``.
        learn: is called where they are not known; what it raises is raised, and nothing is kept.
        by: whose rules these are: a package and its version.
    """
    path = known_path(raw, by)
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return ModelFacts.from_json(read_kept(path))
    facts = learn(raw)
    keep(path, facts.to_json())
    return facts


def renew_facts(raw: Mapping[str, Any], learn: Learn, by: str) -> bool:
    """Learn the facts of a model anew and keep them; return true if others had been kept.

    Args:
        raw: its ``config.json``.
        learn: is called; what it raises is raised, and what was kept stays.
        by: whose rules these are: a package and its version.
    """
    path, kept = known_path(raw, by), None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        kept = ModelFacts.from_json(read_kept(path))
    facts = learn(raw)
    keep(path, facts.to_json())
    return kept not in (None, facts)


def known_path(raw: Mapping[str, Any], by: str) -> Path:
    """Return where the facts of a config are kept; other files about it begin with its stem."""
    told = {key: value for key, value in raw.items() if key not in VOLATILE}
    text = json.dumps([told, by, VERSION, __version__], sort_keys=True, default=str)
    return default_home() / "models" / f"{xxhash.xxh3_128_hexdigest(text.encode())}.json"


def read_kept(path: Path) -> Any:
    """Read a JSON value that ``keep`` wrote.

    Raises:
        OSError: there is no such file, or it is a link, a pipe or the like.
        ValueError, RecursionError: it is no JSON.
    """
    with os.fdopen(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
        return json.load(file)


def keep(path: Path, value: Any) -> None:
    """Write a JSON value, all of it or nothing; a folder that cannot be written is no error."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.{id(value):x}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = open_own(staged, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(json.dumps(value))
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)


def stamps_of(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of a config or a GGUF file, and of what belongs to it."""
    patterns = ["*.json", "*.safetensors"] if path.name == "config.json" else []
    if path.suffix == ".gguf":
        patterns = ["*.gguf"]  # it may be one of several parts
    beside = sorted(file for pattern in patterns for file in path.parent.glob(pattern))
    for file in beside or [path]:
        with contextlib.suppress(OSError):
            stat = file.stat()
            yield str(file), stat.st_size, stat.st_mtime_ns
