"""Configs of transformers, made of the metadata of GGUF files.

transformers has a table of its own for a few architectures, and is asked for those alone that are
in none of the tables here.
"""

from __future__ import annotations

from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.gguf.families import FAMILIES, TILED
from kvcellar.models.gguf.family import Family, Raw
from kvcellar.models.gguf.reader import GgufFile, wrong
from kvcellar.models.gguf.ropes import theta_of

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
    "interleave_moe_layer_step": 1,
    "attention.shared_kv_layers": 0,
    "attention.temperature_scale": 0.0,
    "attention.sliding_window_pattern": 1,
    "expert_group_count": 1,
    "expert_gating_func": 1,
    "moe_latent_size": 0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.dimension_sections": 0,
    "n_deepstack_layers": 0,
    "use_parallel_residual": False,
    "pooling_type": 0,
}
"""Keys that change what is computed -> what they say where they change nothing."""

_LARGEST = dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 1 << 31)
"""Numbers that are no sizes of tensors -> the most that they may be."""


_BESIDE = {
    "adapter": "it is an adapter (LoRA), which is for a model and is not read here; merge the two",
    "mmproj": "it is what sees or hears for a model, and is read where it lies beside that",
    "imatrix": "it is what weights were weighed by when they were quantised",
}
"""Types of files that are no model -> what they are, for people."""


_OURS = {**FAMILIES, **TILED}


def config_of(file: GgufFile) -> Raw:
    """Return what would be the ``config.json`` of a GGUF file.

    Raises:
        ModelError: an architecture that is not read, or metadata that cannot be right.
    """
    name = file.architecture
    kind = file.text("general.type") or "model"
    if kind != "model":
        raise _no_model(file, _BESIDE.get(kind, f"it is of type {kind!r}"))
    if file.metadata.get(f"{name}.pooling_type") or file.flag(f"{name}.attention.causal") is False:
        raise ModelError(
            f"{file.path} is a model of the architecture {name[:80]!r} that makes embeddings and "
            f"writes no text; give the file of a language model"
        )
    if name not in _OURS and name not in _known():
        raise _unknown(file)
    for missing in ("token_embd.weight", "block_count"):
        if missing not in file.tensors and not file.whole(f"{name}.{missing}"):
            raise _no_model(file, f"{name} without its {missing}")
    theta_of(file, f"{name}.rope.freq_base", 1.0)  # whoever reads it, it can be used
    raw = _by_us(file) if name in _OURS else _by_transformers(file)
    raw["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    for ours, key in _TOKENS.items():
        raw[ours] = file.whole(f"tokenizer.ggml.{key}")
    _check_sizes(file, raw)
    return raw


def _by_transformers(file: GgufFile) -> Raw:
    """Return the config that transformers makes of the metadata of an architecture it knows.

    Raises:
        ModelError: a key that it needs is missing or impossible.
    """
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    make = GGUF_CONFIG_ARCHS[file.architecture]
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


def _known() -> list[str]:
    """Return the names of the architectures that are read."""
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    return sorted({*FAMILIES, *GGUF_CONFIG_ARCHS})


def _no_model(file: GgufFile, why: str) -> ModelError:
    """Make the error for a file in which there is no language model."""
    return ModelError(
        f"{file.path} holds no language model ({why}); give the file of the model itself"
    )


def _unknown(file: GgufFile) -> ModelError:
    """Make the error for an architecture that is not read."""
    return ModelError(
        f"{file.path} has the architecture {file.architecture[:80]!r} of GGUF, which is not read "
        f"here; take the model's own safetensors, or one of {', '.join(_known())}"
    )


def _by_us(file: GgufFile) -> Raw:
    """Return the config by the tables here."""
    name = file.architecture
    family = _OURS[name]
    raw: Raw = {"model_type": family.model_type, **family.fixed}
    for key, ours in family.keys.items():
        value = _same_for_all(file, f"{name}.{key}")
        if value is not None:
            raw[ours] = value
    _complete(file, family, raw)
    default = raw["hidden_size"] // raw["num_attention_heads"]
    width = file.whole(f"{name}.rope.dimension_count") if family.is_turned else None
    raw["head_dim"] = file.whole(f"{name}.{family.head_dim}") or width or default
    for ours, tensor in family.biases.items():
        raw[ours] = f"blk.0.{tensor}" in file.tensors
    raw["rope_parameters"] = family.rope(file, raw["head_dim"], raw)
    if family.finish is not None:
        family.finish(file, raw)
    _check_understood(file, family, raw)
    return raw


def _complete(file: GgufFile, family: Family, raw: Raw) -> None:
    """Fill in what may be left out, and take away layers that guess several tokens ahead.

    Raises:
        ModelError: what may not is left out, or is no size.
    """
    name = file.architecture
    if "feed_forward_length" in family.keys and "moe_intermediate_size" in raw:
        raw.setdefault("intermediate_size", raw["moe_intermediate_size"])
    if "attention.head_count_kv" in family.keys and "num_attention_heads" in raw:
        raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    needed = {key: ours for key, ours in family.keys.items() if key not in family.fields}
    missing = sorted(f"{name}.{key}" for key, ours in needed.items() if ours not in raw)
    if missing:
        raise wrong(file.path, f"lacks {', '.join(missing)}")
    for key, ours in needed.items():
        value = raw[ours]
        if not (type(value) is int or key == family.epsilon[0]) or value <= 0:
            raise wrong(file.path, f"has {value!r} for {ours}")
    raw["num_hidden_layers"] -= file.whole(f"{name}.nextn_predict_layers") or 0
    if not 0 < raw["num_hidden_layers"] <= len(file.tensors):
        raise wrong(file.path, f"has {raw['num_hidden_layers']} layers")


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


def _check_understood(file: GgufFile, family: Family, raw: Raw) -> None:
    """Refuse a file that says what its family here has no place for.

    Raises:
        ModelError: it names the key.
    """
    name = file.architecture
    read = {*family.fields, *family.reads}
    for key, neutral in _MATTERS.items():
        value = file.metadata.get(f"{name}.{key}")
        if key in read or value is None or (not hasattr(value, "tolist") and value == neutral):
            continue
        raise ModelError(
            f"{file.path} has {name}.{key}={str(value)[:40]}, which {raw['model_type']} of "
            f"transformers does not do; take the model's own safetensors"
        )
    wide = (
        None if "attention.value_length" in read else file.whole(f"{name}.attention.value_length")
    )
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
