"""Tiny models that read pictures as GGUF: the text, and its vision part as llama.cpp converts it.

What is written follows llama.cpp's converter: names by the package's own table from those of
published checkpoints, and what it does to tensors on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.gguf.case import added, plain, turned
from tests.models.gguf.families import tiled_heads
from tests.models.gguf.writing import Change, in_pairs, write_metadata, write_model
from tests.models.tiny_checkpoints import make_tokenizer
from tests.vision_checkpoints import TEMPLATE, VOCAB_SIZE, family_of, make_vision_model

Tensors = dict[str, np.ndarray]

TEXT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""A chat template that writes messages' text alone."""

_SECTIONS = {"rope.dimension_sections": [4, 2, 2, 0]}
_COMMON = "clip.vision."


def _split(name: str, values: np.ndarray) -> Tensors | None:
    """Write what the converter of the Qwens makes of a tensor; None: it is stored as it is."""
    if name == "visual.patch_embed.proj.weight":
        return {f"v.patch_embd.weight{end}": values[:, :, at] for at, end in enumerate(("", ".1"))}
    return None


def _qwen2(name: str, values: np.ndarray) -> Tensors | None:
    if ".qkv." in name:
        parts = np.split(values, 3)
        return {
            _known(name.replace("qkv", one)): part for one, part in zip("qkv", parts, strict=True)
        }
    return _split(name, values)


def _qwen3(name: str, values: np.ndarray) -> Tensors | None:
    own = {
        "visual.merger.linear_fc1": "mm.0",
        "visual.merger.linear_fc2": "mm.2",
        "visual.merger.norm": "v.post_ln",
    }
    base, _, end = name.rpartition(".")
    if base in own:
        return {f"{own[base]}.{end}": values}
    return _split(name, values)


def _gemma3(name: str, values: np.ndarray) -> Tensors | None:
    if ".head." in name:
        return {}
    if "soft_emb_norm" in name:
        return {"mm.soft_emb_norm.weight": values + 1}
    return {_known(name.replace("_weight", ".weight")): values}


def _pixtral(name: str, values: np.ndarray) -> Tensors | None:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        return {_known(name): in_pairs(2, values)}
    return None


def _internvl(name: str, values: np.ndarray) -> Tensors | None:
    own = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
    for theirs, published in own.items():
        name = name.replace(f"multi_modal_projector.{theirs}", published)
    name = name.replace("vision_tower.encoder.layer.", "model.vision_tower.encoder.layer.")
    renamed = {
        "vision_tower.embeddings.cls_token": "v.class_embd",
        "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
        "vision_tower.embeddings.patch_embeddings.projection.weight": "v.patch_embd.weight",
        "vision_tower.embeddings.patch_embeddings.projection.bias": "v.patch_embd.bias",
    }
    if name in renamed:
        return {renamed[name]: values}
    if ".lambda_" in name:
        name += ".weight"
    return {_known(name): values}


def _lfm2(name: str, values: np.ndarray) -> Tensors | None:
    if ".head." in name:
        return {}
    if name.endswith("patch_embedding.weight"):
        pixels = values.reshape(len(values), 16, 16, 3)
        return {"v.patch_embd.weight": pixels.transpose(0, 3, 1, 2)}
    return None


_OF_LLAVA = {
    "image_newline": "model.image_newline",
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
    "vision_tower": "v",
    "encoder.layers": "blk",
    "embeddings.": "",
    "self_attn.": "attn_",
    "_proj": "",
    "layer_norm": "ln",
    "layrnorm": "ln",
    "mlp.fc1": "ffn_down",
    "mlp.fc2": "ffn_up",
    "embedding": "embd",
}
"""What the converter of LLaVA replaces, in this order; it takes up for down."""


def _llava(n_layers: int) -> Callable[[str, np.ndarray], Tensors]:
    """Make what writes a LLaVA's vision part without what no row is read of."""

    def write(name: str, values: np.ndarray) -> Tensors:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if ".post_layernorm." in name or (layer is not None and int(layer[1]) >= n_layers):
            return {}
        if ".head." in name:
            return {f"v.{name.removeprefix('vision_tower.')}": values}
        for theirs, own in _OF_LLAVA.items():
            name = name.replace(theirs, own)
        return {name: values}

    return write


def _convolved(config: Any) -> Change:
    return lambda name, values: values[:, 0] if ".conv." in name else values


def _known(name: str) -> str:
    """Return the package's name for one of a published checkpoint."""
    base, _, end = name.rpartition(".")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 4)
    found = table.get_name(base) or table.get_name(f"model.{base}")
    spelled = base.replace("vision_tower.", "vision_tower.vision_model.")
    found = found or table.get_name(spelled)
    assert found is not None, name
    return f"{found}.{end}"


@dataclass
class Files:
    """What the files of a family say, and what is done to their tensors.

    Attributes:
        architecture: of the text.
        said: of the text, besides what all texts say.
        change: of its tensors, by its config.
        projector: type of the vision part.
        sees: of it, besides what all vision parts say.
        parts: makes of a tensor, by its name in checkpoints, what is stored.
    """

    architecture: str
    projector: str
    said: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], Change] = plain
    sees: dict[str, Any] = field(default_factory=dict)
    parts: Callable[[str, np.ndarray], Tensors | None] = lambda name, values: None


_QWEN_SEES = {"image_min_pixels": 256, "image_max_pixels": 4096}
_DEEP = {**_QWEN_SEES, "is_deepstack_layers": [True, True], "spatial_merge_size": 2}
_FLAT = {**_DEEP, "is_deepstack_layers": [False, False]}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_DELTA = {
    **_SECTIONS,
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "rope.dimension_count": 16,
}

_GRANITE = {
    "rope.dimension_count": 16,
    "attention.scale": 0.25,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "logit_scale": 1.0,
}
_GRIDS = {
    "image_grid_pinpoints": [16, 32, 32, 16, 32, 32],
    "mm_patch_merge_type": "spatial_unpad",
}

FILES = {
    "gemma3": Files(
        "gemma3",
        "gemma3",
        {"attention.sliding_window": 8, "rope.freq_base": 1e6},
        added,
        {"projector.scale_factor": 2},
        _gemma3,
    ),
    "idefics3": Files(
        "llama",
        "idefics3",
        {"rope.dimension_count": 16},
        turned,
        {"projector.scale_factor": 2, "preproc_image_size": 32},
    ),
    "internvl": Files(
        "qwen3",
        "internvl",
        sees={"projector.scale_factor": 2, "preproc_max_tiles": 4},
        parts=_internvl,
    ),
    "lfm2_vl_published": Files(
        "lfm2",
        "lfm2",
        {
            "attention.head_count_kv": [0, 2, 0, 2],
            "shortconv.l_cache": 3,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "feed_forward_length": 256,
        },
        _convolved,
        {"projector.scale_factor": 2},
        _lfm2,
    ),
    "llava": Files(
        "llama",
        "mlp",
        {"rope.dimension_count": 16},
        turned,
        {"block_count": 2},
        _llava(2),
    ),
    "llava_next": Files(
        "granite",
        "mlp",
        _GRANITE,
        turned,
        {"block_count": 2, "feature_layer": [2], **_GRIDS},
        _llava(2),
    ),
    "granite_vision": Files(
        "granite",
        "mlp",
        _GRANITE,
        turned,
        {"feature_layer": [1, 3], **_GRIDS},
        _llava(3),
    ),
    "mistral3": Files("mistral3", "pixtral", {}, turned, {"spatial_merge_size": 2}, _pixtral),
    "qwen2_vl": Files("qwen2vl", "qwen2vl_merger", _SECTIONS, sees=_QWEN_SEES, parts=_qwen2),
    "qwen2_5_vl": Files(
        "qwen2vl",
        "qwen2.5vl_merger",
        _SECTIONS,
        sees={**_QWEN_SEES, "n_wa_pattern": 2, "window_size": 16},
        parts=_qwen2,
    ),
    "qwen3_5": Files(
        "qwen35",
        "qwen3vl_merger",
        _DELTA,
        tiled_heads,
        _FLAT,
        _qwen3,
    ),
    "qwen3_vl": Files(
        "qwen3vl",
        "qwen3vl_merger",
        {**_SECTIONS, "n_deepstack_layers": 2},
        sees=_DEEP,
        parts=_qwen3,
    ),
    "qwen3_vl_moe": Files(
        "qwen3vlmoe",
        "qwen3vl_merger",
        {**_SECTIONS, **_EXPERTS, "n_deepstack_layers": 2},
        sees=_DEEP,
        parts=_qwen3,
    ),
    "qwen3_5_moe": Files(
        "qwen35moe",
        "qwen3vl_merger",
        {**_DELTA, **_EXPERTS, "expert_shared_feed_forward_length": 48},
        tiled_heads,
        _FLAT,
        _qwen3,
    ),
    "smolvlm": Files(
        "llama",
        "idefics3",
        {"rope.dimension_count": 16},
        turned,
        {"projector.scale_factor": 2, "preproc_image_size": 32},
    ),
}
"""Families of ``tests.vision_checkpoints`` that GGUF has -> what their files are."""


class _Text:
    """The text of a wrapper as a network of its own, for what writes one."""

    def __init__(self, wrapper: Any) -> None:
        self.config = wrapper.config.get_text_config()
        self._wrapper = wrapper

    def state_dict(self, keep_vars: bool = False) -> dict[str, Any]:
        kept = (
            self._wrapper.model.language_model
            if hasattr(self._wrapper.model, "language_model")
            else self._wrapper.model.text_model
        )
        found = {f"model.{name}": one for name, one in kept.state_dict(keep_vars=True).items()}
        return {**found, "lm_head.weight": self._wrapper.lm_head.weight}


def vocabulary_of(family: str) -> Callable[[Any], None]:
    """Make what writes a family's tiny vocabulary: bytes, and special tokens."""
    made = family_of(family)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": made.tokens})
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ÿÿ"]  # in no text
    unused = [f"[PAD{at}]" for at in range(len(tokens), VOCAB_SIZE)]

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([*tokens, *unused])
        kinds = [1 if len(token) <= 2 else 3 for token in tokens]
        writer.add_token_types([*kinds, *[5 for _ in unused]])
        writer.add_token_merges(["ÿ ÿ"])
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)
        writer.add_pad_token_id(257)
        writer.add_add_bos_token(False)
        writer.add_chat_template(TEMPLATE.replace("WRITTEN", made.written))

    return write


def write_old_vocabulary(writer: Any) -> None:
    """Write one of SentencePiece without a placeholder, and a template of text alone."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    unused = [f"[PAD{at}]" for at in range(len(tokens), VOCAB_SIZE)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *unused])
    writer.add_token_scores([0.0] * VOCAB_SIZE)
    writer.add_token_types([2, 3, 3, *([6] * 256), 1, *([5] * len(unused))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEXT_TEMPLATE)


def make_gguf(
    folder: Path,
    family: str,
    kind: Any = None,
    vocabulary: Callable[[Any], None] | None = None,
) -> Path:
    """Write a family's text and its vision part; return the text's file.

    Args:
        folder: where to.
        family: one of ``FILES``.
        kind: type of the text's matrices; None: float32.
        vocabulary: writes the tokenizer; None: the family's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files, wrapper = FILES[family], make_vision_model(family)
    text = _Text(wrapper)
    path = write_model(
        folder / "model-F32.gguf",
        files.architecture,
        text,
        files.said,
        files.change(text.config),
        kind=kind,
        vocabulary=vocabulary or vocabulary_of(family),
    )
    write_mmproj(folder / "mmproj-model-F32.gguf", family, wrapper)
    return path


def mmproj_tensors(family: str, wrapper: Any) -> Tensors:
    """The tensors of a wrapper's vision part by the names of GGUF."""
    found: Tensors = {}
    for name, weight in wrapper.state_dict().items():
        name = name.removeprefix("model.")
        if name.startswith(("language_model.", "text_model.", "lm_head.")):
            continue
        values = weight.detach().numpy()
        own = FILES[family].parts(name, values)
        if own is None and name.startswith("visual.deepstack"):
            at, leaf, end = name.removeprefix("visual.deepstack_merger_list.").split(".")
            own = {f"v.deepstack.{at}.{leaf.removeprefix('linear_')}.{end}": values}
        found |= {_known(name): values} if own is None else own
    return found


def write_mmproj(
    path: Path,
    family: str,
    wrapper: Any,
    *,
    change: Callable[[Tensors], None] = lambda tensors: None,
    projector: str | None = None,
    **said: Any,
) -> Path:
    """Write a family's vision part.

    Args:
        path: of the file.
        family: one of ``FILES``.
        wrapper: of it.
        change: changes the tensors.
        projector: type that it says; None: the family's.
        said: metadata behind ``clip.vision.``, with ``__`` for dots; None: it is left out.
    """
    files, made = FILES[family], family_of(family)
    projector = projector or files.projector
    vision = wrapper.config.vision_config
    size, side = getattr(vision, "image_size", 560), vision.patch_size
    pictures: dict[str, Any] = {
        "projection_dim": wrapper.config.get_text_config().hidden_size,
        "image_size": size if isinstance(size, int) else size[0],
        "patch_size": side if isinstance(side, int) else side[0],
        "embedding_length": getattr(vision, "embed_dim", vision.hidden_size),
        "feed_forward_length": getattr(vision, "intermediate_size", vision.hidden_size),
        "block_count": getattr(vision, "num_hidden_layers", getattr(vision, "depth", 0)),
        "attention.head_count": getattr(
            vision, "num_attention_heads", getattr(vision, "num_heads", 0)
        ),
        "attention.layer_norm_epsilon": float(getattr(vision, "layer_norm_eps", 1e-6)),
        "image_mean": made.preprocessor["image_mean"],
        "image_std": made.preprocessor["image_std"],
        **files.sees,
        **{key.replace("__", "."): value for key, value in said.items()},
    }
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_bool("clip.has_vision_encoder", True)
    is_gelu = getattr(vision, "hidden_act", "gelu") != "quick_gelu"
    writer.add_bool(f"clip.use_{'silu' if projector == 'qwen2.5vl_merger' else 'gelu'}", is_gelu)
    writer.add_string("clip.projector_type", projector)
    for key, value in pictures.items():
        if value is not None:
            write_metadata(writer, f"{_COMMON}{key}", value)
    tensors = mmproj_tensors(family, wrapper)
    change(tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
