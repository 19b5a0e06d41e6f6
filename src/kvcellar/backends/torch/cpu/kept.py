"""Parts of a network that were found before, kept beside the facts of its model.

They are of a network with the same modules of the same classes and sizes, whose config has the same
digest. A file that is damaged, or of another network, costs the time to find them again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash
from torch import nn

from kvcellar.backends.torch.cpu.decoder import Whole
from kvcellar.backends.torch.cpu.modules.parts import (
    AttentionPart,
    LayerPart,
    MlpPart,
    NormPart,
    Part,
    Parts,
)
from kvcellar.backends.torch.cpu.modules.recurrent import MixerPart
from kvcellar.backends.torch.cpu.modules.rotations import Rotation
from kvcellar.models.known import keep, read_kept
from kvcellar.models.plans.plan import ModelPlan

VERSION = 6
"""Version of how parts are found and written; those of another one are found again."""

_KINDS = {kind.__name__: kind for kind in (NormPart, MlpPart, AttentionPart, LayerPart, MixerPart)}

Found = tuple[dict[str, Part], Whole | None, ModelPlan | None]


def key_of(network: Any, linears: Mapping[str, Any]) -> str:
    """Return a digest of what parts depend on beside a config.

    Args:
        network: its modules and its type.
        linears: sizes of the linear layers that can be held, by name.
    """
    modules = [(name, _class_of(module)) for name, module in network.named_modules()]
    text = json.dumps([VERSION, str(network.dtype), modules, sorted(linears.items())])
    return xxhash.xxh3_128_hexdigest(text.encode())


def _class_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def read_parts(path: Path, key: str, *, with_plan: bool = False) -> Found | None:
    """Return parts that were kept under a key, and the plan.

    Args:
        path: where they are kept.
        key: what they depend on.
        with_plan: whether parts that were kept before a plan was looked for count as none.

    Returns:
        None where there are none.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        told = read_kept(path)
        if told["key"] != key or (with_plan and not told["is_planned"]):
            return None
        parts = {name: _part(kind, fields) for name, (kind, fields) in told["parts"].items()}
        whole = told["whole"]
        plan = None if told["plan"] is None else ModelPlan.from_json(told["plan"])
        return parts, None if whole is None else Whole(**_tuples(whole)), plan
    return None


def keep_parts(
    path: Path,
    key: str,
    parts: Parts,
    whole: Whole | None,
    plan: ModelPlan | None = None,
    *,
    is_planned: bool = False,
) -> None:
    """Keep parts under a key; a folder that cannot be written is no error.

    Args:
        path: where to.
        key: what they depend on.
        parts: by name.
        whole: what the network is made of, where it is nothing else.
        plan: of the model.
        is_planned: whether a plan was looked for.
    """
    told = {name: (type(part).__name__, asdict(part)) for name, part in parts.items()}
    said = {"key": key, "parts": told, "whole": None if whole is None else asdict(whole)}
    keep(path, said | {"plan": None if plan is None else plan.to_json(), "is_planned": is_planned})


def _part(kind: str, fields: dict[str, Any]) -> Part:
    if "rotation" in fields:
        fields["rotation"] = Rotation(**fields["rotation"])
    made: Part = _KINDS[kind](**_tuples(fields))
    return made


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()}
