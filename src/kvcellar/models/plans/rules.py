"""Plans of models by their ``config.json`` alone, for families whose rules are written down here.

A plan is learnt from a network where one can be built. These rules are for a machine without: they
say of a family what is learnt of it, and a test holds the two together. A config that has anything
that no rule here reads has no plan by rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcellar.models.facts import LayerFacts, ModelFacts, Rope, StateFacts
from kvcellar.models.files.formats import MXFP4
from kvcellar.models.fingerprint import VOLATILE
from kvcellar.models.plans.dense import (
    as_usual_first_gemma,
    as_usual_gemma3,
    as_usual_glm,
    as_usual_internlm3,
    as_usual_olmo3,
    rope_but_where_all_is_seen,
    rope_of_ministral3,
)
from kvcellar.models.plans.hybrids import (
    OF_GRANITE,
    OF_LFM2,
    OF_OLMO_HYBRID,
    OF_QWEN3_5,
    OF_QWEN3_NEXT,
    READ_BY_DELTA_NETS,
    READ_BY_GRANITE_HYBRID,
    READ_BY_LFM2,
    READ_BY_LFM2_MOE,
    SPARED_BY_GRANITE_HYBRID,
    SPARED_BY_LFM2,
    SPARED_BY_OLMO_HYBRID,
    SPARED_BY_QWEN3_5,
    Recurrents,
    as_usual_granite,
    as_usual_lfm2,
    as_usual_lfm2_moe,
    as_usual_olmo_hybrid,
    as_usual_qwen,
    rope_if_said,
    rope_or_none,
    text_of,
    turned_as_texts,
)
from kvcellar.models.plans.latents import (
    OF_DEEPSEEK_V2,
    OF_DEEPSEEK_V3,
    OF_MINICPM3,
    READ_BY_LATENTS,
    READ_BY_MINICPM3,
    READ_BY_ROUTED,
    SPARED_BY_LATENTS,
    Latent,
    as_usual_latents,
    as_usual_routed,
    scale_of_latents,
)
from kvcellar.models.plans.mixtures import OF_GPT_OSS, OF_QWEN, READ, Mixtures
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
from kvcellar.models.plans.ropes import Ropes, one_rope, rope_but_in, rope_by_kind, said_rope

Raw = Mapping[str, Any]

_SLIDING, _FULL = "sliding_attention", "full_attention"

_GATES: dict[Any, Gate] = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}


def _all_full(raw: Raw) -> list[str]:
    """Return the kinds of layers of a family in which none slides, whatever windows it names.

    Raises:
        ValueError: one does.
    """
    if raw.get("use_sliding_window") or not {*(raw.get("layer_types") or ())} <= {_FULL}:
        raise ValueError("no rule for layers that slide")
    return [_FULL] * raw["num_hidden_layers"]


def _all_slide(raw: Raw) -> list[str]:
    """Return the kinds of layers of a family in which all slide, or none."""
    if raw.get("layer_types") is not None:
        raise ValueError("no rule for layers of several kinds")
    return [_SLIDING if raw["sliding_window"] else _FULL] * raw["num_hidden_layers"]


def _as_said(raw: Raw) -> list[str]:
    """Return the kinds of layers of a family whose configs name them all.

    Raises:
        ValueError: there are others, or not as many as layers.
    """
    found = list(raw["layer_types"])
    if len(found) != raw["num_hidden_layers"] or not {*found} <= {_SLIDING, _FULL}:
        raise ValueError("layers of kinds that no rule knows")
    return found


def _all_but(period: int) -> Callable[[Raw], list[str]]:
    """Make a rule by which all layers slide but each so manieth, where a config names none."""

    def kinds(raw: Raw) -> list[str]:
        n_layers, every = raw["num_hidden_layers"], raw.get("sliding_window_pattern") or period
        slide = [bool((at + 1) % every) for at in range(n_layers)]
        found = raw.get("layer_types") or [_SLIDING if one else _FULL for one in slide]
        if len(found) != n_layers or not {*found} <= {_SLIDING, _FULL}:
            raise ValueError("layers of kinds that no rule knows")
        return list(found)

    return kinds


@dataclass(frozen=True, slots=True)
class _Factors:
    """Numbers of a model beside its tensors, as in :class:`ModelPlan` and :class:`LayerPlan`."""

    scale: float
    softcap: float | None = None
    residual: float = 1.0
    embedding: float = 1.0
    rounds_embedding: bool = False
    logits: float = 1.0
    logit_cap: float | None = None
    query_growth: tuple[float, int] | None = None


def _plain(raw: Raw, head_dim: int) -> _Factors:
    return _Factors(head_dim**-0.5)


def _of_ministral3(raw: Raw, head_dim: int) -> _Factors:
    rope = raw["rope_parameters"]
    stretch = rope["original_max_position_embeddings"]
    if type(stretch) is not int or stretch < 1:
        raise ValueError("no rule for queries that grow otherwise")
    return _Factors(head_dim**-0.5, query_growth=(float(rope["llama_4_scaling_beta"]), stretch))


def _of_gemma(raw: Raw, head_dim: int) -> _Factors:
    """Return the factors of a Gemma; a factor that bfloat16 has is rounded to itself."""
    embedding = float(raw["hidden_size"] ** 0.5)
    bits = int(np.float32(embedding).view(np.uint32))
    return _Factors(
        scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        softcap=raw.get("attn_logit_softcapping"),
        embedding=embedding,
        rounds_embedding=bool(bits & 0xFFFF),
        logit_cap=raw.get("final_logit_softcapping"),
    )


def _of_first_gemma(raw: Raw, head_dim: int) -> _Factors:
    return _of_gemma({**raw, "query_pre_attn_scalar": head_dim}, head_dim)


def _of_latents(raw: Raw, head_dim: int) -> _Factors:
    return _Factors(scale_of_latents(raw))


def _of_minicpm3(raw: Raw, head_dim: int) -> _Factors:
    embedding = float(raw["scale_emb"])
    return _Factors(
        scale=scale_of_latents(raw),
        residual=float(raw["scale_depth"]) / raw["num_hidden_layers"] ** 0.5,
        embedding=embedding,
        rounds_embedding=bool(int(np.float32(embedding).view(np.uint32)) & 0xFFFF),
        logits=float(raw["dim_model_base"]) / raw["hidden_size"],
    )


def _of_granite(raw: Raw, head_dim: int) -> _Factors:
    return _Factors(
        scale=float(raw["attention_multiplier"]),
        residual=float(raw["residual_multiplier"]),
        embedding=float(raw["embedding_multiplier"]),
        logits=1 / float(raw["logits_scaling"]),
    )


_BEFORE = {"before": "input_layernorm", "between": "post_attention_layernorm"}
_BEHIND = {"attended": "post_attention_layernorm", "mixed": "post_feedforward_layernorm"}
_AROUND = {**_BEHIND, "before": "input_layernorm", "between": "pre_feedforward_layernorm"}
"""Norms of a layer, by the names of a plan."""


@dataclass(frozen=True, slots=True)
class _Family:
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
    """

    network: str
    qkv_bias: str | bool = False
    o_bias: str | bool = False
    mlp_bias: str | bool = False
    norms: Mapping[str, str] = field(default_factory=lambda: _BEFORE)
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
    kinds: Callable[[Raw], Sequence[str]] = _all_full
    ropes: Callable[[Raw, int], Ropes | None] = one_rope
    factors: Callable[[Raw, int], _Factors] = _plain
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

    def named(self, usual: str) -> str:
        """Return what the family calls a module."""
        return self.names.get(usual, usual)


_READ_BY_GRANITE = frozenset(
    ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
)

_OF_GEMMA: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "norms": _AROUND,
    "offset": 1.0,
    "in_floats": True,
    "act": ("hidden_activation", "gelu_pytorch_tanh"),
    "is_tied": True,
    "factors": _of_gemma,
}
_READ_BY_GEMMAS = frozenset(
    (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
        "query_pre_attn_scalar",
        "sliding_window_pattern",
        "use_bidirectional_attention",
    )
)
_SPARED_BY_GEMMAS = frozenset(("cache_implementation", "hidden_act", "_sliding_window_pattern"))

_OF_DELTA_NETS: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "offset": 1.0,
    "in_floats": True,
    "head_norms": True,
    "is_tied": False,
    "is_gated": True,
    "as_usual": as_usual_qwen,
}

_OF_LATENTS: dict[str, Any] = {
    "o_bias": "attention_bias",
    "is_tied": False,
    "factors": _of_latents,
    "as_usual": as_usual_latents,
    "reads": READ | OF_QWEN | READ_BY_LATENTS | READ_BY_ROUTED,
    "spares": SPARED_BY_LATENTS,
}

_OF_LFM2: dict[str, Any] = {
    "norms": {"before": "operator_norm", "between": "ffn_norm"},
    "head_norms": True,
    "kinds": OF_LFM2.kinds,
    "recurrents": OF_LFM2,
    "names": {
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        "model.norm": "model.embedding_norm",
    },
}

_BY_SIGMOIDS = Mixtures(
    has_dense=True,
    shared="shared_experts",
    has_share=False,
    is_sigmoid=True,
    correction="gate.e_score_correction_bias",
    rounds_shares=False,
    rounds_logits=False,
    scale="routed_scaling_factor",
)

_OF_SIGMOIDS: dict[str, Any] = {
    **_OF_LATENTS,
    "mixtures": _BY_SIGMOIDS,
    "latents": OF_DEEPSEEK_V3,
}

_OF_GLM_4_MOE: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "is_tied": False,
    "mixtures": _BY_SIGMOIDS,
    "as_usual": as_usual_routed,
    "reads": READ | OF_QWEN | READ_BY_ROUTED | {"partial_rotary_factor", "use_qk_norm"},
    "spares": SPARED_BY_LATENTS,
}

_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": _Family("MistralForCausalLM", kinds=_all_slide),
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", "attention_bias", "attention_bias", head_norms=True),
    "qwen3_vl_text": _Family(
        "Qwen3VLForConditionalGeneration",
        "attention_bias",
        "attention_bias",
        head_norms=True,
        as_usual=turned_as_texts,
    ),
    "ministral": _Family("MinistralForCausalLM", kinds=_as_said),
    "ministral3": _Family(
        "Ministral3ForCausalLM",
        is_tied=False,
        kinds=_all_slide,
        ropes=rope_of_ministral3,
        factors=_of_ministral3,
    ),
    "glm": _Family(
        "GlmForCausalLM",
        "attention_bias",
        is_tied=False,
        joins_mlp=True,
        turns_pairs=True,
        as_usual=as_usual_glm,
        reads=frozenset(("partial_rotary_factor",)),
    ),
    "glm4": _Family(
        "Glm4ForCausalLM",
        "attention_bias",
        norms={
            "before": "input_layernorm",
            "attended": "post_self_attn_layernorm",
            "between": "post_attention_layernorm",
            "mixed": "post_mlp_layernorm",
        },
        is_tied=False,
        joins_mlp=True,
        turns_pairs=True,
        as_usual=as_usual_glm,
        reads=frozenset(("partial_rotary_factor",)),
    ),
    "ernie4_5": _Family(
        "Ernie4_5ForCausalLM",
        "use_bias",
        "use_bias",
        "use_bias",
        is_tied=True,
        turns_pairs=True,
        reads=frozenset(("use_bias",)),
    ),
    "seed_oss": _Family(
        "SeedOssForCausalLM",
        "attention_bias",
        "attention_out_bias",
        "mlp_bias",
        is_tied=False,
        reads=frozenset(("attention_out_bias",)),
        spares=frozenset(("residual_dropout",)),
    ),
    "internlm3": _Family(
        "LlamaForCausalLM",
        "attention_bias",
        "attention_bias",
        "mlp_bias",
        is_tied=False,
        as_usual=as_usual_internlm3,
        reads=frozenset(("bias", "qkv_bias")),
    ),
    "exaone4": _Family(
        "Exaone4ForCausalLM",
        norms=_BEHIND,
        head_norms=True,
        kinds=_as_said,
        ropes=rope_but_where_all_is_seen,
        reads=frozenset(("sliding_window_pattern",)),
    ),
    "olmo3": _Family(
        "Olmo3ForCausalLM",
        "attention_bias",
        "attention_bias",
        norms=_BEHIND,
        in_floats=True,
        head_norms=True,
        norms_together=True,
        is_tied=False,
        kinds=_as_said,
        ropes=rope_by_kind(_as_said),
        as_usual=as_usual_olmo3,
    ),
    "gemma": _Family(
        "GemmaForCausalLM",
        **_OF_GEMMA
        | {
            "norms": _BEFORE,
            "factors": _of_first_gemma,
            "act": ("hidden_act", "gelu_pytorch_tanh"),
        },
        as_usual=as_usual_first_gemma,
        reads=frozenset(("use_bidirectional_attention",)),
        spares=frozenset(("hidden_activation",)),
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM",
        **_OF_GEMMA,
        kinds=_all_but(2),
        reads=_READ_BY_GEMMAS,
        spares=_SPARED_BY_GEMMAS,
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        **_OF_GEMMA,
        head_norms=True,
        kinds=_all_but(6),
        ropes=rope_by_kind(_all_but(6)),
        as_usual=as_usual_gemma3,
        reads=_READ_BY_GEMMAS | {"rope_local_base_freq"},
        spares=_SPARED_BY_GEMMAS,
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        "attention_bias",
        "attention_bias",
        "mlp_bias",
        ropes=rope_but_in("no_rope_layers"),
        is_tied=True,
        reads=frozenset(("no_rope_layers", "no_rope_layer_interval")),
    ),
    "phi3": _Family(
        "Phi3ForCausalLM",
        is_joined=True,
        is_tied=False,
        kinds=_all_slide,
        reads=frozenset(("partial_rotary_factor",)),
        spares=frozenset(
            ("auto_map", "embd_pdrop", "resid_pdrop", "original_max_position_embeddings")
        ),
    ),
    "granite": _Family(
        "GraniteForCausalLM",
        "attention_bias",
        "attention_bias",
        "mlp_bias",
        factors=_of_granite,
        reads=_READ_BY_GRANITE,
    ),
    "olmo2": _Family(
        "Olmo2ForCausalLM",
        "attention_bias",
        "attention_bias",
        norms=_BEHIND,
        in_floats=True,
        head_norms=True,
        norms_together=True,
    ),
    "mixtral": _Family(
        "MixtralForCausalLM",
        kinds=_all_slide,
        mixtures=Mixtures(is_normalised=True, rounds_shares=False),
        reads=READ,
    ),
    "qwen2_moe": _Family(
        "Qwen2MoeForCausalLM",
        qkv_bias=True,
        mixtures=Mixtures(has_dense=True, shared="shared_expert"),
        reads=READ | OF_QWEN,
        needs={"qkv_bias": True},
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        "attention_bias",
        "attention_bias",
        head_norms=True,
        mixtures=Mixtures(has_dense=True),
        reads=READ | OF_QWEN,
    ),
    "olmoe": _Family(
        "OlmoeForCausalLM",
        "attention_bias",
        "attention_bias",
        head_norms=True,
        norms_together=True,
        mixtures=Mixtures(),
        reads=READ,
        needs={"clip_qkv": None},
    ),
    "granitemoe": _Family(
        "GraniteMoeForCausalLM",
        "attention_bias",
        "attention_bias",
        factors=_of_granite,
        mixtures=Mixtures("router", "block_sparse_moe", is_normalised=True),
        reads=READ | _READ_BY_GRANITE,
    ),
    "granitemoehybrid": _Family(
        "GraniteMoeHybridForCausalLM",
        "attention_bias",
        "attention_bias",
        joins_mlp=True,
        factors=_of_granite,
        mixtures=Mixtures("router", "block_sparse_moe", is_normalised=True, is_beside=True),
        kinds=OF_GRANITE.kinds,
        ropes=rope_if_said,
        recurrents=OF_GRANITE,
        names={
            "mlp": "shared_mlp",
            "gate_up_proj": "input_linear",
            "down_proj": "output_linear",
        },
        as_usual=as_usual_granite,
        reads=READ | _READ_BY_GRANITE | READ_BY_GRANITE_HYBRID,
        spares=SPARED_BY_GRANITE_HYBRID,
        needs={"normalization_function": "rmsnorm", "hidden_act": "silu"},
    ),
    "gpt_oss": _Family(
        "GptOssForCausalLM",
        qkv_bias=True,
        o_bias=True,
        kinds=_all_but(2),
        ropes=said_rope,
        mixtures=Mixtures("router", is_normalised=True, is_crossed=True),
        in_floats=True,
        has_sinks=True,
        reads=READ | OF_GPT_OSS,
        spares=frozenset(("initial_context_length", "experts_per_token")),
        needs={"attention_bias": True},
    ),
    "deepseek_v2": _Family(
        "DeepseekV2ForCausalLM",
        mixtures=Mixtures(
            has_dense=True,
            shared="shared_experts",
            has_share=False,
            is_normalised=False,
            rounds_shares=False,
            rounds_logits=False,
            scale="routed_scaling_factor",
            n_best=1,
        ),
        **_OF_LATENTS,
        mlp_bias="mlp_bias",
        latents=OF_DEEPSEEK_V2,
    ),
    "deepseek_v3": _Family("DeepseekV3ForCausalLM", **_OF_SIGMOIDS),
    "glm4_moe": _Family("Glm4MoeForCausalLM", **_OF_GLM_4_MOE, head_norms="use_qk_norm"),
    "dots1": _Family(
        "Dots1ForCausalLM",
        **_OF_GLM_4_MOE,
        o_bias="attention_bias",
        head_norms=True,
        kinds=_as_said,
    ),
    "glm4_moe_lite": _Family("Glm4MoeLiteForCausalLM", **_OF_SIGMOIDS),
    "youtu": _Family(
        "YoutuForCausalLM",
        o_bias="attention_bias",
        is_tied=True,
        factors=_of_latents,
        latents=OF_DEEPSEEK_V3,
        as_usual=as_usual_latents,
        reads=READ_BY_LATENTS | {"rope_interleave"},
        spares=SPARED_BY_LATENTS | {"embedding_initializer_range"},
    ),
    "minicpm3": _Family(
        "MiniCPM3ForCausalLM",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        is_tied=True,
        factors=_of_minicpm3,
        latents=OF_MINICPM3,
        as_usual=as_usual_latents,
        reads=READ_BY_LATENTS | READ_BY_MINICPM3,
        spares=SPARED_BY_LATENTS,
    ),
    "lfm2_moe": _Family(
        "Lfm2MoeForCausalLM",
        **_OF_LFM2,
        mixtures=Mixtures(
            block="feed_forward",
            has_dense=True,
            is_sigmoid=True,
            correction="expert_bias",
            scale="routed_scaling_factor",
        ),
        as_usual=as_usual_lfm2_moe,
        reads=READ | OF_QWEN | READ_BY_LFM2 | READ_BY_LFM2_MOE,
        spares=SPARED_BY_LFM2,
        needs={"hidden_act": "silu"},
    ),
    "olmo_hybrid": _Family(
        "OlmoHybridForCausalLM",
        "attention_bias",
        "attention_bias",
        norms=_BEHIND,
        norms_of_states=_BEFORE,
        in_floats=True,
        head_norms=True,
        norms_together=True,
        is_tied=False,
        kinds=OF_OLMO_HYBRID.kinds,
        ropes=rope_or_none,
        recurrents=OF_OLMO_HYBRID,
        as_usual=as_usual_olmo_hybrid,
        reads=READ_BY_DELTA_NETS | {"linear_allow_neg_eigval"},
        spares=SPARED_BY_OLMO_HYBRID,
        needs={"hidden_act": "silu"},
    ),
    "lfm2": _Family(
        "Lfm2ForCausalLM",
        **_OF_LFM2,
        as_usual=as_usual_lfm2,
        reads=READ_BY_LFM2,
        spares=SPARED_BY_LFM2,
        needs={"block_use_swiglu": True, "use_pos_enc": True, "hidden_act": "silu"},
    ),
    "qwen3_next": _Family(
        "Qwen3NextForCausalLM",
        **_OF_DELTA_NETS,
        kinds=OF_QWEN3_NEXT.kinds,
        recurrents=OF_QWEN3_NEXT,
        mixtures=Mixtures(has_dense=True, shared="shared_expert"),
        reads=READ | OF_QWEN | READ_BY_DELTA_NETS,
        needs={"hidden_act": "silu"},
    ),
    "qwen3_5_text": _Family(
        "Qwen3_5ForCausalLM",
        **_OF_DELTA_NETS,
        kinds=OF_QWEN3_5.kinds,
        recurrents=OF_QWEN3_5,
        reads=READ_BY_DELTA_NETS,
        spares=SPARED_BY_QWEN3_5 | {"mlp_only_layers"},
        needs={"attn_output_gate": True, "hidden_act": "silu"},
    ),
    "qwen3_5_moe_text": _Family(
        "Qwen3_5MoeForCausalLM",
        **_OF_DELTA_NETS,
        kinds=OF_QWEN3_5.kinds,
        recurrents=OF_QWEN3_5,
        mixtures=Mixtures(is_normalised=True, shared="shared_expert"),
        reads=READ | OF_QWEN | READ_BY_DELTA_NETS,
        spares=SPARED_BY_QWEN3_5,
        needs={"attn_output_gate": True, "mlp_only_layers": [], "hidden_act": "silu"},
    ),
}

_HEADS = {
    "qwen3": None,
    "gemma": 256,
    "glm": 128,
    "glm4": 128,
    "ernie4_5": 128,
    "ministral3": 128,
    "internlm3": 128,
    "seed_oss": 128,
    "gemma2": 256,
    "gemma3_text": 256,
    "gpt_oss": 64,
    "qwen3_next": 256,
    "qwen3_5_text": 256,
    "qwen3_5_moe_text": 256,
}
"""Width of heads where a config does not say it and the class has one of its own; None: unknown."""

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
    family = _FAMILIES.get(kind)
    if family is None:
        return None
    raw = family.as_usual(raw)
    if not _is_plain(raw, family):
        return None
    of_config = tuple(raw[name] for name in _SIZES)
    hidden, _, n_layers, n_heads, n_kv_heads, n_vocab, n_positions = of_config
    head_dim = raw.get("head_dim") or _HEADS.get(kind, hidden // n_heads)
    kinds = family.kinds(raw)
    window = raw["sliding_window"] if _SLIDING in kinds else 1
    if not all(type(one) is int and one > 0 for one in (*of_config, head_dim, window)):
        return None
    ropes, factors = family.ropes(raw, head_dim), family.factors(raw, head_dim)
    if ropes is None or head_dim % 2 or n_heads % n_kv_heads:
        return None
    names, heads = _Names(family, raw), (n_heads, n_kv_heads, head_dim)
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
                n_kv_heads if latents is None else 1,
                head_dim,
                head_dim if latents is None else latents.latent_dim,
                factors.scale,
                window if slides == _SLIDING else None,
                softcap=factors.softcap,
                has_sinks=family.has_sinks,
                is_latent=latents is not None,
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
            names.layer(number, heads, factors, ropes[1][number], states.get(number))
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
    )


def _inner_size(raw: Raw, family: _Family) -> int:
    """Return the numbers per token inside of a layer's MLP, of all its experts together."""
    mixtures = family.mixtures
    if mixtures is not None and (mixtures.are_in(raw, 0) or not mixtures.is_beside):
        return mixtures.inner_size(raw)
    inner: int = raw["intermediate_size"]
    return 2 * inner if family.is_joined or family.joins_mlp else inner


def _is_plain(raw: Raw, family: _Family) -> bool:
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


def _is_tied(raw: Raw, family: _Family) -> bool | None:
    """Return true if the head is the embedding; None: nobody says so, or not."""
    found = raw.get("tie_word_embeddings", family.is_tied)
    return found if isinstance(found, bool) else None


class _Names:
    """Tensors of a model, by the names that transformers gives them."""

    def __init__(self, family: _Family, raw: Raw) -> None:
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
        factors: _Factors,
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
        self, at: str, heads: tuple[int, int, int], factors: _Factors, rope: int | None
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
