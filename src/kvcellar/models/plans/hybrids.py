"""Recurrent layers of a plan by a ``config.json`` alone, and how configs of hybrids are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcellar.models.plans.recurrent import CONVOLUTION, DELTA, SCAN, RecurrentPlan
from kvcellar.models.plans.ropes import Ropes, one_rope

Raw = Mapping[str, Any]

_FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class Recurrents:
    """Recurrent layers of a family.

    Attributes:
        kind: what ``layer_types`` calls them.
        module: within a layer.
        inputs: names of the linear layers that are given the layer's rows.
        out: name of the linear layer behind it.
        plan: makes the plan of one, from a config and the module's name.
        bias: field that says if linear layers have biases, or whether they have.
    """

    kind: str
    module: str
    inputs: tuple[str, ...]
    out: str
    plan: Callable[[Raw, str], RecurrentPlan]
    bias: str | bool = False

    def kinds(self, raw: Raw) -> list[str]:
        """Return the kinds of a config's layers.

        Raises:
            ValueError: there are others, or not as many as layers.
        """
        found = list(raw["layer_types"])
        if len(found) != raw["num_hidden_layers"] or {*found} != {self.kind, _FULL}:
            raise ValueError("layers of kinds that no rule knows")
        return found

    def widest(self, plan: RecurrentPlan) -> int:
        """Return the numbers of a token in the widest of a module's matrices."""
        if len(self.inputs) < 3:
            return plan.n_in if len(self.inputs) == 1 else plan.conv_shape[0] + plan.inner
        n_keys = 0 if len(self.inputs) < 5 else plan.heads[1] * plan.heads[2]
        return max(n_keys or plan.conv_shape[0], plan.inner)


_WRAPPERS: dict[str, tuple[tuple[str, ...], str, bool | None]] = {
    "gemma3": (("gemma3_text",), "Gemma3ForConditionalGeneration", True),
    "gemma4": (("gemma4_text",), "Gemma4ForConditionalGeneration", True),
    "gemma4_unified": (
        ("gemma4_unified_text",),
        "Gemma4UnifiedForConditionalGeneration",
        True,
    ),
    "mistral3": (("mistral", "ministral3"), "Mistral3ForConditionalGeneration", None),
    "qwen3_vl": (("qwen3_vl_text",), "Qwen3VLForConditionalGeneration", False),
    "qwen3_5": (("qwen3_5_text",), "Qwen3_5ForConditionalGeneration", False),
    "qwen3_5_moe": (("qwen3_5_moe_text",), "Qwen3_5MoeForConditionalGeneration", False),
}
"""Multimodal families whose text is known by rules -> families that the text may be of, their own
network, and if the head is the embedding where nothing is said; None: it has to be said."""


def text_of(raw: Raw) -> Raw:
    """Return the config of a multimodal model's text, where rules know it; others as they are."""
    text, found = raw.get("text_config"), _WRAPPERS.get(raw.get("model_type", ""))
    if found is None or not isinstance(text, Mapping) or raw.get("quantization_config"):
        return raw
    kinds, network, is_usually_tied = found
    kind, is_tied = text.get("model_type", kinds[0]), raw.get("tie_word_embeddings")
    is_tied = is_usually_tied if is_tied is None else is_tied
    if kind not in kinds or raw.get("architectures") not in (None, [network]):
        return raw
    if text.get("tie_word_embeddings", is_tied) != is_tied:
        return raw
    return {**text, "model_type": kind, "tie_word_embeddings": is_tied}


def as_usual_lfm2(raw: Raw) -> Raw:
    """Return a config of LFM2 with the fields that others have."""
    made = dict(raw)
    inner = made.pop("block_ff_dim", made.get("intermediate_size"))
    if made.get("block_auto_adjust_ff_dim", True):
        inner = int(made.get("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        multiple = made.get("block_multiple_of", 256)
        inner = multiple * -(-inner // multiple)
    if made.get("layer_types") is None:
        at = made["full_attn_idxs"]
        n_layers = made["num_hidden_layers"]
        made["layer_types"] = [_FULL if n in at else "conv" for n in range(n_layers)]
    is_tied = made.get("tie_word_embeddings", True)
    made["tie_word_embeddings"] = made.pop("tie_embedding", is_tied)  # as its class has it
    return made | {"intermediate_size": inner, "rms_norm_eps": made["norm_eps"]}


def as_usual_lfm2_moe(raw: Raw) -> Raw:
    """Return a config of LFM2's mixtures with the fields that others have.

    Raises:
        ValueError: experts are chosen by their scores alone.
    """
    if raw.get("use_expert_bias") is not True:
        raise ValueError("no rule for experts without a bias")
    made = as_usual_lfm2({**raw, "block_auto_adjust_ff_dim": False})
    return {**made, "mlp_only_layers": list(range(made["num_dense_layers"]))}


def as_usual_olmo_hybrid(raw: Raw) -> Raw:
    """Return a config of OLMo Hybrid with the fields that others have."""
    made = dict(raw)
    made["head_dim"] = made["hidden_size"] // made["num_attention_heads"]
    if made.get("num_key_value_heads") is None:
        made["num_key_value_heads"] = made["num_attention_heads"]
    return made


def rope_or_none(raw: Raw, head_dim: int) -> Ropes | None:
    """Return the rotary positions of all layers, of which there are none without a base."""
    if not (raw.get("rope_parameters") or {}).get("rope_theta"):
        return (), (None,) * raw["num_hidden_layers"]
    return one_rope(raw, head_dim)


def as_usual_qwen(raw: Raw) -> Raw:
    """Return a config of Qwen's hybrids with what its class takes where nothing is said."""
    made = dict(raw)
    if made.get("layer_types") is None:
        every, n_layers = made.get("full_attention_interval", 4), made["num_hidden_layers"]
        kinds = [bool((at + 1) % every) for at in range(n_layers)]
        made["layer_types"] = ["linear_attention" if one else _FULL for one in kinds]
    made = {**turned_as_texts(made)}
    if made.get("model_type") == "qwen3_5_moe_text":  # all layers have experts
        made.setdefault("intermediate_size", made["moe_intermediate_size"])
    return {"partial_rotary_factor": 0.25, **made}


_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Fields by which tokens of images are turned: those of texts have one position in each section."""


def turned_as_texts(raw: Raw) -> Raw:
    """Return a config without the fields by which tokens of images alone are turned."""
    made = dict(raw)
    for name in ("rope_parameters", "rope_scaling"):
        if made.get(name):
            made[name] = {key: one for key, one in made[name].items() if key not in _OF_IMAGES}
    return made


_GRANITES_KINDS = {"mamba": "linear_attention", "attention": _FULL}
"""Kinds of layers in files of Granite 4 -> in configs of transformers."""


def as_usual_granite(raw: Raw) -> Raw:
    """Return a config of Granite 4 with the fields that others have; those of experts are apart.

    Raises:
        ValueError: steps are bounded.
    """
    made = dict(raw)
    least, most = made.get("time_step_limit") or (0.0, _INFINITE)
    if least or most not in (float("inf"), _INFINITE):
        raise ValueError("no rule for steps that are bounded")
    kinds = made.get("layer_types") or []
    made["layer_types"] = [_GRANITES_KINDS.get(one, one) for one in kinds]
    made |= {"moe_intermediate_size": made["intermediate_size"]}
    return made | {"intermediate_size": made["shared_intermediate_size"]}


_INFINITE = {"__float__": "Infinity"}
"""Infinity as transformers writes it into a ``config.json``: JSON has no such number."""


def rope_if_said(raw: Raw, head_dim: int) -> Ropes | None:
    """Return the rotary positions of all layers, of which there are none where nothing says so."""
    if raw.get("position_embedding_type") == "rope":
        return one_rope(raw, head_dim)
    return (), (None,) * raw["num_hidden_layers"]


def _mamba(raw: Raw, within: str) -> RecurrentPlan:
    n_heads, n_groups = raw["mamba_n_heads"], raw["mamba_n_groups"]
    inner, dim = int(raw["mamba_expand"] * raw["hidden_size"]), raw["mamba_d_state"]
    if inner % n_heads:
        raise ValueError("no rule for such heads")
    if raw.get("mamba_d_head", "auto") not in ("auto", inner // n_heads):
        raise ValueError("no rule for heads of such a size")
    n_channels = inner + 2 * n_groups * dim
    return RecurrentPlan(
        kind=SCAN,
        at=(inner, 0, inner + n_channels),
        conv=f"{within}.conv1d.weight",
        conv_shape=(n_channels, raw["mamba_d_conv"]),
        conv_bias=f"{within}.conv1d.bias" if raw.get("mamba_conv_bias", True) else None,
        has_silu=True,
        heads=(n_heads, n_groups, inner // n_heads, dim),
        rates=f"{within}.A_log",
        shifts=f"{within}.dt_bias",
        skips=f"{within}.D",
        norm=f"{within}.norm.weight",
        eps=float(raw["rms_norm_eps"]),
        group=inner // n_groups,
        gating=(True, False, True),
    )


def _short_convolution(raw: Raw, within: str) -> RecurrentPlan:
    hidden = raw["hidden_size"]
    return RecurrentPlan(
        kind=CONVOLUTION,
        at=(2 * hidden, 0, hidden),
        conv=f"{within}.conv.weight",
        conv_shape=(hidden, raw["conv_L_cache"]),
        conv_bias=f"{within}.conv.bias" if raw.get("conv_bias") else None,
    )


def _olmo_delta_net(raw: Raw, within: str) -> RecurrentPlan:
    made = _delta_net(by_key_heads=False)({**raw, "rms_norm_eps": 1e-5}, within)
    scale = 2.0 if raw["linear_allow_neg_eigval"] else 1.0
    return replace(made, norm=f"{within}.o_norm.weight", beta_scale=scale)


def _delta_net(*, by_key_heads: bool) -> Callable[[Raw, str], RecurrentPlan]:
    """Make a rule of Qwen's gated delta nets."""

    def plan(raw: Raw, within: str) -> RecurrentPlan:
        heads = (
            raw["linear_num_value_heads"],
            raw["linear_num_key_heads"],
            raw["linear_key_head_dim"],
            raw["linear_value_head_dim"],
        )
        n_heads, n_keys, k_dim, v_dim = heads
        inner, n_channels = n_heads * v_dim, 2 * n_keys * k_dim + n_heads * v_dim
        decays, betas = n_channels + inner, n_channels + inner + n_heads
        if by_key_heads:
            decays, betas = betas, decays
        return RecurrentPlan(
            kind=DELTA,
            at=(0, n_channels, decays, betas),
            conv=f"{within}.conv1d.weight",
            conv_shape=(n_channels, raw["linear_conv_kernel_dim"]),
            has_silu=True,
            by_key_heads=by_key_heads,
            heads=heads,
            rates=f"{within}.A_log",
            shifts=f"{within}.dt_bias",
            norm=f"{within}.norm.weight",
            eps=float(raw["rms_norm_eps"]),
            group=v_dim,
            gating=(False, False, True),
        )

    return plan


OF_LFM2 = Recurrents("conv", "conv", ("in_proj",), "out_proj", _short_convolution, bias="conv_bias")

OF_QWEN3_NEXT = Recurrents(
    "linear_attention",
    "linear_attn",
    ("in_proj_qkvz", "in_proj_ba"),
    "out_proj",
    _delta_net(by_key_heads=True),
)

OF_QWEN3_5 = Recurrents(
    "linear_attention",
    "linear_attn",
    ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
    "out_proj",
    _delta_net(by_key_heads=False),
)

OF_OLMO_HYBRID = Recurrents(
    "linear_attention",
    "linear_attn",
    ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj"),
    "o_proj",
    _olmo_delta_net,
)

OF_GRANITE = Recurrents(
    "linear_attention", "mamba", ("in_proj",), "out_proj", _mamba, bias="mamba_proj_bias"
)

READ_BY_GRANITE_HYBRID = frozenset(
    (
        "mamba_conv_bias",
        "mamba_d_conv",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_expand",
        "mamba_n_groups",
        "mamba_n_heads",
        "mamba_proj_bias",
        "moe_intermediate_size",
        "position_embedding_type",
        "shared_intermediate_size",
        "time_step_limit",
    )
)
SPARED_BY_GRANITE_HYBRID = frozenset(("init_method", "mamba_chunk_size"))

READ_BY_LFM2 = frozenset(
    (
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        "conv_L_cache",
        "conv_bias",
        "full_attn_idxs",
        "norm_eps",
    )
)
SPARED_BY_LFM2 = frozenset(
    (
        "block_dim",
        "block_mlp_init_scale",
        "block_norm_eps",
        "block_out_init_scale",
        "block_use_xavier_init",
        "conv_dim",
        "conv_dim_out",
        "conv_use_xavier_init",
        "num_heads",
        "theta",
    )
)
"""Fields of LFM2's own files that transformers reads as little."""

READ_BY_LFM2_MOE = frozenset(
    ("moe_intermediate_size", "num_dense_layers", "routed_scaling_factor", "use_expert_bias")
)
SPARED_BY_OLMO_HYBRID = frozenset(
    f"linear_{name}" for name in ("a_log_max", "a_log_min", "dt_init_floor", "dt_max", "dt_min")
)
"""Fields of numbers that a model begins to be trained with."""

READ_BY_DELTA_NETS = frozenset(
    (
        "full_attention_interval",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "partial_rotary_factor",
    )
)
SPARED_BY_QWEN3_5 = frozenset(
    ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
)
"""Fields of types that every runtime chooses for itself, and of layers that guess tokens."""
