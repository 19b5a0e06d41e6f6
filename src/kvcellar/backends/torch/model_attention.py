"""The attention function that transformers calls in place of its own: one call of the op.

transformers makes no mask for an attention function that has no mask function of its name, so
neither a mask nor a cache of its own ever exists; positions reach the op as ``position_ids``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvcellar.backends.torch.latent import bound_to
from kvcellar.op import eager_update_and_attend

NAME = "kvcellar"
"""The ``attn_implementation`` that this module registers when it is imported."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    position_ids: Tensor,
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
        scaling: factor on the logits.
        position_ids: ``[1, T]``.
        s_aux: ``[n_heads]``, the sinks of a model that has them.
        kwargs: what other attention functions need.

    Returns:
        ``[1, T, n_heads, v_head_dim]`` and no weights.
    """
    assert attention_mask is None, "the cache is the mask"
    latent = bound_to(module)
    if latent is not None:
        query, key, value = latent.absorb(query, key)
    layer: Any = module.layer_idx
    if not torch.compiler.is_compiling():
        position = position_ids if position_ids.shape[1] == 1 else position_ids.view(-1)
        out = eager_update_and_attend(
            query, key, value, position, layer, scaling, query.dtype, s_aux
        )
    elif s_aux is None:
        out = torch.ops.kvcache.update_and_attend(
            query, key, value, position_ids.view(-1), layer, scaling, query.dtype
        )
    else:
        out = torch.ops.kvcache.update_and_attend_sinks(
            query, key, value, position_ids.view(-1), layer, scaling, query.dtype, s_aux
        )
    if latent is not None:
        out = latent.expand(out)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, attention)
