"""``kv_cache.*`` metadata: a model's cache facts inside an exported program.

Only facts of the architecture are written. Capacity and storage type are the caller's, at run
time. Values are what a program's constant methods can carry: ints, floats, and lists of ints.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from kvcellar.errors import ConfigError, MetadataError
from kvcellar.types import LayerGroup, ModelCacheParams

SCHEMA_VERSION = 1
"""The version that this package writes, and the only one that it reads."""

PREFIX = "kv_cache."


def write_kv_cache_metadata(
    metadata: MutableMapping[str, Any],
    *,
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    groups: Sequence[LayerGroup] = (),
    vocab_size: int | None = None,
) -> MutableMapping[str, Any]:
    """Add a model's cache facts to ``metadata`` and return it.

    Args:
        metadata: an exporter's metadata; other keys stay as they are.
        n_layers: attention layers.
        n_kv_heads: KV heads per layer, not query heads.
        head_dim: length of a K row.
        v_head_dim: length of a V row, where it differs.
        groups: layer groups, where not all layers keep their whole history.
        vocab_size: rows of the embedding; the cache needs none, a sampler does.

    Raises:
        ConfigError: facts that contradict each other; ``metadata`` is unchanged.
    """
    params = ModelCacheParams(n_layers, n_kv_heads, head_dim, v_head_dim or 0, tuple(groups))
    facts: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "n_layers": params.n_layers,
        "n_kv_heads": params.n_kv_heads,
        "head_dim": params.head_dim,
    }
    if params.v_head_dim != params.head_dim:
        facts["v_head_dim"] = params.v_head_dim
    if vocab_size is not None:
        facts["vocab_size"] = vocab_size
    if groups:
        group_of = [0] * n_layers
        for index, group in enumerate(params.groups):
            for layer in group.layers:
                group_of[layer] = index
        facts["layer_groups"] = group_of
        facts["group_windows"] = [group.window or 0 for group in params.groups]
        facts["group_n_kv_heads"] = [group.n_kv_heads for group in params.groups]
        facts["group_head_dims"] = [group.head_dim for group in params.groups]
        facts["group_v_head_dims"] = [group.v_head_dim for group in params.groups]
        for index, group in enumerate(params.groups):
            if group.softcap is not None:
                facts[f"group_softcap.{index}"] = float(group.softcap)
    for key in [key for key in metadata if _is_optional(key)]:
        del metadata[key]  # of another model, written here before
    metadata.update({PREFIX + key: value for key, value in facts.items()})
    return metadata


def _is_optional(key: str) -> bool:
    """Return true if a key is written for some models only."""
    optional = ("v_head_dim", "layer_groups", "vocab_size")
    return key in (PREFIX + name for name in optional) or key.startswith(PREFIX + "group_")


def read_kv_cache_metadata(metadata: Mapping[str, Any]) -> ModelCacheParams:
    """Read the cache facts that ``write_kv_cache_metadata`` wrote.

    Raises:
        MetadataError: no such metadata, an unknown schema version, a missing or impossible value.
    """
    version = metadata.get(PREFIX + "schema_version")
    if version is None:
        raise MetadataError(
            f"no {PREFIX}schema_version: the program carries no cache metadata; export it with "
            f"write_kv_cache_metadata"
        )
    if version != SCHEMA_VERSION:
        raise MetadataError(
            f"{PREFIX}schema_version is {version!r} and this reader knows {SCHEMA_VERSION}; use "
            f"the kvcellar that wrote it, or export again"
        )

    n_layers = _whole(metadata, "n_layers")
    n_kv_heads = _whole(metadata, "n_kv_heads")
    head_dim = _whole(metadata, "head_dim")
    v_head_dim = head_dim
    if PREFIX + "v_head_dim" in metadata:
        v_head_dim = _whole(metadata, "v_head_dim")
    try:
        groups = _read_groups(metadata) if PREFIX + "layer_groups" in metadata else ()
        return ModelCacheParams(n_layers, n_kv_heads, head_dim, v_head_dim, groups)
    except ConfigError as error:
        raise MetadataError(f"{PREFIX}* metadata cannot be right: {error}; export again") from error


def _read_groups(metadata: Mapping[str, Any]) -> tuple[LayerGroup, ...]:
    group_of = _wholes(metadata, "layer_groups")
    windows = _wholes(metadata, "group_windows")
    n_kv_heads = _wholes(metadata, "group_n_kv_heads", len(windows))
    head_dims = _wholes(metadata, "group_head_dims", len(windows))
    v_head_dims = _wholes(metadata, "group_v_head_dims", len(windows))
    return tuple(
        LayerGroup(
            layers=tuple(layer for layer, group in enumerate(group_of) if group == index),
            n_kv_heads=n_kv_heads[index],
            head_dim=head_dims[index],
            v_head_dim=v_head_dims[index],
            window=windows[index] or None,
            softcap=_softcap(metadata, index),
        )
        for index in range(len(windows))
    )


def _softcap(metadata: Mapping[str, Any], index: int) -> float | None:
    key = f"{PREFIX}group_softcap.{index}"
    if key not in metadata:
        return None
    try:
        return float(metadata[key])
    except (TypeError, ValueError):
        raise MetadataError(f"{key} is {metadata[key]!r}, not a number; export again") from None


def _fact(metadata: Mapping[str, Any], key: str) -> Any:
    try:
        return metadata[PREFIX + key]
    except KeyError:
        raise MetadataError(
            f"{PREFIX}{key} is missing from schema version {SCHEMA_VERSION}; export again"
        ) from None


def _whole(metadata: Mapping[str, Any], key: str) -> int:
    value = _fact(metadata, key)
    try:
        return operator.index(value)
    except TypeError:
        raise MetadataError(
            f"{PREFIX}{key} is {value!r}, not a whole number; export again"
        ) from None


def _wholes(metadata: Mapping[str, Any], key: str, length: int | None = None) -> list[int]:
    value = _fact(metadata, key)
    try:
        numbers = [operator.index(number) for number in value]
    except TypeError:
        raise MetadataError(
            f"{PREFIX}{key} is {value!r}, not a list of whole numbers; export again"
        ) from None
    if length is not None and len(numbers) != length:
        raise MetadataError(
            f"{PREFIX}{key} has {len(numbers)} entries for {length} layer groups; export again"
        )
    return numbers
