"""Gemma 4 by its config: layers that differ in their heads, read each other's K and V, and more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvcellar.models.plans.family_rules import FULL, SLIDING, Factors, factor_of_rows
from kvcellar.models.plans.mixtures import Mixtures
from kvcellar.models.plans.plan import (
    ApartPlan,
    LayerPlan,
    LinearPlan,
    NormPlan,
    OwnPlan,
    OwnRowsPlan,
)

Raw = Mapping[str, Any]

_USUAL = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
_OF_UNIFIED = {"max_position_embeddings": 262_144, "sliding_window": 1024}

READ_BY_GEMMA4 = frozenset(
    (
        "attention_k_eq_v",
        "enable_moe_block",
        "final_logit_softcapping",
        "global_head_dim",
        "hidden_activation",
        "hidden_size_per_layer_input",
        "moe_intermediate_size",
        "num_global_key_value_heads",
        "num_kv_shared_layers",
        "per_layer_config",
        "top_k_experts",
        "use_bidirectional_attention",
        "use_double_wide_mlp",
        "vocab_size_per_layer_input",
    )
)

OF_GEMMA4 = Mixtures(
    router="router.proj", block="", is_normalised=True, rounds_shares=False, is_beside=True
)


def as_usual_gemma4(raw: Raw) -> Raw:
    """Return a config of Gemma 4 with the fields that others have, and what its class takes.

    Raises:
        ValueError: a part of each head turns in a way that its class does not have, rows of layers'
            own are not those of all tokens, or nobody says how many experts there are.
    """
    made = {**_USUAL, **raw}
    if made.get("use_bidirectional_attention") == "vision":
        made["use_bidirectional_attention"] = None  # of a text all tokens look back
    n_layers = made["num_hidden_layers"]
    kinds = made.get("layer_types") or [FULL if n % 6 == 5 else SLIDING for n in range(n_layers)]
    made["layer_types"] = kinds = [*kinds[:-1], FULL]
    own: dict[str, Any] = {"head_dim": made.pop("global_head_dim", 512)}
    n_kv_heads = made.pop("num_global_key_value_heads", None)
    if made["attention_k_eq_v"] and n_kv_heads is not None:
        own["num_key_value_heads"] = n_kv_heads
    usual = {at: own for at, kind in enumerate(kinds) if kind == FULL}
    given = made.get("per_layer_config", usual) or {}
    made["per_layer_config"] = {int(at): dict(one) for at, one in given.items()}
    n_experts = made.get("num_experts") if made["enable_moe_block"] else 0
    if n_experts is None:
        raise ValueError("no rule for so many experts")
    made |= {"num_local_experts": n_experts, "num_experts_per_tok": made.pop("top_k_experts", None)}
    if made["use_double_wide_mlp"] and made["num_kv_shared_layers"]:
        made["intermediate_size"] *= 2  # of those layers; files say it of each
    sizes = made["vocab_size"], made["vocab_size_per_layer_input"]
    if made["hidden_size_per_layer_input"] and sizes[0] != sizes[1]:
        raise ValueError("no rule for tokens without rows of layers' own")
    for rope in made["rope_parameters"].values():
        is_whole = rope.get("partial_rotary_factor") in (None, 1)
        if rope.get("rope_type", "default") != "proportional" and not is_whole:
            raise ValueError("no rule for heads that turn in part")
    return made


def as_usual_unified(raw: Raw) -> Raw:
    """Return a config of Gemma 4 12B as ``as_usual_gemma4`` does; its class has less."""
    lacks = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return as_usual_gemma4({**_OF_UNIFIED, **raw, **lacks})


def factors_of_gemma4(raw: Raw, head_dim: int) -> Factors:
    """Return the factors of Gemma 4, whose heads are normed and not scaled."""
    embedding, rounds = factor_of_rows(raw)
    cap = raw.get("final_logit_softcapping")
    return Factors(1.0, embedding=embedding, rounds_embedding=rounds, logit_cap=cap)


def widths_of_gemma4(raw: Raw) -> Mapping[str, int]:
    """Return the numbers of a head by the kind of a layer.

    Raises:
        ValueError: layers of one kind differ.
    """
    found = dict[str, int]()
    for number, kind in enumerate(raw["layer_types"]):
        width = raw["per_layer_config"].get(number, {}).get("head_dim", raw["head_dim"])
        if found.setdefault(kind, width) != width:
            raise ValueError("no rule for layers of one kind with heads of several widths")
    return found


def sources_of_gemma4(raw: Raw) -> Mapping[int, int]:
    """Return whose K and V the last layers read: those of the last one before of their kind.

    Raises:
        ValueError: there is none before of a kind.
    """
    kinds, n_shared = raw["layer_types"], raw["num_kv_shared_layers"]
    first = len(kinds) - n_shared
    last = {kind: number for number, kind in enumerate(kinds[:first])}
    if first < 0 or not {*kinds} <= last.keys():
        raise ValueError("no rule for layers that share what no layer has")
    return {number: last[kinds[number]] for number in range(first, len(kinds))}


def own_rows_of_gemma4(raw: Raw) -> OwnRowsPlan | None:
    """Plan the rows that each layer has of its own; None: it has none."""
    size = raw["hidden_size_per_layer_input"]
    if not size:
        return None
    project = LinearPlan(("model.per_layer_model_projection.weight",), (None,))
    return OwnRowsPlan(
        size=size,
        embedding="model.embed_tokens_per_layer.weight",
        own_scale=float(size**0.5),
        project=project,
        scale=float(raw["hidden_size"] ** -0.5),
        norm=_norm(raw, "model.per_layer_projection_norm"),
        mean=2.0**-0.5,
    )


def layer_of_gemma4(raw: Raw, number: int, layer: LayerPlan) -> LayerPlan:
    """Return a layer's plan with what no other family has."""
    name, (weights, biases) = f"model.layers.{number}", (layer.qkv.weights, layer.qkv.biases)
    made: dict[str, Any] = {"result": f"{name}.layer_scalar"}
    if number in sources_of_gemma4(raw):
        n_heads, _, head_dim = layer.heads
        qkv = LinearPlan(weights[:1], biases[:1])
        made |= {"qkv": qkv, "k_norm": None, "heads": (n_heads, 0, head_dim)}
    else:
        made["v_eps"] = float(raw["rms_norm_eps"])
        if raw["attention_k_eq_v"] and raw["layer_types"][number] == FULL:
            made["qkv"] = LinearPlan((*weights[:2], weights[1]), (*biases[:2], biases[1]))
    if raw["hidden_size_per_layer_input"]:
        gate, out = (
            LinearPlan((f"{name}.{one}.weight",), (None,))
            for one in ("per_layer_input_gate", "per_layer_projection")
        )
        made["own"] = OwnPlan(gate, out, _norm(raw, f"{name}.post_per_layer_input_norm"))
    if layer.mixture is not None:
        apart = ApartPlan(
            router=replace(_norm(raw, name), weight=f"{name}.router.scale"),
            router_scale=float(raw["hidden_size"] ** -0.5),
            experts=_norm(raw, f"{name}.pre_feedforward_layernorm_2"),
            experts_said=_norm(raw, f"{name}.post_feedforward_layernorm_2"),
            mlp_said=_norm(raw, f"{name}.post_feedforward_layernorm_1"),
        )
        factors = f"{name}.router.per_expert_scale"
        made["mixture"] = replace(layer.mixture, factors=factors, apart=apart)
    return replace(layer, **made)


def _norm(raw: Raw, name: str) -> NormPlan:
    return NormPlan(f"{name}.weight", float(raw["rms_norm_eps"]), in_floats=True)
