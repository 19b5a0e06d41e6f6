"""Lowering to XNNPACK without work whose result is known.

ExecuTorch lowers a graph in some thirty passes. Each replays the graph, or a part of it, and runs
every operator on tensors without bytes to learn what its result looks like, whether the pass has
changed something or not; and each deep-copies every node's list of where it came from, which grows
with each pass. For a model of 30 layers that took minutes. What is left out here changes nothing
in the program: a test compares the files byte for byte.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, pass_base, to_edge_transform_and_lower
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import traceback
from torch.utils import _pytree as pytree
from torchao.quantization import quant_primitives

from kvcellar.backends.executorch.replacing import replaced


def lower(graph: ExportedProgram, method: str, constants: dict[str, Any]) -> Any:
    """Lower a traced graph to XNNPACK.

    Args:
        graph: as ``torch.export`` gives it.
        method: what it is called in the program.
        constants: facts that the program carries, by name.

    Returns:
        ExecuTorch's ``EdgeProgramManager``.
    """
    with work_done_once():
        return to_edge_transform_and_lower(
            {method: graph},
            partitioner={method: [XnnpackPartitioner()]},
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods=constants,
        )


@contextlib.contextmanager
def work_done_once() -> Iterator[None]:
    """Let ExecuTorch's and torch's own functions skip what was done, inside of the ``with``.

    Holds for the whole process meanwhile, since it replaces their functions.
    """
    base, ao = pass_base._ExportPassBase, quant_primitives
    quantise, dequantise = "_quantize_affine_no_dtype_cast", "_dequantize_affine_no_dtype_check"
    with (
        replaced(base, "_fx", _remembering(base._fx)),
        replaced(ao, quantise, _shapes_of(getattr(ao, quantise))),
        replaced(ao, dequantise, _shapes_of(getattr(ao, dequantise))),
        replaced(ExportedProgram, "run_decompositions", _if_needed),
        # Lists of where a node came from are never changed, so copies can share them.
        replaced(traceback, "copy", SimpleNamespace(copy=copy.copy, deepcopy=lambda value: value)),
        # A pass writes the whole graph as text for a log that is off.
        replaced(torch.fx.GraphModule, "print_readable", lambda *_, **__: ""),
    ):
        yield


# Replays ------------------------------------------------------------------------------------------


def _remembering(replay: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_ExportPassBase._fx``, which runs one operator of a replay and adds its node."""
    kept: dict[Any, tuple[Any, Any]] = {}

    def replay_remembering(self: Any, kind: str, *rest: Any) -> Any:
        if kind != "call_function":
            return replay(self, kind, *rest)
        interpreter = self.interpreter
        self.interpreter = SimpleNamespace(call_function=call_once(interpreter.call_function))
        try:
            return replay(self, kind, *rest)
        finally:
            self.interpreter = interpreter

    def call_once(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            key = _key(target, args, kwargs)
            if key is None:
                return call(target, args, kwargs)
            if key not in kept:
                # The operands are held, so that no other tensor gets the identity of one of them.
                kept[key] = call(target, args, kwargs), (args, kwargs)
            return kept[key][0]

        return called

    return replay_remembering


def _key(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Name an operator and its operands: tensors and modules by identity, plain values as such.

    None where an operand is of another kind, or the operator changes one of them.
    """
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        return None
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    parts: list[tuple[type, Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor | torch.nn.Module | torch.SymInt):
            parts.append((type(leaf), id(leaf)))
        elif leaf is None or isinstance(leaf, _PLAIN):
            parts.append((type(leaf), leaf))
        else:
            return None
    return target, spec, tuple(parts)


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


# Decompositions -----------------------------------------------------------------------------------

_decompose = ExportedProgram.run_decompositions
_DECOMPOSED = "kvcellar: nothing is left to decompose"


def _if_needed(self: ExportedProgram, decomp_table: Any = None, **more: Any) -> Any:
    """Decompose a program, unless there is nothing in it to decompose.

    ExecuTorch does so three times: with an empty table, whose work the second time does as well;
    with all that XNNPACK does not want whole; and again, for what it does not want after all.
    """
    if decomp_table is not None and not decomp_table:
        return self
    if decomp_table is not None and _DECOMPOSED in self.graph_module.meta:
        targets = {node.target for node in self.graph.nodes if node.op == "call_function"}
        if not (targets & set(decomp_table)) - {torch.ops.aten.sym_size.int}:
            return self
    found = _decompose(self, decomp_table, **more)
    found.graph_module.meta[_DECOMPOSED] = True
    return found


def _shapes_of(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function of torchao whose result has its first operand's shape.

    Real tensors are computed; of those that only stand for shapes just the shape is wanted, and
    the function is some fifteen operators.
    """

    def shapes_of(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if type(input) in (Tensor, torch.nn.Parameter):
            return compute(input, *args, **kwargs)
        # Quantised rows are cast by who called; expanded ones come in the type asked for.
        dtype = args[5] if len(args) > 5 else kwargs.get("output_dtype", torch.float32)
        return torch.empty_like(input, dtype=dtype)

    return shapes_of
