"""A model's cache facts, read from the model's own config.

Windows and layer types are never written down here: a ``config.json`` is handed to the config
class of transformers, whose rules are the ones that the model runs by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.types import LayerGroup, ModelCacheParams

_ALL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")

REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "llama": _ALL[:3],  # without num_key_value_heads there is one per query head
    "mistral": _ALL,
    "qwen2": _ALL,
    "qwen3": (*_ALL, "head_dim"),
    "gemma2": (*_ALL, "head_dim"),
    "gemma3_text": _ALL[:2],  # published configs leave the class's own values out
    "gpt_oss": (*_ALL, "head_dim"),
}
"""The families whose attention is verified here -> fields that their config.json must have.

Every other field has a meaning when it is absent. Without this list the config class would fill
in the sizes of its family's first model, and a wrong cache would be built in silence.
"""

_FULL, _SLIDING = "full_attention", "sliding_attention"


def params_from_config(config: Any) -> ModelCacheParams:
    """What a cache must know of a model, from the model's own config.

    Args:
        config: a config object of transformers, or a ``config.json`` as a dict. The text part is
            taken where a config has one (``text_config``).

    Raises:
        ModelError: an unknown family, a missing or impossible field, or layers that no cache here
            can serve (other than full and sliding attention, layers that share K and V).
        BackendError: a dict is given and transformers, which reads it, is not installed.
    """
    text = config_from_dict(config) if isinstance(config, Mapping) else config
    text = getattr(text, "text_config", None) or text
    family = getattr(text, "model_type", None)
    check_family(family)

    def number(name: str) -> int:
        value = getattr(text, name, None)
        if value is None:
            raise ModelError(_missing(str(family), name))
        if not isinstance(value, int) or value < 1:
            raise ModelError(
                f"the {family} config has {name}={value!r}; it must be at least 1; check the file"
            )
        return value

    n_layers = number("num_hidden_layers")
    n_heads = number("num_attention_heads")
    n_kv_heads = number("num_key_value_heads")
    head_dim = getattr(text, "head_dim", None) or number("hidden_size") // n_heads
    v_head_dim = getattr(text, "v_head_dim", None) or head_dim
    if n_heads % n_kv_heads:
        raise ModelError(
            f"the {family} config has {n_heads} query heads and {n_kv_heads} KV heads; KV heads "
            f"must divide query heads; check the file"
        )
    if getattr(text, "num_kv_shared_layers", None):
        raise ModelError(
            f"the {family} config shares K and V among {text.num_kv_shared_layers} layers, which "
            f"caches here cannot do; choose another model"
        )
    if getattr(text, "use_bidirectional_attention", False):
        raise ModelError(
            f"the {family} config asks for bidirectional attention, where a token sees later ones "
            f"and nothing can be cached; choose a causal model"
        )
    softcap = getattr(text, "attn_logit_softcapping", None)
    layers_by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(_windows(text, n_layers)):
        layers_by_window.setdefault(window, []).append(layer)
    try:
        groups = tuple(
            LayerGroup(tuple(layers), n_kv_heads, head_dim, v_head_dim, window, softcap)
            for window, layers in layers_by_window.items()
        )
        return ModelCacheParams(n_layers, n_kv_heads, head_dim, v_head_dim, groups)
    except ConfigError as error:
        raise ModelError(f"the {family} config cannot work: {error}; check the file") from error


def _windows(text: Any, n_layers: int) -> list[int | None]:
    """The window of every layer, None for full attention.

    transformers masks a sliding layer with ``kv > q - sliding_window``, in every family here, so
    its number is our window: a query at p sees ``(p - w, p]``.
    """
    family, sliding = text.model_type, getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if family in ("llama", "mistral"):
        # These models mask all layers alike and never look at layer_types.
        window = sliding if family == "mistral" else None
        kind = _FULL if window is None else _SLIDING
        if types is not None and set(types[:n_layers]) != {kind}:
            raise ModelError(
                f"the {family} config has layer_types of its own, {sorted(set(types))}, and "
                f"{family} models have {kind} in every layer; the checkpoint is of another family"
            )
        return [window] * n_layers
    if types is None:
        raise ModelError(_missing(family, "layer_types"))
    if len(types) != n_layers:
        raise ModelError(
            f"the {family} config has {n_layers} layers and {len(types)} layer_types; they must "
            f"be one per layer; check the file"
        )
    unknown = sorted(set(types) - {_FULL, _SLIDING})
    if unknown:
        raise ModelError(
            f"the {family} config has layers of {', '.join(unknown)}; caches here serve {_FULL} "
            f"and {_SLIDING}; choose another model"
        )
    if _SLIDING in types and sliding is None:
        raise ModelError(
            f"the {family} config has layers of {_SLIDING} and no sliding_window; add the field, "
            f"or set use_sliding_window where the config has it"
        )
    return [sliding if kind == _SLIDING else None for kind in types]


def check_family(model_type: str | None) -> None:
    """Refuse a family whose attention is not verified here.

    Raises:
        ModelError: it names the family and the supported ones.
    """
    if model_type is None:
        raise ModelError(_missing("model's", "model_type"))
    if model_type not in REQUIRED_FIELDS:
        raise ModelError(
            f"architecture {model_type!r} is not supported; there are: {', '.join(REQUIRED_FIELDS)}"
        )


def config_from_dict(raw: Mapping[str, Any]) -> Any:
    """The config object of transformers for a ``config.json``: of its text part, if it has one.

    Raises:
        ModelError: an unknown family, or a field that is missing or impossible.
        BackendError: transformers is not installed.
    """
    text = raw.get("text_config", raw)
    if not isinstance(text, Mapping):
        raise ModelError(f"text_config is {type(text).__name__} and must be an object")
    family = text.get("model_type")
    check_family(family)
    for name in REQUIRED_FIELDS[str(family)]:
        if text.get(name) is None:
            raise ModelError(_missing(str(family), name))
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise BackendError(
            f"reading a {family} config needs the package {error.name!r}; install it with: "
            f"pip install 'kvcellar[torch]'"
        ) from error
    fields = {key: value for key, value in text.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(str(family), **fields)
    except Exception as error:  # its validators raise classes of their own
        raise ModelError(f"the {family} config cannot be read: {error}; check the file") from error


def _missing(family: str, name: str) -> str:
    return f"the {family} config has no {name}; add the field, or take the model's own config.json"
