"""Learning from a model of mlx-lm what it asks of a cache.

Two forwards are recorded. MLX is lazy, so neither computes anything but masks:

- Two sequences of one token each, as in a flat batch, tell the shapes of K and V, which layer reads
  whose rows, which layer has the latent form, and which module makes the logits.
- Two tokens of one sequence far behind its start tell what each layer sees, by the masks that the
  model and mlx-lm's own caches make there.

Nothing is looked up by a model's name. What cannot be served is refused with what was seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as theirs

from kvcellar.backends.mlx.binding import (
    Fetched,
    Forward,
    LayerCache,
    Running,
    become,
    bind_attention,
    bind_by_hand,
    bind_head,
    subclass,
)
from kvcellar.errors import ModelError
from kvcellar.types import LayerGroup, ModelCacheParams

FAR = (1 << 20) + 37
"""A position behind every window and chunk, and where no chunk begins."""

_HISTORIES = (theirs.KVCache, theirs.RotatingKVCache, theirs.ChunkedKVCache)
"""Caches of mlx-lm that keep K and V of a history."""

_WAY_OUT = "load it with the backend torch, or run it with mlx-lm alone"


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    """A model that is bound, and what was learnt of it.

    Attributes:
        params: what a cache must know.
        vocab_size: logits per token.
        hidden_size: numbers per token between layers.
        dtype: type of K, which is what the model computes in.
        is_head_bound: the module that makes logits was found, and runs on the wanted rows alone.
        caches: what its caches were, by place: nested where mlx-lm's are, each leaf its kind.
    """

    params: ModelCacheParams
    vocab_size: int
    hidden_size: int
    dtype: mx.Dtype
    is_head_bound: bool
    caches: tuple[Any, ...]

    def layer_caches(self, forward: Forward) -> list[Any]:
        """Make what the model is called with as its ``cache``, in every forward of a session."""
        return [_stand_in(kind, forward) for kind in self.caches]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of a layer's cache; fields as ``LayerCache`` takes them."""

    is_latent: bool = False
    scale: float | None = None


def _stand_in(kind: Any, forward: Forward) -> Any:
    if isinstance(kind, tuple):
        return theirs.CacheList(*(_stand_in(one, forward) for one in kind))  # type: ignore[no-untyped-call]
    return LayerCache(forward, is_latent=kind.is_latent, scale=kind.scale)


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a module."""

    module: Any
    method: str
    args: tuple[Any, ...]
    out: Any = None
    parent: _Call | None = None


@dataclass(slots=True, eq=False)
class _Update:
    """K and V that a layer gave its cache.

    Attributes:
        place: which of the model's caches.
        keys: K.
        values: V.
        given: what the layer got back.
        n_calls: calls of modules that had ended before.
        within: the call of the module that attends.
        readers: attention that read it.
    """

    place: int
    keys: mx.array
    values: mx.array
    given: Fetched
    n_calls: int
    within: _Call
    readers: list[_Attend] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Attend:
    """One call of attention.

    Attributes:
        source: whose rows it reads.
        is_latent: its K and V are one array, and its mask holds the logits of the rotary part.
        mask: what it was given.
        softcap: of logits, where attention is written by hand.
        scale: the same; None: attention was called for.
        parts: of attention by hand its rope and its output projection.
    """

    source: _Update
    is_latent: bool
    mask: Any
    softcap: float | None = None
    scale: float | None = None
    parts: tuple[Any, Any] | None = None


def _zeros(like: mx.array, n: int) -> mx.array:
    """Return n rows where there are fewer; nothing is allocated unless somebody reads them."""
    return mx.zeros((*like.shape[:2], n, like.shape[3]), like.dtype)


def _is_cast(given: mx.array, rows: mx.array) -> bool:
    """Return true if an array is other rows in another type."""
    if given.shape != rows.shape:
        return False
    return bool(mx.array_equal(given[..., :2, :], rows[..., :2, :].astype(given.dtype)))


class _Record:
    """A forward whose modules, caches and attention are written down."""

    def __init__(self, name: str, offset: Any) -> None:
        self.name = name
        self.offset = offset
        self.open: list[_Call] = []
        self.calls: list[_Call] = []
        self.updates: list[_Update] = []
        self.attends: list[_Attend] = []
        self.masks: list[tuple[Any, Any]] = []
        """Caches that were asked for a mask, and what they made."""

        self.leaves: list[Any] = []
        """Caches that the model made for itself, one after another."""
        self.taken: list[Any] = []
        """The same, nested as the model made them."""

    def tap(self, made: Any) -> Any:
        """Have a cache that the model made write down what it is given.

        Raises:
            ModelError: it is not K and V of a history.
        """
        if isinstance(made, theirs.CacheList):
            made = theirs.CacheList(*(self._leaf(one) for one in made.caches))  # type: ignore[no-untyped-call]
        else:
            made = self._leaf(made)
        self.taken.append(made)
        return made

    def _leaf(self, leaf: Any) -> Any:
        if type(leaf) not in _HISTORIES:
            what = "is a state, which has no rows and cannot be cut back"
            raise ModelError(
                f"a layer of mlx-lm's {self.name} keeps a {type(leaf).__name__}, which "
                f"{what if isinstance(leaf, theirs.ArraysCache) else 'is no history of K and V'}; "
                f"{_WAY_OUT}"
            )
        place = len(self.leaves)
        leaf.offset = self.offset
        is_far = isinstance(self.offset, int)

        def update_and_fetch(own: Any, keys: mx.array, values: mx.array) -> Fetched:
            n = _n_read(own, keys.shape[2])
            given = (_zeros(keys, n), _zeros(values, n)) if is_far else (keys, values)
            return self.update(place, keys, values, given)

        def keys_and_values(own: Any) -> Fetched:
            return next(update.given for update in reversed(self.updates) if update.place == place)

        methods: dict[str, Any] = {
            "update_and_fetch": update_and_fetch,
            "keys_and_values": keys_and_values,
        }
        if not is_far:
            methods["make_mask"] = lambda own, *args, **kwargs: None
        elif hasattr(leaf, "make_mask"):
            methods["make_mask"] = self._masking(type(leaf).make_mask)
        leaf.__class__ = subclass(type(leaf), methods)
        self.leaves.append(leaf)
        return leaf

    def _masking(self, make: Any) -> Any:
        def make_mask(own: Any, *args: Any, **kwargs: Any) -> Any:
            mask = make(own, *args, **kwargs)
            self.masks.append(mask)
            return mask

        return make_mask

    def update(self, place: int, keys: mx.array, values: mx.array, given: Fetched) -> Fetched:
        within = self.open[-1]
        self.updates.append(_Update(place, keys, values, given, len(self.calls), within))
        return given

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        found = self._reading(keys, values, mask)
        found.source.readers.append(found)
        self.attends.append(found)
        return mx.zeros((*queries.shape[:-1], values.shape[-1]), dtype=queries.dtype)

    def _reading(self, keys: mx.array, values: mx.array, mask: Any) -> _Attend:
        """Return what K and V of an attention are: of which layer, in which form.

        Raises:
            ModelError: they are not what a cache gave.
        """
        for update in reversed(self.updates):
            if keys is update.given[0] and values is update.given[1]:
                return _Attend(update, is_latent=False, mask=mask)
            if values is keys is update.given[0] and mask is not None:
                return _Attend(update, is_latent=True, mask=mask)
        last = self.updates[-1] if self.updates else None
        if last is not None and not last.readers:
            if values is last.given[1] and _is_cast(keys, last.given[0]):
                return _Attend(last, is_latent=False, mask=mask)
            if isinstance(self.offset, int):  # for several tokens, latent rows are expanded
                return _Attend(last, is_latent=True, mask=None)
        raise ModelError(
            f"mlx-lm's {self.name} attends K and V that are not what its cache gave it, so a "
            f"cache that keeps rows cannot serve it; {_WAY_OUT}"
        )

    def find_attention_by_hand(self) -> None:
        """Find the attention of layers that call for none and write it out.

        Its queries come from the rope that gave the keys, and its output goes to the next module.

        Raises:
            ModelError: there is no such attention: rows are kept that nothing attends.
        """
        for update in self.updates:
            if update.readers:
                continue
            module = update.within.module
            before = [c for c in self.calls[: update.n_calls] if c.parent is update.within]
            after = [c for c in self.calls[update.n_calls :] if c.parent is update.within]
            ropes = [c.module for c in before if c.out is update.keys]
            scale = getattr(module, "scale", None)
            queries = [c for c in before if c.module in ropes and c.out is not update.keys]
            if scale is None or not after or not queries:
                raise ModelError(
                    f"cache {update.place} of mlx-lm's {self.name} keeps rows of "
                    f"{update.keys.shape[1:]} that no attention reads; {_WAY_OUT}"
                )
            masks = [a for a in update.within.args if any(a is mask for mask in self.masks)]
            softcap = getattr(module, "attn_logit_softcapping", None)
            found = _Attend(
                update,
                is_latent=False,
                mask=masks[0] if masks else None,
                softcap=softcap,
                scale=float(scale),
                parts=(ropes[0], after[0].module),
            )
            update.readers.append(found)
            self.attends.append(found)


@contextlib.contextmanager
def _traced(model: Any, record: _Record) -> Iterator[None]:
    """Have every module of a model tell a record of its calls."""
    before = [(module, type(module)) for module in model.modules()]
    made: dict[type, type] = {}
    try:
        for module, base in before:
            if base not in made:
                names = [name for name in ("__call__", "as_linear") if hasattr(base, name)]
                made[base] = subclass(base, {n: _telling(base, n, record) for n in names})
            become(module, made[base])
        yield
    finally:
        for module, base in before:
            become(module, base)


def _telling(base: type, name: str, record: _Record) -> Any:
    own = getattr(base, name)

    def tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        parent = record.open[-1] if record.open else None
        call = _Call(self, name, (*args, *kwargs.values()), parent=parent)
        record.open.append(call)
        try:
            call.out = own(self, *args, **kwargs)
        finally:
            record.open.pop()
        record.calls.append(call)
        return call.out

    return tell


def learn(
    model: Any, name: str, said: Sequence[int | None] = (), *, adds_windows: bool = False
) -> Learnt:
    """Learn what a model asks of a cache, and bind it.

    Args:
        model: of mlx-lm, its weights read or not.
        name: of its architecture, for messages.
        said: the window of each layer by the model's config; empty: it does not say.
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
            f"{len(seen.attends)} times for two; {_WAY_OUT}"
        )
    for attend in shapes.attends:
        if attend.parts is not None:
            bind_by_hand(*attend.parts)
    logits = shapes.calls[-1].out
    head = next(call for call in reversed(shapes.calls) if not call.module.children())
    is_head = head.out.shape == logits.shape
    if is_head:
        bind_head(head.module, head.method)
    return Learnt(
        _params(shapes, _Sight(seen, said, adds_windows=adds_windows)),
        int(logits.shape[-1]),
        int(head.args[0].shape[-1]),
        shapes.updates[0].keys.dtype,
        is_head,
        _kinds(shapes),
    )


def _recorded(model: Any, name: str, offset: Any, ids: list[list[int]]) -> _Record:
    """Record one forward of token ids ``[B, N]`` at an offset.

    Raises:
        ModelError: the model cannot be served.
    """
    record = _Record(name, offset)
    caches = [record.tap(one) for one in theirs.make_prompt_cache(model)]
    with _traced(model, record), Running(record):
        try:
            model(mx.array(ids), cache=caches)
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise ModelError(
                f"mlx-lm's {name} cannot run a batch with a position for each sequence ({error}); "
                f"{_WAY_OUT}"
            ) from error
    record.find_attention_by_hand()
    if not record.attends:
        raise ModelError(f"mlx-lm's {name} has no layer that attends; {_WAY_OUT}")
    return record


def _params(shapes: _Record, sight: _Sight) -> ModelCacheParams:
    """Put what was seen of each layer into groups."""
    layers: dict[tuple[Any, ...], list[int]] = {}
    stored: dict[int, tuple[int, Any]] = {}
    shared: list[tuple[int, int]] = []
    for layer, attend in enumerate(shapes.attends):
        source = attend.source
        window, chunk = seen = sight.of(layer)
        first, seen_first = stored.setdefault(id(source), (layer, seen))
        if seen != seen_first:
            raise ModelError(
                f"layer {layer} shares the rows of layer {first} and sees another part of them; "
                f"{_WAY_OUT}"
            )
        if first != layer:
            shared.append((layer, first))
            continue
        k, v = source.keys.shape, source.values.shape
        dims = (v[3], k[3]) if attend.is_latent else (k[3], v[3])
        facts = (k[1], *dims, window, attend.softcap, chunk, attend.is_latent)
        layers.setdefault(facts, []).append(layer)
    groups = tuple(LayerGroup(tuple(found), *facts) for facts, found in layers.items())
    return ModelCacheParams(len(shapes.attends), groups=groups, shared=tuple(shared))


class _Sight:
    """Sight of each layer, by the masks of a forward far behind the start of a sequence."""

    def __init__(self, record: _Record, said: Sequence[int | None], *, adds_windows: bool) -> None:
        """Judge a record by what the config said; arguments as of ``learn``."""
        n_layers = len(record.attends)
        if any(said) and len(said) != n_layers:
            raise ModelError(
                f"mlx-lm's {record.name} attends in {n_layers} layers, and its config says the "
                f"windows of {len(said)}; {_WAY_OUT}"
            )
        self._record = record
        self._said = tuple(said) if len(said) == n_layers else (None,) * n_layers
        self._adds_windows = adds_windows
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
        if firsts == (0, 0) and (said is None or self._adds_windows):
            return said, None
        window, chunk = FAR + 1 - firsts[0], getattr(leaf, "chunk_size", None)
        if firsts[1] == firsts[0] + 1 and said in (None, window):
            return window, None
        if chunk is not None and firsts[0] == firsts[1] == FAR - FAR % chunk and said is None:
            return None, int(chunk)
        raise ModelError(
            f"layer {layer} of mlx-lm's {name} sees from position {firsts[0]} on at {FAR} and from "
            f"{firsts[1]} at {FAR + 1}; its config says a window of {said}; {_WAY_OUT}"
        )

    def _check_latent(self, layer: int) -> None:
        """Make sure that a layer sees all: its mask cannot be told from its logits."""
        for mask in self._record.masks:
            leaf = self._record.leaves[self._record.attends[layer].source.place]
            if self._first_seen(mask, leaf, layer) != (0, 0):
                raise ModelError(
                    f"layer {layer} of mlx-lm's {self._record.name} keeps latent rows beside "
                    f"layers that see a part of the history; {_WAY_OUT}"
                )

    def _first_seen(self, mask: Any, leaf: Any, layer: int) -> tuple[int, int]:
        """Return the first positions that the two tokens see."""
        n_read = _n_read(leaf, 2)
        if mask is None or isinstance(mask, str):
            return FAR + 2 - n_read, FAR + 2 - n_read
        if id(mask) not in self._firsts:
            rows = np.array(mask).reshape(-1, mask.shape[-1])
            start = FAR + 2 - rows.shape[1]
            firsts = rows.argmax(axis=1)
            is_span = rows.shape[1] == n_read and all(
                row[first : FAR + 1 + i - start].all() and not row[FAR + 1 + i - start :].any()
                for i, (row, first) in enumerate(zip(rows, firsts, strict=True))
            )
            if mask.dtype != mx.bool_ or len(rows) != 2 or not is_span:
                raise ModelError(
                    f"layer {layer} of mlx-lm's {self._record.name} is masked by {mask.shape} of "
                    f"{mask.dtype}, which is not one stretch of the history; {_WAY_OUT}"
                )
            self._firsts[id(mask)] = int(firsts[0]) + start, int(firsts[1]) + start
        return self._firsts[id(mask)]


def _n_read(leaf: Any, n_tokens: int) -> int:
    """Return how many rows a cache of mlx-lm gives to a forward of so many tokens, far behind."""
    if isinstance(leaf, theirs.RotatingKVCache):
        return int(leaf.max_size) - 1 + n_tokens
    return FAR + n_tokens


def _kinds(record: _Record) -> tuple[Any, ...]:
    """Return the kind of each of the model's caches, nested as they are."""
    found = {
        attend.source.place: _Kind(attend.is_latent, attend.scale) for attend in record.attends
    }

    def kind(taken: Any) -> Any:
        if isinstance(taken, theirs.CacheList):
            return tuple(kind(one) for one in taken.caches)
        return found.get(record.leaves.index(taken), _Kind())

    return tuple(kind(taken) for taken in record.taken)
