"""Writes ``families.json``, by which ``tools/check_families.py`` knows transformers without torch.

``python -m tests.models.family_logits --write`` makes the file anew; names of models after it make
those alone, and leave the others as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from kvcellar.backends.torch.learn.shrink.checkpoints import (
    default_raw,
    started_network,
    twin_raw,
)
from kvcellar.backends.torch.learn.shrink.configs import VOCAB_SIZE
from kvcellar.models.files.checkpoint import read_config
from kvcellar.models.fingerprint import VOLATILE
from kvcellar.models.plans.rules import plan_by_rules
from tests.models.players import Oracle
from tests.models.test_check import OFTEN, RECURRENT
from tests.models.test_native import FAMILIES, OTHERS, SHAPE
from tests.tools.scripts import load_script

checking = load_script("check_families")

_OF_OTHERS = {
    "gemma4",
    "gemma4_unified",
    "lfm2_vl",
    "mistral3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
}
"""Wrappers, whose text is a family of its own."""

_KINDS = {kind for kind, _ in (FAMILIES | OTHERS).values()} | _OF_OTHERS
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (kind, {**SHAPE, **fields}) for name, (kind, fields) in FAMILIES.items()},
    **{
        name: (kind, {**SHAPE, "num_hidden_layers": 3, **fields})
        for name, (kind, fields) in OTHERS.items()
    },
    **{kind: (kind, {}) for kind in (*OFTEN.split(), *RECURRENT.split()) if kind not in _KINDS},
}
"""Name of a model -> its family, and fields of its config that are not the family's own."""


def made(name: str) -> dict[str, Any]:
    """Return what the file has of a model; what has no plan by rules has no tensors and logits."""
    kind, fields = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        network = started_network(twin_raw(default_raw(kind, **fields)))
        getattr(network, "whole", network).save_pretrained(folder)
        raw = {k: one for k, one in read_config(Path(folder)).items() if k not in VOLATILE}
        tensors: dict[str, Any] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            tensors |= load_file(file)
    if plan_by_rules(raw) is None:
        return {"config": raw, "tensors": {}, "logits": None}
    told = {name: _told(tensors[name]) for name in sorted(tensors)}
    family = {"config": raw, "tensors": _together(told)}
    with tempfile.TemporaryDirectory() as folder:
        checking.write(family, Path(folder))
        oracle = Oracle(Path(folder))
        texts = checking.TEXT, checking.FORK
        logits = [
            checking.told(oracle.logits(text)).astype(float).round(5).tolist() for text in texts
        ]
    return {**family, "logits": logits}


def _told(one: Any) -> tuple[list[int], float, float]:
    """Return a tensor's shape, and the mean and deviation that its numbers are to have."""
    if one.ndim < 2:  # norms, biases and the like stay near what the class starts with
        return [*one.shape], round(float(one.mean()), 2), 0.1
    if VOCAB_SIZE in one.shape:
        return [*one.shape], 0.0, 0.15
    return [*one.shape], 0.0, round(one.shape[-1] ** -0.5, 4)


def _together(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors with those of several layers, alike, under one name."""
    layers: dict[tuple[str, str, str], list[str]] = {}
    for name, one in tensors.items():
        before, layer, behind = re.fullmatch(r"(.*?layers\.|)(\d*)(.*)", name).groups()
        layers.setdefault((before, behind, json.dumps(one)), []).append(layer)
    return {
        f"{before}{','.join(numbers)}{behind}": json.loads(one)
        for (before, behind, one), numbers in layers.items()
    }


def known() -> dict[str, Any]:
    """Return what the file has, by the names of models."""
    found: dict[str, Any] = json.loads(checking.FILE.read_text())
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", nargs="*", metavar="MODEL", required=True)
    names = parser.parse_args(arguments).write or list(MODELS)
    before = known() if checking.FILE.is_file() else {}
    after = {name: made(name) if name in names else before[name] for name in MODELS}
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in after.items()]
    checking.FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
