"""Rules of a family of models: how it differs from others, and its numbers by a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcellar.models.plans.hybrids import (
    Recurrents,
)
from kvcellar.models.plans.latents import (
    Latent,
    scale_of_latents,
)
from kvcellar.models.plans.mixtures import Mixtures
from kvcellar.models.plans.plan import LayerPlan, OwnRowsPlan
from kvcellar.models.plans.ropes import Ropes, one_rope

Raw = Mapping[str, Any]

SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in configs: those with a window, and those that see all."""


def all_full(raw: Raw) -> list[str]:
    """Return the kinds of layers of a family in which none slides, whatever windows it names.

    Raises:
        ValueError: one does.
    """
    if raw.get("use_sliding_window") or not {*(raw.get("layer_types") or ())} <= {FULL}:
        raise ValueError("no rule for layers that slide")
    return [FULL] * raw["num_hidden_layers"]


def all_slide(raw: Raw) -> list[str]:
    """Return the kinds of layers of a family in which all slide, or none."""
    if raw.get("layer_types") is not None:
        raise ValueError("no rule for layers of several kinds")
    return [SLIDING if raw["sliding_window"] else FULL] * raw["num_hidden_layers"]


def as_said(raw: Raw) -> list[str]:
    """Return the kinds of layers of a family whose configs name them all.

    Raises:
        ValueError: there are others, or not as many as layers.
    """
    found = list(raw["layer_types"])
    if len(found) != raw["num_hidden_layers"] or not {*found} <= {SLIDING, FULL}:
        raise ValueError("layers of kinds that no rule knows")
    return found


def all_but(period: int) -> Callable[[Raw], list[str]]:
    """Make a rule by which all layers slide but each so manieth, where a config names none."""

    def kinds(raw: Raw) -> list[str]:
        n_layers, every = raw["num_hidden_layers"], raw.get("sliding_window_pattern") or period
        slide = [bool((at + 1) % every) for at in range(n_layers)]
        found = raw.get("layer_types") or [SLIDING if one else FULL for one in slide]
        if len(found) != n_layers or not {*found} <= {SLIDING, FULL}:
            raise ValueError("layers of kinds that no rule knows")
        return list(found)

    return kinds


@dataclass(frozen=True, slots=True)
class Factors:
    """Numbers of a model beside its tensors, as in :class:`ModelPlan` and :class:`LayerPlan`."""

    scale: float
    softcap: float | None = None
    residual: float = 1.0
    embedding: float = 1.0
    rounds_embedding: bool = False
    logits: float = 1.0
    logit_cap: float | None = None
    query_growth: tuple[float, int] | None = None


def plain_factors(raw: Raw, head_dim: int) -> Factors:
    """Return the factors of most families: attention is scaled by the width of heads."""
    return Factors(head_dim**-0.5)


def of_ministral3(raw: Raw, head_dim: int) -> Factors:
    """Return the factors of Ministral 3, whose queries grow with positions.

    Raises:
        ValueError: they grow with stretches of no positions.
    """
    rope = raw["rope_parameters"]
    stretch = rope["original_max_position_embeddings"]
    if type(stretch) is not int or stretch < 1:
        raise ValueError("no rule for queries that grow otherwise")
    return Factors(head_dim**-0.5, query_growth=(float(rope["llama_4_scaling_beta"]), stretch))


def factor_of_rows(raw: Raw) -> tuple[float, bool]:
    """Return a Gemma's factor on rows of its embedding, and if it is rounded to their type.

    One that bfloat16 has is rounded to itself.
    """
    embedding = float(raw["hidden_size"] ** 0.5)
    return embedding, bool(int(np.float32(embedding).view(np.uint32)) & 0xFFFF)


def of_gemma(raw: Raw, head_dim: int) -> Factors:
    """Return the factors of a Gemma."""
    embedding, rounds = factor_of_rows(raw)
    return Factors(
        scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        softcap=raw.get("attn_logit_softcapping"),
        embedding=embedding,
        rounds_embedding=rounds,
        logit_cap=raw.get("final_logit_softcapping"),
    )


def of_first_gemma(raw: Raw, head_dim: int) -> Factors:
    """Return the factors of the first Gemma, whose attention is scaled by the width of heads."""
    return of_gemma({**raw, "query_pre_attn_scalar": head_dim}, head_dim)


def of_latents(raw: Raw, head_dim: int) -> Factors:
    """Return the factors of a family that attends over latents."""
    return Factors(scale_of_latents(raw))


def of_minicpm3(raw: Raw, head_dim: int) -> Factors:
    """Return the factors of MiniCPM3: of what is added, of embeddings and of logits."""
    embedding = float(raw["scale_emb"])
    return Factors(
        scale=scale_of_latents(raw),
        residual=float(raw["scale_depth"]) / raw["num_hidden_layers"] ** 0.5,
        embedding=embedding,
        rounds_embedding=bool(int(np.float32(embedding).view(np.uint32)) & 0xFFFF),
        logits=float(raw["dim_model_base"]) / raw["hidden_size"],
    )


def of_granite(raw: Raw, head_dim: int) -> Factors:
    """Return the factors of a Granite, all of which its config says."""
    return Factors(
        scale=float(raw["attention_multiplier"]),
        residual=float(raw["residual_multiplier"]),
        embedding=float(raw["embedding_multiplier"]),
        logits=1 / float(raw["logits_scaling"]),
    )


def no_sources(raw: Raw) -> Mapping[int, int]:
    """Return whose K and V layers read in most families: their own."""
    return {}


def no_own_rows(raw: Raw) -> OwnRowsPlan | None:
    """Return the rows that layers have of their own in most families: none."""
    return None


def as_planned(raw: Raw, number: int, layer: LayerPlan) -> LayerPlan:
    """Return a layer's plan as it is."""
    return layer


BEFORE = {"before": "input_layernorm", "between": "post_attention_layernorm"}
BEHIND = {"attended": "post_attention_layernorm", "mixed": "post_feedforward_layernorm"}
AROUND = {**BEHIND, "before": "input_layernorm", "between": "pre_feedforward_layernorm"}
"""Norms of a layer, by the names of a plan."""


@dataclass(frozen=True, slots=True)
class FamilyRules:
    """A family, as it differs from the others.

    Attributes:
        network: class of transformers.
        qkv_bias: field that says if Q, K and V have biases, or what is so of all of them.
        o_bias: the same of what is behind the attention.
        mlp_bias: the same of the MLP.
        norms: of a layer, by the names of a plan.
        offset: what is added to the weights of norms.
        in_floats: true if norms round once.
        head_norms: field that says if the heads of Q and K are normed, or what is so of all; each
            is, or, where the next is true, all are together.
        norms_together: true if all heads are normed together.
        act: field that says which activation there is, and that where nothing is said.
        is_joined: true if Q, K and V are one matrix, and gate and up another.
        joins_mlp: true if gate and up are one.
        is_tied: true if the head is the embedding where nothing is said of it; None: it is said.
        mixtures: of a config, where there are experts.
        has_sinks: true if heads have a logit of their own.
        kinds: of layers.
        ropes: rotary positions of a config, by the width of heads.
        factors: of a config, by the width of heads.
        reads: further fields that ``factors`` and the like read.
        spares: further fields that change nothing.
        needs: fields that have to have these values, where they are there.
        recurrents: layers that are recurrent.
        is_gated: true if attention has a gate behind it.
        names: modules that others call otherwise, by their names there.
        as_usual: makes of a config one with the fields of others.
        norms_of_states: norms of recurrent layers, where they are others.
        latents: layers attend over latents, of a config; None: no layer does.
        turns_pairs: true if neighbours of a head turn against each other.
        sources: by number of a layer that reads an earlier one's K and V, that one's.
        own_rows: what layers have of their own.
        finish: adds to the plan of a layer what is the family's alone.
    """

    network: str
    qkv_bias: str | bool = False
    o_bias: str | bool = False
    mlp_bias: str | bool = False
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    offset: float = 0.0
    in_floats: bool = False
    head_norms: str | bool = False
    norms_together: bool = False
    act: tuple[str, str] = ("hidden_act", "silu")
    is_joined: bool = False
    joins_mlp: bool = False
    is_tied: bool | None = None
    mixtures: Mixtures | None = None
    has_sinks: bool = False
    kinds: Callable[[Raw], Sequence[str]] = all_full
    ropes: Callable[[Raw, int], Ropes | None] = one_rope
    factors: Callable[[Raw, int], Factors] = plain_factors
    reads: frozenset[str] = frozenset()
    spares: frozenset[str] = frozenset()
    needs: Mapping[str, Any] = field(default_factory=dict)
    recurrents: Recurrents | None = None
    is_gated: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    as_usual: Callable[[Raw], Raw] = dict
    norms_of_states: Mapping[str, str] | None = None
    latents: Latent | None = None
    turns_pairs: bool = False
    sources: Callable[[Raw], Mapping[int, int]] = no_sources
    own_rows: Callable[[Raw], OwnRowsPlan | None] = no_own_rows
    finish: Callable[[Raw, int, LayerPlan], LayerPlan] = as_planned

    def named(self, usual: str) -> str:
        """Return what the family calls a module."""
        return self.names.get(usual, usual)
