"""Architectures that are run, and checks of a config for what would run wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""model_type -> the class of transformers that runs it with its attention on the op."""

MULTIMODAL = {"gemma3": "Gemma3ForConditionalGeneration"}
"""model_type of a checkpoint whose text part is loaded alone -> what its config calls itself."""


def check_architecture(raw: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint that would load and then run wrongly, or that nobody here runs.

    Raises:
        ModelError: its architecture, its quantisation or a field of its config is not supported.
    """
    family = raw.get("model_type")
    if family not in CLASSES and family not in MULTIMODAL:
        supported = ", ".join([*CLASSES, *MULTIMODAL])
        raise ModelError(
            f"{folder} is of architecture {family!r}, which is not supported; there are: "
            f"{supported}"
        )
    known = MULTIMODAL.get(family) or CLASSES[family]
    named = raw.get("architectures") or [known]
    if known not in named and CLASSES.get(family) not in named:
        raise ModelError(f"{folder} is a {', '.join(named)}; to generate text it must be a {known}")
    quantization = raw.get("quantization_config")
    if is_quantised_for_mlx(raw):
        raise ModelError(f"{folder} is quantised for MLX; load it with the backend mlx")
    if quantization and (quantization.get("quant_method") != "mxfp4" or family != "gpt_oss"):
        raise ModelError(
            f"{folder} is quantised with {quantization.get('quant_method')!r}, which is not "
            f"supported; choose a checkpoint in bfloat16, float16 or float32"
        )
    text = raw.get("text_config") or raw
    if family in ("gemma3", "gemma3_text") and text.get("attn_logit_softcapping"):
        raise ModelError(
            f"{folder} asks for attn_logit_softcapping, which Gemma 3 of transformers ignores; "
            f"the result would not be the model's"
        )
    check_rope(text, folder)


def check_rope(text: Mapping[str, Any], folder: Path) -> None:
    """Refuse a RoPE with which K that was cached would be wrong.

    Raises:
        ModelError: it is of such a type.
    """
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    for part in (rope, *nested):
        kind = part.get("rope_type", part.get("type"))
        if kind in ("dynamic", "longrope"):
            raise ModelError(
                f"{folder} has RoPE of type {kind!r}, which turns every position anew as a "
                f"sequence grows; K that is cached would be wrong, so it is not supported"
            )


def is_quantised_for_mlx(raw: Mapping[str, Any]) -> bool:
    """Return true if a checkpoint's config says that only MLX's own functions read its weights."""
    return "quantization" in raw


def without_quantisation(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's config without what it says of how its weights are stored."""
    return {k: v for k, v in raw.items() if k not in ("quantization", "quantization_config")}
