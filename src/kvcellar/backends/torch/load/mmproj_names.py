"""Names and layouts of tensors in vision parts of GGUF, by transformers' names of parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import gguf
from torch import Tensor

from kvcellar.backends.torch.load.gguf_names import Stored, halves
from kvcellar.models.gguf.reader import GgufFile

_LAST_BLOCK = 4
"""Number of a block by which the format's table knows every part of a projector."""

_OWN = {
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
    "vision_tower.embeddings.cls_token": "v.class_embd",
    "vision_tower.embeddings.class_embedding": "v.class_embd",
    "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
    "image_newline": "model.image_newline",
}
"""Names of modules and of parameters that the format's table does not know -> names in files."""

_OF_LLAVA = {
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
}
_OF_KIND = {
    "internvl": {
        "multi_modal_projector.layer_norm": "mm.model.mlp.0",
        "multi_modal_projector.linear_1": "mm.model.mlp.1",
        "multi_modal_projector.linear_2": "mm.model.mlp.3",
    },
    "llava": _OF_LLAVA,
    "llava_next": _OF_LLAVA,
}
"""By model type: tensor names in GGUF that mean something else for other projectors."""

_SCALE = re.compile(r"^vision_tower\.encoder\.layer\.(\d+)\.lambda_([12])$")
_DEEP = re.compile(r"^visual\.deepstack_merger_list\.(\d+)\.(norm|linear_fc1|linear_fc2)\.(\w+)$")
_FFN = re.compile(r"\.ffn_(up|down)\.")
_OTHER = {"up": "down", "down": "up"}

UNUSED = re.compile(r"^v\.(?:token_embd\.img_break$|head\.)")
"""Tensors of vision parts that the text has as well, or that say of a picture as a whole what it is
like."""


def seen_as(file: GgufFile, config: Any, names: Iterable[str]) -> dict[str, Stored]:
    """Return how parameters of a vision part are stored.

    Args:
        file: the vision part.
        config: of the whole.
        names: of transformers.
    """
    n_layers = max(file.whole("clip.vision.block_count") or 0, _LAST_BLOCK)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, n_layers)
    is_turned_over = _is_turned_over(file)
    found = {}
    for name in names:
        source = _source(table, config, name.removeprefix("model."))
        if is_turned_over:
            source = _FFN.sub(lambda part: f".ffn_{_OTHER[part[1]]}.", source)
        found[name] = _stored(file, config, name, source)
    return found


def _is_turned_over(file: GgufFile) -> bool:
    """Return true if a file calls what goes into a layer's inner numbers down, as older ones do."""
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    width = file.whole("clip.vision.embedding_length")
    return up is not None and up.shape[-1] != width


def _source(table: Any, config: Any, name: str) -> str:
    """Return what a file calls a parameter."""
    scale, deep = _SCALE.match(name), _DEEP.match(name)
    if scale is not None:
        return f"v.blk.{scale[1]}.ls{scale[2]}.weight"
    if deep is not None:
        layer = config.vision_config.deepstack_visual_indexes[int(deep[1])]
        return f"v.deepstack.{layer}.{deep[2].removeprefix('linear_')}.{deep[3]}"
    own = {**_OWN, **_OF_KIND.get(config.model_type, {})}
    base, _, end = name.rpartition(".")
    if name in own:
        return own[name]
    spelled = (
        base,
        f"model.{base}",
        base.replace("vision_tower.", "vision_tower.vision_model.", 1),
    )
    known = own.get(base) or next(filter(None, map(table.get_name, spelled)), base)
    return f"{known}.{end}"


def _stored(file: GgufFile, config: Any, name: str, source: str) -> Stored:
    """Return how a parameter is stored, of which a file has the tensor of a name, or its parts."""
    if name.endswith("mm_soft_emb_norm.weight"):
        return Stored((source,), lambda some: some - 1.0, is_of_rows=False)
    if ".attn_qkv." in source and source not in file.tensors:
        parts = tuple(source.replace("attn_qkv", f"attn_{one}") for one in "qkv")
        return Stored(parts, views=lambda out: [[part] for part in out.chunk(3)])
    if name.endswith("visual.patch_embed.proj.weight"):
        return Stored((source, f"{source}.1"), views=lambda out: [[out[:, :, at]] for at in (0, 1)])
    if config.vision_config.model_type == "siglip2_vision_model" and "patch_embd.weight" in source:
        side = config.vision_config.patch_size
        return Stored((source,), views=partial(_of_pixels, side=side))
    if config.vision_config.model_type == "pixtral" and re.search(r"\.attn_[qk]\.", source):
        return Stored((source,), partial(halves, n_heads=config.vision_config.num_attention_heads))
    return Stored((source,))


def _of_pixels(out: Tensor, *, side: int) -> list[list[Tensor]]:
    """Return a view, colours first, of what takes patches whose pixels have their colours last."""
    return [[out.view(-1, side, side, 3).permute(0, 3, 1, 2)]]
