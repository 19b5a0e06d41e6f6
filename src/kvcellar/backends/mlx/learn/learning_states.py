"""Learning the states of a model of mlx-lm: who uses which, and what they are.

Nothing is looked up by a model's name. A convolution is an array ``[width - 1, channels]`` of a
module that has a weight of ``width`` and ``channels``. The gated delta rule is known by mlx-lm's
function that computes it, which the module calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta

from kvcellar.backends.mlx.bind.state_layers import Held, State, StateLayer
from kvcellar.backends.mlx.learn.recording import WAY_OUT, ModuleCall, Record, Use
from kvcellar.errors import ModelError

_DELTA_RULES = (
    gated_delta.gated_delta_update,
    gated_delta.gated_delta_kernel,
    gated_delta.gated_delta_ops,
)
"""Functions of mlx-lm with states ``[heads, v_dim, k_dim]``, which transformers has k_dim first."""


def learn_states(one: Record, two: Record) -> tuple[tuple[StateLayer, ...], list[Any]]:
    """Learn the states of a model from its two records, and which modules use them.

    Args:
        one: a forward of one token each of two sequences.
        two: one of two tokens of a sequence.

    Returns:
        The recurrent layers in the order of the model, and their mixers, which are to be bound.

    Raises:
        ModelError: there are states that slots cannot hold, or modules whose tokens cannot be told
            apart by sequence.
    """
    for record in (one, two):
        for use in record.uses:
            _check_mixer(record, use)
    layers: list[StateLayer] = []
    mixers: dict[int, Any] = {}
    for place in dict.fromkeys(use.place for use in one.uses):
        uses = [use for use in one.uses if use.place == place]
        modules = {id(use.within.module): use.within.module for use in uses}
        held = [_held(use, one, two) for use in _given(uses)]
        leaf = one.leaves[place]
        layers.append(StateLayer(place, len(leaf.cache), len(modules), _joined(held)))
        mixers |= modules
    return tuple(layers), list(mixers.values())


def _given(uses: list[Use]) -> list[Use]:
    """Return the last use of each index that gave a new state."""
    return list({_key(use): use for use in uses if use.value is not None}.values())


def _check_mixer(record: Record, use: Use) -> None:
    """Make sure that a module which uses a state can be run for some sequences at a time.

    Raises:
        ModelError: its arguments or results are not one per token, or it keeps rows as well.
    """
    what = f"the states that {type(use.within.module).__name__} of mlx-lm's {record.name} keeps"
    others = {
        id(other.within.module)
        for other in record.uses
        if (other.place, other.index) == (use.place, use.index)
    }
    if len(others) > 1:
        raise ModelError(f"{what} are used by several of its modules; {WAY_OUT}")
    inside = [update.within for update in record.updates] + [other.within for other in record.uses]
    if any(use.within in _above(call) for call in inside) or use.within in [
        update.within for update in record.updates
    ]:
        raise ModelError(f"{what} cannot be told from the rows that it keeps as well; {WAY_OUT}")
    given = [value for value in use.within.args if value is not record.offset]
    out = use.within.out
    arrays = _arrays([*given, *(out if isinstance(out, tuple) else (out,))])
    for array, is_nested in arrays:
        if is_nested or array.shape[:2] != record.ids.shape:
            raise ModelError(f"{what} go with tensors that are not one per token; {WAY_OUT}")


def _above(call: ModuleCall) -> Iterator[ModuleCall]:
    """Yield the calls that a call is in, itself left out."""
    while call.parent is not None:
        call = call.parent
        yield call


def _arrays(values: Iterable[Any], *, is_nested: bool = False) -> Iterator[tuple[mx.array, bool]]:
    """Yield the arrays among values, and whether each is in a list or tuple of its own."""
    for value in values:
        if isinstance(value, mx.array):
            yield value, is_nested
        elif isinstance(value, list | tuple):
            yield from _arrays(value, is_nested=True)


def _held(use: Use, one: Record, two: Record) -> Held:
    """Return what an array of a cache is, by two forwards that gave it.

    Raises:
        ModelError: it is no array of numbers whose shape is that of one sequence, however long.
    """
    again = [other.value for other in _given(two.uses) if _key(other) == _key(use)]
    values = [use.value, *again]
    shapes = {tuple(value.shape[1:]) for value in values if isinstance(value, mx.array)}
    dtypes = {value.dtype for value in values if isinstance(value, mx.array)}
    module = use.within.module
    if (
        len(values) != 2
        or len(shapes) != 1
        or not min(shapes.copy().pop(), default=0)
        or len(dtypes) != 1
        or not mx.issubdtype(dtypes.copy().pop(), mx.floating)
        or [value.shape[0] for value in values] != [one.ids.shape[0], two.ids.shape[0]]
    ):
        seen = " and ".join(str(getattr(value, "shape", value)) for value in values)
        raise ModelError(
            f"{type(module).__name__} of mlx-lm's {one.name} keeps {seen}, which is no state of "
            f"floats of one shape; {WAY_OUT}"
        )
    shape = shapes.pop()
    is_convolution = _is_convolution(shape, module)
    is_turned = len(shape) == 3 and not is_convolution and _calls(module, _DELTA_RULES)
    return Held(use.index, shape, dtypes.pop(), is_convolution, is_turned)


def _key(use: Use) -> tuple[int, int]:
    return use.place, use.index


def _is_convolution(shape: tuple[int, ...], module: Any) -> bool:
    """Return true for ``[width - 1, channels]`` where a weight of the module has these two."""
    if len(shape) != 2:
        return False
    wanted = sorted([shape[0] + 1, shape[1]])
    leaves: Any = tree_flatten(module.parameters())
    return any(sorted(n for n in weight.shape if n > 1) == wanted for _, weight in leaves)


def _calls(module: Any, functions: tuple[Any, ...]) -> bool:
    """Return true if a method of a module names one of some functions."""
    methods = (
        method
        for owner in type(module).__mro__
        for method in vars(owner).values()
        if isinstance(method, FunctionType)
    )
    return any(
        method.__globals__.get(name) in functions
        for method in methods
        for name in method.__code__.co_names
    )


def _joined(held: list[Held]) -> tuple[State, ...]:
    """Return the states of a layer: convolutions of one width as one, in front."""
    held = sorted(held, key=lambda one: one.index)
    by_width: dict[int, list[Held]] = {}
    for one in held:
        if one.is_convolution:
            by_width.setdefault(one.shape[0], []).append(one)
    convolutions = [State(tuple(ones)) for ones in by_width.values()]
    return (*convolutions, *(State((one,)) for one in held if not one.is_convolution))
