"""``kv_cache.*`` metadata: a model's cache facts inside an exported program.

Only facts of the architecture are written. Capacity and storage type are the caller's, at run
time. Values are what a program's constant methods can carry: ints, floats, and lists of ints.
States of recurrent layers are none of them: models that have some are not exported.
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

SHAPE = ("n_kv_heads", "head_dim", "v_head_dim")
"""Facts of every layer's rows, where all layers have the same."""


def write_kv_cache_metadata(
    metadata: MutableMapping[str, Any],
    *,
    n_layers: int,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    groups: Sequence[LayerGroup] = (),
    shared: Sequence[tuple[int, int]] = (),
    vocab_size: int | None = None,
) -> MutableMapping[str, Any]:
    """Add a model's cache facts to ``metadata`` and return it.

    Args:
        metadata: an exporter's metadata; other keys stay as they are.
        n_layers: attention layers.
        n_kv_heads: KV heads of every layer, not query heads; None where layers differ.
        head_dim: length of every layer's K rows; None where they differ.
        v_head_dim: length of every layer's V rows, where it is another.
        groups: layer groups, where not all layers keep their whole history, or layers differ.
        shared: ``(layer, source)`` for each layer that attends over an earlier one's rows.
        vocab_size: rows of the embedding; the cache needs none, a sampler does.

    Raises:
        ConfigError: facts that contradict each other; ``metadata`` is unchanged.
    """
    params = ModelCacheParams(
        n_layers, n_kv_heads, head_dim, v_head_dim or 0, tuple(groups), tuple(shared)
    )
    facts: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "n_layers": params.n_layers}
    if vocab_size is not None:
        facts["vocab_size"] = vocab_size
    if groups or shared:
        facts |= _group_facts(params)
    else:
        facts |= {"n_kv_heads": params.n_kv_heads, "head_dim": params.head_dim}
        if params.v_head_dim != params.head_dim:
            facts["v_head_dim"] = params.v_head_dim
    for key in [key for key in metadata if _is_optional(key)]:
        del metadata[key]  # of another model, written here before
    metadata.update({PREFIX + key: value for key, value in facts.items()})
    return metadata


def _group_facts(params: ModelCacheParams) -> dict[str, Any]:
    """Return what is written of layers that are not all alike."""
    groups = params.groups
    facts: dict[str, Any] = {
        "layer_groups": list(params.group_of),
        "group_windows": [group.window or 0 for group in groups],
        "group_n_kv_heads": [group.n_kv_heads for group in groups],
        "group_head_dims": [group.head_dim for group in groups],
        "group_v_head_dims": [group.v_head_dim for group in groups],
    }
    if params.shared:
        facts["layer_sources"] = list(params.sources)
    if any(group.chunk is not None for group in groups):
        facts["group_chunks"] = [group.chunk or 0 for group in groups]
    if any(group.is_latent for group in groups):
        facts["group_is_latent"] = [int(group.is_latent) for group in groups]
    for index, group in enumerate(groups):
        if group.softcap is not None:
            facts[f"group_softcap.{index}"] = float(group.softcap)
    return facts


def _is_optional(key: str) -> bool:
    """Return true if a key is written for some models only."""
    optional = (*SHAPE, "layer_groups", "layer_sources", "vocab_size")
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
    try:
        if PREFIX + "layer_groups" in metadata:
            return _read_groups(metadata, n_layers)
        v_head_dim = _whole(metadata, "v_head_dim") if PREFIX + "v_head_dim" in metadata else 0
        n_kv_heads, head_dim = (_whole(metadata, name) for name in ("n_kv_heads", "head_dim"))
        return ModelCacheParams(n_layers, n_kv_heads, head_dim, v_head_dim)
    except ConfigError as error:
        raise MetadataError(f"{PREFIX}* metadata cannot be right: {error}; export again") from error


def _read_groups(metadata: Mapping[str, Any], n_layers: int) -> ModelCacheParams:
    group_of = _wholes(metadata, "layer_groups")
    windows = _wholes(metadata, "group_windows")
    none = [0] * len(windows)
    n_kv_heads = _wholes(metadata, "group_n_kv_heads", len(windows))
    head_dims = _wholes(metadata, "group_head_dims", len(windows))
    v_head_dims = _wholes(metadata, "group_v_head_dims", len(windows))
    chunks = _wholes_or(metadata, "group_chunks", none)
    latent = _wholes_or(metadata, "group_is_latent", none)
    sources = _wholes_or(metadata, "layer_sources", list(range(len(group_of))), "layers")
    pairs = list(enumerate(sources))
    groups = tuple(
        LayerGroup(
            tuple(layer for layer, at in pairs if at == layer and group_of[layer] == index),
            n_kv_heads[index],
            head_dims[index],
            v_head_dims[index],
            window=windows[index] or None,
            softcap=_softcap(metadata, index),
            chunk=chunks[index] or None,
            is_latent=bool(latent[index]),
        )
        for index in range(len(windows))
    )
    shared = tuple((layer, source) for layer, source in pairs if source != layer)
    return ModelCacheParams(n_layers, groups=groups, shared=shared)


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


def _wholes_or(
    metadata: Mapping[str, Any], key: str, default: list[int], of: str = "layer groups"
) -> list[int]:
    """Return whole numbers that are written for some models only."""
    if PREFIX + key not in metadata:
        return default
    return _wholes(metadata, key, len(default), of)


def _wholes(
    metadata: Mapping[str, Any], key: str, length: int | None = None, of: str = "layer groups"
) -> list[int]:
    value = _fact(metadata, key)
    try:
        numbers = [operator.index(number) for number in value]
    except TypeError:
        raise MetadataError(
            f"{PREFIX}{key} is {value!r}, not a list of whole numbers; export again"
        ) from None
    if length is not None and len(numbers) != length:
        raise MetadataError(
            f"{PREFIX}{key} has {len(numbers)} entries for {length} {of}; export again"
        )
    return numbers
