"""Narrow models: a config's own attention, and all that is beside it small.

Some networks read numbers on their way, which torch's meta device has not, and are too large for
memory. What is narrow keeps the heads, their lengths, the layers and who sees whom; between layers
it has other, small sizes. Two of different widths that are alike in their layers say that these do
not depend on the width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from kvcellar.backends.torch.learn.shrink.checkpoints import raw_of, with_text
from kvcellar.models.files.configs import whole_config

WIDTHS = (64, 96)
"""Hidden sizes of narrow models."""

_INNER, _VOCAB = 32, 288

_EXPERTS = re.compile(r"^(n_routed_experts|num_experts|num_local_experts|moe_num_experts)$")
_HIDDEN = re.compile(r"^(hidden_size|d_model|n_embd)$")
_SMALL = tuple(
    (re.compile(pattern), most)
    for pattern, most in (
        (r"^vocab_size$", _VOCAB),
        (r"intermediate_size|^ffn_dim$|^ffn_hidden_size$|^n_inner$|^d_ff$", _INNER),
    )
)


def narrow_raw(raw: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return the ``config.json`` of a narrow model.

    Args:
        raw: the model's.
        width: its hidden size.

    Raises:
        ModelError: the config cannot be read.
        Exception: whatever its class does not like.
    """
    whole = whole_config(raw)
    text = whole.get_text_config(decoder=True)
    fields = text.to_dict()
    hidden, n_heads = int(text.hidden_size), int(text.num_attention_heads)
    n_experts = max(2, int(getattr(text, "num_experts_per_tok", None) or 1))
    narrow = {key: _narrowed(key, value, width, n_experts) for key, value in fields.items()}
    if getattr(text, "head_dim", None) is None:
        narrow["head_dim"] = hidden // n_heads
    made = type(text)(**narrow)
    names = {key: raw[key] for key in ("architectures",) if raw.get(key)}
    return {**raw_of(with_text(whole, made)), **names}


def _narrowed(key: str, value: Any, width: int, n_experts: int) -> Any:
    """Return a narrow model's value of one field."""
    if type(value) is not int or value <= 0:
        return value
    if _HIDDEN.match(key):
        return width
    if _EXPERTS.match(key):
        return min(value, n_experts)
    return min([value, *(most for pattern, most in _SMALL if pattern.search(key))])


def is_narrow_of(narrow: nn.Module, network: nn.Module) -> bool:
    """Return true if attention modules differ from a network's by what is small beside them alone.

    Args:
        narrow: of a narrow config.
        network: of the config that it was made of; on the meta device.
    """
    small, large = narrow.config, network.config
    names = [name for name in vars(small) if _HIDDEN.match(name) or _EXPERTS.match(name)]
    pairs = {(getattr(large, name), getattr(small, name)) for name in names}
    theirs = dict(network.named_modules())
    for name, module in narrow.named_modules():
        if not hasattr(module, "layer_idx"):
            continue
        shapes = {key: p.shape for key, p in theirs[name].named_parameters()}
        for key, parameter in module.named_parameters():
            sizes = zip(shapes[key], parameter.shape, strict=True)
            if any(a != b and (a, b) not in pairs for a, b in sizes):
                return False
    return True
