"""A forward of a model of mlx-lm, written down: its modules, its caches and its attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as theirs

from kvcellar.backends.mlx.bind.binding import Fetched, become, subclass
from kvcellar.errors import ModelError

FAR = (1 << 20) + 37
"""A position behind every window and chunk, and where no chunk begins."""

_HISTORIES = (theirs.KVCache, theirs.RotatingKVCache, theirs.ChunkedKVCache)
"""Caches of mlx-lm that keep K and V of a history."""

WAY_OUT = "load it with the backend torch, or run it with mlx-lm alone"
"""Advice for a model that cannot be served."""


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a module."""

    module: Any
    method: str
    args: tuple[Any, ...]
    out: Any = None
    parent: ModuleCall | None = None


@dataclass(slots=True, eq=False)
class Update:
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
    within: ModuleCall
    readers: list[Attend] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Attend:
    """One call of attention.

    Attributes:
        source: whose rows it reads.
        is_latent: its K and V are one array, and its mask holds the logits of the rotary part.
        mask: what it was given.
        n_heads: query heads.
        scale: factor on the logits.
        has_sinks: true if it was given sinks.
        softcap: of logits, where attention is written by hand.
        parts: of attention by hand its rope and its output projection; None: it was called for.
        within: the call of the module that attends.
    """

    source: Update
    is_latent: bool
    mask: Any
    n_heads: int = 0
    scale: float = 1.0
    has_sinks: bool = False
    softcap: float | None = None
    parts: tuple[Any, Any] | None = None
    within: ModuleCall | None = None


@dataclass(slots=True, eq=False)
class Use:
    """A use of one state: a module asked its cache for it, or gave the new one.

    Attributes:
        place: which of the model's caches.
        index: which of its arrays.
        value: what was given, ``[B, ...]``; None: it was asked for.
        within: the call of the module, a *mixer*.
    """

    place: int
    index: int
    value: Any
    within: ModuleCall


def _zeros(like: mx.array, n: int) -> mx.array:
    """Return n rows where there are fewer; nothing is allocated unless somebody reads them."""
    return mx.zeros((*like.shape[:2], n, like.shape[3]), like.dtype)


class Record:
    """A forward whose modules, caches and attention are written down."""

    def __init__(self, name: str, offset: Any, ids: mx.array) -> None:
        self.name = name
        self.offset = offset
        self.ids = ids
        self.open: list[ModuleCall] = []
        self.calls: list[ModuleCall] = []
        self.updates: list[Update] = []
        self.attends: list[Attend] = []
        self.uses: list[Use] = []
        """Uses of states, in their order."""
        self.masks: list[Any] = []
        """Masks that caches of a history made."""

        self.leaves: list[Any] = []
        """Caches that the model made for itself, one after another."""
        self.taken: list[Any] = []
        """Caches of the layers as the model returned them: lists of caches may be inside."""

    def tap(self, made: Any) -> Any:
        """Have a cache that the model made write down what it is given.

        Raises:
            ModelError: it is neither K and V of a history nor states.
        """
        if isinstance(made, theirs.CacheList):
            made = theirs.CacheList(*(self._leaf(one) for one in made.caches))  # type: ignore[no-untyped-call]
        else:
            made = self._leaf(made)
        self.taken.append(made)
        return made

    def _leaf(self, leaf: Any) -> Any:
        place = len(self.leaves)
        if type(leaf) is theirs.ArraysCache:
            return self._states(leaf, place)
        if type(leaf) not in _HISTORIES:
            raise ModelError(
                f"a layer of mlx-lm's {self.name} keeps a {type(leaf).__name__}, which is neither "
                f"K and V of a history nor states; {WAY_OUT}"
            )
        leaf.offset = self.offset
        is_far = isinstance(self.offset, int)

        def update_and_fetch(own: Any, keys: mx.array, values: mx.array) -> Fetched:
            n = n_read(own, keys.shape[2])
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

    def _states(self, leaf: Any, place: int) -> Any:
        """Have a cache of states write down who uses which."""

        def get(own: Any, index: int) -> Any:
            value = theirs.ArraysCache.__getitem__(own, index)  # type: ignore[no-untyped-call]
            self.uses.append(Use(place, index, None, self.open[-1]))
            return value

        def put(own: Any, index: int, value: Any) -> None:
            theirs.ArraysCache.__setitem__(own, index, value)  # type: ignore[no-untyped-call]
            self.uses.append(Use(place, index, value, self.open[-1]))

        leaf.__class__ = subclass(type(leaf), {"__getitem__": get, "__setitem__": put})
        self.leaves.append(leaf)
        return leaf

    def _masking(self, make: Any) -> Any:
        def make_mask(own: Any, *args: Any, **kwargs: Any) -> Any:
            mask = make(own, *args, **kwargs)
            self.masks.append(mask)
            return mask

        return make_mask

    def update(self, place: int, keys: mx.array, values: mx.array, given: Fetched) -> Fetched:
        """Write down what a cache was given, and return what it gives back."""
        within = self.open[-1]
        self.updates.append(Update(place, keys, values, given, len(self.calls), within))
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
        """Write down a call of attention, as :class:`Attending` takes it; return zeros.

        Raises:
            ModelError: its K and V are not what a cache gave.
        """
        found = self._reading(keys, values, mask)
        found.n_heads, found.scale = queries.shape[1], float(scale)
        found.has_sinks = sinks is not None
        found.within = self.open[-1]
        found.source.readers.append(found)
        self.attends.append(found)
        return mx.zeros((*queries.shape[:-1], values.shape[-1]), dtype=queries.dtype)

    def _reading(self, keys: mx.array, values: mx.array, mask: Any) -> Attend:
        """Return what K and V of an attention are: of which layer, in which form.

        Raises:
            ModelError: they are not what a cache gave.
        """
        for update in reversed(self.updates):
            if keys is update.given[0] and values is update.given[1]:
                return Attend(update, is_latent=False, mask=mask)
            if values is keys is update.given[0] and mask is not None:
                return Attend(update, is_latent=True, mask=mask)
        last = self.updates[-1] if self.updates else None
        if last is not None and not last.readers:
            if values is last.given[1] and keys.shape == last.given[0].shape:  # a cast of them
                return Attend(last, is_latent=False, mask=mask)
            if isinstance(self.offset, int):  # for several tokens, latent rows are expanded
                return Attend(last, is_latent=True, mask=None)
        raise ModelError(
            f"mlx-lm's {self.name} attends K and V that are not what its cache gave it, so a "
            f"cache that keeps rows cannot serve it; {WAY_OUT}"
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
                    f"{update.keys.shape[1:]} that no attention reads; {WAY_OUT}"
                )
            masks = [a for a in update.within.args if any(a is mask for mask in self.masks)]
            softcap = getattr(module, "attn_logit_softcapping", None)
            found = Attend(
                update,
                is_latent=False,
                mask=masks[0] if masks else None,
                n_heads=queries[0].out.shape[1],
                scale=float(scale),
                softcap=softcap,
                parts=(ropes[0], after[0].module),
                within=update.within,
            )
            update.readers.append(found)
            self.attends.append(found)


@contextlib.contextmanager
def traced(model: Any, record: Record) -> Iterator[None]:
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


def _telling(base: type, name: str, record: Record) -> Any:
    own = getattr(base, name)

    def tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        parent = record.open[-1] if record.open else None
        call = ModuleCall(self, name, (*args, *kwargs.values()), parent=parent)
        record.open.append(call)
        try:
            call.out = own(self, *args, **kwargs)
        finally:
            record.open.pop()
        record.calls.append(call)
        return call.out

    return tell


def n_read(leaf: Any, n_tokens: int) -> int:
    """Return how many rows a cache of mlx-lm gives to a forward of so many tokens, far behind."""
    if isinstance(leaf, theirs.RotatingKVCache):
        return int(leaf.max_size) - 1 + n_tokens
    return FAR + n_tokens
