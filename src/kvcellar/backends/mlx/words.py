"""Configs of transformers in the words that mlx-lm's models know.

mlx-lm reads older configs than transformers writes today: RoPE in fields of its own, tied
embeddings by a default of its own. So its arguments are made from the config of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import mlx_lm.utils
from transformers import CONFIG_MAPPING, PretrainedConfig

from kvcellar.errors import ModelError
from kvcellar.models.files.configs import config_from_dict

_FULL, _SLIDING = "full_attention", "sliding_attention"

_LINEAR = "linear_attention"

_UNTURNED = 10_000.0
"""Value for a ``rope_theta`` that mlx-lm demands of a model that rotates no positions: not used."""

_SPELLINGS: tuple[dict[str, str], ...] = ({}, {_LINEAR: "mamba", _FULL: "attention"})
"""How models of mlx-lm spell kinds of layers that transformers names alike in all its configs."""


def empty_model(raw: Mapping[str, Any], config: Any) -> tuple[Any, dict[str, Any]]:
    """Make a model of mlx-lm whose weights are never computed; return it and its arguments.

    Args:
        raw: its ``config.json``.
        config: the config object of its text part.

    Raises:
        ModelError: mlx-lm makes none of the config.
    """
    failed: Exception | None = None
    for spelling in _SPELLINGS:
        try:
            words = arguments(raw, config)
            if words.get("layer_types"):
                spelt = [spelling.get(kind, kind) for kind in words["layer_types"]]
                words["layer_types"] = spelt
            asked = {**decoded(raw), **words}
            model_class, arguments_class = mlx_lm.utils._get_classes(asked)
            return model_class(arguments_class.from_dict(asked)), words
        except Exception as error:  # its models raise whatever their arguments lead to
            failed = failed or error
    raise ModelError(f"mlx-lm makes no model of the config: {failed}") from failed


def arguments(raw: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Write a checkpoint's config in the words that mlx-lm knows."""
    raw = _wrapped(decoded(raw))
    text = {**config.to_dict(), **(raw.get("text_config") or raw)}
    rope = text.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in full:
            text[name] = full[name]
    kind = full.get("rope_type", "default")
    if kind != "default":
        text["rope_scaling"] = {"type": kind, **full}  # some models read the older name
    elif full:
        text["rope_scaling"] = None
    if "sliding_attention" in rope:
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if type(config) is not PretrainedConfig and not hasattr(type(config), "layer_types"):
        text["layer_types"] = None  # of no meaning there, and mlx-lm would take it for one
    types = list(text.get("layer_types") or ())
    if set(types) == {_FULL, _SLIDING} and not isinstance(text.get("sliding_window_pattern"), str):
        text["sliding_window_pattern"] = types.index(_FULL) + 1
    if text.get("position_embedding_type", "") is None:
        text["position_embedding_type"] = "nope"  # mlx-lm takes all other words for rotary ones
    text.pop("architectures", None)
    if "text_config" in raw:
        return {**raw, "text_config": text, "vocab_size": text["vocab_size"]}
    return {**text, **_demanded(raw, text, config)}


def _wrapped(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json; of a text part that mlx-lm knows inside of a wrapper alone, in one."""
    try:
        mlx_lm.utils._get_classes(dict(raw))
    except ValueError:
        outer = str(raw.get("model_type")).removesuffix("_text")
        return {"model_type": outer, "text_config": dict(raw)}
    return raw


def _demanded(raw: Mapping[str, Any], text: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return what mlx-lm demands and the config says in other words, or leaves to its class."""
    _, asked = mlx_lm.utils._get_classes(dict(raw))
    derived = {
        "head_dim": config.hidden_size // config.num_attention_heads,
        "rotary_pct": text.get("partial_rotary_factor"),
        "rotary_emb_base": text.get("rope_theta"),
        "n_ctx": getattr(config, "n_positions", None),
        "block_dim": config.hidden_size,
        "linear_attn_config": _delta_words(config),
        "rope_theta": None if text.get("rope_parameters") else _UNTURNED,
    }
    return {
        name: value
        for name, parameter in inspect.signature(asked).parameters.items()
        if parameter.default is parameter.empty and text.get(name) is None
        if (value := getattr(config, name, None) or derived.get(name)) is not None
    }


def _delta_words(config: Any) -> dict[str, Any] | None:
    """Return what transformers' words say of delta attention; None: they say nothing of it."""
    if not hasattr(config, "linear_num_heads"):
        return None
    numbered: dict[str, list[int]] = {_FULL: [], _LINEAR: []}
    for number, kind in enumerate(config.layer_types, 1):
        numbered[kind].append(number)
    return {
        "full_attn_layers": numbered[_FULL],
        "kda_layers": numbered[_LINEAR],
        "num_heads": config.linear_num_heads,
        "head_dim": config.linear_head_dim,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
    }


def text_config(raw: Mapping[str, Any]) -> Any:
    """Make the config object of the text part of a ``config.json``.

    It is that of transformers where transformers has the architecture; else one without its rules.

    Raises:
        ModelError: it names no architecture, or has a field that is missing or impossible.
    """
    if raw.get("model_type") is None or raw["model_type"] in CONFIG_MAPPING:
        return config_from_dict(raw)
    return PretrainedConfig.from_dict(decoded(raw.get("text_config") or raw))


def decoded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config whose infinities are numbers."""
    decoded: dict[str, Any] = mlx_lm.utils._decode_tagged_floats(dict(raw))
    return decoded


def windows_of(config: Any) -> list[int | None]:
    """Return the window of each layer by a config of transformers; empty: it does not say.

    A config with ``layer_types`` says it for each; a window without them is every layer's. What a
    file says and the config's class does not know is nothing that the model looks at.
    """
    known = type(config)
    if not hasattr(known, "sliding_window"):
        return []
    if not hasattr(known, "layer_types"):
        return [config.sliding_window] * int(config.num_hidden_layers)
    types = config.layer_types or ()
    if not {_FULL, _SLIDING} >= set(types):
        return []
    return [config.sliding_window if kind == _SLIDING else None for kind in types]
