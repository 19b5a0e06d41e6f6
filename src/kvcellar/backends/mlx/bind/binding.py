"""A model of mlx-lm whose attention runs on our caches. The model's own code stays as it is.

mlx-lm's models take many sequences at a time as a batch, with one offset for each. So a flat batch
of T tokens goes through a model as T sequences of one token: its ropes turn every token by its own
position, and nothing in it needs to know whose token is whose.

What the attention of a token reads is the cache's to say. A model hands queries and what its cache
gave it to ``scaled_dot_product_attention``, a global name in the module that defines its attention.
The methods that use that name are bound again, in one model and not in mlx-lm, with a function of
the same name that asks the cache of the forward that runs in this thread. Without such a forward it
is mlx-lm's own, so a bound model does with caches of mlx-lm's what it always did.

The layer that computes the logits is bound as well: it runs on the rows that are wanted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from kvcellar.backends.mlx.bind.mixing import Batches, MixerCache, batches_of, mixing
from kvcellar.backends.mlx.bind.state_layers import StateLayer
from kvcellar.backends.mlx.cache.caches import MlxCache
from kvcellar.backends.mlx.cache.state_pools import StatePools
from kvcellar.errors import ConfigError
from kvcellar.states import StatePlan
from kvcellar.types import IntArray

ATTENTION = "scaled_dot_product_attention"
"""The name by which mlx-lm's models call for attention."""

Fetched = tuple[mx.array, mx.array]
"""K and V ``[T, n_kv_heads, 1, dim]`` of this forward's tokens, as a model gave them."""


class Attending(Protocol):
    """Protocol of a forward that is asked to attend in place of mlx-lm."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend as mlx-lm's function of that name."""
        ...


_running = threading.local()


class Running:
    """Lets bound modules know the forward of this thread while a ``with`` lasts."""

    __slots__ = ("_forward",)

    def __init__(self, forward: Attending) -> None:
        """Mark the attention of this forward."""
        self._forward = forward

    def __enter__(self) -> None:
        """Make this the forward that the modules of this thread run in."""
        _running.forward = self._forward

    def __exit__(self, *error: object) -> None:
        """Leave the forward."""
        _running.forward = None


class Forward:
    """State that bound modules and the layers' caches share during a forward.

    Attributes:
        offsets: ``[T]`` positions, as ropes take them.
        rows: ``[R]`` tokens whose logits are wanted; None: of one token, its own.
        wanted: layers whose inputs are to be kept.
        hidden: what logits are made of, ``[R, 1, hidden]``.
        inputs: what was kept, ``[T, 1, hidden]`` by layer.
    """

    def __init__(self, cache: MlxCache) -> None:
        """Serve attention from a session's cache."""
        self._cache = cache
        self._fetched: dict[int, tuple[Fetched, bool]] = {}
        self._last: tuple[Fetched, bool] | None = None
        self._turned: list[mx.array] = []
        self._attended: mx.array | None = None
        self._layer = 0
        self._state_plan: StatePlan | None = None
        self._batches: Batches | None = None
        self._state_caches: list[MixerCache] = []
        self.wanted: tuple[int, ...] = ()
        self.inputs: dict[int, mx.array] = {}
        self.hidden: mx.array | None = None

    def begin(self, positions: IntArray, rows: IntArray | None) -> None:
        """Begin a forward of tokens at ``positions [T]``; ``rows`` as a runner takes them."""
        self._positions = positions
        self.offsets = mx.array(positions.astype("int32"))
        n_tokens = len(positions)
        if rows is None:
            self.rows = None if n_tokens == 1 else mx.array([n_tokens - 1])
        else:
            self.rows = mx.array(rows)
        self.end()

    def end(self) -> None:
        """Let go of what the modules left, also after a failure."""
        self._layer = 0
        self._fetched.clear()
        self._turned.clear()
        self._attended = None
        for cache in self._state_caches:
            cache.end()

    def fetch(self, keys: mx.array, values: mx.array, *, is_latent: bool) -> Fetched:
        """Take K and V of a layer; return what the model hands on to attention.

        A latent layer multiplies its rotary queries with what it gets for rotary keys, to make the
        mask of its attention. It gets the identity, so the mask is those queries.
        """
        given = (keys, mx.eye(values.shape[-1], dtype=values.dtype)[None, None])
        handed = given if is_latent else (keys, values)
        self._last = self._fetched[id(keys)] = (keys, values), is_latent
        return handed

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """Store the K and V that were fetched and attend over the history of each token.

        Args:
            queries: ``[T, n_heads, 1, head_dim]``.
            keys: as ``fetch`` gave them, of this layer or of an earlier one that it shares; or
                this layer's in another type.
            values: the same.
            scale: factor on the logits.
            mask: of a latent layer its rotary queries, already scaled; else not looked at.
            sinks: ``[n_heads]``, or None.

        Returns:
            ``[T, n_heads, 1, v_head_dim]``.
        """
        found = self._fetched.get(id(keys), self._last)
        assert found is not None, "keys come from a cache"
        (k, v), is_latent = found
        if is_latent:
            k, v = v, k
            queries, scale = mx.concatenate([queries * scale, mask], axis=-1), 1.0
        layer, self._layer = self._layer, self._layer + 1
        q, k, v = (x.swapaxes(0, 2) for x in (queries, k, v))
        out = self._cache.update_and_attend(
            q, k, v, self._positions, layer, float(scale), q.dtype, sinks
        )
        return out.swapaxes(0, 2)

    # Recurrent layers ----------------------------------------------------------------------------

    def state_cache(self, layer: int, states: StateLayer) -> MixerCache:
        """Make what stands in for the cache of recurrent layer ``layer``."""
        made = MixerCache(self, layer, states)
        self._state_caches.append(made)
        return made

    def batches(self, layer: int) -> Batches:
        """Return the batches in which a recurrent layer's mixers run: the same for all layers."""
        plan = self._cache.plan_states(layer, len(self._positions), self._positions)
        if self._batches is None or plan is not self._state_plan:
            self._state_plan, self._batches = plan, batches_of(plan)
        return self._batches

    def wrote_states(self, layer: int) -> None:
        """Note that a recurrent layer has given all its states."""
        self._cache.wrote_states(layer)

    @property
    def state_pools(self) -> StatePools:
        """The pools of the session."""
        pools = self._cache.pools.states
        assert pools is not None, "the session's cache has a state group"
        return pools

    # Attention that a model writes out by hand ---------------------------------------------------

    def turned(self, x: mx.array) -> None:
        """Note what a rope gave: queries are found among it."""
        self._turned.append(x)

    def attend_by_hand(self, keys: mx.array, values: mx.array, scale: float) -> None:
        """Attend the queries that were turned with these keys; the projection takes the result."""
        queries = next(x for x in self._turned if x is not keys)
        self._turned.clear()
        self.fetch(keys, values, is_latent=False)
        self._attended = self.attend(queries, keys, values, scale, None, None)

    def projected(self, x: mx.array) -> mx.array:
        """Return what an output projection is to take in place of ``x [T, 1, n_heads * dim]``."""
        attended, self._attended = self._attended, None
        return x if attended is None else attended.swapaxes(1, 2).flatten(2)


class LayerCache:
    """Cache of one layer as a model sees it: mlx-lm's protocol, for a flat batch."""

    __slots__ = ("_forward", "_held", "_is_latent", "_scale")

    start_position = 0
    """The first position that is held, for models that make masks of their own."""

    def __init__(self, forward: Forward, *, is_latent: bool, scale: float | None) -> None:
        """Stand in for the cache of one layer.

        Args:
            forward: the forwards of a session.
            is_latent: the layer keeps a latent row and a rotary row.
            scale: of attention that the layer writes out by hand; None: it calls for it.
        """
        self._forward = forward
        self._is_latent = is_latent
        self._scale = scale
        self._held: Fetched | None = None

    @property
    def offset(self) -> mx.array:
        """Position of each token ``[T]``."""
        return self._forward.offsets

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """None: the cache is the mask."""

    def maybe_trim_front(self) -> None:
        """Do nothing: what is behind a chunk is the cache's to let go of."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Fetched:
        """Take K and V ``[T, n_kv_heads, 1, dim]``, which attention stores."""
        if self._scale is not None:
            self._forward.attend_by_hand(keys, values, self._scale)
            return keys, values
        self._held = self._forward.fetch(keys, values, is_latent=self._is_latent)
        return self._held

    def keys_and_values(self) -> Fetched:
        """Return what was fetched last, for a layer that shares it."""
        assert self._held is not None, "the layer that stores them comes before"
        return self._held


def _current() -> Any:
    return getattr(_running, "forward", None)


def _attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend as mlx-lm's function, on the cache of the forward of this thread where one runs."""
    forward = _current()
    if forward is None:
        own: mx.array = scaled_dot_product_attention(
            queries, keys, values, cache, scale, mask, sinks
        )
        return own
    out: mx.array = forward.attend(queries, keys, values, scale, mask, sinks)
    return out


# Classes of bound modules ------------------------------------------------------------------------


def _class(module: object) -> Any:
    return type(module)


def become(module: Any, made: type) -> None:
    """Make a module an object of a subclass of its class, its weights untouched."""
    object.__setattr__(module, "__class__", made)


def subclass(base: type, methods: Mapping[str, Any]) -> type:
    """Make a subclass of the same name."""
    return type(base.__name__, (base,), {"__module__": base.__module__, **methods})


@functools.cache
def _attending(base: type) -> type | None:
    """Return a subclass whose attention is ours; None: the class calls for none."""
    names = {name for owner in base.__mro__ for name in vars(owner)}
    found = {name: getattr(base, name) for name in names}
    methods = {
        name: made
        for name, method in found.items()
        if isinstance(method, FunctionType) and (made := _rebound(method)) is not None
    }
    return subclass(base, methods) if methods else None


class _Counting:
    """MLX, for methods that count positions from a cache's offset: one count per sequence."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def arange(self, *args: Any, **kwargs: Any) -> mx.array:
        """Return ``mx.arange``; of offsets ``[T]`` the positions ``[T, 1, 1]`` of one token each.

        So many axes, and one that a model adds, stand for sequences, heads and tokens.
        """
        counted = [arg for arg in args if isinstance(arg, mx.array) and arg.ndim]
        return counted[0][:, None, None] if counted else mx.arange(*args, **kwargs)


_OURS: dict[str, tuple[Any, Any]] = {
    ATTENTION: (scaled_dot_product_attention, _attention),
    "mx": (mx, _Counting()),
}
"""Global names of mlx-lm's modules -> what they stand for there, and in a bound method."""


def _rebound(method: FunctionType) -> FunctionType | None:
    """Return a function of the same code with names of ours; None: it has no need of them."""
    used = method.__code__.co_names
    wanted = [ATTENTION] * (ATTENTION in used) + ["mx"] * ("arange" in used)
    names = {
        name: ours
        for name in wanted
        for theirs, ours in [_OURS[name]]
        if method.__globals__.get(name) is theirs
    }
    if not names:
        return None
    made = FunctionType(
        method.__code__,
        {**method.__globals__, **names},
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    made.__kwdefaults__ = method.__kwdefaults__
    return made


@functools.cache
def _selecting(base: type, name: str) -> type:
    """Return a subclass whose method ``name`` runs on the wanted rows alone."""
    own = getattr(base, name)

    def on_rows(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        forward = _current()
        if forward is not None and forward.rows is not None:
            x = mx.take(x, forward.rows, axis=0)
        if forward is not None:
            forward.hidden = x
        out: mx.array = own(self, x, *args, **kwargs)
        return out

    return subclass(base, {name: on_rows})


@functools.cache
def _keeping(base: type, layer: int) -> type:
    """Return a subclass that keeps what it is given, where the forward wants it."""
    own: Any = base.__call__

    def keep(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        forward = _current()
        if forward is not None and layer in forward.wanted:
            forward.inputs[layer] = x
        out = own(self, x, *args, **kwargs)
        if forward is not None and layer + 1 in forward.wanted:
            forward.inputs[layer + 1] = out[0] if isinstance(out, tuple) else out
        return out

    return subclass(base, {"__call__": keep, "kept_layer": layer})


@functools.cache
def _turning(base: type) -> type:
    """Return a subclass of a rope that tells the forward what it gave."""
    own: Any = base.__call__

    def turn(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        out: mx.array = own(self, *args, **kwargs)
        forward = _current()
        if forward is not None:
            forward.turned(out)
        return out

    return subclass(base, {"__call__": turn})


@functools.cache
def _projecting(base: type) -> type:
    """Return a subclass of a projection that takes what the forward has attended."""
    own: Any = base.__call__

    def project(self: Any, x: mx.array) -> mx.array:
        forward = _current()
        out: mx.array = own(self, x if forward is None else forward.projected(x))
        return out

    return subclass(base, {"__call__": project})


def bind_attention(model: Any) -> None:
    """Have all modules of a model that call for attention ask the forward of their thread."""
    for module in model.modules():
        made = _attending(_class(module))
        if made is not None:
            become(module, made)


@functools.cache
def _mixing(base: type) -> type:
    """Return a subclass of a mixer that is run for some sequences at a time."""
    return subclass(base, mixing(base))


def bind_mixers(mixers: Iterable[Any]) -> None:
    """Have the modules that use states be run for the sequences of a batch at a time."""
    for module in mixers:
        become(module, _mixing(_class(module)))


def bind_by_hand(rope: Any, projection: Any) -> None:
    """Bind the rope and the output projection of attention that is written out by hand."""
    become(rope, _turning(_class(rope)))
    become(projection, _projecting(_class(projection)))


def bind_head(head: Any, method: str) -> None:
    """Have the module that makes logits, by this method, run on the wanted rows."""
    become(head, _selecting(_class(head), method))


def bind_features(model: Any, layers: Iterable[int]) -> None:
    """Have some layers keep what they are given; the number of layers is the last one's output.

    Raises:
        ConfigError: the model's layers are not one after another.
    """
    blocks: Sequence[Any] = model.layers
    for layer in {min(layer, len(blocks) - 1) for layer in layers}:
        kept = getattr(type(blocks[layer]), "kept_layer", None)
        if kept is None:
            become(blocks[layer], _keeping(_class(blocks[layer]), layer))
        elif kept != layer:
            raise ConfigError(
                f"the model's layers {kept} and {layer} are one module, which cannot tell their "
                f"inputs apart; run it without features"
            )
