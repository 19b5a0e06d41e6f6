"""Parts of models that are written in another way in a graph, with the same result.

- Mixtures of experts: a graph cannot branch, so all experts run, and the router weighs them.
  transformers' own ways look at which experts were hit, or copy the weights of each token's
  experts, which no memory plan holds for a long prompt.
- GELU by tanh (Gemma): XNNPACK computes the other GELU in its place, which is off by 5e-4.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.activations import GELUTanh
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "kvcellar_dense"


def dense_experts(
    module: Any, hidden_states: Tensor, router_indices: Tensor, weights: Tensor
) -> Tensor:
    """``[T, hidden] -> [T, hidden]``: the sum over all experts, 0 for those not chosen.

    Args:
        module: an experts module of gpt-oss: transposed weights with biases.
        hidden_states: ``[T, hidden]``.
        router_indices: ``[T, k]``, the chosen experts.
        weights: ``[T, k]``, their weights.
    """
    n_experts = module.gate_up_proj.shape[0]
    chosen = router_indices.unsqueeze(-1) == torch.arange(n_experts)
    of_expert = (chosen.to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1)  # [T, n_experts]
    out = torch.zeros_like(hidden_states)
    for expert in range(n_experts):
        inside = hidden_states @ module.gate_up_proj[expert] + module.gate_up_proj_bias[expert]
        gated = (
            module._apply_gate(inside) @ module.down_proj[expert] + module.down_proj_bias[expert]
        )
        out = out + gated * of_expert[:, expert : expert + 1]
    return out


class TanhGelu(torch.nn.Module):
    """GELU in its approximation by tanh, of plain operators."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        inside = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + torch.tanh(inside))


@contextlib.contextmanager
def rewritten(model: Any) -> Iterator[None]:
    """While it lasts the model computes these parts in the ways above."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, dense_experts)
    before = getattr(model.config, "_experts_implementation", None)
    has_experts = any(hasattr(module, "gate_up_proj") for module in model.modules())
    gelus = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, GELUTanh)
    ]
    if has_experts:
        model.config._experts_implementation = NAME
    for module, name, _ in gelus:
        setattr(module, name, TanhGelu())
    try:
        yield
    finally:
        for module, name, child in gelus:
            setattr(module, name, child)
        if has_experts:
            model.config._experts_implementation = before
