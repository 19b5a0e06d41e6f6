"""Modules whose weights the kernel can hold: linear layers and embeddings.

They are known by what they compute: a layer of any class that multiplies by its matrix, whichever
way round, and an embedding of any class that returns its rows, or those times a number. A layer
whose weights the module around it reads, instead of calling it, is not held. Nothing here reads a
weight, so that a network without any (on the meta device) is looked at the same way.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from kvcellar.backends.torch.cpu.modules.mixtures import matrices_of_experts, mixtures
from kvcellar.backends.torch.cpu.modules.sorted_experts import sorted_matrices
from kvcellar.models.weights import BLOCK, Matrix

_SIZES = (0.01, 1.0, 1000.0)
"""Sizes of the inputs on which a module is tried: a product of matrices scales with all of them."""


def linear_of(module: nn.Module) -> nn.Linear | None:
    """Return a module as a linear layer of torch; None for one that is something else.

    The weights are the module's own, turned where it keeps them turned.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return module
    own = list(module.parameters(recurse=False))
    if any(module.children()) or isinstance(module, nn.Embedding) or not 1 <= len(own) <= 2:
        return None
    if own[0].dim() != 2 or (len(own) == 2 and own[1].dim() != 1):
        return None
    weight = own[0]
    bias = own[1] if len(own) == 2 else None
    is_turned = _multiplies(module, weight, bias)
    if is_turned is None:
        return None
    n_out, n_in = weight.shape[::-1] if is_turned else weight.shape
    linear = nn.Linear(n_in, n_out, bias=False, device="meta")
    turned = weight.detach().T if is_turned else weight.detach()
    linear.weight = nn.Parameter(turned, requires_grad=False)
    if bias is not None:
        linear.bias = bias
    return linear.eval()


_known: dict[tuple[Any, ...], bool | None] = {}


def _multiplies(module: nn.Module, weight: Tensor, bias: Tensor | None) -> bool | None:
    """Return true if a module multiplies by its weight turned, false by it as it is, else None."""
    plain = tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, (int, float))))
    key = type(module), weight.shape, bias is not None, plain
    if key not in _known:
        _known[key] = _run_turned(module, weight, bias)
    return _known[key]


def _run_turned(module: nn.Module, weight: Tensor, bias: Tensor | None) -> bool | None:
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(weight.shape, generator=generator)
    memo: dict[int, Any] = {id(weight): nn.Parameter(matrix)}
    if bias is not None:
        added = torch.randn(bias.shape, generator=generator)
        memo[id(bias)] = nn.Parameter(added)
    try:
        there = copy.deepcopy(module, memo)
    except Exception:  # it holds what cannot be copied: no plain layer
        return None
    for is_turned, turned in ((False, matrix), (True, matrix.T)):
        x = torch.randn(1, 3, turned.shape[1], generator=generator)
        x *= torch.tensor(_SIZES)[:, None]
        try:
            with torch.inference_mode():
                got = there(x)
                want = F.linear(x, turned, added if bias is not None else None)
        except Exception:  # other shapes, other arguments
            continue
        is_one = isinstance(got, Tensor) and got.shape == want.shape
        if is_one and torch.allclose(got, want, rtol=1e-4, atol=1e-4):
            return is_turned
    return None


@dataclass(frozen=True)
class EmbeddingRows:
    """An embedding that returns its rows; times ``scale`` in their type, where there is one."""

    scale: Tensor | None


def rows_of(module: nn.Module) -> EmbeddingRows | None:
    """Return how a module is an embedding; None for one that is something else."""
    if not isinstance(module, nn.Embedding):
        return None
    if type(module).forward is nn.Embedding.forward:
        return EmbeddingRows(None)
    ids = torch.tensor([[2, 0, 1]])
    shape, dtype = (ids.numel(), module.embedding_dim), module.weight.dtype
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    memo: dict[int, Any] = {id(module.weight): nn.Parameter(weight, requires_grad=False)}
    scales = [torch.tensor(value) for value in vars(module).values() if isinstance(value, float)]
    for buffer in module.buffers():
        is_empty = buffer.device.type == "meta"
        memo[id(buffer)] = torch.full(buffer.shape, 1.5, dtype=buffer.dtype) if is_empty else buffer
        scales += [memo[id(buffer)]] * (buffer.numel() == 1)
    try:
        there = copy.deepcopy(module, memo)
        there.padding_idx = None  # it may be another row
        with torch.inference_mode():
            got = there(ids)
    except Exception:  # other arguments
        return None
    want = F.embedding(ids, weight)
    if torch.equal(got, want):
        return EmbeddingRows(None)
    found = (scale for scale in scales if torch.equal(got, want * scale.to(dtype)))
    return next((EmbeddingRows(scale) for scale in found), None)


def held_linears(network: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a network whose weights may be held otherwise, by name.

    Not those that choose among experts, which must stay exact, nor those whose weights others read,
    nor those of fewer outputs than lie together in memory.

    Args:
        network: in main memory, or on the meta device.
    """
    plain = {id(module) for find in (_choosers, _read_by_others) for module in find(network)}
    found = {}
    for name, module in network.named_modules():
        if id(module) in plain:
            continue
        linear = linear_of(module)
        if linear is not None and linear.out_features >= BLOCK:
            found[name] = linear
    return found


def held_embeddings(network: Any) -> dict[str, EmbeddingRows]:
    """Return the embeddings of tokens whose rows may be held otherwise, by name."""
    n_vocab = network.get_input_embeddings().weight.shape[0]
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding) and 2 * module.num_embeddings > n_vocab:
            rows = rows_of(module)
            if rows is not None:
                found[name] = rows
    return found


def matrices_of(network: Any) -> dict[str, Matrix]:
    """Return the parameters of a network that the kernel may hold, by name; a tied one once."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    modules = dict(network.named_modules())
    found = {}
    for name in held_embeddings(network):
        n_rows, dim = modules[name].weight.shape
        found[names[id(modules[name].weight)]] = Matrix(n_rows, dim, True, True)
    for name, linear in held_linears(network).items():
        is_head = modules[name] is network.get_output_embeddings()
        key = names[id(next(modules[name].parameters(recurse=False)))]
        found[key] = Matrix(linear.out_features, linear.in_features, is_head, False)
    of_experts = [one for module in mixtures(network) for one in matrices_of_experts(module)]
    of_experts += [one for module in network.modules() for one in sorted_matrices(module)]
    for weight, matrix in of_experts:
        found[names[id(weight)]] = matrix
    return found


def _choosers(network: nn.Module) -> Iterator[nn.Module]:
    """Yield linear layers with an output for each of the experts beside them."""
    modules = dict(network.named_modules())
    for name, module in modules.items():
        n_experts = {p.shape[0] for p in module.parameters(recurse=False) if p.dim() > 2}
        if isinstance(module, _ConvNd):
            continue
        if isinstance(module, nn.ModuleList) and _are_alike(module):
            n_experts = {len(module)}
        if not n_experts:
            continue
        beside = modules[name.rpartition(".")[0]]
        inside = {id(one) for one in module.modules()}
        for one in beside.modules():
            is_own = id(one) in inside and one is not module
            if not is_own and isinstance(one, nn.Linear) and one.out_features in n_experts:
                yield one


def _read_by_others(network: nn.Module) -> Iterator[nn.Module]:
    """Yield modules whose weights the code of one around them reads."""
    for module in network.modules():
        kind: Any = type(module)
        for name in _read_weights(kind):
            try:
                yield module.get_submodule(name)
            except AttributeError:  # it has none with these settings
                continue


@functools.cache
def _read_weights(kind: type[nn.Module]) -> frozenset[str]:
    """Return the modules of a module whose weights its own code reads, by their names in it."""
    found = _Read()
    for base in kind.__mro__:
        for own in vars(base).values() if not base.__module__.startswith("torch.") else ():
            function = inspect.unwrap(own) if inspect.isfunction(own) else None
            if function is not None and "weight" in function.__code__.co_names:
                try:
                    source = textwrap.dedent(inspect.getsource(function))
                except OSError:  # it was not read from a file
                    continue
                found.visit(ast.parse(source))
    return frozenset(found.names)


class _Read(ast.NodeVisitor):
    """Finds ``self.NAME.weight`` where it is read, but for what is done in training alone."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        terms = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        is_all = not (isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or))
        if is_all and "self.training" in map(ast.unparse, terms):
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner, _, name = ast.unparse(node.value).partition(".")
        is_module = owner == "self" and all(part.isidentifier() for part in name.split("."))
        if is_module and node.attr == "weight" and isinstance(node.ctx, ast.Load):
            self.names.add(name)
        self.generic_visit(node)


def _are_alike(modules: nn.ModuleList) -> bool:
    """Return true if a list has several modules of one class, which have weights."""
    kinds = {type(module) for module in modules}
    return len(modules) > 1 and len(kinds) == 1 and any(True for _ in modules.parameters())
