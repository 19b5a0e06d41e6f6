"""Experts that are given a row for each token from every expert, zeros where they were not chosen.

Some models (Llama 4) do not ask transformers' interface how to run their experts: they multiply the
rows of all of them at once, sorted by expert, so that a step reads every expert. A row of zeros
gives zeros. So the kernel runs the others alone. Such a module is known by its two parameters and
by what it makes of a few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvcellar.backends.torch.cache.memory import Arena
from kvcellar.backends.torch.cpu.modules.experts import HeldExperts, Rows
from kvcellar.backends.torch.cpu.modules.mixtures import (
    APART,
    ExpertRows,
    FoundExperts,
    find_gate,
    is_mixture,
    kernel_experts,
)
from kvcellar.models.weights import Matrix

_N_ROWS = 3
"""Rows of an expert by which a module is tried."""


class SortedExperts(nn.Module):
    """Experts that the kernel holds, in the place of a module that is given rows by expert."""

    def __init__(self, held: HeldExperts) -> None:
        """Run these experts."""
        super().__init__()
        self.held = held

    def forward(self, rows: Tensor) -> Tensor:
        """Run each expert on its rows: ``[n_experts * n_each, hidden]``, and so the result."""
        x = rows.view(self.held.n_experts, -1, rows.shape[-1])
        if self.held.skips_rows:  # and nothing has to wait for which rows these are
            numbers = torch.arange(self.held.n_experts, device=x.device)[:, None]
            each = torch.where(x.any(-1), numbers, -1).view(-1, 1)
            found: Tensor = self.held(rows, each, torch.ones(each.shape, device=x.device))
            return found
        experts, at = x.any(-1).nonzero(as_tuple=True)
        out = torch.zeros_like(x)
        if len(experts):
            chosen = experts[:, None]
            shares = torch.ones(chosen.shape, device=x.device)
            out[experts, at] = self.held(x[experts, at], chosen, shares)
        return out.view(rows.shape)


def sorted_matrices(module: nn.Module) -> Iterator[tuple[nn.Parameter, Matrix]]:
    """Yield the parameters of what may be such a module, and what they are to the kernel."""
    parts = _parts(module)
    for weight in parts or ():
        n_experts, n_in, n_out = weight.shape
        yield weight, Matrix(n_out, n_in, False, False, n_experts)


def hold_sorted_experts(model: nn.Module, weights: str, arena: Arena) -> int:
    """Have the kernel hold such modules of a model; return how many numbers it holds.

    Args:
        model: of transformers, on a CPU, in evaluation mode.
        weights: a name of ``WEIGHTS``.
        arena: where weights shall lie.
    """
    return replace_sorted(model, lambda found: kernel_experts(found, weights, arena))


def replace_sorted(model: nn.Module, make: Callable[[FoundExperts], HeldExperts | None]) -> int:
    """Put what holds and runs such experts into a model; return how many numbers are held.

    Args:
        model: of transformers, in evaluation mode.
        make: makes it of what was found; None: it cannot.
    """
    n_held = 0
    for name in [name for name, module in model.named_modules() if _parts(module)]:
        found = _found(model.get_submodule(name))
        held = None if found is None else make(found)
        if held is not None:
            model.set_submodule(name, SortedExperts(held))
            n_held += held.n_weights
    return n_held


def _parts(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter] | None:
    """Return ``[n_experts, hidden, 2 * inner]`` and ``[n_experts, inner, hidden]``, a module's all.

    None: it has other parameters.
    """
    own = list(module.parameters(recurse=False))
    is_all = len(own) == 2 == len(list(module.parameters()))
    if not is_all or is_mixture(module) or any(one.dim() != 3 for one in own):
        return None
    up, down = own
    n_experts, hidden, doubled = up.shape
    fits = down.shape == (n_experts, doubled // 2, hidden) and doubled % 2 == 0
    return (up, down) if fits else None


def find_sorted(module: nn.Module) -> tuple[ExpertRows, ExpertRows, Rows] | None:
    """Return the two products of such a module, of all experts, and what lies between them.

    None: it is no such module.
    """
    found = _parts(module)
    if found is None:
        return None
    up, down = (ExpertRows(part.detach(), True, None) for part in found)
    betweens = (each for each in _betweens(module) if _is_it(module, up, down, each))
    between = next(betweens, None)
    return None if between is None else (up, down, between)


def _found(module: Any) -> FoundExperts | None:
    """Return what such a module's experts are; None where it is not what was understood."""
    found = find_sorted(module)
    if found is None:
        return None
    up, down, between = found
    gate, joined = find_gate(between, False)
    return FoundExperts(up, down, None, None, gate, joined, None)


def _betweens(module: nn.Module) -> Iterator[Rows]:
    """Yield what a module may compute between its products, by one of its own functions."""
    for act in module.children():
        for gate in (0, 1):
            yield partial(_gated, act, gate)


def _gated(act: Rows, gate: int, x: Tensor) -> Tensor:
    """Multiply one half of the rows with what a function makes of the other, the gate."""
    halves = x.chunk(2, -1)
    return act(halves[gate]) * halves[1 - gate]


def _is_it(module: Any, up: ExpertRows, down: ExpertRows, between: Rows) -> bool:
    """Return true if a module makes of a few rows what its parts do; and of zeros, zeros."""
    n_experts, hidden = len(up), up[0].shape[1]
    some = sorted({0, n_experts // 2, n_experts - 1})
    x = torch.zeros(n_experts, _N_ROWS, hidden)
    x[some] = torch.randn(len(some), _N_ROWS, hidden, generator=torch.Generator().manual_seed(0))
    x = x.to(up[0])
    with torch.inference_mode():
        try:
            want = module(x.view(-1, hidden)).view(x.shape).float()
        except Exception:  # it takes something else
            return False
        got = torch.zeros_like(want)
        for expert in some:
            got[expert] = F.linear(between(F.linear(x[expert], up[expert])), down[expert]).float()
    return float((got - want).norm()) <= APART * float(want.norm())
