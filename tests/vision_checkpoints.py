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

from kvcellar.backends.torch.learn.shrink.checkpoints import randomise
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


def _qwen3_vl() -> Family:
    tower = {**_QWEN_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return _qwen(
        {"text_config": {**_TEXT, "rope_parameters": _MROPE}, "vision_config": tower}, "Qwen3VL"
    )


def _qwen3_5() -> Family:
    text = {
        **_TEXT,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True},
    }
    tower = {**_QWEN_TOWER, "num_position_embeddings": 64}
    return _qwen({"text_config": text, "vision_config": tower}, "Qwen3VL")


def _mixed(dense: Family) -> Family:
    """Return a family whose text is a mixture of experts."""
    dense.config["text_config"] |= {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    }
    return dense


_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_LLAVA = {**_TOWER, "num_hidden_layers": 3, "intermediate_size": 48}
"""One whose layers are told apart, and up from down."""
_LLAMA = {"model_type": "llama", **_TEXT}
_GRANITE = {"attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
_SQUARE = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, **_MEAN}


def _llava() -> Family:
    said = {"patch_size": 4, "vision_feature_select_strategy": "default"}
    return Family(
        {"text_config": _LLAMA, "vision_config": _LLAVA, "image_token_index": _OWN},
        ["<image>"],
        "<image>",
        {"image_processor_type": "CLIPImageProcessor", **_SQUARE},
        {"processor_class": "LlavaProcessor", "num_additional_image_tokens": 1, **said},
    )


def _llava_next() -> Family:
    pinpoints = [[16, 32], [32, 16], [32, 32]]
    said = {"patch_size": 4, "vision_feature_select_strategy": "default"}
    return Family(
        {
            "text_config": {**_TEXT, "model_type": "granite", **_GRANITE},
            "vision_config": _LLAVA,
            "image_token_index": _OWN,
            "image_grid_pinpoints": pinpoints,
        },
        ["<image>"],
        "<image>",
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": pinpoints,
            **_SQUARE,
        },
        {"processor_class": "LlavaNextProcessor", "num_additional_image_tokens": 1, **said},
    )


def _granite_vision() -> Family:
    """A LLaVA-NeXT that reads several layers of a SigLIP."""
    made = _llava_next()
    made.config["model_type"] = "llava_next"
    made.config["vision_config"] = {**_LLAVA, "model_type": "siglip_vision_model"}
    made.config |= {
        "vision_feature_layer": [-3, -1],
        "vision_feature_select_strategy": "full",
    }
    made.processor |= {"num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"}
    return made


_TILES = [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]


def _tiled(kind: str) -> Family:
    tokens = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    return Family(
        {
            "text_config": _LLAMA,
            "vision_config": _TOWER,
            "image_token_id": _OWN + 1,
            "scale_factor": 2,
        },
        [*tokens, *_TILES],
        "<image>",
        {
            "image_processor_type": f"{kind}ImageProcessor",
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
            "do_image_splitting": True,
            **_MEAN,
        },
        {"processor_class": f"{kind}Processor", "image_seq_len": 4},
    )


def _mistral3() -> Family:
    return Family(
        {
            "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**_TOWER, "image_size": 32, "head_dim": 16},
            "image_token_index": _OWN,
            "spatial_merge_size": 2,
        },
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "[IMG]",
        {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": 4,
            "size": {"longest_edge": 32},
            **_MEAN,
        },
        {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2},
    )


def _internvl() -> Family:
    return Family(
        {
            "text_config": {**_TEXT, "model_type": "qwen3"},
            "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": _OWN,
            "image_seq_length": 4,
        },
        ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        "<IMG_CONTEXT>",
        {
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "size": {"height": 16, "width": 16},
            "crop_to_patches": True,
            "max_patches": 4,
            **_MEAN,
        },
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
    )


def _gemma3() -> Family:
    """A picture has 16 rows, which is more than the window of 8."""
    return Family(
        {
            "text_config": {
                **_TEXT,
                "num_hidden_layers": 6,
                "sliding_window": 8,
                "query_pre_attn_scalar": 16,
            },
            "vision_config": {**_TOWER, "image_size": 32},
            "mm_tokens_per_image": 16,
            "boi_token_index": _OWN,
            "image_token_index": _OWN + 1,
            "eoi_token_index": _OWN + 2,
        },
        ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        "<start_of_image>",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
            **_MEAN,
        },
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        {
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
    )


def _gemma4(*, both_ways: bool) -> Family:
    named = {
        "boi_token": "<|image>",
        "image_token": "<|image|>",
        "eoi_token": "<image|>",
        "boa_token": "<|audio>",
        "audio_token": "<|audio|>",
        "eoa_token": "<audio|>",
    }
    names = ("boi_token_id", "image_token_id", "eoi_token_id", "boa_token_id", "audio_token_id")
    ids = {name: _OWN + i for i, name in enumerate((*names, "eoa_token_index", "video_token_id"))}
    text = {
        **_TEXT,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "sliding_window": 8,
        "use_bidirectional_attention": "vision" if both_ways else None,
    }
    tower = {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2}
    return Family(
        {
            "model_type": "gemma4",
            "text_config": text,
            "vision_config": {**tower, "position_embedding_size": 64},
            "audio_config": None,
            **ids,
        },
        [*named.values(), "<|video|>"],
        "<|image|>",
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
        {"processor_class": "Gemma4Processor", "image_seq_length": 70},
        named,
    )


def _lfm2_vl(*, as_published: bool) -> Family:
    """Without small settings of its own, a picture is 64 tokens or more."""
    tokens = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    tiles = [f"<|img_row_{i}_col_{j}|>" for i in (1, 2) for j in (1, 2)]
    text = {
        **_TEXT,
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
    }
    tower = {**_TOWER, "model_type": "siglip2_vision_model", "num_patches": 16}
    small = {
        "encoder_patch_size": 4,
        "tile_size": 16,
        "max_tiles": 4,
        "min_image_tokens": 4,
        "max_image_tokens": 8,
    }
    if as_published:
        small, tower["patch_size"] = {}, 16
    return Family(
        {
            "text_config": text,
            "vision_config": {k: v for k, v in tower.items() if k != "image_size"},
            "image_token_id": _OWN,
            "projector_hidden_size": 32,
        },
        [*tokens, *tiles],
        "<image>",
        {
            "image_processor_type": "Lfm2VlImageProcessorFast",
            **small,
            **_MEAN,
        },
        {"processor_class": "Lfm2VlProcessor"},
    )


FAMILIES: dict[str, Callable[[], Family]] = {
    "gemma3": _gemma3,
    "gemma4": lambda: _gemma4(both_ways=False),
    "gemma4_both_ways": lambda: _gemma4(both_ways=True),
    "idefics3": lambda: _tiled("Idefics3"),
    "internvl": _internvl,
    "lfm2_vl": lambda: _lfm2_vl(as_published=False),
    "llava": _llava,
    "llava_next": _llava_next,
    "mistral3": _mistral3,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen3_5": _qwen3_5,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": lambda: _tiled("SmolVLM"),
}
"""Name of a family -> what its checkpoint is made of."""

FURTHER = {
    "granite_vision": _granite_vision,
    "lfm2_vl_published": lambda: _lfm2_vl(as_published=True),
    "qwen3_vl_moe": lambda: _mixed(_qwen3_vl()),
    "qwen3_5_moe": lambda: _mixed(_qwen3_5()),
}
"""The same of families whose settings cannot be small in every format, and of mixtures."""


def family_of(name: str) -> Family:
    """Return what a checkpoint of a family is made of."""
    return {**FAMILIES, **FURTHER}[name]()


def make_vision_model(family: str, **vision: Any) -> Any:
    """Return a model of a family with random weights, the same each time.

    Args:
        family: one of ``FAMILIES``.
        vision: fields of its vision part's config that are to be others.
    """
    made = family_of(family)
    fields = json.loads(json.dumps(made.config))
    fields["vision_config"] |= vision
    kind = fields.pop("model_type", family.removesuffix("_published"))
    config = transformers.CONFIG_MAPPING[kind](**fields)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    auto: Any = transformers.AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    if "linear_key_head_dim" in made.config["text_config"]:
        randomise(model, seed=4)  # one in which float32 itself rounds little
    else:
        randomize(model)
    return model


def make_vision_checkpoint(folder: Path, family: str = "qwen2_5_vl", **save_options: Any) -> Path:
    """Save a model of a family that reads pictures, its processor and its tokenizer.

    Returns:
        The folder.
    """
    made = family_of(family)
    folder.mkdir(parents=True, exist_ok=True)
    make_vision_model(family).save_pretrained(folder, **save_options)
    tokenizer = make_tokenizer(chat_template=TEMPLATE.replace("WRITTEN", made.written))
    tokenizer.add_special_tokens({"additional_special_tokens": made.tokens})
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, **made.named, "extra_special_tokens": made.named}))
    (folder / "preprocessor_config.json").write_text(json.dumps(made.preprocessor))
    (folder / "processor_config.json").write_text(json.dumps(made.processor))
    return folder


def make_picture(width: int = 32, height: int = 24, seed: int = 0) -> Picture:
    """Return a PNG of random pixels, the same for the same seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Picture.read(file.getvalue())
