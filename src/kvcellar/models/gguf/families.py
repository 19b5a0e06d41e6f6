"""Architectures of GGUF: which family of transformers each is, and what its metadata says of it.

The names are the format's own: a file says nothing else of how its model computes. What is common
to all is written down once, a family adds what is its alone. transformers has a table of its own
for a few; those are asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.gguf.reader import GgufFile, wrong
from kvcellar.models.gguf.ropes import rope_of_file

Raw = dict[str, Any]

_COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys that every family has, behind the architecture's name -> fields of transformers."""

_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
"""Fields of a config -> keys of the tokenizer; what the file does not say is not the class's."""

_MATTERS = {
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "router_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "expert_count": 0,
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "interleave_moe_layer_step": 1,
    "attention.shared_kv_layers": 0,
    "use_parallel_residual": False,
    "pooling_type": 0,
}
"""Keys that change what is computed -> what they say where they change nothing."""

_LARGEST = dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 1 << 31)
"""Numbers that are no sizes of tensors -> the most that they may be."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of transformers, and how files of an architecture say what a model of it is.

    Attributes:
        model_type: of transformers.
        fields: keys behind the architecture's name -> fields of its config.
        fixed: fields that are the same for all files.
        biases: fields that are true where a tensor of the first layer is there -> its name.
        is_turned: true if rows of Q and K are stored in pairs, as llama.cpp turns positions, where
            transformers has halves.
        norm_offset: what was added to the weights of norms.
        finish: reads what is its alone.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    is_turned: bool = False
    norm_offset: float = 0.0
    finish: Callable[[GgufFile, Raw], None] | None = None


def _mixtral(file: GgufFile, raw: Raw) -> None:
    if file.whole("llama.expert_count"):
        raw |= {
            "model_type": "mixtral",
            "num_local_experts": file.whole("llama.expert_count"),
            "num_experts_per_tok": file.whole("llama.expert_used_count"),
        }


def _scaled_by(n_layers: int) -> Callable[[GgufFile, Raw], None]:
    """Make what reads the scale of a Gemma's attention, which llama.cpp knows by its layers."""

    def finish(file: GgufFile, raw: Raw) -> None:
        is_largest = raw["num_hidden_layers"] == n_layers
        per_head = raw["hidden_size"] // raw["num_attention_heads"]
        raw["query_pre_attn_scalar"] = per_head if is_largest else raw["head_dim"]
        if file.architecture == "gemma3":
            raw["rope_parameters"] = {
                "full_attention": raw["rope_parameters"],
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": file.number("gemma3.rope.freq_base_swa") or 10_000.0,
                },
            }

    return finish


def _phi3(file: GgufFile, raw: Raw) -> None:
    raw["sliding_window"] = raw.get("sliding_window") or None
    original = raw["rope_parameters"].get("original_max_position_embeddings")
    raw["original_max_position_embeddings"] = original or raw["max_position_embeddings"]


_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

FAMILIES = {
    "llama": Family("llama", biases=_BIASES, is_turned=True, finish=_mixtral),
    "qwen2": Family("qwen2"),
    "qwen2moe": Family(
        "qwen2_moe",
        {**_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3": Family("qwen3"),
    "qwen3moe": Family("qwen3_moe", _EXPERTS, {"norm_topk_prob": True}),
    "gemma": Family("gemma", norm_offset=1.0),
    "gemma2": Family("gemma2", {**_WINDOW, **_CAPS}, norm_offset=1.0, finish=_scaled_by(46)),
    "gemma3": Family("gemma3_text", {**_WINDOW, **_CAPS}, norm_offset=1.0, finish=_scaled_by(62)),
    "phi3": Family("phi3", _WINDOW, finish=_phi3),
    "glm4": Family("glm4", biases={"attention_bias": "attn_q.bias"}),
    "granite": Family(
        "granite",
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        biases=_BIASES,
        is_turned=True,
    ),
    "smollm3": Family("smollm3", biases=_BIASES, is_turned=True),
}
"""Families by architecture of GGUF."""


def config_of(file: GgufFile) -> Raw:
    """Return what would be the ``config.json`` of a GGUF file.

    Raises:
        ModelError: an architecture that is not read, or metadata that cannot be right.
    """
    name = file.architecture
    if "token_embd.weight" not in file.tensors or not file.whole(f"{name}.block_count"):
        kind = file.text("general.type")
        raise ModelError(
            f"{file.path} holds no language model"
            + (f" (it is of type {kind!r})" if kind not in (None, "model") else "")
            + "; give the file of the model itself"
        )
    theirs = _by_transformers(file)
    raw = _by_us(file) if theirs is None else theirs
    raw["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    for ours, key in _TOKENS.items():
        raw[ours] = file.whole(f"tokenizer.ggml.{key}")
    _check_sizes(file, raw)
    return raw


def _by_transformers(file: GgufFile) -> Raw | None:
    """Return the config that transformers makes of metadata; None: it knows none.

    Raises:
        ModelError: a key that it needs is missing or impossible.
    """
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    make = GGUF_CONFIG_ARCHS.get(file.architecture)
    if make is None:
        return None
    plain = {
        key: value.tolist() if hasattr(value, "tolist") else value
        for key, value in file.metadata.items()
        if not key.startswith("tokenizer.")
    }
    try:
        made: Raw = make({"tokenizer.ggml.tokens": 0, **plain}, tuple(file.tensors))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise wrong(file.path, f"says too little of its model ({error})") from error
    return made


def _by_us(file: GgufFile) -> Raw:
    """Return the config by the tables here."""
    name = file.architecture
    family = FAMILIES.get(name)
    if family is None:
        raise ModelError(
            f"{file.path} has the architecture {name[:80]!r} of GGUF, which is not read here; take "
            f"the model's own safetensors, or one of {', '.join(sorted(FAMILIES))}"
        )
    raw: Raw = {"model_type": family.model_type, **family.fixed}
    for key, ours in {**_COMMON, **family.fields}.items():
        value = _same_for_all(file, f"{name}.{key}")
        if value is not None:
            raw[ours] = value
    missing = sorted(f"{name}.{key}" for key, ours in _COMMON.items() if ours not in raw)
    missing = [key for key in missing if not key.endswith("head_count_kv")]
    if missing:
        raise wrong(file.path, f"lacks {', '.join(missing)}")
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    _check_positive(file, raw)
    default = raw["hidden_size"] // raw["num_attention_heads"]
    width = file.whole(f"{name}.rope.dimension_count") if family.is_turned else None
    raw["head_dim"] = file.whole(f"{name}.attention.key_length") or width or default
    for ours, tensor in family.biases.items():
        raw[ours] = f"blk.0.{tensor}" in file.tensors
    raw["rope_parameters"] = rope_of_file(file, raw["head_dim"], raw)
    if family.finish is not None:
        family.finish(file, raw)
    _check_understood(file, family, raw)
    return raw


def _same_for_all(file: GgufFile, key: str) -> Any:
    """Return a number that may be said once for each layer, if it is the same in all.

    Raises:
        ModelError: it is not, or is no number.
    """
    if not hasattr(file.metadata.get(key), "tolist"):
        return file.number(key)
    values = set(file.numbers(key) or ())
    if len(values) != 1:
        raise ModelError(
            f"{file.path} has another {key} in each layer, which is not read for this "
            f"architecture; take the model's own safetensors"
        )
    return values.pop()


def _check_positive(file: GgufFile, raw: Raw) -> None:
    """Refuse sizes that are no whole numbers above 0.

    Raises:
        ModelError: it names the field.
    """
    for ours in _COMMON.values():
        value = raw[ours]
        is_size = type(value) is int or ours == "rms_norm_eps"
        if not is_size or value <= 0:
            raise wrong(file.path, f"has {value!r} for {ours}")


def _check_understood(file: GgufFile, family: Family, raw: Raw) -> None:
    """Refuse a file that says what its family here has no place for.

    Raises:
        ModelError: it names the key.
    """
    name = file.architecture
    read = {*family.fields, *(("expert_count",) if raw["model_type"] == "mixtral" else ())}
    for key, neutral in _MATTERS.items():
        value = file.metadata.get(f"{name}.{key}")
        if key in read or value is None or (not hasattr(value, "tolist") and value == neutral):
            continue
        raise ModelError(
            f"{file.path} has {name}.{key}={str(value)[:40]}, which {raw['model_type']} of "
            f"transformers does not do; take the model's own safetensors"
        )
    wide = file.whole(f"{name}.attention.value_length")
    if wide is not None and wide != raw["head_dim"]:
        raise wrong(file.path, f"has values of {wide} and keys of {raw['head_dim']} numbers")


def _check_sizes(file: GgufFile, raw: Raw) -> None:
    """Refuse sizes that are larger than anything in the file, before anything is made of them.

    Raises:
        ModelError: it names the field.
    """
    most = max(max(one.shape) for one in file.tensors.values())
    for ours, value in raw.items():
        if type(value) is not int or isinstance(value, bool):
            continue
        limit = _LARGEST.get(ours, most)
        limit = len(file.tensors) if ours == "num_hidden_layers" else limit
        if not 0 <= value <= limit:
            raise wrong(file.path, f"has {value} for {ours}, and {limit} is the most it can be")
