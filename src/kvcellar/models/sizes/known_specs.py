"""Costs of models that were worked out before, kept in the user's own folder.

Working them out takes torch and transformers, which take seconds to import; a later look at a
model of which no file has changed takes neither. A file that is damaged, or that cannot be written,
costs that time again, and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import xxhash

from kvcellar.errors import ConfigError
from kvcellar.home import default_home
from kvcellar.models.facts import VERSION
from kvcellar.models.known import keep, read_kept, stamps_of
from kvcellar.models.options import LoadOptions
from kvcellar.models.sizes.sizing import find_config, size_model
from kvcellar.spec import ModelCacheSpec
from kvcellar.states import StateGroup, StateShape
from kvcellar.types import LayerGroup, ModelCacheParams
from kvcellar.version import __version__

_BY = ("torch", "transformers", "mlx", "mlx-lm", "executorch")
"""Packages by whose rules costs are worked out."""


def known_spec(options: LoadOptions, kernel: str) -> ModelCacheSpec:
    """Return what a model's KV and weights cost, as ``size_model`` works it out, and keep that.

    Args:
        options: of the model.
        kernel: level of the CPU kernel here: how weights are held depends on it.

    Raises:
        ModelError, ConfigError, BackendError: as ``size_model``; nothing is kept then.
    """
    kept = default_home() / "models" / f"{_digest(options, kernel)}.spec.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return _from_json(read_kept(kept))
    spec = size_model(options)
    keep(kept, asdict(spec))
    return spec


def _digest(options: LoadOptions, kernel: str) -> str:
    """Return a digest of all that the costs of a model depend on."""
    asked = [str(one) for one in (options.model, options.backend, options.dtype, options.weights)]
    here = [platform.machine(), kernel, str(options.device)]
    text = json.dumps([asked, here, *_versions(), *stamps_of(find_config(options.model))])
    return xxhash.xxh3_128_hexdigest(text.encode())


def _versions() -> Iterator[str]:
    """Yield the version of everything whose rules are applied."""
    yield f"{__version__} {VERSION}"
    for package in _BY:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{package} {importlib.metadata.version(package)}"


def _from_json(value: Any) -> ModelCacheSpec:
    """Make a spec of what ``keep`` wrote.

    Raises:
        ValueError: it is none.
    """
    try:
        return ModelCacheSpec(**{**value, "params": _params(value["params"])})
    except (TypeError, KeyError, AttributeError, ConfigError) as error:
        raise ValueError(f"these are no costs of a model: {error}") from error


def _params(value: Mapping[str, Any]) -> ModelCacheParams:
    """Make a model's facts of a JSON object."""
    groups = (LayerGroup(**{**one, "layers": tuple(one["layers"])}) for one in value["groups"])
    state = value["state"]
    if state is not None:
        layers = (
            tuple(StateShape(kind, tuple(shape)) for kind, shape in of) for of in state["layers"]
        )
        state = StateGroup(tuple(layers))
    return ModelCacheParams(
        value["n_layers"],
        groups=tuple(groups),
        shared=tuple((layer, source) for layer, source in value["shared"]),
        state=state,
        kv_dtype=value["kv_dtype"],
    )
