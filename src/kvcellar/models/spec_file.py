"""Sizes a model by a file of fields that people write, where no config says enough of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES
from kvcellar.spec import ModelCacheSpec
from kvcellar.types import LayerGroup, ModelCacheParams

SPEC_FIELDS: dict[str, str] = {
    "n_layers": "attention layers",
    "n_kv_heads": "KV heads per layer",
    "head_dim": "length of a K row",
    "v_head_dim": "length of a V row; as head_dim where it is left out",
    "groups": "layer groups: objects of layers (a list of ids, or how many), window (or null), "
    "n_kv_heads, head_dim, v_head_dim",
    "max_positions": "the longest sequence",
    "weight_bytes": "weights in memory",
    "stored_bytes": "weights in files; as weight_bytes where it is left out",
    "dtype": "type of the weights in memory",
    "n_heads": "query heads",
    "hidden_size": "numbers per token between layers",
    "inner_size": "numbers per token inside an MLP",
    "vocab_size": "logits per token",
}
"""Fields of a spec file and what they mean."""

_NEEDED = ("n_layers", "n_kv_heads", "head_dim", "max_positions", "weight_bytes")
_SHAPE = {"n_layers", "n_kv_heads", "head_dim", "v_head_dim", "groups"}
_GROUP_FIELDS = ("layers", "window", "n_kv_heads", "head_dim", "v_head_dim")


def spec_from_file(path: Path, base: ModelCacheSpec | None = None) -> ModelCacheSpec:
    """Read a spec from a JSON object of its fields, over those of ``base`` where there is one.

    Raises:
        ConfigError: no JSON object, unknown or impossible fields, or too few without a base; the
            message names the file and the field.
    """
    file = _SpecFile(path, _read_fields(path, has_base=base is not None))
    raw = file.raw
    params = _params(file, base)
    dtype = raw.get("dtype", base.dtype if base else "bfloat16")
    if dtype not in FLOAT_KV_DTYPES:
        raise ConfigError(f"{path} has dtype={dtype!r}; choose one of {', '.join(FLOAT_KV_DTYPES)}")
    weight_bytes = file.number("weight_bytes", base.weight_bytes if base else 0)
    stored = base.stored_bytes if base and "weight_bytes" not in raw else weight_bytes
    n_heads = file.number("n_heads", base.n_heads if base else params.n_kv_heads)
    if n_heads % params.n_kv_heads:
        raise ConfigError(
            f"{path}: {n_heads} query heads (n_heads) are no multiple of {params.n_kv_heads} KV "
            f"heads (n_kv_heads)"
        )
    hidden = file.number("hidden_size", base.hidden_size if base else n_heads * params.head_dim)
    from_base = f"{base.counted}; " if base and "weight_bytes" not in raw else ""
    return ModelCacheSpec(
        name=base.name if base else str(path),
        family=base.family if base else "custom",
        params=params,
        max_positions=file.number("max_positions", base.max_positions if base else 0),
        stored_bytes=file.number("stored_bytes", stored),
        weight_bytes=weight_bytes,
        dtype=dtype,
        counted=f"{from_base}{', '.join(raw) or 'nothing'} from {path.name}",
        n_heads=n_heads,
        hidden_size=hidden,
        inner_size=file.number("inner_size", base.inner_size if base else 4 * hidden),
        vocab_size=file.number("vocab_size", base.vocab_size if base else 262_144),
    )


@dataclass(frozen=True, slots=True)
class _SpecFile:
    """A spec file, or one of its groups: fields, and where they are for messages."""

    path: Path
    raw: Mapping[str, Any]
    where: str = ""

    def number(self, name: str, other: int) -> int:
        """Return a field, or ``other`` where it is left out.

        Raises:
            ConfigError: it is no whole number of at least 1.
        """
        value = self.raw.get(name, other)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{self.path} has {self.where}{name}={value!r}; it must be a whole number >= 1"
            )
        return value


def _read_fields(path: Path, *, has_base: bool) -> dict[str, Any]:
    """Read a file of known fields, all that are needed among them.

    Raises:
        ConfigError: it is no JSON object, or has unknown fields or too few.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; write one object") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}; write one object of fields")
    unknown = sorted(set(raw) - set(SPEC_FIELDS))
    if unknown:
        raise ConfigError(
            f"{path} has the field {unknown[0]!r}, which a spec does not have; there are: "
            f"{', '.join(SPEC_FIELDS)}"
        )
    missing = [name for name in _NEEDED if name not in raw and not has_base]
    if missing:
        raise ConfigError(
            f"{path} has no {missing[0]} ({SPEC_FIELDS[missing[0]]}) and there is no model's "
            f"config to take it from; add it, or name a model"
        )
    return raw


def _params(file: _SpecFile, base: ModelCacheSpec | None) -> ModelCacheParams:
    """Return what a cache must know: the file's fields over those of the base.

    Raises:
        ConfigError: they cannot work together.
    """
    own = base.params if base else None
    n_kv_heads = file.number("n_kv_heads", own.n_kv_heads if own else 0)
    n_layers = file.number("n_layers", own.n_layers if own else 0)
    head_dim = file.number("head_dim", own.head_dim if own else 0)
    v_head_dim = file.number("v_head_dim", own.v_head_dim if own else head_dim)
    if own is not None and not _SHAPE & set(file.raw):
        return own
    groups: tuple[LayerGroup, ...] = ()
    if "groups" in file.raw:
        groups = _groups(file, n_kv_heads, head_dim, v_head_dim)
    elif own is not None and "n_layers" not in file.raw:
        shape = n_kv_heads, head_dim, v_head_dim
        groups = tuple(LayerGroup(g.layers, *shape, g.window, g.softcap) for g in own.groups)
    try:
        return ModelCacheParams(n_layers, n_kv_heads, head_dim, v_head_dim, groups)
    except ConfigError as error:
        raise ConfigError(f"{file.path} cannot work: {error}") from error


def _groups(
    file: _SpecFile, n_kv_heads: int, head_dim: int, v_head_dim: int
) -> tuple[LayerGroup, ...]:
    """Return the ``groups`` of a file; layers that are counted follow those of the group before.

    Raises:
        ConfigError: they are no list of objects with known fields that can work.
    """
    raw, path = file.raw["groups"], file.path
    if not isinstance(raw, list) or not raw or not all(isinstance(part, dict) for part in raw):
        raise ConfigError(f"{path} has groups={raw!r}; write a list of objects")
    groups: list[LayerGroup] = []
    start = 0
    for index, fields in enumerate(raw):
        part = _SpecFile(path, fields, f"groups[{index}].")
        layers = _layers(part, start)
        start = max([start, *(layer + 1 for layer in layers)])
        window = None if fields.get("window") is None else part.number("window", 0)
        try:
            groups.append(
                LayerGroup(
                    tuple(layers),
                    part.number("n_kv_heads", n_kv_heads),
                    part.number("head_dim", head_dim),
                    part.number("v_head_dim", v_head_dim),
                    window,
                )
            )
        except ConfigError as error:
            raise ConfigError(f"{path} has {part.where[:-1]} that cannot work: {error}") from error
    return tuple(groups)


def _layers(part: _SpecFile, start: int) -> list[int]:
    """Return the layers of a group; where their number is given, they begin at ``start``.

    Raises:
        ConfigError: the group has unknown fields, or layers that are no ids.
    """
    path, where = part.path, part.where
    unknown = sorted(set(part.raw) - set(_GROUP_FIELDS))
    if unknown:
        raise ConfigError(
            f"{path} has {where}{unknown[0]}, which a group does not have; there are: "
            f"{', '.join(_GROUP_FIELDS)}"
        )
    layers = part.raw.get("layers")
    if isinstance(layers, int) and not isinstance(layers, bool) and layers > 0:
        return list(range(start, start + layers))
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ConfigError(
            f"{path} has {where}layers={layers!r}; write a list of layer ids, or how many"
        )
    return layers
