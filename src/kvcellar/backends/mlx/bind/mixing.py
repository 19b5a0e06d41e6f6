"""Running the mixers of recurrent layers for a flat batch: each sequence from its slot to another.

Tokens go through a model of mlx-lm as sequences of one token each, of which a mixer (the module
that uses a cache of states) could make nothing. So a bound mixer is run once for each *batch*: the
tokens of all sequences that bring as many and that go on from what is known by then. Decodes of
many sequences are one call, and so are the nodes of one depth of their trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as theirs

from kvcellar.backends.mlx.bind.state_layers import StateLayer
from kvcellar.backends.mlx.cache.state_pools import StatePools
from kvcellar.states import NO_SLOT, Advance, StatePlan
from kvcellar.types import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class MixerBatch:
    """Stretches of as many tokens each, which a mixer runs in one call.

    Attributes:
        tokens: ``[n * length]`` of the flat batch; None: all of them in their order.
        first: ``[n]`` first token of each.
        n: stretches.
        length: tokens of each.
        src: ``[n]`` slots that are read; None: there is no past.
        made: ``(batch, row)`` of each that goes on from what an earlier batch makes; else empty.
        dst: ``[n]`` slots that are written.
    """

    tokens: mx.array | None
    first: mx.array
    n: int
    length: int
    src: mx.array | None
    made: tuple[tuple[int, int], ...]
    dst: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """All batches of a forward.

    Attributes:
        of: the batches, in the order in which they are run.
        order: ``[T]`` where each token is among the batches' tokens; None: in their order.
    """

    of: tuple[MixerBatch, ...]
    order: mx.array | None


def batches_of(plan: StatePlan) -> Batches:
    """Sort a plan's advances into batches."""
    sorted_into: dict[tuple[int, int, bool], list[Advance]] = {}
    level_of: dict[int, int] = {}  # slot that is written -> batch level that writes it
    for advance in plan.advances:
        level = level_of.get(advance.src, -1) + 1
        level_of[advance.dst] = level
        key = level, advance.n_tokens, advance.src == NO_SLOT
        sorted_into.setdefault(key, []).append(advance)
    where: dict[int, tuple[int, int]] = {}  # slot -> the batch and row that write it last
    found: list[MixerBatch] = []
    tokens: list[np.ndarray[Any, Any]] = []
    for (level, length, is_new), advances in sorted(sorted_into.items(), key=lambda kv: kv[0]):
        first = np.array([advance.q_start for advance in advances])
        own = (first[:, None] + np.arange(length)).reshape(-1)
        src = [advance.src for advance in advances]
        made = tuple(where[slot] for slot in src) if level else ()
        dst = [advance.dst for advance in advances]
        where |= {slot: (len(found), row) for row, slot in enumerate(dst)}
        is_all = np.array_equal(own, np.arange(plan.n_tokens))
        found.append(
            MixerBatch(
                None if is_all else mx.array(own),
                mx.array(first),
                len(advances),
                length,
                None if is_new or level else mx.array(src),
                made,
                np.array(dst),
            )
        )
        tokens.append(own)
    order = np.argsort(np.concatenate(tokens), kind="stable")
    is_ordered = np.array_equal(order, np.arange(plan.n_tokens))
    return Batches(tuple(found), None if is_ordered else mx.array(order))


class Mixing(Protocol):
    """Protocol of a forward whose mixers are run by batches."""

    offsets: mx.array

    def batches(self, layer: int) -> Batches:
        """Return the batches of a recurrent layer."""
        ...

    def wrote_states(self, layer: int) -> None:
        """Note that a recurrent layer has given all its states."""
        ...

    @property
    def state_pools(self) -> StatePools:
        """The pools of the session."""
        ...


@dataclass(slots=True)
class _Progress:
    """A forward of one layer, between its mixers."""

    batches: Batches | None = None
    given: list[dict[int, mx.array]] = field(default_factory=list)
    """Per batch the states that it begins with, by index."""
    made: list[dict[int, mx.array]] = field(default_factory=list)
    """Per batch the states that its mixers gave, by index."""
    n_mixed: int = 0


class MixerCache(theirs.ArraysCache):
    """States of one layer as a model sees them: mlx-lm's protocol, for a batch at a time."""

    def __init__(self, forward: Mixing, layer: int, states: StateLayer) -> None:
        """Stand in for the cache of recurrent layer ``layer``."""
        super().__init__(states.n_arrays)
        self._forward = forward
        self._layer = layer
        self._states = states
        self._progress = _Progress()
        self._batch = 0

    def make_mask(self, N: int) -> None:  # noqa: N803
        """None: a batch holds tokens of sequences that bring as many, and nothing else."""

    def advance(self, N: int) -> None:  # noqa: N803
        """Do nothing: slots know where they are."""

    def __getitem__(self, index: int) -> mx.array | None:
        """Return a state of this batch; None: it has no past.

        Raises:
            IndexError: there are fewer.
        """
        if not 0 <= index < self._states.n_arrays:
            raise IndexError(index)
        made = self._progress.made[self._batch].get(index)
        return self._progress.given[self._batch].get(index) if made is None else made

    def __setitem__(self, index: int, value: mx.array) -> None:
        """Take the new state of this batch."""
        self._progress.made[self._batch][index] = value

    def mix(self, own: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a mixer, whose method is ``own``, for all tokens; return what it returns for them."""
        progress = self._progress
        if progress.batches is None:
            progress.batches = self._forward.batches(self._layer)
            progress.made = [{} for _ in progress.batches.of]
            progress.given = [self._read(batch) for batch in progress.batches.of]
        batches = progress.batches
        outs = []
        for self._batch, batch in enumerate(batches.of):
            if batch.made:
                progress.given[self._batch] = self._of_earlier(batch)
            out = own(
                module,
                *(self._part(batch, value) for value in args),
                **{name: self._part(batch, value) for name, value in kwargs.items()},
            )
            outs.append(out)
        progress.n_mixed += 1
        if progress.n_mixed == self._states.n_mixers:
            self._write(batches)
        return _joined(outs, batches)

    def end(self) -> None:
        """Let go of what a forward has left."""
        self._progress = _Progress()

    def _read(self, batch: MixerBatch) -> dict[int, mx.array]:
        """Return the states that a batch goes on from, by index."""
        if batch.src is None:
            return {}
        return self._states.give(self._forward.state_pools.read(self._layer, batch.src))

    def _of_earlier(self, batch: MixerBatch) -> dict[int, mx.array]:
        """Return what earlier batches of this forward gave, as far as mixers have run."""
        made = [self._progress.made[at] for at, _ in batch.made]
        return {
            index: mx.stack([of[index][row] for of, (_, row) in zip(made, batch.made, strict=True)])
            for index in made[0]
        }

    def _write(self, batches: Batches) -> None:
        """Write what the layer's mixers gave into the batches' slots."""
        pools, progress = self._forward.state_pools, self._progress
        self.end()
        for batch, made in zip(batches.of, progress.made, strict=True):
            pools.write(self._layer, batch.dst, self._states.store(made))
        self._forward.wrote_states(self._layer)

    def _part(self, batch: MixerBatch, value: Any) -> Any:
        """Return what a batch is given of an argument: tokens ``[n, length, ...]`` of its own."""
        if value is self._forward.offsets:
            return mx.take(value, batch.first, axis=0)
        if not isinstance(value, mx.array):
            return value
        tokens = value if batch.tokens is None else mx.take(value, batch.tokens, axis=0)
        return tokens.reshape(batch.n, batch.length, *value.shape[2:])


def _joined(outs: list[Any], batches: Batches) -> Any:
    """Return for all tokens in their order what batches returned: arrays, or tuples of them."""
    if isinstance(outs[0], tuple):
        return tuple(_joined(list(parts), batches) for parts in zip(*outs, strict=True))
    if not isinstance(outs[0], mx.array):
        return outs[0]
    flat = [out.reshape(-1, 1, *out.shape[2:]) for out in outs]
    joined = flat[0] if len(flat) == 1 else mx.concatenate(flat)
    return joined if batches.order is None else mx.take(joined, batches.order, axis=0)


def state_cache_of(values: tuple[Any, ...]) -> MixerCache | None:
    """Return the stand-in among a mixer's arguments, also in a list; None: there is none."""
    return next(_stand_ins(values), None)


def _stand_ins(values: Any) -> Iterator[MixerCache]:
    for value in values:
        if isinstance(value, MixerCache):
            yield value
        elif isinstance(value, theirs.CacheList):
            yield from _stand_ins(value.caches)


def mixing(base: type) -> dict[str, Any]:
    """Return the methods of a mixer that is run by batches where a stand-in is its cache."""
    own: Any = base.__call__

    def mix(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = state_cache_of((*args, *kwargs.values()))
        return own(self, *args, **kwargs) if states is None else states.mix(own, self, args, kwargs)

    return {"__call__": mix}
