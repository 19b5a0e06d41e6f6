"""Sizes a model by a file of fields that people write, where no config says enough of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES
from kvcellar.spec import ModelCacheSpec
from kvcellar.states import StateGroup, StateShape
from kvcellar.types import LayerGroup, ModelCacheParams

SPEC_FIELDS: dict[str, str] = {
    "n_layers": "attention layers",
    "n_kv_heads": "KV heads per layer",
    "head_dim": "length of a K row",
    "v_head_dim": "length of a V row; as head_dim where it is left out",
    "groups": "layer groups: objects of layers (a list of ids, or how many), window or chunk (or "
    "null), is_latent, n_kv_heads, head_dim, v_head_dim (the model's where they are left out)",
    "shared": "pairs [layer, source]: a layer without rows of its own, and the one whose it reads",
    "state_bytes": "states of all recurrent layers at one position of a sequence, in float32",
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
_ROWS = ("n_kv_heads", "head_dim", "v_head_dim")
_SHAPE = {"n_layers", *_ROWS, "groups", "shared", "state_bytes"}
_GROUP_FIELDS = ("layers", "window", "chunk", "is_latent", *_ROWS)


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
    kv_heads = sorted({group.n_kv_heads for group in params.groups})
    n_heads = file.number("n_heads", base.n_heads if base else kv_heads[-1])
    uneven = [n for n in kv_heads if n_heads % n]
    if uneven:
        raise ConfigError(
            f"{path}: {n_heads} query heads (n_heads) are no multiple of {uneven[0]} KV heads "
            f"(n_kv_heads)"
        )
    head_dim = max(group.head_dim for group in params.groups)
    hidden = file.number("hidden_size", base.hidden_size if base else n_heads * head_dim)
    from_base = f"{base.counted}; " if base and "weight_bytes" not in raw else ""
    return ModelCacheSpec(
        name=base.name if base else str(path),
        family=base.family if base else "custom",
        params=replace(params, kv_dtype=base.kv_dtype if base and "dtype" not in raw else dtype),
        max_positions=file.number("max_positions", base.max_positions if base else 0),
        stored_bytes=file.number("stored_bytes", stored),
        weight_bytes=weight_bytes,
        dtype=dtype,
        counted=f"{from_base}{', '.join(raw) or 'nothing'} from {path.name}",
        n_heads=n_heads,
        hidden_size=hidden,
        inner_size=file.number("inner_size", base.inner_size if base else 4 * hidden),
        vocab_size=file.number("vocab_size", base.vocab_size if base else 262_144),
        quantisation=base.quantisation if base else "",
        stored_types=base.stored_types if base else {},
        is_in_blocks=base is not None and base.is_in_blocks,
    )


class _Rows(NamedTuple):
    """Shapes of rows as far as they are given for the whole model."""

    n_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class _SpecFile:
    """A spec file, or one of its groups: fields, and where they are for messages."""

    path: Path
    raw: Mapping[str, Any]
    where: str = ""

    def number(self, name: str, other: int | None = None) -> int:
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

    def optional_rows(self, other: _Rows | ModelCacheParams) -> _Rows:
        """Return the shapes of rows that this file gives, over those of ``other``."""
        found = {name: self.number(name) for name in _ROWS if name in self.raw}
        given = {name: getattr(other, name) for name in _ROWS if getattr(other, name) is not None}
        return _Rows(**(given | found))

    def rows(self, other: _Rows | ModelCacheParams | LayerGroup) -> tuple[int, int, int]:
        """Return the shapes of rows, those of ``other`` where this file gives none.

        Raises:
            ConfigError: neither gives one.
        """
        head_dim = self.number("head_dim", other.head_dim)
        v_head_dim = head_dim if other.v_head_dim is None else other.v_head_dim
        return (
            self.number("n_kv_heads", other.n_kv_heads),
            head_dim,
            self.number("v_head_dim", v_head_dim),
        )


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
    missing = [name for name in _NEEDED if not has_base and not _is_given(raw, name)]
    if missing:
        raise ConfigError(
            f"{path} has no {missing[0]} ({SPEC_FIELDS[missing[0]]}) and there is no model's "
            f"config to take it from; add it, or name a model"
        )
    return raw


def _is_given(raw: Mapping[str, Any], name: str) -> bool:
    """Return true if a file has a field, or all of its groups have."""
    groups = raw.get("groups")
    parts = groups if isinstance(groups, list) and name in _ROWS else []
    of_groups = [isinstance(part, dict) and name in part for part in parts]
    return name in raw or (bool(of_groups) and all(of_groups))


def _params(file: _SpecFile, base: ModelCacheSpec | None) -> ModelCacheParams:
    """Return what a cache must know: the file's fields over those of the base.

    Raises:
        ConfigError: they cannot work together.
    """
    own = base.params if base else None
    if own is not None and not _SHAPE & set(file.raw):
        return own
    n_layers = file.number("n_layers", own.n_layers if own else None)
    other = own or _Rows()
    groups: tuple[LayerGroup, ...] = ()
    if "groups" in file.raw:
        groups = _groups(file, file.optional_rows(other))
    elif own is not None and "n_layers" not in file.raw:
        groups = tuple(
            LayerGroup(g.layers, *file.rows(g), g.window, g.softcap, g.chunk, g.is_latent)
            for g in own.groups
        )
    shared = file.raw.get("shared", own.shared if own and groups else ())
    state = own.state if own else None
    if "state_bytes" in file.raw:
        state = StateGroup(((StateShape("recurrent", (file.number("state_bytes") // 4,)),),))
    try:
        if groups:
            return ModelCacheParams(n_layers, groups=groups, shared=shared, state=state)
        return ModelCacheParams(n_layers, *file.rows(other), shared=shared, state=state)
    except ConfigError as error:
        raise ConfigError(f"{file.path} cannot work: {error}") from error


def _groups(file: _SpecFile, rows: _Rows) -> tuple[LayerGroup, ...]:
    """Return the ``groups`` of a file; layers that are counted follow those of the group before.

    Args:
        file: the spec file.
        rows: shapes of rows where a group has none of its own.

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
        window, chunk = (
            None if fields.get(name) is None else part.number(name) for name in ("window", "chunk")
        )
        shape, is_latent = part.rows(rows), fields.get("is_latent", False)
        try:
            groups.append(LayerGroup(tuple(layers), *shape, window, None, chunk, is_latent))
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
