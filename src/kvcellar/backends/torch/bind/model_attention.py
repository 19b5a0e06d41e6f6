"""The attention function that transformers calls in place of its own: one call of the op.

transformers makes no mask for an attention function that has no mask function of its name, so
neither a mask nor a cache of its own ever exists. Positions are what the forward's runner has said;
where there is none, as in a program that calls a model itself, what the model hands on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvcellar.backends.torch.bind.latent import bound_to
from kvcellar.backends.torch.bind.positions import current_positions
from kvcellar.op import eager_update_and_attend

NAME = "kvcellar"
"""The ``attn_implementation`` that this module registers when it is imported."""


_NUMBER = "_kvcellar_layer"
"""Name under which a module has the number that caches know its layer by; a copy has it too."""


def number_layers(network: torch.nn.Module, numbers: Mapping[int, int]) -> None:
    """Have the attention of a network name layers as caches do, who count those with attention.

    Args:
        network: of transformers.
        numbers: by the model's own number of a layer.
    """
    for module in network.modules():
        layer: Any = vars(module).get("layer_idx")
        if layer in numbers:
            vars(module)[_NUMBER] = numbers[layer]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store K and V of one layer in the active cache and attend over its history.

    The window and the cap on the logits that the model passes along are the cache's to apply: it
    has them from the same config.

    Args:
        module: the attention module; its ``layer_idx`` says whose history.
        query: ``[1, n_heads, T, head_dim]``, rotated.
        key: ``[1, n_kv_heads, T, head_dim]``, rotated.
        value: ``[1, n_kv_heads, T, v_head_dim]``. Where latents are bound they take the place of
            key and value, and lengths are those before and after.
        attention_mask: always None.
        scaling: factor on the logits; None: one over the root of ``head_dim``.
        position_ids: ``[1, T]``, where no runner has said them.
        s_aux: ``[n_heads]``, the sinks of a model that has them.
        kwargs: what other attention functions need.

    Returns:
        ``[1, T, n_heads, v_head_dim]`` and no weights.
    """
    assert attention_mask is None, "the cache is the mask"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    latent = bound_to(module)
    if latent is not None:
        query, key, value = latent.absorb(query, key)
    layer: Any = vars(module).get(_NUMBER, module.layer_idx)
    said = current_positions()
    positions = position_ids if said is None else said
    assert positions is not None, "a model that hands on no positions is run by a runner"
    if not torch.compiler.is_compiling():
        at = positions if positions.shape[1] == 1 else positions.view(-1)
        out = eager_update_and_attend(query, key, value, at, layer, scale, query.dtype, s_aux)
    elif s_aux is None:
        out = torch.ops.kvcache.update_and_attend(
            query, key, value, positions.view(-1), layer, scale, query.dtype
        )
    else:
        out = torch.ops.kvcache.update_and_attend_sinks(
            query, key, value, positions.view(-1), layer, scale, query.dtype, s_aux
        )
    if latent is not None:
        out = latent.expand(out)
    out = out.transpose(1, 2)
    return out.contiguous(), None


AttentionInterface.register(NAME, attention)
