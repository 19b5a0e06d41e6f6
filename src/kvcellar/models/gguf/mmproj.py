"""Vision parts in GGUF (``mmproj`` files): which lies beside a model, and what it says of itself.

llama.cpp keeps what reads pictures in a file of its own, with the sizes of the network and of
pictures in its metadata; the placeholders are tokens of the text's vocabulary. Of both is made what
would be the ``config.json``, ``preprocessor_config.json`` and ``processor_config.json`` of a
checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.gguf.configs import config_of
from kvcellar.models.gguf.family import Raw, shape_of
from kvcellar.models.gguf.reader import GgufFile, read_gguf, wrong
from kvcellar.models.gguf.ropes import theta_of

_NAME = re.compile(r"[-_.]?mmproj[-_.]?", re.IGNORECASE)
_QUANT = re.compile(
    r"[-_.](?:(?:iq|q|tq)\d\w*|b?f16|f32|mxfp4\w*|fp16|model|ud|i1)$", re.IGNORECASE
)

_BLOCK = re.compile(r"v\.blk\.(\d{1,4})\.(.+)")

_MOST_SIDE = 1 << 13
"""Pixels of a side to which a file may have pictures resized."""

_MOST_PIXELS = 1 << 26
"""Pixels to which a file may have a picture resized."""

_MOST_TILES = 64

_AUDIO = frozenset(
    (
        "ultravox",
        "qwen2a",
        "qwen3a",
        "glma",
        "voxtral",
        "meralion",
        "lfm2a",
        "musicflamingo",
        "granite_speech",
        "gemma3na",
        "gemma4a",
    )
)
"""Projectors of sounds."""


@dataclass(frozen=True, slots=True)
class Mmproj:
    """A vision part in GGUF beside a model.

    Attributes:
        file: it.
        config: what the whole's ``config.json`` would say.
        preprocessor: what its ``preprocessor_config.json`` would say.
        processor: what its ``processor_config.json`` would say.
        named: names that the processor has for tokens -> these.
    """

    file: GgufFile
    config: Raw
    preprocessor: Raw
    processor: Raw
    named: Mapping[str, str]


def mmproj_beside(path: Path) -> tuple[Mmproj | None, str]:
    """Return the vision part that lies beside a model in GGUF.

    Args:
        path: the model, of which the file can be read.

    Returns:
        None, and why, where there is none that can be read; without a reason where there is none.
    """
    stamps = []
    for one in sorted(path.parent.glob("*.gguf")):
        try:
            stat = one.stat()
        except OSError:  # a link to nowhere
            continue
        stamps.append((one, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return _beside(path, tuple(stamps))


def seen_config(path: Path, raw: Raw) -> Raw:
    """Return the config of a model with the vision part beside it.

    Args:
        path: a model in GGUF, or another checkpoint.
        raw: its ``config.json``, which is returned where it has no such part.
    """
    seen = mmproj_beside(path)[0] if path.is_file() else None
    return raw if seen is None else seen.config


@lru_cache(maxsize=4)
def _beside(
    path: Path, stamps: tuple[tuple[Path, int, int, int], ...]
) -> tuple[Mmproj | None, str]:
    """Return the vision part beside a model, where files have these sizes and times."""
    try:
        found = _find(path, [one for one, *_ in stamps])
        return (None, "") if found is None else (_read(read_gguf(found), read_gguf(path)), "")
    except ModelError as error:
        return None, str(error)


def _find(path: Path, beside: list[Path]) -> Path | None:
    """Return the only vision part beside a model, or the only one that is named after it.

    Raises:
        ModelError: there are several.
    """
    found = [one for one in beside if _NAME.search(one.stem) and one != path]
    if len(found) > 1:
        named = [one for one in found if _bare(_NAME.sub("-", one.stem)) == _bare(path.stem)]
        if len(named) != 1:
            raise ModelError(
                f"{len(found)} vision parts lie beside {path.name} "
                f"({', '.join(one.name for one in found)}); give the one to be read the model's "
                f"name, mmproj-{_bare(path.stem)}.gguf, or move the others to another folder"
            )
        found = named
    return found[0] if found else None


def _bare(stem: str) -> str:
    """Return the name of a model without its quantisation and the number of its file."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", stem).lower().strip("-_.")
    while _QUANT.search(stem):
        stem = _QUANT.sub("", stem)
    return stem


def _read(file: GgufFile, text: GgufFile) -> Mmproj:
    """Read what a vision part says of itself.

    Args:
        file: it.
        text: the model that it lies beside.

    Raises:
        ModelError: it is none, one that is not read here, or one of another model.
    """
    if not file.tensors:
        raise wrong(file.path, "has no tensors")
    if file.architecture != "clip":
        raise ModelError(
            f"{file.path} is named as a vision part (mmproj), and is of the architecture "
            f"{file.architecture[:80]!r}; take it away, or give it another name"
        )
    projector = file.text("clip.vision.projector_type") or file.text("clip.projector_type") or "mlp"
    known = _PROJECTORS.get(projector)
    if known is None:
        kind = "for sounds, which are not read" if projector in _AUDIO else "not read here"
        raise ModelError(
            f"{file.path} has a projector of type {projector[:80]!r}, which is {kind}; those for "
            f"pictures that are: {', '.join(sorted(_PROJECTORS))}; take the model's folder of "
            f"Hugging Face for others"
        )
    if text.architecture not in known.texts:
        raise ModelError(
            f"{file.path} is a vision part for texts of the architecture "
            f"{' or '.join(known.texts)}, and {text.path.name} is {text.architecture}; take the "
            f"one that was published with this"
        )
    said = _Pair(file, text, config_of(text))
    width, wanted = said.shape(known.last)[known.axis], said.raw["hidden_size"]
    if width != wanted:
        raise ModelError(
            f"{file.path} makes rows of {width} numbers, and {text.path.name} reads rows of "
            f"{wanted}: it is the vision part of another model; take the one that was published "
            f"with this"
        )
    _check_blocks(file)
    return known.make(said)


def _check_blocks(file: GgufFile) -> None:
    """Refuse a file in which a block of the tower lacks what another one has.

    Raises:
        ModelError: it is so, as after half of a conversion.
    """
    blocks: dict[int, set[str]] = {}
    for name in file.tensors:
        if match := _BLOCK.fullmatch(name):
            blocks.setdefault(int(match[1]), set()).add(match[2])
    every = set().union(*blocks.values())
    for number in range(max(blocks, default=-1) + 1):
        lacks = every - blocks.get(number, set())
        if lacks:
            raise wrong(file.path, f"has no v.blk.{number}.{min(lacks)}")


class _Pair:
    """Reader of what the files of a model and of its vision part say."""

    def __init__(self, file: GgufFile, text: GgufFile, raw: Raw) -> None:
        """Take a vision part's file, the text's, and the text's config."""
        self.file, self.text, self.raw = file, text, raw
        self._vocabulary = text.texts("tokenizer.ggml.tokens") or []

    def size(self, key: str, default: int | None = None, most: int | None = None) -> int:
        """Return a size by its key behind ``clip.vision.``.

        Args:
            key: of it.
            default: where the file does not say.
            most: it may be; None: the largest axis of a tensor.

        Raises:
            ModelError: the file does not say it, and there is no default, or it cannot be.
        """
        found = self.file.whole(f"clip.vision.{key}")
        found = default if found is None else found
        if most is None:
            most = max(max(one.shape) for one in self.file.tensors.values())
        if found is None or not 0 < found <= most:
            raise wrong(self.file.path, f"has {found} for clip.vision.{key}, of {most} at most")
        return found

    def has(self, tensor: str) -> bool:
        """Return true if the vision part has a tensor."""
        return tensor in self.file.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return a matrix's shape.

        Raises:
            ModelError: there is none of that name, or it has one axis.
        """
        shape = shape_of(self.file, tensor)
        if len(shape) < 2:
            raise wrong(self.file.path, f"has {list(shape)} numbers for {tensor}")
        return shape

    def knows(self, token: str) -> bool:
        """Return true if the text's vocabulary has a token."""
        return token in self._vocabulary

    def token(self, text: str) -> int:
        """Return the id of a token of the text's vocabulary.

        Raises:
            ModelError: there is none.
        """
        try:
            return self._vocabulary.index(text)
        except ValueError:
            raise ModelError(
                f"{self.text.path.name} has no token {text!r}, which stands for a picture in what "
                f"{self.file.path.name} is for; take a text model that was converted with it"
            ) from None

    def tower(self) -> Raw:
        """Return what all vision parts say of their network, by the names of most families.

        Raises:
            ModelError: some of it is missing or impossible.
        """
        width, n_heads = self.size("embedding_length"), self.size("attention.head_count")
        if width % n_heads:
            raise wrong(self.file.path, f"has {n_heads} heads in layers of {width} numbers")
        return {
            "hidden_size": width,
            "intermediate_size": self._inner(),
            "num_hidden_layers": self.size("block_count", most=len(self.file.tensors)),
            "num_attention_heads": n_heads,
            "patch_size": self.patch(),
        }

    def _inner(self) -> int:
        """Return the inner numbers of a layer, of which older files call up down."""
        n_out, n_in = self.shape("v.blk.0.ffn_up.weight")[-2:]
        return n_out if n_in == self.size("embedding_length") else n_in

    def patch(self) -> int:
        """Return the side of a patch.

        Raises:
            ModelError: it is another one than the tensors'.
        """
        size, there = self.size("patch_size"), self.shape("v.patch_embd.weight")
        if there[-2:] != (size, size):
            raise wrong(self.file.path, f"has patches of {size} pixels and weights of {there[-2:]}")
        return size

    def activation(self) -> str:
        """Return the activation of a network that files have with either of two."""
        return "silu" if self.file.flag("clip.use_silu") else "gelu"

    def epsilon(self) -> float:
        """Return what is added to variances."""
        return self.file.number("clip.vision.attention.layer_norm_epsilon") or 1e-6

    def square(self) -> int:
        """Return the side of the pictures that a network with a position for each patch reads.

        Raises:
            ModelError: it has another number of positions.
        """
        size, n_positions = self.size("image_size", most=_MOST_SIDE), self._n_positions()
        if (size // self.patch()) ** 2 != n_positions:
            raise wrong(
                self.file.path, f"has {n_positions} positions for pictures of {size} pixels a side"
            )
        return size

    def side(self, size: int, scale: int) -> int:
        """Return the rows in a row or column of a picture of so many pixels.

        Args:
            size: pixels of a side.
            scale: patches of a side that become one row.

        Raises:
            ModelError: there are none.
        """
        found = size // self.patch() // scale
        if not found:
            raise wrong(self.file.path, f"makes one row of {scale} patches a side, and has fewer")
        return found

    def _n_positions(self) -> int:
        return self.shape("v.position_embd.weight")[-2] - self.has("v.class_embd")

    def colours(self) -> Raw:
        """Return the mean and deviation by which colours are scaled.

        Raises:
            ModelError: they are none.
        """
        found = {}
        for name in ("image_mean", "image_std"):
            values = self.file.numbers(f"clip.vision.{name}") or []
            if len(values) != 3 or not all(-10 < one < 10 for one in values):
                raise wrong(self.file.path, f"has {values[:4]} for clip.vision.{name}")
            found[name] = [float(one) for one in values]
        if not all(one > 0 for one in found["image_std"]):
            raise wrong(self.file.path, f"has {found['image_std']} for clip.vision.image_std")
        return found

    def whole(self, model_type: str, vision: Raw, **fields: Any) -> Raw:
        """Return the config of the whole."""
        shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        return {
            "model_type": model_type,
            "text_config": self.raw,
            "vision_config": vision,
            **{name: self.raw[name] for name in shared},
            **fields,
        }


# Projectors --------------------------------------------------------------------------------------


def _gemma3(said: _Pair) -> Mmproj:
    size = said.square()
    side = said.side(size, said.size("projector.scale_factor", 4))
    named = {
        "boi_token": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>",
    }
    config = said.whole(
        "gemma3",
        {
            "model_type": "siglip_vision_model",
            **said.tower(),
            "image_size": size,
            "layer_norm_eps": said.epsilon(),
            "hidden_act": "gelu_pytorch_tanh",
            "vision_use_head": False,
        },
        mm_tokens_per_image=side**2,
        **{f"{name}_index": said.token(token) for name, token in named.items()},
    )
    preprocessor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": size, "width": size},
        **said.colours(),
    }
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": side**2}
    return Mmproj(said.file, config, preprocessor, processor, named)


def _idefics3(said: _Pair) -> Mmproj:
    size, scale = said.square(), said.size("projector.scale_factor", 2)
    config = said.whole(
        "idefics3",
        {
            "model_type": "idefics3_vision",
            **said.tower(),
            "image_size": size,
            "layer_norm_eps": said.epsilon(),
            "hidden_act": "gelu_pytorch_tanh",
        },
        scale_factor=scale,
        image_token_id=said.token("<image>"),
    )
    for token in ("<fake_token_around_image>", "<global-img>"):
        said.token(token)
    preprocessor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": said.size("preproc_image_size", size, 16 * size)},
        "max_image_size": {"longest_edge": size},
        "do_image_splitting": True,
        **said.colours(),
    }
    n_rows = said.side(size, scale) ** 2
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": n_rows}
    return Mmproj(said.file, config, preprocessor, processor, {})


_QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def _qwen(said: _Pair, kind: str, vision: Raw, text: Raw, pixels: tuple[int, int]) -> Mmproj:
    """Return a vision part of the Qwens, whose rows are turned by rows and columns.

    Args:
        said: what its files say.
        kind: the model's, as its classes are named.
        vision: config of its network.
        text: what the text's config says besides.
        pixels: least and most of a picture, where the file does not say.
    """
    sections = said.text.numbers(f"{said.text.architecture}.rope.dimension_sections") or []
    if len(sections) < 3 or not all(type(one) is int and one >= 0 for one in sections):
        raise wrong(said.text.path, f"has {sections} for the sections of its RoPE")
    rope = {**said.raw["rope_parameters"], "mrope_section": sections[:3]}
    said.raw = {**said.raw, **text, "rope_parameters": rope | text.get("rope_parameters", {})}
    merge = said.size("spatial_merge_size", 2)
    least = said.size("image_min_pixels", pixels[0], _MOST_PIXELS)
    most = said.size("image_max_pixels", pixels[1], _MOST_PIXELS)
    config = said.whole(
        text["model_type"].removesuffix("_text"),
        {**vision, "spatial_merge_size": merge, "temporal_patch_size": 2},
        **{name: said.token(token) for name, token in _QWEN_TOKENS.items()},
    )
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": said.patch(),
        "merge_size": merge,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": least, "longest_edge": max(least, most)},
        **said.colours(),
    }
    processor = {"processor_class": f"{kind}Processor"}
    return Mmproj(said.file, config, preprocessor, processor, {})


def _qwen_tower(said: _Pair) -> Raw:
    tower = said.tower()
    return {
        "depth": tower["num_hidden_layers"],
        "num_heads": tower["num_attention_heads"],
        "patch_size": tower["patch_size"],
        "hidden_size": tower["hidden_size"],
        "intermediate_size": tower["intermediate_size"],
        "out_hidden_size": said.raw["hidden_size"],
    }


_QWEN2_PIXELS = 56 * 56, 28 * 28 * 16384
_QWEN3_PIXELS = 256 * 256, 4096 * 4096
"""Least and most pixels of a picture, as the published models have them."""


def _qwen2_vl(said: _Pair) -> Mmproj:
    tower = _qwen_tower(said)
    width = tower.pop("hidden_size")
    ratio = tower.pop("intermediate_size") / width
    vision = {
        **tower,
        "embed_dim": width,
        "hidden_size": tower.pop("out_hidden_size"),
        "mlp_ratio": int(ratio) if ratio.is_integer() else ratio,
        "hidden_act": "quick_gelu",
    }
    del vision["out_hidden_size"]
    return _qwen(said, "Qwen2VL", vision, {"model_type": "qwen2_vl_text"}, _QWEN2_PIXELS)


def _qwen2_5_vl(said: _Pair) -> Mmproj:
    tower = _qwen_tower(said)
    period = said.size("n_wa_pattern")
    vision = {
        **tower,
        "window_size": said.size("window_size", 112, _MOST_SIDE),
        "fullatt_block_indexes": list(range(period - 1, tower["depth"], period)),
        "hidden_act": "silu",
    }
    return _qwen(said, "Qwen2_5_VL", vision, {"model_type": "qwen2_5_vl_text"}, _QWEN2_PIXELS)


_QWEN3_TEXTS = {
    "qwen3vl": "qwen3_vl_text",
    "qwen3vlmoe": "qwen3_vl_moe_text",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}
"""Architectures of GGUF with this projector -> families of their texts."""


def _qwen3_vl(said: _Pair) -> Mmproj:
    architecture = said.text.architecture
    tower = _qwen_tower(said)
    is_deep = said.file.numbers("clip.vision.is_deepstack_layers") or []
    deep = [at for at, one in enumerate(is_deep) if one]
    if len(is_deep) > tower["depth"]:
        raise wrong(said.file.path, f"says of {len(is_deep)} layers whether they are deep")
    vision = {
        **tower,
        "num_position_embeddings": said.shape("v.position_embd.weight")[0],
        "hidden_act": "gelu_pytorch_tanh",
    }
    text: Raw = {
        "model_type": _QWEN3_TEXTS[architecture],
        "rope_parameters": {"mrope_interleaved": True},
    }
    if architecture.startswith("qwen3vl"):
        vision["deepstack_visual_indexes"] = deep
    elif deep:
        raise wrong(said.file.path, f"has deep layers for a {architecture}, which has none")
    return _qwen(said, "Qwen3VL", vision, text, _QWEN3_PIXELS)


def _pixtral(said: _Pair) -> Mmproj:
    if not said.has("mm.patch_merger.weight"):
        raise ModelError(
            f"{said.file.path} has a projector of type 'pixtral' that merges no patches (Pixtral "
            f"12B), which is not read here; take the model's folder of Hugging Face"
        )
    size = said.size("image_size", most=_MOST_SIDE)
    merge = said.size("spatial_merge_size")
    tower = said.tower()
    head_dim = tower["hidden_size"] // tower["num_attention_heads"]
    theta = theta_of(said.file, "clip.rope.freq_base", 10_000.0)
    config = said.whole(
        "mistral3",
        {
            "model_type": "pixtral",
            **tower,
            "image_size": size,
            "head_dim": head_dim,
            "hidden_act": said.activation(),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        },
        spatial_merge_size=merge,
        multimodal_projector_bias=said.has("mm.1.bias"),
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        image_token_index=said.token("[IMG]"),
    )
    for token in ("[IMG_BREAK]", "[IMG_END]"):
        said.token(token)
    preprocessor = {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": tower["patch_size"],
        "size": {"longest_edge": size},
        **said.colours(),
    }
    processor = {
        "processor_class": "PixtralProcessor",
        "patch_size": tower["patch_size"],
        "spatial_merge_size": merge,
    }
    return Mmproj(said.file, config, preprocessor, processor, {})


def _internvl(said: _Pair) -> Mmproj:
    size, scale = said.square(), said.size("projector.scale_factor", 2)
    tower = said.tower()
    side, n_rows = tower.pop("patch_size"), said.side(size, scale) ** 2
    named = {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
    }
    for token in named.values():
        said.token(token)
    config = said.whole(
        "internvl",
        {
            "model_type": "internvl_vision",
            **tower,
            "image_size": [size, size],
            "patch_size": [side, side],
            "layer_norm_eps": said.epsilon(),
            "hidden_act": said.activation(),
            "attention_bias": said.has("v.blk.0.attn_q.bias"),
            "use_qk_norm": said.has("v.blk.0.attn_q_norm.weight"),
            "norm_type": "layer_norm" if said.has("v.blk.0.ln1.bias") else "rms_norm",
            "use_absolute_position_embeddings": True,
        },
        downsample_ratio=1 / scale,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        image_seq_length=n_rows,
        image_token_id=said.token("<IMG_CONTEXT>"),
    )
    preprocessor = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": size, "width": size},
        "crop_to_patches": True,
        "min_patches": said.size("preproc_min_tiles", 1, _MOST_TILES),
        "max_patches": said.size("preproc_max_tiles", 12, _MOST_TILES),
        **said.colours(),
    }
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": n_rows}
    # Its processor wants a token for videos too, which older vocabularies have not.
    return Mmproj(said.file, config, preprocessor, processor, {**named, "video_token": "<video>"})


_LFM2_ROWS = 64, 256
"""Least and most rows of a picture that is not cut, as the published models have them."""


def _lfm2(said: _Pair) -> Mmproj:
    tower, scale = said.tower(), said.size("projector.scale_factor", 2)
    pixels = (tower["patch_size"] * scale) ** 2
    least, most = (
        said.size(f"image_{name}_pixels", n * pixels, _MOST_PIXELS) // pixels
        for name, n in zip(("min", "max"), _LFM2_ROWS, strict=True)
    )
    config = said.whole(
        "lfm2_vl",
        {
            "model_type": "siglip2_vision_model",
            **tower,
            "num_patches": said.shape("v.position_embd.weight")[0],
            "layer_norm_eps": said.epsilon(),
            "hidden_act": "gelu_pytorch_tanh",
            "vision_use_head": False,
        },
        downsample_factor=scale,
        projector_hidden_size=said.shape("mm.1.weight")[0],
        projector_bias=said.has("mm.1.bias"),
        projector_use_layernorm=said.has("mm.input_norm.weight"),
        image_token_id=said.token("<image>"),
    )
    for token in ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"):
        said.token(token)
    preprocessor = {
        "image_processor_type": "Lfm2VlImageProcessor",
        "encoder_patch_size": tower["patch_size"],
        "downsample_factor": scale,
        "min_image_tokens": max(1, least),
        "max_image_tokens": max(1, least, most),
        **said.colours(),
    }
    return Mmproj(said.file, config, preprocessor, {"processor_class": "Lfm2VlProcessor"}, {})


_PLACEHOLDER, _UNKNOWN = "<image>", "<unk>"


def _placeholder(said: _Pair) -> str:
    """Return what stands for a row of a LLaVA's picture.

    Older vocabularies have no token for it. Those of SentencePiece have one that no text becomes,
    since they know every byte.
    """
    is_old = said.text.text("tokenizer.ggml.model") == "llama" and not said.knows(_PLACEHOLDER)
    return _UNKNOWN if is_old and said.knows("<0x00>") else _PLACEHOLDER


def _mlp(said: _Pair) -> Mmproj:
    """Read the vision part of a LLaVA, whose rows are those of inner layers.

    A file has no layer behind the last that is read.
    """
    size, tower, has_class = said.square(), said.tower(), said.has("v.class_embd")
    if not said.has("mm.0.weight") or said.has("mm.4.weight"):
        raise ModelError(
            f"{said.file.path} has a projector of type 'mlp' that is not of two layers, which is "
            f"not read here; take the model's folder of Hugging Face"
        )
    is_gelu = said.file.flag("clip.use_gelu")
    vision = {
        "model_type": "clip_vision_model" if has_class else "siglip_vision_model",
        **tower,
        "image_size": size,
        "layer_norm_eps": said.epsilon(),
        "hidden_act": ("gelu" if is_gelu else "quick_gelu") if has_class else "gelu_pytorch_tanh",
        **({} if has_class else {"vision_use_head": False}),
    }
    layers = _feature_layers(said, tower["num_hidden_layers"])
    placeholder = _placeholder(said)
    strategy = "default" if has_class else "full"
    kind, tiles = _tiles(said, size)
    config = said.whole(
        kind,
        vision,
        image_token_index=said.token(placeholder),
        multimodal_projector_bias=said.has("mm.0.bias"),
        projector_hidden_act="gelu",
        vision_feature_layer=layers[0] if len(layers) == 1 else layers,
        vision_feature_select_strategy=strategy,
        **tiles,
    )
    preprocessor = {
        "image_processor_type": "LlavaNextImageProcessor" if tiles else "CLIPImageProcessor",
        "size": {"shortest_edge": size},
        "crop_size": {"height": size, "width": size},
        **tiles,
        **said.colours(),
    }
    processor = {
        "processor_class": "LlavaNextProcessor" if tiles else "LlavaProcessor",
        "patch_size": tower["patch_size"],
        "num_additional_image_tokens": int(has_class),
        "vision_feature_select_strategy": strategy,
    }
    return Mmproj(said.file, config, preprocessor, processor, {"image_token": placeholder})


def _feature_layers(said: _Pair, n_layers: int) -> list[int]:
    """Return the layers behind which rows are read; 0: before the first."""
    found = said.file.numbers("clip.vision.feature_layer") or [n_layers]
    layers = [one for one in found if type(one) is int and 0 <= one <= n_layers]
    if len(layers) != len(found):
        raise wrong(said.file.path, f"has {found[:8]} for layers that are read, of {n_layers}")
    return layers


def _tiles(said: _Pair, size: int) -> tuple[str, Raw]:
    """Return a LLaVA's kind, and what its config says of the tiles of which it has pictures.

    Args:
        said: what its files say.
        size: pixels of a side of a tile.
    """
    sides = said.file.numbers("clip.vision.image_grid_pinpoints") or []
    merge = said.file.text("clip.vision.mm_patch_merge_type") or "flat"
    has_newline = said.has("model.image_newline")
    if not sides and not has_newline:
        return "llava", {}
    if not (sides and has_newline and merge == "spatial_unpad"):
        raise ModelError(
            f"{said.file.path} is of a LLaVA with {len(sides) // 2} grids of tiles that are merged "
            f"as {merge[:40]!r}, {'with' if has_newline else 'without'} what ends a row of them "
            f"(model.image_newline); 'spatial_unpad' with grids and that is read here, and what "
            f"has none of these; take the model's folder of Hugging Face"
        )
    if len(sides) % 2 or not all(type(one) is int and 0 < one <= _MOST_SIDE for one in sides):
        raise wrong(said.file.path, f"has {sides[:8]} for clip.vision.image_grid_pinpoints")
    grids = [list(pair) for pair in zip(sides[::2], sides[1::2], strict=True)]
    for height, width in grids:
        if height % size or width % size or height * width > _MOST_TILES * size**2:
            raise wrong(
                said.file.path, f"has a grid of {height} by {width} pixels of tiles of {size}"
            )
    return "llava_next", {"image_grid_pinpoints": grids}


@dataclass(frozen=True, slots=True)
class _Projector:
    """A type of projector.

    Attributes:
        make: reads what a vision part with it says.
        texts: architectures of the texts that it is for.
        last: name of the last matrix that a row goes through.
        axis: of that, which is as long as a row.
    """

    make: Callable[[_Pair], Mmproj]
    texts: Collection[str]
    last: str
    axis: int = 0


_PROJECTORS = {
    "gemma3": _Projector(_gemma3, ("gemma3",), "mm.input_projection.weight", 1),
    "idefics3": _Projector(_idefics3, ("llama",), "mm.model.fc.weight"),
    "internvl": _Projector(
        _internvl, ("llama", "qwen2", "qwen3", "qwen3moe"), "mm.model.mlp.3.weight"
    ),
    "lfm2": _Projector(_lfm2, ("lfm2", "lfm2moe"), "mm.2.weight"),
    "mlp": _Projector(_mlp, ("llama", "granite"), "mm.2.weight"),
    "pixtral": _Projector(_pixtral, ("llama", "mistral3"), "mm.2.weight"),
    "qwen2vl_merger": _Projector(_qwen2_vl, ("qwen2vl",), "mm.2.weight"),
    "qwen2.5vl_merger": _Projector(_qwen2_5_vl, ("qwen2vl",), "mm.2.weight"),
    "qwen3vl_merger": _Projector(_qwen3_vl, _QWEN3_TEXTS, "mm.2.weight"),
}
"""Projectors that are read, by the format's names."""
