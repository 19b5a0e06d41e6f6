"""Plans of models by their ``config.json`` alone, for families whose rules are written down here.

A plan is learnt from a network where one can be built. These rules are for a machine without: they
say of a dense family what is learnt of it, and a test holds the two together. A config that has
anything that no rule here reads has no plan by rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcellar.models.facts import LayerFacts, ModelFacts, Rope
from kvcellar.models.fingerprint import VOLATILE
from kvcellar.models.plan import (
    LayerPlan,
    LinearPlan,
    ModelPlan,
    NormPlan,
    RopePlan,
    kept_plan,
)


@dataclass(frozen=True, slots=True)
class _Family:
    """A dense family, as it differs from the others.

    Attributes:
        network: class of transformers.
        qkv_bias: field that says if Q, K and V have biases, or what is so of all of them.
        o_bias: the same of what is behind the attention.
        mlp_bias: the same of the MLP.
        has_head_norms: true if the heads of Q and K are normed.
        has_window: true if ``sliding_window`` alone says that there is one.
    """

    network: str
    qkv_bias: str | bool = False
    o_bias: str | bool = False
    mlp_bias: str | bool = False
    has_head_norms: bool = False
    has_window: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": _Family("MistralForCausalLM", has_window=True),
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", "attention_bias", "attention_bias", has_head_norms=True),
}

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)

_READ = {
    *_SIZES,
    "architectures",
    "attention_bias",
    "head_dim",
    "hidden_act",
    "layer_types",
    "mlp_bias",
    "model_type",
    "pretraining_tp",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
}
"""Fields that are looked at here."""

_OF_NO_MATTER = {
    *VOLATILE,
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "max_window_layers",
    "pad_token_id",
    "torch_dtype",
    "transformers.js_config",
}
"""Fields that change nothing of what a model computes where all that is read is as it has to be."""

_LLAMA3 = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def known_plan(raw: Mapping[str, Any]) -> ModelPlan | None:
    """Return the plan of a model: the one that was learnt, else by rules; None: there is none."""
    return kept_plan(raw) or plan_by_rules(raw)


def plan_by_rules(raw: Mapping[str, Any]) -> ModelPlan | None:
    """Return the plan of a model by its ``config.json``; None: no rule here says it all."""
    try:
        return _plan(raw)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None


def _plan(raw: Mapping[str, Any]) -> ModelPlan | None:
    """Return the plan; errors are those of fields that are missing or of another kind."""
    kind = raw["model_type"]
    family = _FAMILIES.get(kind)
    if family is None or not raw.keys() <= _READ | _OF_NO_MATTER or not _is_plain(raw, family):
        return None
    if kind == "qwen3" and not raw.get("head_dim"):
        return None  # a head's width is the class's own then
    of_config = tuple(raw[name] for name in _SIZES)
    hidden, inner, n_layers, n_heads, n_kv_heads, n_vocab, n_positions = of_config
    head_dim = raw.get("head_dim") or hidden // n_heads
    window = raw["sliding_window"] if family.has_window else None
    sizes = (*of_config, head_dim, 1 if window is None else window)
    if not all(type(one) is int and one > 0 for one in sizes):
        return None
    frequencies = _frequencies(raw, head_dim)
    if frequencies is None or head_dim % 2 or n_heads % n_kv_heads:
        return None
    layer = LayerFacts(0, n_heads, n_kv_heads, head_dim, head_dim, head_dim**-0.5, window)
    facts = ModelFacts(
        family=kind,
        layers=tuple(_at(layer, number) for number in range(n_layers)),
        others=(),
        n_layers=n_layers,
        hidden_size=hidden,
        inner_size=inner,
        vocab_size=n_vocab,
        max_positions=n_positions,
        rope=Rope("fixed"),
    )
    names = _Names(family, raw)
    embedding = "model.embed_tokens.weight"
    head = (
        LinearPlan((embedding,), (None,))
        if raw["tie_word_embeddings"]
        else names.linear("", ("lm_head",), False)
    )
    return ModelPlan(
        facts,
        embedding,
        tuple(
            names.layer(f"model.layers.{number}", (n_heads, n_kv_heads, head_dim))
            for number in range(n_layers)
        ),
        names.norm("model.norm"),
        head,
        RopePlan(frequencies, 1.0),
    )


def _is_plain(raw: Mapping[str, Any], family: _Family) -> bool:
    """Return true if a config says nothing that no plan can say."""
    layers = raw.get("layer_types")
    is_whole = layers is None or (set(layers) == {"full_attention"} and not family.has_window)
    return (
        raw.get("architectures") in (None, [family.network])
        and raw.get("hidden_act", "silu") == "silu"
        and raw.get("pretraining_tp", 1) == 1
        and is_whole
        and not raw.get("use_sliding_window")
        and type(raw["tie_word_embeddings"]) is bool
    )


def _at(layer: LayerFacts, number: int) -> LayerFacts:
    """Return the facts of another layer that is like this one."""
    return LayerFacts(
        number,
        layer.n_heads,
        layer.n_kv_heads,
        layer.head_dim,
        layer.v_head_dim,
        layer.scale,
        layer.window,
    )


class _Names:
    """Tensors of a model, by the names that transformers gives them."""

    def __init__(self, family: _Family, raw: Mapping[str, Any]) -> None:
        self._family, self._raw = family, raw
        self._eps = float(raw["rms_norm_eps"])

    def _has(self, bias: str | bool) -> bool:
        return bias if isinstance(bias, bool) else bool(self._raw.get(bias, False))

    def norm(self, name: str) -> NormPlan:
        """Plan a norm."""
        return NormPlan(f"{name}.weight", self._eps)

    def linear(self, within: str, names: tuple[str, ...], bias: str | bool) -> LinearPlan:
        """Plan linear layers of one input."""
        whole = [f"{within}.{name}" if within else name for name in names]
        biases = [f"{name}.bias" if self._has(bias) else None for name in whole]
        return LinearPlan(tuple(f"{name}.weight" for name in whole), tuple(biases))

    def layer(self, name: str, heads: tuple[int, int, int]) -> LayerPlan:
        """Plan a decoder layer."""
        at, of_mlp, family = f"{name}.self_attn", f"{name}.mlp", self._family
        normed = family.has_head_norms
        return LayerPlan(
            before=self.norm(f"{name}.input_layernorm"),
            qkv=self.linear(at, ("q_proj", "k_proj", "v_proj"), family.qkv_bias),
            q_norm=self.norm(f"{at}.q_norm") if normed else None,
            k_norm=self.norm(f"{at}.k_norm") if normed else None,
            o=self.linear(at, ("o_proj",), family.o_bias),
            between=self.norm(f"{name}.post_attention_layernorm"),
            gate_up=self.linear(of_mlp, ("gate_proj", "up_proj"), family.mlp_bias),
            down=self.linear(of_mlp, ("down_proj",), family.mlp_bias),
            heads=heads,
            scale=heads[2] ** -0.5,
        )


def _frequencies(raw: Mapping[str, Any], head_dim: int) -> tuple[float, ...] | None:
    """Return radians per position of each pair of numbers; None: a kind that no rule here knows."""
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    theta = float(rope.pop("rope_theta", None) or raw["rope_theta"])
    kind = {rope.pop(name) for name in ("rope_type", "type") if name in rope} or {"default"}
    # Rounded where a network rounds, so that hardly any number differs in its last bit.
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    powers = (theta ** exponents.astype(np.float64)).astype(np.float32)
    found = (np.float32(1) / powers).astype(np.float64)
    if kind == {"linear"} and rope.keys() == {"factor"}:
        found = found / float(rope["factor"])
    elif kind == {"llama3"} and rope.keys() == {*_LLAMA3}:
        factor, low, high, original = (float(rope[name]) for name in _LLAMA3)
        # Turns within the original context, between which two the stretching sets in.
        turns = original * found / (2 * math.pi)
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        found = found * (share + (1 - share) / factor)
    elif kind != {"default"} or rope:
        return None
    return tuple(map(float, found.astype(np.float32)))
