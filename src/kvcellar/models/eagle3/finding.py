"""Finds a head and computes its costs; nothing is loaded."""

from __future__ import annotations

from pathlib import Path

from kvcellar.errors import ConfigError, ModelError
from kvcellar.models.eagle3.config import MOST_HELD_TWICE, read_eagle3_config
from kvcellar.models.files.checkpoint import check_weights, read_config, stored_bytes
from kvcellar.models.files.hub import DEMO_FOLDER, find_checkpoint
from kvcellar.models.options import DEMO
from kvcellar.models.weights import BLOCK, GROUP, packed_bytes
from kvcellar.spec import DTYPE_BYTES, ModelCacheSpec
from kvcellar.types import ModelCacheParams

DEMO_HEAD_FOLDER = DEMO_FOLDER.parent / "demo_eagle3"
"""Folder of the bundled model's head."""

_MAPS = ("d2t", "t2d")
_STORED_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def find_head(name_or_path: str | Path | None, target: str | Path) -> Path:
    """Return the folder of a head.

    Args:
        name_or_path: a folder, or a name on the Hugging Face hub, from where it is downloaded;
            ``demo``: the head of the bundled model; None: the same, where that is the target.
        target: the model that it guesses for, as it was asked for.

    Raises:
        ConfigError: no head is bundled with the target.
        ModelError: there is no such head.
    """
    if name_or_path not in (None, DEMO):
        return find_checkpoint(name_or_path, lambda part, what: None)
    if name_or_path is None and target != DEMO and Path(target) != DEMO_FOLDER:
        raise ConfigError(
            f"only the bundled model comes with a head; name one that was trained for "
            f"{str(target)!r}: eagle3:PATH"
        )
    if not DEMO_HEAD_FOLDER.is_dir():
        raise ModelError(
            f"the bundled head is not in this installation ({DEMO_HEAD_FOLDER}); install kvcellar "
            f"again, or name another one: eagle3:PATH"
        )
    return DEMO_HEAD_FOLDER


def size_eagle3(
    name_or_path: str | Path | None, target: str | Path, *, dtype: str
) -> ModelCacheSpec:
    """Work out what a head's KV and weights cost, by its config and the sizes of its tensors.

    Args:
        name_or_path: as ``find_head`` takes it.
        target: the model that it guesses for, as it was asked for.
        dtype: type of its weights in memory: that of its target's.

    Raises:
        ConfigError, ModelError: there is no such head, or not all of it.
    """
    folder = find_head(name_or_path, target)
    config = read_eagle3_config(read_config(folder), folder)
    dtypes = check_weights(folder)
    stored = stored_bytes(folder, _MAPS) or 0
    width = next((_STORED_BYTES[kind] for kind, _ in dtypes.most_common() if kind in _STORED_BYTES))
    n_params = stored // width
    weight_bytes = n_params * DTYPE_BYTES[dtype]
    if dtype == "float32" and n_params <= MOST_HELD_TWICE:
        weight_bytes += packed_bytes(1, n_params // GROUP * GROUP, 8) // BLOCK
    return ModelCacheSpec(
        name=str(folder),
        family="eagle3",
        params=ModelCacheParams(1, config.n_kv_heads, config.head_dim, kv_dtype=dtype),
        max_positions=config.max_positions,
        stored_bytes=stored,
        weight_bytes=weight_bytes,
        dtype=dtype,
        counted=f"{n_params:,} parameters, sizes from its files",
        n_heads=config.n_heads,
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        vocab_size=config.draft_vocab_size,
    )
