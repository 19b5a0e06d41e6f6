"""Recurrent modules of a network, bound: transformers computes, and the states are a cache's slots.

A module that asks transformers' cache for states (a mixer) takes one batch of sequences of one
length, all with a past or all without. A flat batch has tokens of many sequences behind each other,
so the mixer is called for the tokens that can go together, with a cache that knows the states of
just these. What it leaves there is stored in the slots that the step writes.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvcellar.backends.torch.bind.active_adapters import rows_of
from kvcellar.backends.torch.bind.positions import current_positions
from kvcellar.backends.torch.cache.state_pools import StateKeeper, Stretches
from kvcellar.errors import ModelError
from kvcellar.models.facts import ModelFacts, StateFacts
from kvcellar.registry import active_cache

Place = tuple[str, int]
"""Kind of a state and its number among those of its kind in transformers' cache."""


def _is_no_advice(record: logging.LogRecord) -> bool:
    """Return false for advice to install kernels for other devices than the one that runs."""
    return "is falling back to its reference" not in str(record.msg)


def spare_advice() -> None:
    """Have transformers not advise kernels for cards to a model that runs on a CPU."""
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_no_advice)


_STEP = "mamba2_selective_state_update"
"""Function of transformers by which Mamba 2 takes one token."""

_told = threading.local()
"""``time_step_limit`` of the module that this thread runs, which transformers does not hand to
``_STEP``."""


def time_limit_of(module: nn.Module) -> tuple[float, float] | None:
    """Return within what a module's prompts keep their time steps; None: nothing bounds them.

    transformers bounds them in prompts alone, so that a token that comes by itself would be
    computed otherwise than the same token in a prompt.
    """
    limit = getattr(module, "time_step_limit", None)
    if limit is None:
        return None
    least, most = limit
    return (float(least), float(most)) if least > 0.0 or most < math.inf else None


def _bound_steps(module: nn.Module) -> None:
    """Have the function by which a module takes one token keep the limit that its thread has."""
    defined_in = sys.modules[type(module).__module__]
    step = getattr(defined_in, _STEP)
    if not hasattr(step, "keeps_limit"):
        setattr(defined_in, _STEP, _keeping_limit(step))


def _keeping_limit(step: Any) -> Any:
    """Return a step of Mamba 2 that bounds time steps where its thread has a limit."""

    @functools.wraps(step)
    def bounded(
        state: Tensor, x: Tensor, dt: Tensor, *given: Any, dt_bias: Any = None, **named: Any
    ) -> Any:
        limit = getattr(_told, "limit", None)
        if limit is not None:
            dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            if named.pop("dt_softplus", False):
                dt = nn.functional.softplus(dt)
            dt, dt_bias = dt.clamp(*limit), None
        return step(state, x, dt, *given, dt_bias=dt_bias, **named)

    vars(bounded)["keeps_limit"] = True
    return bounded


@contextmanager
def _bounded(limit: tuple[float, float] | None) -> Iterator[None]:
    """Bound the time steps of the modules that this thread runs in a block."""
    _told.limit = limit
    try:
        yield
    finally:
        _told.limit = None


def bind_states(network: nn.Module, facts: ModelFacts) -> None:
    """Have the recurrent modules of a network keep their states in the cache that is active.

    Where none of ours is active they run as before.

    Args:
        network: of transformers.
        facts: what was learnt of it.

    Raises:
        ModelError: it has no such modules; those before are bound.
    """
    for number, layer in enumerate(facts.states):
        for at, (path, argument) in enumerate(layer.askers):
            try:
                module = network.get_submodule(path)
            except AttributeError as error:
                raise ModelError(
                    f"layer {layer.layer} was found to keep its states in {path!r}, and this "
                    f"network has no such module; it is another model than the one that was "
                    f"looked at"
                ) from error
            is_last = at + 1 == len(layer.askers)
            mixer = Mixer(module, argument, layer, number, is_first=not at, is_last=is_last)
            vars(module)["forward"] = mixer


class Mixer:
    """The forward of a recurrent module, whose states are those of the cache that is active."""

    def __init__(
        self,
        module: nn.Module,
        argument: str,
        layer: StateFacts,
        number: int,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """Stand in for a module's forward.

        Args:
            module: a copy of it has a copy of this.
            argument: the name by which it is given transformers' cache.
            layer: facts of its layer.
            number: of its layer, among the recurrent ones.
            is_first: of the modules of its layer that have states.
            is_last: of them.
        """
        self.module = module
        self.number = number
        self._argument = argument
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]
        self._is_first, self._is_last = is_first, is_last
        self._by_token = layer.by_token
        self._limit = time_limit_of(module)
        if self._limit is not None:
            _bound_steps(module)
        self.is_alone = is_first and is_last
        """True if all states of its layer are its own."""
        self.shapes = tuple(state.shape for state in layer.shapes)
        """Shapes of its layer's states."""
        self.places: dict[Place, int] = {
            (shape.kind, index): at
            for at, (shape, index) in enumerate(zip(layer.shapes, layer.indices, strict=True))
        }
        self._dtypes: dict[Place, torch.dtype] = {}
        """Types in which the module has its states; known once it has run without a past."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Run the module on a flat batch ``[1, T, ...]``, or as it is where no cache is ours."""
        cache = active_cache()
        if not isinstance(cache, StateKeeper) or not cache.keeps_states:
            return self._run(given, named)
        named = self.named(given, named)
        hidden = next(value for value in named.values() if isinstance(value, Tensor))
        n_tokens = hidden.shape[1]
        if self._is_first:
            begin_states(cache, self.number, hidden)
        states = cache.states_of(self.number)
        joined = _Joined(n_tokens)
        for stretches in self._calls(cache.stretches):
            joined.add(stretches, self.advance(stretches, states, named, hidden))
        if self._is_last:
            cache.wrote_states(self.number)
        return joined.result

    def named(self, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their names."""
        return {**dict(zip(self._names, given, strict=False)), **named}

    def advance(
        self,
        stretches: Stretches,
        states: list[Tensor],
        named: Mapping[str, Any],
        hidden: Tensor,
    ) -> Any:
        """Run the module on some stretches and store their states; return its result."""
        if stretches.src is not None and not self._dtypes:
            self._learn_dtypes(named, hidden)
        past = SlotStates(self.places, states, stretches, self._dtypes)
        n_tokens = hidden.shape[1]
        own = {name: _part(value, stretches, n_tokens) for name, value in named.items()}
        with rows_of(stretches.tokens), _bounded(self._limit):
            result = self._run((), {**own, self._argument: past})
        past.store()
        self._dtypes.update(past.dtypes)
        return result

    def _calls(self, all_stretches: Iterable[Stretches]) -> Iterator[Stretches]:
        """Yield what is run together, in its order."""
        for stretches in all_stretches:
            if self._by_token and stretches.src is not None and stretches.n_tokens > 1:
                yield from stretches.by_token()
            else:
                yield stretches

    def _learn_dtypes(self, named: Mapping[str, Any], hidden: Tensor) -> None:
        """Run one token without a past, to see in which types the module has its states."""
        one = Stretches(1, 1, slice(0, 1), None, torch.zeros(0))
        own = {name: _part(value, one, hidden.shape[1]) for name, value in named.items()}
        past = SlotStates(self.places, [], one, {})
        with rows_of(one.tokens):
            self._run((), {**own, self._argument: past})
        self._dtypes.update(past.dtypes)

    def _run(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return type(self.module).forward(self.module, *given, **named)


def begin_states(cache: StateKeeper, layer: int, hidden: Tensor) -> list[Tensor]:
    """Let a recurrent layer have its turn in the forward that this thread runs.

    Args:
        cache: the active one.
        layer: its number among the recurrent layers.
        hidden: ``[1, T, ...]``, the flat batch.

    Returns:
        Its states ``[n_slots, *shape]``; whoever has written them calls ``wrote_states``.
    """
    said = current_positions()
    at = None if said is None else said[0]
    return cache.begin_states(layer, hidden.shape[1], at, hidden.device)


class SlotStates(Cache):
    """Transformers' cache of one layer's states for sequences that a module runs together."""

    def __init__(
        self,
        places: Mapping[Place, int],
        states: list[Tensor],
        stretches: Stretches,
        dtypes: Mapping[Place, torch.dtype],
    ) -> None:
        """Know where the states are.

        Args:
            places: where each is in ``states``.
            states: of the layer, each ``[n_slots, *shape]``.
            stretches: whose states are asked for.
            dtypes: in which the module has its states, where there is a past.
        """
        super().__init__(layers=[])
        self._places, self._states, self._stretches = places, states, stretches
        self._given = dtypes
        self._now: dict[Place, Tensor] = {}
        """States ``[n, *shape]`` as they are: some modules write to what they were given."""
        self.dtypes: dict[Place, torch.dtype] = {}
        """Types of the states that the module came to."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs ``[n, channels, width]`` of a convolution; None: no past."""
        return self._get(("convolution", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state ``[n, *shape]``; None: there is no past."""
        return self._get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Go on with inputs ``[n, channels, T]``; return those before them and them.

        Where there is no past and they are fewer than the convolution's width, zeros come before.
        """
        place = "convolution", state_idx
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        before = self._get(place)
        if before is not None:
            conv_states = torch.cat((before, conv_states), dim=-1)
        elif conv_states.shape[-1] < width:
            conv_states = nn.functional.pad(conv_states, (width - conv_states.shape[-1], 0))
        self._keep(place, conv_states[..., -width:])
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Go on with a recurrent state ``[n, *shape]``, and return it."""
        self._keep(("recurrent", state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return true if the sequences have a past."""
        return self._stretches.src is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: slots are the record."""
        return False

    def store(self) -> None:
        """Store the states that the module came to in the slots of the sequences."""
        for place, state in self._now.items():
            self._stretches.write(self._states[self._places[place]], state)

    def _get(self, place: Place) -> Tensor | None:
        if self._stretches.src is None:
            return None
        if place not in self._now:
            state = self._stretches.read(self._states[self._places[place]])
            self._now[place] = state.to(self._given[place])
        return self._now[place]

    def _keep(self, place: Place, state: Tensor) -> None:
        self.dtypes[place] = state.dtype
        self._now[place] = state


class _Joined:
    """Results of a module for parts of a flat batch, put together."""

    def __init__(self, n_tokens: int) -> None:
        """Wait for the results for ``n_tokens`` tokens."""
        self._n_tokens = n_tokens
        self.result: Any = None

    def add(self, stretches: Stretches, part: Any) -> None:
        """Add the result for some stretches: tensors ``[n, T, ...]``, or tuples of them."""
        if isinstance(part, Tensor):
            self.result = self._with(self.result, stretches, part)
        elif isinstance(part, tuple):
            before = self.result or (None,) * len(part)
            self.result = tuple(
                self._with(one, stretches, other) if isinstance(other, Tensor) else other
                for one, other in zip(before, part, strict=True)
            )
        else:
            self.result = part

    def _with(self, before: Tensor | None, stretches: Stretches, part: Tensor) -> Tensor:
        flat = part.flatten(0, 1)
        if len(flat) == self._n_tokens and isinstance(stretches.tokens, slice):
            return flat[None]
        if before is None:
            before = part.new_empty((1, self._n_tokens, *part.shape[2:]))
        before[0, stretches.tokens] = flat
        return before


def _part(value: Any, stretches: Stretches, n_tokens: int) -> Any:
    """Return what of an argument is of some stretches' tokens: ``[1, T, ...]`` as a batch."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, n_tokens):
        part = value[0, stretches.tokens]
        return part.view(stretches.n, stretches.n_tokens, *part.shape[1:])
    if isinstance(value, (tuple, list)):
        return type(value)(_part(one, stretches, n_tokens) for one in value)
    return value
