"""Parts of models that are written in another way in a graph, with the same result.

- Mixtures of experts: a graph cannot branch, so all experts run, and the router weighs them.
  transformers' own ways look at which experts were hit, or copy the weights of each token's
  experts, which no memory plan holds for a long prompt.
- GELU by tanh (Gemma): XNNPACK computes the other GELU in its place, which is off by 5e-4.
- RMS norms: XNNPACK takes no mean of a row, but it does take a linear layer of equal weights. So
  norms no longer part the layers around them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

RMS_NORMS = {
    f"{family}RMSNorm"
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "GptOss")
}
"""Classes of transformers; Gemma's add 1 to their weight."""


def rewrite(model: Any) -> None:
    """Put the modules below in place of those that they stand for, with the same weights."""
    found = [
        (module, name, made)
        for module in model.modules()
        for name, child in module.named_children()
        if (made := _replacement(child)) is not None
    ]
    for module, name, made in found:
        setattr(module, name, made)


def _replacement(module: Any) -> nn.Module | None:
    if isinstance(module, GELUTanh):
        return TanhGelu()
    if isinstance(module, GptOssExperts):
        return DenseExperts(module)
    return RmsNorm(module) if type(module).__name__ in RMS_NORMS else None


class TanhGelu(nn.Module):
    """GELU in its approximation by tanh, of plain operators."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to each number; the shape stays."""
        inside = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + torch.tanh(inside))


class RmsNorm(nn.Module):
    """The norm of a model of transformers, with its mean as a product."""

    def __init__(self, norm: Any) -> None:
        """Take the place of ``norm``, whose weights it shares."""
        super().__init__()
        self.weight = norm.weight
        self.is_gemma = type(norm).__name__.startswith("Gemma")
        self.eps: float = norm.eps if self.is_gemma else norm.variance_epsilon
        dim = norm.weight.shape[0]
        self.register_buffer("mean", torch.full((1, dim), 1 / dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in float32; shape and type stay."""
        rows = x.float()
        mean = nn.functional.linear(rows * rows, self.mean)  # type: ignore[arg-type]
        rows = rows * torch.rsqrt(mean + self.eps)
        if self.is_gemma:
            rows = rows * (1.0 + self.weight.float())
        else:
            rows = self.weight * rows.to(x.dtype)
        out: Tensor = rows.to(x.dtype)
        return out


class DenseExperts(nn.Module):
    """The experts of gpt-oss as linear layers, all of which run for every token."""

    def __init__(self, experts: Any) -> None:
        """Take the place of ``experts``, with gate and up apart, whose columns alternate there."""
        super().__init__()
        self.alpha, self.limit = experts.alpha, experts.limit
        inside, bias = experts.gate_up_proj.detach(), experts.gate_up_proj_bias.detach()
        self.gate = _linears(inside[..., ::2], bias[..., ::2])
        self.up = _linears(inside[..., 1::2], bias[..., 1::2])
        self.down = _linears(experts.down_proj.detach(), experts.down_proj_bias.detach())

    def forward(self, hidden_states: Tensor, router_indices: Tensor, weights: Tensor) -> Tensor:
        """Sum over all experts, 0 for those not chosen: ``[T, hidden] -> [T, hidden]``.

        Args:
            hidden_states: ``[T, hidden]``.
            router_indices: ``[T, k]``, the chosen experts.
            weights: ``[T, k]``, their weights.
        """
        chosen = router_indices.unsqueeze(-1) == torch.arange(len(self.gate))
        of_expert = (chosen.to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1)  # [T, experts]
        out = torch.zeros_like(hidden_states)
        for index, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            opened = gate(hidden_states).clamp(max=self.limit)
            opened = opened * torch.sigmoid(opened * self.alpha)
            added = up(hidden_states).clamp(min=-self.limit, max=self.limit) + 1
            out = out + down(added * opened) * of_expert[:, index : index + 1]
        return out


def _linears(weights: Tensor, biases: Tensor) -> nn.ModuleList:
    """Make one layer per expert of weights ``[experts, in, out]`` and biases ``[experts, out]``."""
    made = nn.ModuleList()
    for weight, bias in zip(weights, biases, strict=True):
        linear = nn.Linear(weight.shape[0], weight.shape[1], device="meta")
        linear.weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
        linear.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
        made.append(linear)
    return made
