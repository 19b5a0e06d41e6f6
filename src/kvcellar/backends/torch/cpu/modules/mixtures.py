"""Mixtures in a model of transformers: found by what they have, and tried before they are replaced.

A module of experts that asks transformers' interface for experts says of itself how its parameters
lie, and has a gate of its own. Which gate that is shows in what it makes of a few numbers; whether
all of it was understood shows in what the module makes of a few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvcellar.backends.torch.cache.memory import Arena
from kvcellar.backends.torch.cpu.modules.blocks import StoredExperts
from kvcellar.backends.torch.cpu.modules.experts import (
    MXFP4,
    STORED,
    ExpertWeights,
    HeldExperts,
    KernelExperts,
    Rows,
    ShippedWeights,
    StoredRows,
)
from kvcellar.backends.torch.cpu.modules.linears import codes_well
from kvcellar.kernel import experts as native
from kvcellar.models.weights import FILE, GROUP, Matrix, bits_of, can_pack, is_packed

NAME = "kvcellar"
"""Name under which transformers knows the kernel's experts."""

HELD = "held_by_kernel"
"""Name of what a module of experts has in place of its parameters."""

FACTS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
"""Attributes that transformers' experts interface sets on every module of experts."""

_FAR = 1e6
"""More than any limit of a gate."""

APART = 0.03
"""Most that results may differ by rounding in another order, as a share of the result's norm."""


def mixtures(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules of experts in a model that ask transformers' interface how to run."""
    return (module for module in model.modules() if is_mixture(module))


def is_mixture(module: nn.Module) -> bool:
    """Return true if a module has experts and asks transformers' interface how to run them."""
    return all(name in vars(module) for name in FACTS)


def n_numbers(model: nn.Module) -> int:
    """Return how many numbers a model's parameters are; a byte of MXFP4 is two of them."""
    n = sum(parameter.numel() for parameter in model.parameters())
    for module in mixtures(model):
        for name, parameter in module.named_parameters(recurse=False):
            n += parameter.numel() * name.endswith("_blocks")
            n -= parameter.numel() * name.endswith("_scales")
    return n


def matrices_of_experts(module: Any) -> Iterator[tuple[nn.Parameter, Matrix]]:
    """Yield a mixture's parameters of three dimensions, and what they are to the kernel."""
    for weight in module.parameters(recurse=False):
        if weight.dim() == 3:
            n_experts, *shape = weight.shape
            n_out, n_in = reversed(shape) if module.is_transposed else shape
            yield weight, Matrix(n_out, n_in, False, False, n_experts)


def hold_experts(
    model: Any, weights: str, arena: Arena, stored: Mapping[int, StoredExperts] | None = None
) -> int:
    """Have the kernel hold and run the experts of a model's mixtures; others stay as they are.

    Args:
        model: of transformers, on a CPU, in evaluation mode.
        weights: a name of ``WEIGHTS``; experts that a checkpoint ships in MXFP4 keep that.
        arena: where weights shall lie.
        stored: parameters that stay as a file has them, by their ids. Those of a mixture that was
            not understood become plain numbers.

    Returns:
        How many numbers the kernel holds.
    """
    return replace_experts(model, lambda found: kernel_experts(found, weights, arena), stored or {})


def replace_experts(
    model: Any,
    make: Callable[[FoundExperts], HeldExperts | None],
    stored: Mapping[int, StoredExperts],
) -> int:
    """Put what holds and runs their experts into a model's mixtures; others stay as they are.

    Args:
        model: of transformers, in evaluation mode.
        make: makes it of what was found; None: it cannot.
        stored: as ``hold_experts`` has them.

    Returns:
        How many numbers are held.
    """
    n_held = 0
    for module in list(mixtures(model)):
        found = find_experts(module, stored)
        held = None if found is None else make(found)
        if held is None:
            _make_plain(module, stored)
            continue
        for name in list(module._parameters):
            delattr(module, name)
        module.add_module(HELD, held)
        _interface().register(NAME, run_experts)
        config: Any = module.config
        config._experts_implementation = NAME
        n_held += held.n_weights
    return n_held


def _make_plain(module: Any, stored: Mapping[int, StoredExperts]) -> None:
    """Give a module numbers in the place of those that stayed as a file has them."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if id(weight) in stored:
            rows = StoredRows(stored[id(weight)], None)
            whole = torch.empty(rows.shape, dtype=weight.dtype)
            for expert in range(len(rows)):
                whole[expert] = rows[expert]
            whole = whole.transpose(1, 2).contiguous() if module.is_transposed else whole
            module.register_parameter(name, nn.Parameter(whole, requires_grad=False))


def reads_shipped(kind: type[Any]) -> type[Any]:
    """Return a class of transformers that reads experts as a checkpoint in MXFP4 has them.

    Its mixtures have bytes ``gate_up_proj_blocks`` and ``gate_up_proj_scales`` in the place of
    ``gate_up_proj``, and so for ``down_proj``, until :func:`hold_experts` places them. It has the
    name and the module of the class that it is made of.
    """

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        for module in mixtures(self):
            for name, matrix in [
                (name, matrix)
                for weight, matrix in matrices_of_experts(module)
                for name, own in module.named_parameters(recurse=False)
                if own is weight
            ]:
                _put_bytes(module, name, matrix)
            vars(module)["_is_hf_initialized"] = True  # transformers would fill what is not there

    own = {"__init__": build, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), own)


def _put_bytes(module: nn.Module, name: str, matrix: Matrix) -> None:
    shape = matrix.n_experts, matrix.n_out, matrix.n_in // GROUP
    device = module._parameters[name].device  # type: ignore[union-attr]
    delattr(module, name)
    for ending, size in (("blocks", (*shape, GROUP // 2)), ("scales", shape)):
        held = torch.empty(size, dtype=torch.uint8, device=device)
        module.register_parameter(f"{name}_{ending}", nn.Parameter(held, requires_grad=False))


def run_experts(module: Any, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Run a module's experts, as transformers' interface asks; one that is not held by torch."""
    held = module._modules.get(HELD)
    if held is None:
        by_torch: Callable[..., Tensor] = _interface()["grouped_mm"]
        return by_torch(module, x, chosen, shares)
    out: Tensor = held(x, chosen, shares)
    return out


def _interface() -> Any:
    from transformers.integrations import moe  # it imports much of transformers

    return moe.ALL_EXPERTS_FUNCTIONS


# What a module has ------------------------------------------------------------------------------


class ExpertRows(Sequence[Tensor]):
    """Parameters of all experts as each one's outputs; nothing is copied before it is asked for."""

    def __init__(self, weight: Tensor, is_transposed: bool, order: Tensor | None) -> None:
        """Look at parameters ``[n_experts, n_out, n_in]``, or with the last two the other way."""
        self._weight, self._is_transposed, self._order = weight, is_transposed, order

    def __len__(self) -> int:
        """Return how many experts there are."""
        return len(self._weight)

    def __getitem__(self, expert: Any) -> Any:
        """Return an expert's weights ``[n_out, n_in]``."""
        weight = self._weight[expert]
        weight = weight.T if self._is_transposed else weight
        return weight if self._order is None else weight[self._order]


def _weights_of(
    module: Any, name: str, order: Tensor | None, stored: Mapping[int, StoredExperts]
) -> Weights:
    """Return one of a module's two products, its outputs in an order where one is given."""
    held = module._parameters
    if id(held.get(name)) in stored:
        return StoredRows(stored[id(held[name])], order)
    if f"{name}_blocks" in held:
        return ShippedWeights(held[f"{name}_blocks"], held[f"{name}_scales"], order)
    return ExpertRows(held[name].detach(), bool(module.is_transposed), order)


Weights: TypeAlias = ExpertRows | ShippedWeights | StoredRows


class FoundExperts(NamedTuple):
    """Experts of a module as they were found.

    Attributes:
        up: weights of the first product; of gate and up joined, where there is a gate.
        down: of the second.
        up_bias: ``[n_experts, n_out]`` or None.
        down_bias: the same of the second.
        gate_numbers: alpha, cubic, shift and limit of the kernel's gate that computes what is
            between them; None: it has no such gate.
        between: the same by torch, ``[n, up's outputs] -> [n, down's inputs]``.
        after: what becomes of each expert's result before it is weighed, if anything.
    """

    up: Weights
    down: Weights
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate_numbers: Gate | None
    between: Rows
    after: Rows | None


def bits_of_experts(weights: Weights, name: str) -> float | None:
    """Return how many bits a weight gets by a name of ``WEIGHTS``; None: the kernel has no such."""
    if isinstance(weights, StoredRows):
        return STORED
    if isinstance(weights, ShippedWeights):
        return MXFP4
    one: Tensor = weights[0]
    if name == FILE:
        return None
    if is_packed(name):
        return bits_of(name) if can_pack(one.shape[1]) else None
    if one.dtype != torch.bfloat16:
        return None
    return 12 if codes_well(one) else 16


def _between(module: Any) -> Rows:
    """Return what a module computes between its products, by torch."""
    by_module: Rows = module._apply_gate if module.has_gate else module.act_fn
    return by_module


Gate: TypeAlias = tuple[float, float, float, float]
"""Alpha, cubic, shift and limit of one of the kernel's gates."""

SILU: Gate = (1.0, 0.0, 0.0, 0.0)
"""The silu of a gate, times what it is joined with."""


def find_gate(between: Rows, is_interleaved: bool) -> tuple[Gate | None, Rows]:
    """Find the kernel's gate that computes what a module does between its products.

    Args:
        between: that, ``[n, 2 * inner] -> [n, inner]``.
        is_interleaved: true if gate and up come by turns, and not one behind the other.

    Returns:
        The gate, None where none of the kernel's computes this; and the same by torch, of gate and
        up one behind the other where there is one.
    """
    joined = (lambda x: between(_by_turns(x))) if is_interleaved else between
    numbers = _gate_numbers(joined)
    return (None, between) if numbers is None else (_exact(numbers), joined)


def _exact(numbers: Gate) -> Gate:
    """Return a gate's numbers, those of silu where they are that but for rounding."""
    return SILU if max(abs(a - b) for a, b in zip(numbers, SILU, strict=True)) < 1e-6 else numbers


def _gate_numbers(between: Rows) -> Gate | None:
    """Find alpha, cubic, shift and limit of a gate; None where it is none of the kernel's."""

    def at(gate: float, up: float) -> float:
        return float(between(torch.tensor([[gate, up]], dtype=torch.float64)))

    try:
        half = at(1.0, 1.0) - at(1.0, 0.0)  # sigmoid of alpha + cubic
        shift = at(1.0, 0.0) / half
        limit = at(1.0, _FAR) / half - shift
        whole = at(0.5, 1.0) - at(0.5, 0.0)
        near, far = _logit(half), _logit(whole / 0.5) / 0.5
    except (ValueError, ZeroDivisionError, RuntimeError):
        return None
    cubic = (near - far) / (1 - 0.25)
    found = tuple(
        0.0 if abs(value) < 1e-5 else value
        for value in (near - cubic, cubic, shift, 0.0 if limit > 0.99 * _FAR else limit)
    )
    alpha, cubic, shift, limit = found
    if cubic < 0 or alpha <= 0 or limit < 0:
        return None
    some = torch.linspace(-12, 12, 49, dtype=torch.float64)
    rows = torch.stack([some, some.flip(0) * 1.3], 1)
    is_same = torch.allclose(between(rows), _gated(rows, *found), rtol=1e-3, atol=1e-3)
    return (alpha, cubic, shift, limit) if is_same else None


def _gated(rows: Tensor, alpha: float, cubic: float, shift: float, limit: float) -> Tensor:
    """Compute the kernel's gate by torch, of gate and up one behind the other."""
    gate, up = rows.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + shift) * gate * torch.sigmoid(gate * (alpha + cubic * gate * gate))


def _logit(x: float) -> float:
    return math.log(x / (1 - x))


def _by_turns(x: Tensor) -> Tensor:
    """Put gate and up, which lie one behind the other, by turns."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def find_experts(module: Any, stored: Mapping[int, StoredExperts]) -> FoundExperts | None:
    """Return what a module's experts are; None where it computes something else.

    Args:
        module: of experts.
        stored: parameters that stay as a file has them, by their ids.
    """
    gate, between = None, _between(module)
    is_interleaved = module.has_gate and not module.is_concatenated
    order = None
    if module.has_gate:
        gate, between = find_gate(between, is_interleaved)
        if gate is not None and is_interleaved:
            n_up = _weights_of(module, "gate_up_proj", None, stored)[0].shape[0]
            order = torch.cat([torch.arange(0, n_up, 2), torch.arange(1, n_up, 2)])
    up = "gate_up_proj" if module.has_gate else "up_proj"
    parts = [_weights_of(module, *one, stored) for one in ((up, order), ("down_proj", None))]
    biases = [module._parameters.get(f"{part}_bias") for part in (up, "down_proj")]
    if order is not None and biases[0] is not None:
        biases[0] = biases[0][:, order]
    after: Rows | None = module.post_expert_norm if module.has_post_expert_norm else None
    if not _is_understood(module, parts, biases, between, after, stored):
        return None
    found = [None if bias is None else bias.detach() for bias in biases]
    return FoundExperts(parts[0], parts[1], found[0], found[1], gate, between, after)


def kernel_experts(found: FoundExperts, name: str, arena: Arena) -> KernelExperts | None:
    """Make what the kernel runs; None: it has no such weights."""
    parts, biases = (found.up, found.down), (found.up_bias, found.down_bias)
    bits = [bits_of_experts(part, name) for part in parts]
    if None in bits:
        return None
    up, down = (
        ExpertWeights(part, bias, n, arena)
        for part, bias, n in zip(parts, biases, bits, strict=True)
        if n is not None
    )
    gate = None if found.gate_numbers is None else native.Gate(*found.gate_numbers)
    return KernelExperts(up, down, gate, found.between, found.after)


def _is_understood(
    module: Any,
    parts: Sequence[Weights],
    biases: Sequence[Tensor | None],
    between: Rows,
    after: Rows | None,
    stored: Mapping[int, StoredExperts],
) -> bool:
    """Return true if a module makes of a few tokens what its parts, as they were found, do."""
    n_experts = int(module.num_experts)
    floats = (each.dtype for each in module.parameters() if each.is_floating_point())
    dtype, device = next(floats, torch.float32), next(module.parameters()).device
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, parts[0][0].shape[1], generator=generator).to(device, dtype)
    some = sorted({0, n_experts // 2, n_experts - 1})
    slots = range(min(2, len(some)))
    chosen = torch.tensor([[some[(i + j) % len(some)] for j in slots] for i in range(3)])
    shares = torch.rand(chosen.shape, generator=generator).to(device, dtype)
    with torch.inference_mode():
        want = _eager(module, x, chosen.to(device), shares, stored).float()
        found = torch.zeros_like(want)
        for token, slot in torch.cartesian_prod(torch.arange(3), torch.arange(chosen.shape[1])):
            expert = int(chosen[token, slot])
            row = _linear(x[token][None], parts[0], biases[0], expert)
            row = _linear(between(row), parts[1], biases[1], expert)
            row = row if after is None else after(row)
            found[token] += row[0].float() * shares[token, slot].float()
    return float((found - want).norm()) <= APART * float(want.norm())


def _linear(x: Tensor, weights: Weights, biases: Tensor | None, expert: int) -> Tensor:
    bias = None if biases is None else biases[expert].to(x.dtype)
    return F.linear(x, weights[expert].to(x.dtype), bias)


def _eager(
    module: Any,
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    stored: Mapping[int, StoredExperts],
) -> Tensor:
    """Run a module's own forward; shipped and stored weights are numbers for it meanwhile."""
    own: Callable[..., Tensor] = type(module).forward.__wrapped__
    held = module._parameters
    names = [
        name
        for name in ("gate_up_proj", "up_proj", "down_proj")
        if f"{name}_blocks" in held or id(held.get(name)) in stored
    ]
    for name in names:
        weights = _weights_of(module, name, None, stored)
        vars(module)[name] = _Numbers(weights, bool(module.is_transposed), x.dtype)
    try:
        return own(module, x, chosen, shares)
    finally:
        for name in names:
            del vars(module)[name]


class _Numbers:
    """Shipped or stored weights as a module would index its parameters."""

    def __init__(self, weights: Any, is_transposed: bool, dtype: torch.dtype) -> None:
        """Look at weights of all experts."""
        self._weights, self._is_transposed, self._dtype = weights, is_transposed, dtype

    def __getitem__(self, expert: Any) -> Tensor:
        """Return an expert's, as the module has it."""
        weight: Tensor = self._weights[int(expert)].to(self._dtype)
        return weight.T if self._is_transposed else weight
