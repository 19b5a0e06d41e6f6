"""Learning from a model of mlx-lm what it asks of a cache.

Two forwards are recorded. MLX is lazy, so neither computes anything but masks:

- Two sequences of one token each, as in a flat batch, tell the shapes of K and V, which layer reads
  whose rows, which layer has the latent form, and which module makes the logits.
- Two tokens of one sequence far behind its start tell what each layer sees, by the masks that the
  model and mlx-lm's own caches make there.

Nothing is looked up by a model's name. What cannot be served is refused with what was seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as theirs

from kvcellar.backends.mlx.bind.binding import (
    Forward,
    LayerCache,
    Running,
    bind_attention,
    bind_by_hand,
    bind_head,
    bind_mixers,
)
from kvcellar.backends.mlx.bind.state_layers import StateLayer
from kvcellar.backends.mlx.learn.learning_states import learn_states
from kvcellar.backends.mlx.learn.recording import FAR, WAY_OUT, ModuleCall, Record, n_read, traced
from kvcellar.errors import ModelError
from kvcellar.models.facts import LayerFacts, ModelFacts, Rope, StateFacts
from kvcellar.types import ModelCacheParams


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    """A model that is bound, and what was learnt of it.

    Attributes:
        layers: facts of its attention.
        vocab_size: logits per token.
        hidden_size: numbers per token between layers.
        dtype: type of K, which is what the model computes in.
        added_window: the shortest window that the config says and the model of mlx-lm does not
            know; None: there is none.
        is_head_bound: the module that makes logits was found, and runs on the wanted rows alone.
        caches: what its caches were, by place: nested where mlx-lm's are, each leaf its kind.
        states: facts of its recurrent layers.
        n_layers: all layers.
    """

    layers: tuple[LayerFacts, ...]
    vocab_size: int
    hidden_size: int
    dtype: mx.Dtype
    added_window: int | None
    is_head_bound: bool
    caches: tuple[Any, ...]
    states: tuple[StateFacts, ...]
    n_layers: int

    def facts(self, family: str, max_positions: int, inner_size: int) -> ModelFacts:
        """Return the facts of the model, with what its config says besides.

        Every position is turned in one way: a model for which that is not so is refused.
        """
        return ModelFacts(
            family=family,
            layers=self.layers,
            others=(),
            n_layers=self.n_layers,
            hidden_size=self.hidden_size,
            inner_size=inner_size,
            vocab_size=self.vocab_size,
            max_positions=max_positions,
            rope=Rope("fixed"),
            states=self.states,
        )

    @property
    def params(self) -> ModelCacheParams:
        """Facts for a cache of the model."""
        return self.facts("", 1, 1).params

    def layer_caches(self, forward: Forward) -> list[Any]:
        """Make what the model is called with as its ``cache``, in every forward of a session."""
        return [_stand_in(kind, forward) for kind in self.caches]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of a layer's cache; fields as ``LayerCache`` takes them."""

    is_latent: bool = False
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class _StateKind:
    """Kind of a cache of states: which recurrent layer it is, and what that keeps."""

    layer: int
    states: StateLayer


def _stand_in(kind: Any, forward: Forward) -> Any:
    if isinstance(kind, tuple):
        return theirs.CacheList(*(_stand_in(one, forward) for one in kind))  # type: ignore[no-untyped-call]
    if isinstance(kind, _StateKind):
        return forward.state_cache(kind.layer, kind.states)
    return LayerCache(forward, is_latent=kind.is_latent, scale=kind.scale)


def learn(
    model: Any, name: str, said: Sequence[int | None] = (), *, adds_windows: bool = False
) -> Learnt:
    """Learn what a model asks of a cache, and bind it.

    Args:
        model: of mlx-lm, its weights read or not.
        name: of its architecture, for messages.
        said: the window of each layer by the model's config, None for those that see all; empty:
            it does not say.
        adds_windows: where the config says a window and the model of mlx-lm sees all, as some do,
            the window is the cache's to keep; false: such a model is refused.

    Raises:
        ModelError: it keeps something other than K and V of a history, or attends otherwise than
            a cache can serve.
    """
    bind_attention(model)
    shapes = _recorded(model, name, mx.array([3, 7]), [[0], [0]])
    seen = _recorded(model, name, FAR, [[0, 0]])
    if len(shapes.attends) != len(seen.attends):
        raise ModelError(
            f"mlx-lm's {name} attends {len(shapes.attends)} times for one token and "
            f"{len(seen.attends)} times for two; {WAY_OUT}"
        )
    recurrent, mixers = learn_states(shapes, seen)
    for attend in shapes.attends:
        if attend.parts is not None:
            bind_by_hand(*attend.parts)
    bind_mixers(mixers)
    logits = shapes.calls[-1].out
    head = next(call for call in reversed(shapes.calls) if not call.module.children())
    is_head = head.out.shape == logits.shape
    if is_head:
        bind_head(head.module, head.method)
    sight = _Sight(seen, said, adds_windows=adds_windows)
    numbers = _Numbers(model, shapes)
    return Learnt(
        tuple(_layers(shapes, sight, numbers.of_attention)),
        int(logits.shape[-1]),
        int(head.args[0].shape[-1]),
        shapes.updates[0].keys.dtype,
        min(sight.added, default=None),
        is_head,
        _kinds(shapes, recurrent),
        tuple(
            StateFacts(
                layer,
                tuple(state.shape for state in kept.states),
                tuple(state.held[0].index for state in kept.states),
            )
            for layer, kept in zip(numbers.of_states(recurrent), recurrent, strict=True)
        ),
        numbers.n_layers,
    )


class _Numbers:
    """The model's own numbers of its layers; where one attends twice, each attention counts."""

    def __init__(self, model: Any, record: Record) -> None:
        """Look for the layers of a record's calls among those of the model."""
        self._blocks = {id(block): number for number, block in enumerate(model.layers)}
        self._record = record
        found = [self._of(attend.within) for attend in record.attends]
        self._has_own = all(one < two for one, two in itertools.pairwise(found))
        self.of_attention = found if self._has_own else list(range(len(found)))
        """Number of each attention, ascending."""
        self.n_layers = len(model.layers) if self._has_own else len(found)

    def of_states(self, layers: Sequence[StateLayer]) -> list[int]:
        """Return the number of each recurrent layer."""
        first = {use.place: use.within for use in reversed(self._record.uses)}
        return [self._of(first[layer.place]) for layer in layers]

    def _of(self, call: ModuleCall | None) -> int:
        """Return the number of the layer that a call is in; -1: it is in none."""
        while call is not None and id(call.module) not in self._blocks:
            call = call.parent
        return -1 if call is None else self._blocks[id(call.module)]


def _recorded(model: Any, name: str, offset: Any, ids: list[list[int]]) -> Record:
    """Record one forward of token ids ``[B, N]`` at an offset.

    Raises:
        ModelError: the model cannot be served.
    """
    given = mx.array(ids)
    record = Record(name, offset, given)
    caches = [record.tap(one) for one in theirs.make_prompt_cache(model)]
    with traced(model, record), Running(record):
        try:
            model(given, cache=caches)
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise ModelError(
                f"mlx-lm's {name} cannot run a batch with a position for each sequence ({error}); "
                f"{WAY_OUT}"
            ) from error
    record.find_attention_by_hand()
    if not record.attends:
        raise ModelError(
            f"mlx-lm's {name} has no layer that attends, and caches here hold the K and V of at "
            f"least one; choose a model that has attention, or run it with mlx-lm alone"
        )
    return record


def _layers(shapes: Record, sight: _Sight, numbers: Sequence[int]) -> Iterator[LayerFacts]:
    """Yield what was seen of each layer that attends, by the numbers that these have."""
    firsts: dict[int, LayerFacts] = {}
    for layer, attend in enumerate(shapes.attends):
        source = attend.source
        window, chunk = sight.of(layer)
        first = firsts.get(id(source))
        if first is not None and (first.window, first.chunk) != (window, chunk):
            raise ModelError(
                f"layer {layer} of mlx-lm's {shapes.name} shares the rows of layer {first.layer} "
                f"and sees another part of them; {WAY_OUT}"
            )
        k, v = source.keys.shape, source.values.shape
        dims = (v[3], k[3]) if attend.is_latent else (k[3], v[3])
        made = LayerFacts(
            numbers[layer],
            attend.n_heads,
            k[1],
            *dims,
            scale=attend.scale,
            window=window,
            chunk=chunk,
            softcap=attend.softcap,
            has_sinks=attend.has_sinks,
            is_latent=attend.is_latent,
            source=None if first is None else first.layer,
        )
        firsts.setdefault(id(source), made)
        yield made


class _Sight:
    """Sight of each layer, by the masks of a forward far behind the start of a sequence."""

    def __init__(self, record: Record, said: Sequence[int | None], *, adds_windows: bool) -> None:
        """Judge a record by what the config said; arguments as of ``learn``."""
        n_layers = len(record.attends)
        if any(said) and len(said) != n_layers:
            raise ModelError(
                f"mlx-lm's {record.name} attends in {n_layers} layers, and its config says the "
                f"windows of {len(said)}; {WAY_OUT}"
            )
        self._record = record
        self._said = tuple(said) if len(said) == n_layers else (None,) * n_layers
        self._is_said = len(said) == n_layers
        self._adds_windows = adds_windows
        self.added: list[int] = []
        """Windows of layers that the model of mlx-lm does not know."""
        self._firsts: dict[int, tuple[int, int]] = {}

    def of(self, layer: int) -> tuple[int | None, int | None]:
        """Return the window and the chunk of a layer.

        Raises:
            ModelError: it sees something else, or not what its config says.
        """
        attend, name, said = self._record.attends[layer], self._record.name, self._said[layer]
        if attend.is_latent:
            self._check_latent(layer)
            return None, None
        leaf = self._record.leaves[attend.source.place]
        firsts = self._first_seen(attend.mask, leaf, layer)
        if firsts == (0, 0) and said is None:
            return None, None
        if firsts == (0, 0) and said is not None and self._adds_windows:
            self.added.append(said)
            return said, None
        window, chunk = FAR + 1 - firsts[0], getattr(leaf, "chunk_size", None)
        if firsts[1] == firsts[0] + 1 and (said == window or not self._is_said):
            return window, None
        if chunk is not None and not self._is_said and firsts == 2 * (FAR - FAR % chunk,):
            return None, int(chunk)
        raise ModelError(
            f"layer {layer} of mlx-lm's {name} sees from position {firsts[0]} on at {FAR} and from "
            f"{firsts[1]} at {FAR + 1}; by its config a window of {said}; {WAY_OUT}"
        )

    def _check_latent(self, layer: int) -> None:
        """Make sure that a layer sees all: its mask cannot be told from its logits."""
        for mask in self._record.masks:
            leaf = self._record.leaves[self._record.attends[layer].source.place]
            if self._first_seen(mask, leaf, layer) != (0, 0):
                raise ModelError(
                    f"layer {layer} of mlx-lm's {self._record.name} keeps latent rows beside "
                    f"layers that see a part of the history; {WAY_OUT}"
                )

    def _first_seen(self, mask: Any, leaf: Any, layer: int) -> tuple[int, int]:
        """Return the first positions that the two tokens see."""
        n_rows = n_read(leaf, 2)
        if mask is None or isinstance(mask, str):
            return FAR + 2 - n_rows, FAR + 2 - n_rows
        if id(mask) not in self._firsts:
            rows = np.array(mask).reshape(-1, mask.shape[-1])
            start = FAR + 2 - rows.shape[1]
            firsts = rows.argmax(axis=1)
            is_span = rows.shape[1] == n_rows and all(
                row[first : FAR + 1 + i - start].all() and not row[FAR + 1 + i - start :].any()
                for i, (row, first) in enumerate(zip(rows, firsts, strict=True))
            )
            if mask.dtype != mx.bool_ or len(rows) != 2 or not is_span:
                raise ModelError(
                    f"layer {layer} of mlx-lm's {self._record.name} is masked by {mask.shape} of "
                    f"{mask.dtype}, which is not one stretch of the history; {WAY_OUT}"
                )
            self._firsts[id(mask)] = int(firsts[0]) + start, int(firsts[1]) + start
        return self._firsts[id(mask)]


def _kinds(record: Record, recurrent: Sequence[StateLayer]) -> tuple[Any, ...]:
    """Return the kind of each of the model's caches, nested as they are."""
    found: dict[int, Any] = {layer.place: _StateKind(i, layer) for i, layer in enumerate(recurrent)}
    found |= {
        attend.source.place: _Kind(attend.is_latent, attend.scale if attend.parts else None)
        for attend in record.attends
    }

    def kind(taken: Any) -> Any:
        if isinstance(taken, theirs.CacheList):
            return tuple(kind(one) for one in taken.caches)
        return found.get(record.leaves.index(taken), _Kind())

    return tuple(kind(taken) for taken in record.taken)
