"""Adapters as PEFT saves them, with random numbers, and the oracle: weights with them merged in."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def plain_model(folder: Path) -> Any:
    """A checkpoint as transformers itself runs it, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def linears(model: Any) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a model's linear layers, by name."""
    return {
        name: (one.in_features, one.out_features)
        for name, one in model.named_modules()
        if isinstance(one, torch.nn.Linear)
    }


def write_adapter(
    folder: Path,
    base: Path,
    targets: Sequence[str] | str = ATTENTION,
    *,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter for a checkpoint; ``targets`` are ends of names, or an expression."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    rank = config.setdefault("r", 4)
    for name, (n_in, n_out) in linears(plain_model(base)).items():
        is_one = (
            re.fullmatch(targets, name)
            if isinstance(targets, str)
            else name.rpartition(".")[2] in targets
        )
        if is_one:
            own = next((n for end, n in (ranks or {}).items() if name.endswith(end)), rank)
            for half, shape in (("A", (own, n_in)), ("B", (n_out, own))):
                numbers = torch.randn(shape, generator=generator) * 0.15
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = numbers.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "rank_pattern": ranks or {},
        "alpha_pattern": {},
        "modules_to_save": None,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def merged(base: Path, adapter: Path | None, alphas: dict[str, float] | None = None) -> Any:
    """The oracle: a checkpoint's model with ``alpha / r * B @ A`` added to its weights."""
    model = plain_model(base)
    if adapter is None:
        return model
    said = json.loads((adapter / "adapter_config.json").read_text())
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118 (a file is no dict)
            if key.endswith("lora_A.weight"):
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                a, b = file.get_tensor(key), file.get_tensor(key.replace("_A.", "_B."))
                alpha = (alphas or {}).get(name, said["lora_alpha"])
                root = math.sqrt(len(a)) if said.get("use_rslora") else len(a)
                model.get_submodule(name).weight += alpha / root * (b.float() @ a.float())
    return model


def logits_of(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Logits ``[T, vocab]`` of a whole text."""
    with torch.inference_mode():
        found: np.ndarray = model(input_ids=torch.tensor([list(ids)])).logits[0].float().numpy()
    return found
