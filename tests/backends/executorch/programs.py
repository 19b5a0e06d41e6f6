"""Tiny checkpoints of every family, one or two layers each, exported once per test run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock

from kvcellar.backends.executorch import export_program
from tests.models.tiny_checkpoints import FAMILIES, randomize, save


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """ExecuTorch's Python side warns of its own deprecations when it is imported and used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


MAX_TOKENS = 48
"""Of a step."""

FEW_LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 1},
    "qwen2_window": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "gemma2": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Name of a tiny model -> what differs from that of the other tests."""

EACH_TIME = ("llama", "qwen2_window", "gemma3", "gpt_oss")
"""Those that every run holds to transformers; with ``KVCELLAR_ALL_CASES`` it is all."""


def checkpoint_of(shared: Path, family: str) -> Path:
    """The checkpoint, made by whoever needs it first."""
    folder = shared / "checkpoints" / family
    with FileLock(shared / f"{family}.lock"):
        if not folder.exists():
            config = FAMILIES[family]()
            for name, value in FEW_LAYERS[family].items():
                setattr(config, name, value)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            randomize(model)
            staged = folder.with_name(f"{family}.staged")
            save(model, staged)
            staged.rename(folder)
    return folder


def export_once(shared: Path, family: str, quantize: str) -> Path:
    """The program, exported by whoever needs it first."""
    path = shared / f"{family}-{quantize}.pte"
    checkpoint = checkpoint_of(shared, family)
    with FileLock(shared / f"{path.name}.lock"):
        if not path.exists():
            export_program(checkpoint, path, quantize=quantize, max_tokens_per_step=MAX_TOKENS)
    return path
