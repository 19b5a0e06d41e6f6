"""Plans of models by their ``config.json`` alone, for families whose rules are written down here.

A plan is learnt from a network where one can be built. These rules are for a machine without: they
say of a family what is learnt of it, and a test holds the two together. A config that has anything
that no rule here reads has no plan by rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcellar.models.facts import LayerFacts, ModelFacts, Rope, StateFacts
from kvcellar.models.files.formats import MXFP4
from kvcellar.models.fingerprint import VOLATILE
from kvcellar.models.plans.families import FAMILIES, HEADS
from kvcellar.models.plans.family_rules import SLIDING, Factors, FamilyRules
from kvcellar.models.plans.hybrids import (
    text_of,
)
from kvcellar.models.plans.latents import (
    Latent,
)
from kvcellar.models.plans.plan import (
    GELU_TANH,
    SILU,
    Gate,
    LatentPlan,
    LayerPlan,
    LinearPlan,
    ModelPlan,
    NormPlan,
    kept_plan,
)
from kvcellar.models.plans.recurrent import RecurrentPlan

Raw = Mapping[str, Any]

_GATES: dict[Any, Gate] = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}

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


def known_plan(raw: Mapping[str, Any]) -> ModelPlan | None:
    """Return the plan of a model: the one that was learnt, else by rules; None: there is none."""
    return kept_plan(raw) or plan_by_rules(raw)


def plan_by_rules(raw: Mapping[str, Any]) -> ModelPlan | None:
    """Return the plan of a model by its ``config.json``; None: no rule here says it all."""
    try:
        return _plan(text_of(raw))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError):
        return None


def _plan(raw: Raw) -> ModelPlan | None:
    """Return the plan; errors are those of fields that are missing or of another kind."""
    kind = raw["model_type"]
    family = FAMILIES.get(kind)
    if family is None:
        return None
    raw = family.as_usual(raw)
    if not _is_plain(raw, family):
        return None
    of_config = tuple(raw[name] for name in _SIZES)
    hidden, _, n_layers, n_heads, n_kv_heads, n_vocab, n_positions = of_config
    head_dim = raw.get("head_dim") or HEADS.get(kind, hidden // n_heads)
    kinds = family.kinds(raw)
    window = raw["sliding_window"] if SLIDING in kinds else 1
    if not all(type(one) is int and one > 0 for one in (*of_config, head_dim, window)):
        return None
    ropes, factors = family.ropes(raw, head_dim), family.factors(raw, head_dim)
    names, heads = _Names(family, raw), (n_heads, n_kv_heads, head_dim)
    of_layers, sources = _heads(raw, heads), family.sources(raw)
    if ropes is None or any(dim % 2 or n_heads % n for _, n, dim in of_layers):
        return None
    states = {
        number: found
        for number in range(n_layers)
        if (found := names.recurrent(number, kinds[number])) is not None
    }
    latents = None if family.latents is None else family.latents.shape(raw)
    if latents is not None and 2 * len(ropes[0][0].frequencies) != latents.rotary_dim:
        return None
    facts = ModelFacts(
        family=kind,
        layers=tuple(
            LayerFacts(
                number,
                n_heads,
                of_layers[number][1] if latents is None else 1,
                of_layers[number][2],
                of_layers[number][2] if latents is None else latents.latent_dim,
                factors.scale,
                window if slides == SLIDING else None,
                softcap=factors.softcap,
                has_sinks=family.has_sinks,
                is_latent=latents is not None,
                source=sources.get(number),
                latents=latents,
            )
            for number, slides in enumerate(kinds)
            if number not in states
        ),
        others=(),
        n_layers=n_layers,
        hidden_size=hidden,
        inner_size=max(
            _inner_size(raw, family),
            names.widest(states.values(), heads),
            0 if family.latents is None else family.latents.widest(raw),
        ),
        vocab_size=n_vocab,
        max_positions=n_positions,
        rope=Rope("fixed"),
        states=tuple(
            StateFacts(number, one.shapes, (0,) * len(one.shapes)) for number, one in states.items()
        ),
    )
    embedding = "model.embed_tokens.weight"
    is_tied = _is_tied(raw, family)
    head = LinearPlan((embedding,), (None,)) if is_tied else names.linear("", ("lm_head",), False)
    return ModelPlan(
        facts,
        embedding,
        tuple(
            family.finish(
                raw,
                number,
                names.layer(
                    number, of_layers[number], factors, ropes[1][number], states.get(number)
                ),
            )
            for number in range(n_layers)
        ),
        names.norm(family.named("model.norm")),
        head,
        ropes[0],
        embedding_scale=factors.embedding,
        rounds_scale=factors.rounds_embedding,
        logit_scale=factors.logits,
        logit_cap=factors.logit_cap,
        query_growth=factors.query_growth,
        own_rows=family.own_rows(raw),
    )


def _heads(raw: Raw, usual: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Return query heads, KV heads and numbers of a head of each layer, of which some may differ.

    Raises:
        ValueError: they differ in something else, or in what is no number.
    """
    found, own = [], raw.get("per_layer_config") or {}
    for number in range(raw["num_hidden_layers"]):
        said = dict(own.get(number, {}))
        n_kv_heads = said.pop("num_key_value_heads", usual[1])
        head_dim = said.pop("head_dim", usual[2])
        if said or not all(type(one) is int and one > 0 for one in (n_kv_heads, head_dim)):
            raise ValueError("no rule for layers that differ otherwise")
        found.append((usual[0], n_kv_heads, head_dim))
    return found


def _inner_size(raw: Raw, family: FamilyRules) -> int:
    """Return the numbers per token inside of a layer's MLP, of all its experts together."""
    mixtures = family.mixtures
    if mixtures is not None and (mixtures.are_in(raw, 0) or not mixtures.is_beside):
        return mixtures.inner_size(raw)
    inner: int = raw["intermediate_size"]
    return 2 * inner if family.is_joined or family.joins_mlp else inner


def _is_plain(raw: Raw, family: FamilyRules) -> bool:
    """Return true if rules read all fields of a config, and a plan can say their values."""
    return (
        raw.keys() <= {*_READ, *_OF_NO_MATTER, *family.reads, *family.spares, *family.needs}
        and raw.get("architectures") in (None, [family.network])
        and raw.get(*family.act) in _GATES
        and (family.network != "LlamaForCausalLM" or raw.get("pretraining_tp", 1) == 1)
        and not raw.get("use_bidirectional_attention")
        and (raw.get("quantization_config") or {}).get("quant_method") in (None, MXFP4)
        and all(raw.get(name, value) == value for name, value in family.needs.items())
        and type(_is_tied(raw, family)) is bool
    )


def _is_tied(raw: Raw, family: FamilyRules) -> bool | None:
    """Return true if the head is the embedding; None: nobody says so, or not."""
    found = raw.get("tie_word_embeddings", family.is_tied)
    return found if isinstance(found, bool) else None


class _Names:
    """Tensors of a model, by the names that transformers gives them."""

    def __init__(self, family: FamilyRules, raw: Raw) -> None:
        self._family, self._raw = family, raw
        self._eps = float(raw["rms_norm_eps"])

    def _has(self, bias: str | bool) -> bool:
        return bias if isinstance(bias, bool) else bool(self._raw.get(bias, False))

    def norm(self, name: str) -> NormPlan:
        """Plan a norm."""
        return NormPlan(f"{name}.weight", self._eps, self._family.offset, self._family.in_floats)

    def linear(self, within: str, names: tuple[str, ...], bias: str | bool) -> LinearPlan:
        """Plan linear layers of one input."""
        whole = [f"{within}.{name}" if within else name for name in names]
        biases = [f"{name}.bias" if self._has(bias) else None for name in whole]
        return LinearPlan(tuple(f"{name}.weight" for name in whole), tuple(biases))

    def recurrent(self, number: int, kind: str) -> RecurrentPlan | None:
        """Plan the recurrent module of a layer of a kind; None: that has attention."""
        found = self._family.recurrents
        if found is None or kind != found.kind:
            return None
        made = found.plan(self._raw, f"model.layers.{number}.{found.module}")
        made.check()
        return made

    def widest(self, states: Iterable[RecurrentPlan], heads: tuple[int, int, int]) -> int:
        """Return the numbers per token inside of the modules before MLPs, where some have states.

        Those of attention are counted with the MLPs where no layer has.
        """
        found, (n_heads, _, dim) = self._family.recurrents, heads
        if found is None:
            return 0
        widths = [(1 + self._family.is_gated) * n_heads * dim, *map(found.widest, states)]
        hidden: int = self._raw["hidden_size"]
        return max(hidden, *widths)

    def layer(
        self,
        number: int,
        heads: tuple[int, int, int],
        factors: Factors,
        rope: int | None,
        recurrent: RecurrentPlan | None,
    ) -> LayerPlan:
        """Plan a decoder layer."""
        name, family = f"model.layers.{number}", self._family
        own_norms = family.norms
        if recurrent is not None and family.norms_of_states is not None:
            own_norms = family.norms_of_states
        norms: dict[str, Any] = {
            role: self.norm(f"{name}.{own}") for role, own in own_norms.items()
        }
        if recurrent is not None:
            between = self._recurrent(name, recurrent)
        elif family.latents is not None:
            between = self._latent(f"{name}.self_attn", family.latents, factors.scale)
        else:
            between = self._attention(f"{name}.self_attn", heads, factors, rope)
        return LayerPlan(
            before=norms.pop("before", None),
            between=norms.pop("between", None),
            **norms,
            residual=factors.residual,
            **between,
            **self._mixer(name, number),
        )

    def _attention(
        self, at: str, heads: tuple[int, int, int], factors: Factors, rope: int | None
    ) -> dict[str, Any]:
        """Plan attention, as fields of a layer."""
        family, q_norm, k_norm = self._family, None, None
        qkv = ("qkv_proj",) if family.is_joined else ("q_proj", "k_proj", "v_proj")
        if self._has(family.head_norms):
            q_norm, k_norm = (
                self.norm(f"{at}.{family.named(one)}") for one in ("q_norm", "k_norm")
            )
        return {
            "qkv": self.linear(at, qkv, family.qkv_bias),
            "q_norm": q_norm,
            "k_norm": k_norm,
            "o": self.linear(at, (family.named("o_proj"),), family.o_bias),
            "heads": heads,
            "scale": factors.scale,
            "norms_together": family.norms_together and max(heads[:2]) > 1,
            "rope": rope,
            "sinks": f"{at}.sinks" if family.has_sinks else None,
            "is_gated": family.is_gated,
            "turns_pairs": family.turns_pairs and rope is not None,
        }

    def _latent(self, at: str, found: Latent, scale: float) -> dict[str, Any]:
        """Plan attention over latents, as fields of a layer."""
        bias = self._has("attention_bias")
        q_size = self._raw.get("q_lora_rank") or 0
        q = "q_a_proj" if q_size else "q_proj"
        names = tuple(f"{at}.{one}" for one in (q, "kv_a_proj_with_mqa"))
        has = (bias and bool(q_size), bias)
        biases = (f"{one}.bias" if each else None for one, each in zip(names, has, strict=True))
        return {
            "qkv": LinearPlan(tuple(f"{one}.weight" for one in names), tuple(biases)),
            "q_norm": None,
            "k_norm": None,
            "o": self.linear(at, ("o_proj",), self._family.o_bias),
            "heads": (0, 0, 0),
            "scale": scale,
            "rope": 0,
            "latent": LatentPlan(
                shape=found.shape(self._raw),
                expand=f"{at}.kv_b_proj.weight",
                norm=NormPlan(f"{at}.kv_a_layernorm.weight", found.eps),
                turned=found.turned(self._raw),
                q=self.linear(at, ("q_b_proj",), False) if q_size else None,
                q_norm=NormPlan(f"{at}.q_a_layernorm.weight", found.eps) if q_size else None,
                q_size=q_size,
            ),
        }

    def _recurrent(self, name: str, plan: RecurrentPlan) -> dict[str, Any]:
        """Plan a recurrent module and its linear layers, as fields of a layer."""
        found = self._family.recurrents
        assert found is not None, "a layer of them was found"
        at = f"{name}.{found.module}"
        return {
            "qkv": self.linear(at, found.inputs, found.bias),
            "q_norm": None,
            "k_norm": None,
            "o": self.linear(at, (found.out,), found.bias),
            "heads": (0, 0, 0),
            "scale": 1.0,
            "rope": None,
            "recurrent": plan,
        }

    def _mixer(self, name: str, number: int) -> dict[str, Any]:
        """Plan what a layer has behind its attention, as fields of it."""
        family, gate = self._family, _GATES[self._raw.get(*self._family.act)]
        mixtures = family.mixtures
        if mixtures is None or not mixtures.are_in(self._raw, number):
            return {"gate": gate, **self._mlp(f"{name}.{family.named('mlp')}")}
        beside: dict[str, Any] = {"gate_up": None, "down": None}
        if mixtures.shared is not None:
            beside = self._mlp(f"{name}.{mixtures.block}.{mixtures.shared}")
        if mixtures.is_beside:
            beside = self._mlp(f"{name}.{family.named('mlp')}")
        found = mixtures.plan(self._raw, name)
        return {**beside, "mixture": found, "gate": mixtures.gate(self._raw) or gate}

    def _mlp(self, within: str) -> dict[str, Any]:
        """Plan a gated MLP, as fields of a layer."""
        family, bias = self._family, self._family.mlp_bias
        is_one = family.is_joined or family.joins_mlp
        both = ("gate_up_proj",) if is_one else ("gate_proj", "up_proj")
        return {
            "gate_up": self.linear(within, tuple(map(family.named, both)), bias),
            "down": self.linear(within, (family.named("down_proj"),), bias),
        }
