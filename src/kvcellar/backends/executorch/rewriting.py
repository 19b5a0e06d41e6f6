"""Parts of models that are written in another way in a graph, with the same result.

- Mixtures of experts: a graph cannot branch, so all experts run, and the router weighs them.
  transformers' own ways look at which experts were hit, or copy the weights of each token's
  experts, which no memory plan holds for a long prompt.
- GELU by tanh (Gemma): XNNPACK computes the other GELU in its place, which is off by 5e-4.
- RMS norms: XNNPACK takes no mean of a row, but it does take a linear layer of equal weights. So
  norms no longer part the layers around them.

Experts are found by the interface that transformers has for them, norms by running them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh

from kvcellar.backends.torch.cpu.modules.parts import read_eps
from kvcellar.backends.torch.cpu.modules.sorted_experts import find_sorted


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
    if isinstance(module, GELUTanh) or getattr(module, "approximate", None) == "tanh":
        return TanhGelu()
    if vars(module).keys() >= _EXPERTS and not module.has_post_expert_norm:
        return DenseExperts(module)
    found = find_sorted(module)
    return _norm_like(module) if found is None else DenseSortedExperts(*found)


_EXPERTS = {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed"}
"""Attributes that transformers' interface for experts gives a module."""


def _norm_like(module: Any) -> nn.Module | None:
    """Return an RMS norm that does what a module does; None: it does something else."""
    weights = list(module.parameters())
    if len(weights) != 1 or weights[0].dim() != 1 or list(module.children()):
        return None
    dim, dtype = len(weights[0]), weights[0].dtype
    rows = torch.randn(1, 3, dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    try:
        with torch.no_grad():
            want, eps = module(rows), read_eps(module.float(), dim)
    except Exception:  # it takes something else, so it is something else
        return None
    finally:
        module.to(dtype)
    if not isinstance(want, Tensor) or want.shape != rows.shape or want.dtype != dtype:
        return None
    made = [
        RmsNorm(weights[0], eps, added=added, casts_last=casts_last)
        for added in (0.0, 1.0)
        for casts_last in (False, True)
    ]
    with torch.no_grad():
        off = [float((one(rows) - want).abs().max()) for one in made]
    best = min(range(len(made)), key=off.__getitem__)
    is_same = off[best] <= torch.finfo(dtype).eps * 8 * float(want.abs().max())
    return made[best] if is_same else None


class TanhGelu(nn.Module):
    """GELU in its approximation by tanh, of plain operators."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to each number; the shape stays."""
        inside = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + torch.tanh(inside))


class RmsNorm(nn.Module):
    """The norm of a model of transformers, with its mean as a product."""

    def __init__(self, weight: nn.Parameter, eps: float, *, added: float, casts_last: bool) -> None:
        """Take the place of a norm.

        Args:
            weight: ``[dim]``, which is shared.
            eps: what is added to the mean of squares.
            added: what is added to the weight: 1 where a model stores it so.
            casts_last: the weight is multiplied in float32, not in the type of the rows.
        """
        super().__init__()
        self.weight, self.eps, self.added, self.casts_last = weight, eps, added, casts_last
        dim = len(weight)
        self.register_buffer("mean", torch.full((1, dim), 1 / dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in float32; shape and type stay."""
        rows = x.float()
        mean = nn.functional.linear(rows * rows, self.mean)  # type: ignore[arg-type]
        rows = rows * torch.rsqrt(mean + self.eps)
        weight = self.weight + self.added if self.added else self.weight
        rows = rows * weight.float() if self.casts_last else weight * rows.to(x.dtype)
        out: Tensor = rows.to(x.dtype)
        return out


class DenseExperts(nn.Module):
    """Experts as linear layers, all of which run for every token."""

    def __init__(self, experts: Any) -> None:
        """Take the place of a module of transformers' interface for experts."""
        super().__init__()
        inside = "gate_up_proj" if experts.has_gate else "up_proj"
        self.inside = _linears(experts, inside)
        self.down = _linears(experts, "down_proj")
        self._activate = experts._apply_gate if experts.has_gate else experts.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum over all experts, 0 for those not chosen: ``[T, hidden] -> [T, hidden]``.

        Args:
            hidden_states: ``[T, hidden]``.
            top_k_index: ``[T, k]``, the chosen experts.
            top_k_weights: ``[T, k]``, their weights.
        """
        chosen = top_k_index.unsqueeze(-1) == torch.arange(len(self.down))
        of_expert = (chosen.to(top_k_weights.dtype) * top_k_weights.unsqueeze(-1)).sum(dim=1)
        out = torch.zeros_like(hidden_states)
        for index, (inside, down) in enumerate(zip(self.inside, self.down, strict=True)):
            found = down(self._activate(inside(hidden_states)))
            out = out + found * of_expert[:, index : index + 1]
        return out


class DenseSortedExperts(nn.Module):
    """Experts as linear layers, each of which runs for its rows of those that lie by expert."""

    def __init__(self, up: Sequence[Tensor], down: Sequence[Tensor], between: Any) -> None:
        """Take weights ``[n_out, n_in]`` of each expert, and what lies between the products."""
        super().__init__()
        self.inside, self.down = (
            nn.ModuleList(_linear(weight.contiguous()) for weight in each) for each in (up, down)
        )
        self._activate = between

    def forward(self, rows: Tensor) -> Tensor:
        """Compute ``[n_experts * n_each, hidden] -> [n_experts * n_each, hidden]``."""
        of_experts = rows.view(len(self.down), -1, rows.shape[-1]).unbind(0)
        layers = zip(of_experts, self.inside, self.down, strict=True)
        return torch.cat([down(self._activate(inside(x))) for x, inside, down in layers])


def _linears(experts: Any, name: str) -> nn.ModuleList:
    """Make one layer per expert of its weights under a name."""
    weights = getattr(experts, name).detach()
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else None
    made = nn.ModuleList()
    for index, weight in enumerate(weights):
        rows = weight.T.contiguous() if experts.is_transposed else weight.contiguous()
        made.append(_linear(rows, None if biases is None else biases[index].contiguous()))
    return made


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Make a linear layer of weights ``[n_out, n_in]``."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
