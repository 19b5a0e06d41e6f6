"""Names and layouts of tensors in GGUF files, by the names of transformers' parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import gguf
from torch import Tensor

from kvcellar.models.gguf.family import Family

Turn = Callable[[Tensor], Tensor]
Views = Callable[[Tensor], list[list[Tensor]]]

_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")

_STACKED = re.compile(r"^model\.(altup_(?:unembed_)?projections)\.(\d+)\.weight$")
_STACKS = {
    "altup_projections": "altup_proj.weight",
    "altup_unembed_projections": "altup_unembd_proj.weight",
}
"""Lists of matrices that files keep as one tensor."""

_ENDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "experts.gate_up_proj": (
        ("ffn_gate_up_exps.weight",),
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    ),
    "experts.gate_up_proj_bias": (("ffn_gate_exps.bias", "ffn_up_exps.bias"),),
    "experts.up_proj": (("ffn_up_exps.weight",),),
    "experts.down_proj": (("ffn_down_exps.weight",),),
    "experts.down_proj_bias": (("ffn_down_exps.bias",),),
    "router.weight": (("ffn_gate_inp.weight",),),
    "router.scale": (("ffn_gate_inp.scale",),),
    "router.per_expert_scale": (("ffn_down_exps.scale",),),
    "e_score_correction_bias": (("exp_probs_b.bias",),),
    "expert_bias": (("exp_probs_b.bias",),),
    "shared_mlp.input_linear.weight": (
        ("ffn_gate.weight", "ffn_up.weight"),
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    ),
    "shared_mlp.output_linear.weight": (("ffn_down.weight",), ("ffn_down_shexp.weight",)),
    "self_attn.kv_b_proj.weight": (
        ("attn_kv_b.weight",),
        ("attn_k_b.weight", "attn_v_b.weight"),
    ),
    "self_attn.sinks": (("attn_sinks.weight",),),
    "linear_attn.in_proj_qkvz.weight": (
        ("ssm_in.weight",),
        ("attn_qkv.weight", "attn_gate.weight"),
    ),
    "A_log": (("ssm_a",),),
    "D": (("ssm_d",),),
    "dt_bias": (("ssm_dt.bias",),),
    "layer_scalar": (("layer_output_scale.weight",),),
    "altup.correct_output_scale": (("altup_correct_scale.weight",),),
}
"""Ends of names of a layer's parameters that files have in another form than the format's table
knows -> what they are made of; where there are several ways, the last is the usual one."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Form in which a parameter is stored.

    Attributes:
        sources: tensors of the file that it is made of.
        turn: undoes how the only one is stored; None: nothing is to be done.
        is_of_rows: true if ``turn`` changes the order of rows alone.
        is_part: true if the only one holds other parameters as well.
        views: makes of a parameter, for each source, the views that its rows fill one after the
            other; None: they fill it one behind the other.
        is_crossed: true if ``views`` are experts' whose outputs come last.
    """

    sources: tuple[str, ...]
    turn: Turn | None = None
    is_of_rows: bool = True
    is_part: bool = False
    views: Views | None = None
    is_crossed: bool = False


def stored_as(
    there: Collection[str], architecture: str, family: Family, name: str, config: Any
) -> Stored:
    """Return how a parameter is stored.

    Args:
        there: names of the file's tensors.
        architecture: by the format's names.
        family: of it.
        name: of transformers.
        config: of the network.
    """
    stacked = _STACKED.match(name)
    if stacked is not None:
        at = int(stacked[2])
        return Stored((_STACKS[stacked[1]],), lambda some: some[at], is_of_rows=False, is_part=True)
    layer = _LAYER.match(name)
    end = "" if layer is None else _end(layer[2])
    if layer is None or not end:
        return _by_table(architecture, family, name, config)
    ways = [tuple(f"blk.{layer[1]}.{one}" for one in way) for way in _ENDS[end]]
    sources = next((way for way in ways if all(one in there for one in way)), ways[-1])
    if end == "A_log":
        return Stored(sources, lambda some: some.neg().log(), is_of_rows=False)
    if family.is_crossed and end.startswith("experts."):
        views = partial(_crossed, n_sources=len(sources))
        return Stored(sources, views=views, is_crossed=True)
    if len(sources) == 2 and end.startswith("self_attn.kv_b"):
        return Stored(sources, views=partial(_latent, config=config))
    if len(sources) == 2 and end.startswith("linear_attn"):
        return Stored(sources, views=partial(_by_key_heads, config=config))
    return Stored(sources)


def _end(leaf: str) -> str:
    """Return the end of a layer's parameter that files have in another form; '': none."""
    parts = leaf.split(".")
    return next((end for n in (3, 2, 1) if (end := ".".join(parts[-n:])) in _ENDS), "")


def _by_table(architecture: str, family: Family, name: str, config: Any) -> Stored:
    """Return how a parameter is stored that the format's own table knows."""
    base, _, suffix = name.rpartition(".")
    names = _names(architecture, config.num_hidden_layers)
    found = names.get_name(base) or names.get_name(base.replace("model.", "backbone.", 1))
    source = f"{found}.{suffix}" if found else names.get_name(name) or name
    leaf = source.split(".", 2)[-1]
    if family.norm_offset and source.endswith("norm.weight") and leaf != "ssm_norm.weight":
        return Stored((source,), lambda some: some - family.norm_offset, is_of_rows=False)
    if family.is_turned and leaf.startswith(("attn_q.", "attn_k.")):
        is_q = leaf.startswith("attn_q.")
        n_heads = config.num_attention_heads if is_q else config.num_key_value_heads
        return Stored((source,), partial(halves, n_heads=n_heads))
    return Stored((source,))


@lru_cache(maxsize=4)
def _names(architecture: str, n_layers: int) -> Any:
    """Return the format's own table from other programs' names to its."""
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(known[architecture], n_layers)


def halves(stored: Tensor, *, n_heads: int) -> Tensor:
    """Return rows of heads whose halves turn together, of rows that turn in pairs."""
    by_pairs = stored.view(n_heads, -1, 2, *stored.shape[1:])
    return by_pairs.transpose(1, 2).reshape(stored.shape)


# Parameters of several tensors -------------------------------------------------------------------


def _crossed(out: Tensor, *, n_sources: int) -> list[list[Tensor]]:
    """Return views of experts' numbers whose outputs come last: gate and up in turns, or down.

    Args:
        out: ``[n_experts, n_in, n_out]``, or biases ``[n_experts, n_out]``.
        n_sources: two for gate and up.
    """
    rows = out.transpose(-1, -2) if out.dim() > 2 else out
    return [[rows[:, at::n_sources]] for at in range(n_sources)]


def _latent(out: Tensor, *, config: Any) -> list[list[Tensor]]:
    """Return views of what makes keys and values of latents; keys' is stored turned over."""
    heads = out.view(config.num_attention_heads, -1, out.shape[-1])
    n_key = config.qk_nope_head_dim
    return [[heads[:, :n_key].transpose(1, 2)], [heads[:, n_key:]]]


def _by_key_heads(out: Tensor, *, config: Any) -> list[list[Tensor]]:
    """Return views of q, k, v and z, which lie side by side for each key head."""
    heads = out.view(config.linear_num_key_heads, -1, out.shape[-1])
    n_key = config.linear_key_head_dim
    n_value = (heads.shape[1] - 2 * n_key) // 2
    q, k, v, z = heads.split([n_key, n_key, n_value, n_value], dim=1)
    return [[q, k, v], [z]]
