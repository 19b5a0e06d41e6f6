"""Facts of a model where no torch is installed to run it: as its config's own class tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.configs import config_from_dict, positions_of, rope_of
from kvcellar.models.facts import LayerFacts, ModelFacts

_WINDOWS = {"full_attention": False, "sliding_attention": True}


def learn_facts(raw: Mapping[str, Any]) -> ModelFacts:
    """Read the facts of a model from its ``config.json``.

    Raises:
        ModelError: an unknown family, a field that is missing or impossible, or layers that are no
            full or sliding attention.
    """
    config = config_from_dict(raw)
    n_layers, n_heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or int(config.hidden_size) // n_heads
    window = getattr(config, "sliding_window", None)
    usual = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * n_layers
    strange = sorted(set(kinds) - set(_WINDOWS))
    if strange:
        raise ModelError(
            f"the {config.model_type} config has layers of {', '.join(strange)}, which are known "
            f"where torch is installed; install it with: pip install 'kvcellar[torch]'"
        )
    v_head_dim = int(getattr(config, "v_head_dim", None) or head_dim)
    layers = [
        LayerFacts(
            layer,
            n_heads,
            n_kv_heads=int(getattr(config, "num_key_value_heads", None) or n_heads),
            head_dim=int(head_dim),
            v_head_dim=v_head_dim,
            scale=float(getattr(config, "query_pre_attn_scalar", None) or head_dim) ** -0.5,
            window=window if _WINDOWS[kind] else None,
            softcap=getattr(config, "attn_logit_softcapping", None),
        )
        for layer, kind in enumerate(kinds)
    ]
    active = int(getattr(config, "num_experts_per_tok", None) or 1)
    return ModelFacts(
        family=str(config.model_type),
        layers=tuple(layers),
        others=(),
        n_layers=n_layers,
        hidden_size=int(config.hidden_size),
        inner_size=int(config.intermediate_size) * active,
        vocab_size=int(config.vocab_size),
        max_positions=positions_of(config),
        rope=rope_of(config),
    )
