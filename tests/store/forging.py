"""Files with a valid checksum that say what they should not."""

from __future__ import annotations

import copy
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.store.values.format import FileBytes, Tensor, pack, read_file

NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "U8", "int64": "I64"}

Change = Callable[[dict[str, str], dict[str, Any]], None]
"""Changes a file's metadata and tensors in place."""


def forged(file: FileBytes, change: Change) -> bytes:
    metadata = {name: text for name, text in file.metadata.items() if name != "checksum"}
    tensors = {name: array.copy() for name, array in file.tensors.items()}
    change(metadata, tensors)
    held = {name: Tensor(NAMES[array.dtype.name], array) for name, array in tensors.items()}
    return pack(held, metadata).data.tobytes()


def forge(path: Path, change: Change) -> None:
    """Change a file of a store in place."""
    path.write_bytes(forged(read_file(path), change))


def forge_export(path: Path, change: Change) -> None:
    """Change the reference in an exported file in place."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    whole = path.with_name("reference.tmp")
    whole.write_bytes(entries["reference.safetensors"])
    entries["reference.safetensors"] = forged(read_file(whole), change)
    whole.unlink()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data)


def facts(**new: Any) -> Change:
    """Facts of the reference itself."""

    def change(metadata: dict[str, str], tensors: dict[str, Any]) -> None:
        metadata["facts"] = json.dumps(json.loads(metadata["facts"]) | new)

    return change


def about(**new: Any) -> Change:
    """Facts of the agent whose reference it is."""

    def change(metadata: dict[str, str], tensors: dict[str, Any]) -> None:
        metadata["metadata"] = json.dumps(json.loads(metadata["metadata"]) | new)

    return change


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**62, 2**63, 2**70, -(2**70), 1.5, 1e308, float("inf"),
    float("nan"), "", "x", "\ud83d", "\0", "a" * 600, "../etc", [], [5], [[]], [None], {}, {"x": 1},
    {"role": 5}, {"role": "user", "content": 5}, [{"role": "user", "content": "hi"}], 10**400,
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    entries = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        entries = enumerate(value)  # type: ignore[assignment]
    for key, part in entries:
        found += places(part, (*at, key))
    return found


def mutated(value: Any, rng: random.Random) -> Any:
    """JSON with one place of it changed, left out, or doubled."""
    value = copy.deepcopy(value)
    at = rng.choice(places(value))
    inside = value
    for key in at[:-1]:
        inside = inside[key]
    kind = rng.randrange(8)
    if kind == 0:
        del inside[at[-1]]
    elif kind == 1 and isinstance(inside, list):
        inside.append(copy.deepcopy(inside[at[-1]]))
    elif kind == 2 and isinstance(inside, dict):
        inside["more"] = rng.choice(VALUES)
    else:
        inside[at[-1]] = rng.choice(VALUES)
    return value


def random_change(rng: random.Random) -> Change:
    def change(metadata: dict[str, str], tensors: dict[str, Any]) -> None:
        kind = rng.randrange(10)
        if kind < 3:
            metadata["facts"] = json.dumps(mutated(json.loads(metadata["facts"]), rng))
        elif kind < 7:
            metadata["metadata"] = json.dumps(mutated(json.loads(metadata["metadata"]), rng))
        elif kind == 7:
            metadata["layout"] = json.dumps(
                mutated(json.loads(metadata["layout"]), rng), sort_keys=True, separators=(",", ":")
            )
        elif kind == 8:
            name = rng.choice(sorted(tensors))
            tensors[name] = rng.choice(
                [
                    np.array([-1], np.int64),
                    np.array([2**62], np.int64),
                    np.zeros((2, 3), np.int64),
                    np.zeros(5, np.uint8),
                    np.zeros((), np.int64),
                    np.zeros((0, 16), np.uint8),
                    np.zeros((3, 16), np.uint8),
                ]
            )
        else:
            name = rng.choice(["facts", "metadata", "layout", "kind", "fingerprint"])
            deep = "[" * 100_000 + "]" * 100_000
            text = rng.choice(["", "{}", "[]", "null", "5", deep, "NaN", '{"a":' * 80 + "1"])
            metadata[name] = text

    return change
