"""One family of an architecture of GGUF: what all of them share, and what each says besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcellar.models.gguf.reader import GgufFile, wrong
from kvcellar.models.gguf.ropes import rope_of_file

Raw = dict[str, Any]

COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""Keys that every family has, behind the architecture's name -> fields of transformers."""

RMS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")
"""Keys of what is added to variances -> fields of transformers."""

SOFTMAX, SIGMOID = 1, 2
"""Numbers of ``expert_gating_func``."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of transformers, and how files of an architecture say what a model of it is.

    Attributes:
        model_type: of transformers.
        fields: keys behind the architecture's name -> fields of its config.
        fixed: fields that are the same for all files.
        biases: fields that are true where a tensor of the first layer is there -> its name.
        reads: further keys, which ``finish`` reads; they may differ between layers.
        epsilon: key and field of what is added to variances.
        head_dim: key of the width of heads.
        rope: reads the RoPE.
        is_turned: true if rows of Q and K are stored in pairs, as llama.cpp turns positions, where
            transformers has halves.
        is_crossed: true if transformers multiplies from the left by its experts' matrices, in whose
            columns gate and up take turns.
        norm_offset: what was added to the weights of norms.
        finish: reads what is its alone.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    epsilon: tuple[str, str] = RMS
    head_dim: str = "attention.key_length"
    rope: Callable[[GgufFile, int, Mapping[str, Any]], Raw] = rope_of_file
    is_turned: bool = False
    is_crossed: bool = False
    norm_offset: float = 0.0
    finish: Callable[[GgufFile, Raw], None] | None = None

    @property
    def keys(self) -> dict[str, str]:
        """Keys with one number for all layers -> fields of transformers."""
        common = {key: ours for key, ours in COMMON.items() if key not in self.reads}
        return {**common, **dict([self.epsilon]), **self.fields}


def of_layers(file: GgufFile, key: str, n_layers: int) -> list[Any]:
    """Return a number for each layer, where a file says one for all, or one for each.

    Args:
        file: the model.
        key: behind the architecture's name.
        n_layers: of the network; a file may say it for more, which guess tokens ahead.

    Raises:
        ModelError: it says none, or fewer.
    """
    key = f"{file.architecture}.{key}"
    if not hasattr(file.metadata.get(key), "tolist"):
        one = file.number(key)
        if one is None:
            raise wrong(file.path, f"lacks {key}")
        return [one] * n_layers
    each = file.numbers(key) or []
    if len(each) < n_layers or not all(isinstance(one, int) for one in each):
        raise wrong(file.path, f"has {len(each)} numbers for {key}, and {n_layers} layers")
    return each[:n_layers]


def windows_of(file: GgufFile, n_layers: int, period: int) -> list[str]:
    """Return the kinds of layers by the file's own pattern, or all but each ``period``-th slide."""
    key = "attention.sliding_window_pattern"
    found = file.metadata.get(f"{file.architecture}.{key}")
    if isinstance(found, int) and not isinstance(found, bool):
        period = found
    if hasattr(found, "tolist"):
        slides = [bool(one) for one in of_layers(file, key, n_layers)]
    else:
        slides = [period > 0 and (at + 1) % period != 0 for at in range(n_layers)]
    return ["sliding_attention" if one else "full_attention" for one in slides]


def shape_of(file: GgufFile, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor that a family needs.

    Raises:
        ModelError: there is none of that name.
    """
    if name not in file.tensors:
        raise wrong(file.path, f"lacks the tensor {name}")
    return file.tensors[name].shape


def whole_of(file: GgufFile, key: str) -> int:
    """Return a size that a family needs, by its key behind the architecture's name.

    Raises:
        ModelError: there is none, or it is no size.
    """
    found = file.whole(f"{file.architecture}.{key}")
    if found is None or found <= 0:
        raise wrong(file.path, f"has {found!r} for {file.architecture}.{key}")
    return found
