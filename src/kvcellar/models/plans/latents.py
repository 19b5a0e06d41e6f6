"""Attention over latents of a plan by a ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.models.latents import Latents
from kvcellar.models.plans.plan import HALVES, PAIRS, PARTED
from kvcellar.models.plans.ropes import yarn_scale

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention over latents of a family.

    Attributes:
        turned: how rotary numbers lie, of a config; see
            :class:`~kvcellar.models.plans.plan.LatentPlan`.
        eps: of the norms within.
    """

    turned: Callable[[Raw], str]
    eps: float = 1e-6

    def shape(self, raw: Raw) -> Latents:
        """Return how latents would be expanded.

        Raises:
            ValueError: sizes that are none.
        """
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        n_heads, *sizes = (raw[name] for name in ("num_attention_heads", *names))
        q_size = raw.get("q_lora_rank")
        if not all(type(one) is int and one > 0 for one in (n_heads, *sizes)) or sizes[1] % 2:
            raise ValueError("no rule for latents of such sizes")
        if q_size is not None and (type(q_size) is not int or q_size <= 0):
            raise ValueError("no rule for short queries of such a size")
        return Latents("kv_b_proj", True, True, False, n_heads, *sizes)

    def widest(self, raw: Raw) -> int:
        """Return the most numbers of a side of a layer's matrices before its MLP."""
        shape, n_heads = self.shape(raw), raw["num_attention_heads"]
        each = shape.plain_dim + max(shape.rotary_dim, shape.v_dim)
        widths: list[int] = [raw["hidden_size"], n_heads * each]
        return max(*widths, shape.latent_dim + shape.rotary_dim)


def scale_of_latents(raw: Raw) -> float:
    """Return the factor on logits, which grows with the context that YaRN stretches."""
    scale = float((raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]) ** -0.5)
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        times = rope.get("mscale_all_dim", 0)
        if times:
            scale = scale * yarn_scale(rope["factor"], times) * yarn_scale(rope["factor"], times)
    return scale


def as_usual_latents(raw: Raw) -> Raw:
    """Return a config of a family with latents with the fields that others have.

    Raises:
        ValueError: heads share what is expanded; or as of ``as_usual_routed``.
    """
    made = dict(raw)
    made["head_dim"] = made["qk_rope_head_dim"]
    if made.get("num_key_value_heads") not in (None, made["num_attention_heads"]):
        raise ValueError("no rule for heads that share what is expanded")
    made["num_key_value_heads"] = made["num_attention_heads"]
    if made.get("v_head_dim") is None:
        made["v_head_dim"] = made["hidden_size"] // made["num_attention_heads"]
    if made["model_type"] in ("minicpm3", "youtu"):  # which have no experts
        return made
    return as_usual_routed(made)


def as_usual_routed(raw: Raw) -> Raw:
    """Return a config of a family of DeepSeek's mixtures with the fields that others have.

    Raises:
        ValueError: experts are chosen in another way.
    """
    made = dict(raw)
    n_layers = made["num_hidden_layers"]
    if made["model_type"] == "deepseek_v2":
        method = made.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError("no rule for such a way to choose experts")
        if method == "greedy":
            made["n_group"] = made["topk_group"] = 1
    if made["model_type"] == "glm4_moe":
        made.setdefault("partial_rotary_factor", 0.5)
    if not (made["n_group"] and made["topk_group"]):
        raise ValueError("nobody says which groups of experts there are")
    if made["model_type"] == "glm4_moe_lite":  # which says it of each layer
        kinds = made.get("mlp_layer_types") or ["dense"]
        dense = [n for n, kind in enumerate(kinds) if kind == "dense"]
    else:
        dense = list(range(made["first_k_dense_replace"]))
    made |= {
        "num_experts": made["n_routed_experts"],
        "mlp_only_layers": [n for n in dense if n < n_layers],
        "shared_experts_intermediate_size": made["moe_intermediate_size"]
        * made["n_shared_experts"],
    }
    return made


def _parted(raw: Raw) -> str:
    return PARTED if raw.get("rope_interleave", True) else HALVES


OF_DEEPSEEK_V2 = Latent(lambda raw: PAIRS)
OF_DEEPSEEK_V3 = Latent(_parted)
OF_MINICPM3 = Latent(lambda raw: HALVES)

READ_BY_LATENTS = frozenset(
    (
        "kv_lora_rank",
        "partial_rotary_factor",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )
)
READ_BY_ROUTED = frozenset(
    (
        "first_k_dense_replace",
        "mlp_layer_types",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "rope_interleave",
        "routed_scaling_factor",
        "shared_experts_intermediate_size",
        "topk_group",
        "topk_method",
    )
)
READ_BY_MINICPM3 = frozenset(("dim_model_base", "scale_depth", "scale_emb"))
SPARED_BY_LATENTS = frozenset(
    (
        "auto_map",
        "aux_loss_alpha",
        "ep_size",
        "moe_layer_freq",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "qk_head_dim",
        "scoring_func",
        "seq_aux",
    )
)
"""Fields that transformers does not read, or of layers that guess tokens."""
