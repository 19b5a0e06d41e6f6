"""Tiny checkpoints of models that read pictures, saved as transformers saves published ones.

Pictures are small: one of 32 by 24 pixels is a dozen tokens or so. Tokens are bytes, so that a
prompt reads as it is.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from kvcellar.pictures.picture import Picture
from tests.models.tiny_checkpoints import COMMON, SPECIALS, make_tokenizer, randomize

VOCAB_SIZE = 320
"""256 bytes, the special tokens of text, those of a family, and rows to spare."""

_OWN = 256 + len(SPECIALS)
"""Id of the first token of a family's own."""

_TEXT: dict[str, Any] = {
    **COMMON,
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}

_MEAN = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}WRITTEN{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template; ``WRITTEN`` is what a family has it write for a picture."""


class Family:
    """What a checkpoint of a family is made of.

    Attributes:
        config: its ``config.json``, without token ids of pictures.
        tokens: special tokens of its own, in the order of their ids.
        written: what its template writes where a picture stands.
        preprocessor: its ``preprocessor_config.json``.
        processor: its ``processor_config.json``.
        named: token -> the name by which its tokenizer has it.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tokens: list[str],
        written: str,
        preprocessor: dict[str, Any],
        processor: dict[str, Any],
        named: dict[str, str] | None = None,
    ) -> None:
        self.config, self.tokens, self.written = config, tokens, written
        self.preprocessor, self.processor, self.named = preprocessor, processor, named or {}


def _id(tokens: list[str], token: str) -> int:
    return _OWN + tokens.index(token)


_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_QWEN_IDS = {
    "vision_start_token_id": _OWN,
    "vision_end_token_id": _OWN + 1,
    "image_token_id": _OWN + 2,
    "video_token_id": _OWN + 3,
}
_QWEN_TOWER = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "out_hidden_size": 64,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}


def _qwen(config: dict[str, Any], kind: str) -> Family:
    sizes: dict[str, Any] = {"min_pixels": 256, "max_pixels": 4096}
    if kind == "Qwen3VL":
        sizes = {"size": {"shortest_edge": 256, "longest_edge": 4096}}
    return Family(
        {**config, **_QWEN_IDS},
        _QWEN_TOKENS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": f"{kind}Processor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            **sizes,
            **_MEAN,
        },
        {"processor_class": f"{kind}Processor"},
    )


def _qwen2_vl() -> Family:
    tower = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    return _qwen(
        {"text_config": {**_TEXT, "rope_parameters": _MROPE}, "vision_config": tower}, "Qwen2VL"
    )


def _qwen2_5_vl() -> Family:
    tower = {**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    return _qwen(
        {"text_config": {**_TEXT, "rope_parameters": _MROPE}, "vision_config": tower}, "Qwen2_5_VL"
    )


FAMILIES: dict[str, Callable[[], Family]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
}
"""Name of a family -> what its checkpoint is made of."""


def make_vision_model(family: str) -> Any:
    """Return a model of a family with random weights, the same each time."""
    made = FAMILIES[family]()
    fields = json.loads(json.dumps(made.config))
    config = transformers.CONFIG_MAPPING[fields.pop("model_type", family)](**fields)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    auto: Any = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model)
    return model


def make_vision_checkpoint(folder: Path, family: str = "qwen2_5_vl", **save_options: Any) -> Path:
    """Save a model of a family that reads pictures, its processor and its tokenizer.

    Returns:
        The folder.
    """
    made = FAMILIES[family]()
    folder.mkdir(parents=True, exist_ok=True)
    make_vision_model(family).save_pretrained(folder, **save_options)
    tokenizer = make_tokenizer(chat_template=TEMPLATE.replace("WRITTEN", made.written))
    tokenizer.add_special_tokens({"additional_special_tokens": made.tokens})
    if made.named:
        tokenizer.init_kwargs["extra_special_tokens"] = made.named
    tokenizer.save_pretrained(folder)
    if made.named:  # as published ones have them
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **made.named}))
    (folder / "preprocessor_config.json").write_text(json.dumps(made.preprocessor))
    (folder / "processor_config.json").write_text(json.dumps(made.processor))
    return folder


def make_picture(width: int = 32, height: int = 24, seed: int = 0) -> Picture:
    """Return a PNG of random pixels, the same for the same seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Picture.read(file.getvalue())
