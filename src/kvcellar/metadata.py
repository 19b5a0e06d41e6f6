"""``kv_cache.*`` metadata: a model's cache facts inside an exported program.

Only facts of the architecture are written. Capacity and storage type are the caller's, at run
time. Values are what a program's constant methods can carry: ints, floats, and lists of ints.
"""

from __future__ import annotations

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
) -> MutableMapping[str, Any]:
    """Add a model's cache facts to ``metadata`` and return it.

    Args:
        metadata: an exporter's metadata; other keys stay as they are.
        n_layers: attention layers.
        n_kv_heads: KV heads per layer, not query heads.
        head_dim: length of a K row.
        v_head_dim: length of a V row, where it differs.
        groups: layer groups, where not all layers keep their whole history.

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
    metadata.update({PREFIX + key: value for key, value in facts.items()})
    return metadata


def read_kv_cache_metadata(metadata: Mapping[str, Any]) -> ModelCacheParams:
    """The cache facts that ``write_kv_cache_metadata`` wrote.

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

    def fact(key: str) -> Any:
        try:
            return metadata[PREFIX + key]
        except KeyError:
            raise MetadataError(
                f"{PREFIX}{key} is missing from schema version {version}; export again"
            ) from None

    try:
        n_layers = int(fact("n_layers"))
        head_dim = int(fact("head_dim"))
        v_head_dim = int(metadata.get(PREFIX + "v_head_dim", head_dim))
        groups: list[LayerGroup] = []
        if PREFIX + "layer_groups" in metadata:
            group_of = [int(i) for i in fact("layer_groups")]
            for index, window in enumerate(fact("group_windows")):
                softcap = metadata.get(f"{PREFIX}group_softcap.{index}")
                groups.append(
                    LayerGroup(
                        layers=tuple(i for i, g in enumerate(group_of) if g == index),
                        n_kv_heads=int(fact("group_n_kv_heads")[index]),
                        head_dim=int(fact("group_head_dims")[index]),
                        v_head_dim=int(fact("group_v_head_dims")[index]),
                        window=int(window) or None,
                        softcap=None if softcap is None else float(softcap),
                    )
                )
        return ModelCacheParams(
            n_layers, int(fact("n_kv_heads")), head_dim, v_head_dim, tuple(groups)
        )
    except (ConfigError, TypeError, ValueError, IndexError) as error:
        raise MetadataError(f"{PREFIX}* metadata is not usable: {error}; export again") from error
