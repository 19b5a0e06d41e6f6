"""A whole forward over one buffer: what is recorded as a graph, with the addresses of that moment.

The buffer has the step's tokens first, then the slots of recurrent layers, then the plans of the
layer groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvcellar.backends.torch.bind.inputs import inputs_of
from kvcellar.backends.torch.bind.positions import Positions
from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.backends.torch.cache.state_pools import StateKeeper, Stretches, Together
from kvcellar.backends.torch.gpu.attend import launch
from kvcellar.backends.torch.gpu.attend.plans import Ints, PackedPlan, PlanForm
from kvcellar.backends.torch.gpu.attend.steps import GroupPlan
from kvcellar.backends.torch.gpu.sampler.sampling import likeliest
from kvcellar.errors import StepError
from kvcellar.registry import use_cache
from kvcellar.types import IntArray


class StateForm(NamedTuple):
    """Shape of the advances that run together: sequences, tokens of each, and where these are.

    Attributes:
        n: sequences.
        n_tokens: of each.
        first: token where a run of all of them begins; None: they are listed.
    """

    n: int
    n_tokens: int
    first: int | None

    @property
    def n_ints(self) -> int:
        """Integers of 64 bits: tokens that are listed, then both slots of each sequence."""
        return 2 * self.n + (self.n * self.n_tokens if self.first is None else 0)


class Shape(NamedTuple):
    """Shape of a padded step: of equal shapes the launches are equal, over the same addresses.

    Attributes:
        n_tokens: of the batch.
        n_rows: tokens whose logits come.
        rope_length: the length of text whose RoPE factors turn positions.
        has_features: true if the inputs of some layers are wanted.
        states: of what recurrent layers run together, in its order.
        forms: of the plans, in the order of their slots.
    """

    n_tokens: int
    n_rows: int
    rope_length: int
    has_features: bool
    states: tuple[StateForm, ...]
    forms: tuple[PlanForm, ...]

    @property
    def input_ints(self) -> int:
        """Integers of 32 bits before the plans: all that have 64, rounded up."""
        n = 2 * self.n_tokens + self.n_rows + sum(form.n_ints for form in self.states)
        return -(-2 * n // 4) * 4


def joined(
    shape: Shape,
    at: IntArray,
    rows: IntArray,
    advances: Sequence[Together],
    plans: Sequence[PackedPlan],
) -> Ints:
    """Return what a step transfers, with zeros for its tokens and for what pads it.

    Args:
        shape: of the step.
        at: ``[T]`` positions.
        rows: ``[R]`` tokens whose logits are wanted.
        advances: of the recurrent layers, by what runs together.
        plans: of the layer groups, by slot, padded.
    """
    first = np.zeros(shape.input_ints, np.int32)
    inputs, n = first.view(np.int64), shape.n_tokens
    inputs[n : n + len(at)] = at
    start = 2 * n
    inputs[start : start + len(rows)] = rows
    start += shape.n_rows
    for one, form in zip(advances, shape.states, strict=True):
        assert one.src is not None, "those without a past are not recorded"
        listed = [one.tokens] if form.first is None else []
        inputs[start : start + form.n_ints] = np.concatenate([*listed, one.src, one.dst])
        start += form.n_ints
    return np.concatenate([first, *(plan.numbers for plan in plans)])


def put_tokens(numbers: Ints, ids: IntArray) -> None:
    """Put a step's tokens ``[T]`` in their place, the first."""
    numbers[: 2 * len(ids)].view(np.int64)[:] = ids


def form_of(one: Together) -> StateForm:
    """Return the shape of advances that run together."""
    return StateForm(one.n, one.n_tokens, int(one.tokens[0]) if one.is_run else None)


class Played(NamedTuple):
    """Results of a recorded forward; each replay fills them again.

    Attributes:
        logits: ``[R, vocab_size]``.
        likeliest: float64 ``[R, 2]``: each row's likeliest token, or -1, and its logit.
        features: ``[T, n_features]``; of no numbers where none are wanted.
    """

    logits: Tensor
    likeliest: Tensor
    features: Tensor


class OnDevice(NamedTuple):
    """A plan whose integers lie on the device."""

    form: PlanForm
    sections: dict[str, Tensor]


class PlannedForward(StateKeeper):
    """A forward whose plans and cells lie where they lie: its layers launch, and count nothing.

    It stands for the cache in the op while a network is recorded.
    """

    takes_tensors = True

    def __init__(
        self, cache: TorchCache, plans: Sequence[GroupPlan], stretches: tuple[Stretches, ...]
    ) -> None:
        """Hold the plan of each attention layer, and the advances of recurrent ones."""
        assert cache.on_gpu is not None or not plans, "tilings are known"
        self.config = cache.config
        self._cache, self._plans, self._stretches = cache, plans, stretches
        states = cache.config.params.state
        self._left = {f"layer {i}" for i in range(len(plans))}
        self._left |= {f"recurrent layer {i}" for i in range(len(states.layers) if states else 0)}

    def update_and_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        layer_id: int,
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write and attend one layer; see :func:`kvcellar.op.eager_update_and_attend`.

        Raises:
            StepError: its queries are others than those that the plan was made for.
        """
        cache, planned = self._cache, self._plans[layer_id]
        assert cache.on_gpu is not None, "tilings are known"
        pool = cache.on_gpu.arguments(layer_id, cache.pools.of_layer[layer_id])
        found = launch.tiling_of(q.shape[1], pool, v.dtype, q.device)
        if found != planned.tiling:
            raise StepError(
                f"layer {layer_id} wants tiles of {found}; planned were {planned.tiling}"
            )
        self._left.discard(f"layer {layer_id}")
        q, k = cache.as_stored(q, k)
        return cache.launch(layer_id, planned, q, k, v, scale, out_dtype, sinks)

    @property
    def keeps_states(self) -> bool:
        """True if the model has recurrent layers."""
        return self._cache.keeps_states

    def begin_states(
        self, layer: int, n_tokens: int, position: Tensor | None, device: torch.device
    ) -> list[Tensor]:
        """Return a layer's states, whose slots are there already."""
        return self.states_of(layer)

    def states_of(self, layer: int) -> list[Tensor]:
        """Return a layer's states where they lie."""
        return self._cache.states_of(layer)

    @property
    def stretches(self) -> tuple[Stretches, ...]:
        """Advances of the step that is in the buffer."""
        return self._stretches

    def wrote_states(self, layer: int) -> None:
        """Note that a recurrent layer's states are stored."""
        self._left.discard(f"recurrent layer {layer}")

    def check(self) -> None:
        """Raise StepError if a layer has not had its turn."""
        if self._left:
            raise StepError(f"{', '.join(sorted(self._left))} had no turn in this forward")


class FilledNumbers(TorchFunctionMode):
    """Has single numbers come to a device by being filled in, where modules would copy them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch's; of a number's tensor on a device, the one that fills it."""
        named: dict[str, Any] = kwargs or {}
        is_number = func is torch.tensor and len(args) == 1 and isinstance(args[0], int | float)
        if is_number and named.get("device") is not None and named.keys() <= {"device", "dtype"}:
            return torch.full((), args[0], **named)
        return func(*args, **named)


class BufferedForward:
    """A whole forward over the buffer: call it to launch it."""

    def __init__(
        self,
        network: Any,
        cache: TorchCache,
        shape: Shape,
        buffer: Tensor,
        counts: Tensor,
        slots: Sequence[int],
        modules: Sequence[Any],
    ) -> None:
        """Take views of the buffer, and where the pools lie.

        Args:
            network: whose forward it is.
            cache: with the pools.
            shape: of the step.
            buffer: of 32-bit integers.
            counts: zeros for ``likeliest``, as long as the forward is run.
            slots: per attention layer, where its plan is.
            modules: whose inputs are the features.
        """
        self._network, self._cache, self._rope_length = network, cache, shape.rope_length
        self._modules = modules
        n = shape.n_tokens
        inputs = buffer[: shape.input_ints].view(torch.int64)
        self._ids, self._at = inputs[:n][None], inputs[n : 2 * n][None]
        self._rows = inputs[2 * n : 2 * n + shape.n_rows]
        self._counts = counts[: shape.n_rows]
        self._stretches = tuple(_stretches(shape, inputs[2 * n + shape.n_rows :]))
        first = shape.input_ints
        plans: dict[int, GroupPlan] = {}
        for slot, form in zip(sorted(set(slots)), shape.forms, strict=True):
            assert cache.on_gpu is not None, "layers have attended on the GPU"
            stop = first + sum(form.sections)
            plan = OnDevice(form, launch.sections_of(form, buffer[first:stop]))
            plans[slot] = GroupPlan(plan, cache.on_gpu.tilings[slot])
            first = stop
        self._plans = [plans[slot] for slot in slots]

    def __call__(self) -> Played:
        """Run the step that is in the buffer."""
        layers = PlannedForward(self._cache, self._plans, self._stretches)
        positions = Positions(self._at, self._rope_length)
        cached = use_cache(cast(Any, layers))
        with cached, inputs_of(self._modules) as seen, positions, FilledNumbers():
            logits: Tensor = self._network(
                input_ids=self._ids,
                position_ids=self._at,
                use_cache=False,
                logits_to_keep=self._rows,
            ).logits[0]
        layers.check()
        features = [hidden[0].float() for hidden in seen] or [logits.new_empty(0, 0)]
        return Played(logits, likeliest(logits, self._counts), torch.cat(features, dim=-1))


def _stretches(shape: Shape, numbers: Tensor) -> list[Stretches]:
    """Return the advances of a step as views of its integers."""
    found, at = [], 0
    for form in shape.states:
        tokens: Tensor | slice
        if form.first is None:
            tokens = numbers[at : at + form.n * form.n_tokens]
        else:
            tokens = slice(form.first, form.first + form.n * form.n_tokens)
        stop = at + form.n_ints
        src, dst = numbers[stop - 2 * form.n : stop - form.n], numbers[stop - form.n : stop]
        found.append(Stretches(form.n, form.n_tokens, tokens, src, dst))
        at = stop
    return found
