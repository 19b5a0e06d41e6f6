"""Our caches for users of mlx-lm: in place of ``mlx_lm.models.cache.make_prompt_cache``.

::

    from mlx_lm import generate, load
    from kvcellar.integrations.mlx_lm import make_prompt_cache

    model, tokenizer = load("mlx-community/gemma-3-4b-it-4bit")
    cache = make_prompt_cache(model, kv_dtype="int8")
    generate(model, tokenizer, prompt="...", prompt_cache=cache)

The model needs no change. What is different: K and V may be quantised from the first token on,
windows can be cut back by ``rollback`` tokens where mlx-lm's rotating caches refuse, and a cache
that is full says so and forgets nothing. Files are those of mlx-lm, both ways.

States of recurrent layers (hybrid models) stay in mlx-lm's own ``ArraysCache``. They cannot be cut
back, so the cache of such a model says that it cannot be trimmed, and is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as theirs
from mlx_lm.models.base import create_causal_mask

from kvcellar.backends.mlx.cache.attention import joined
from kvcellar.backends.mlx.cache.codecs import FLOAT_DTYPES, Quantised, Stored
from kvcellar.backends.mlx.cache.run import MlxRunCache
from kvcellar.cache_config import make_config
from kvcellar.errors import ConfigError, RewindError
from kvcellar.kv_dtype import GROUP_SIZES, KvDtype
from kvcellar.types import LayerGroup, ModelCacheParams

__all__ = ["load_prompt_cache", "make_prompt_cache", "save_prompt_cache"]

MOST_TOKENS = 1 << 20
"""The most tokens where neither the caller nor the model says; memory grows with use."""

save_prompt_cache = theirs.save_prompt_cache
"""mlx-lm's own: it saves our caches as well, and what it writes mlx-lm alone reads too."""


def make_prompt_cache(
    model: Any,
    capacity: int | None = None,
    *,
    kv_dtype: str | None = None,
    rollback: int = 64,
) -> list[Any]:
    """Make a cache of ours for ``mlx_lm.generate``, ``stream_generate`` and ``generate_step``.

    Args:
        model: of mlx-lm. Its attention layers are those that it makes caches for itself.
        capacity: the most tokens; None: as many as the model was made for. A full cache raises, it
            does not forget.
        kv_dtype: how K and V are stored (``int8``, ``k8v4``, ``int4:rot:first4:last64`` ...); None:
            as the model computes them.
        rollback: by how many tokens the layers with a window can be cut back.

    Returns:
        One cache per layer, as mlx-lm makes them, lists of several where a layer has those. Those
        of attention all share one.

    Raises:
        ConfigError: layers that keep something other than K and V of one sequence or states, or no
            layer that attends, or no such ``kv_dtype``.
    """
    tried = theirs.make_prompt_cache(model)
    leaves = list(_leaves(tried))
    for leaf in leaves:
        if type(leaf) not in (theirs.KVCache, theirs.RotatingKVCache, theirs.ArraysCache):
            raise ConfigError(
                f"a layer of this model keeps a {type(leaf).__name__}, which is neither K and V of "
                f"a history nor states; use mlx-lm's own make_prompt_cache for it"
            )
    made = [leaf for leaf in leaves if type(leaf) is not theirs.ArraysCache]
    if not made:
        raise ConfigError(
            "no layer of this model keeps K and V of a history; use mlx-lm's own "
            "make_prompt_cache for it"
        )
    model(mx.zeros((1, 1), dtype=mx.int32), cache=tried)  # lazy: shapes are known, nothing is run
    windows = [getattr(layer, "max_size", None) for layer in made]
    shapes = [(layer.keys.shape, layer.values.shape) for layer in made]
    stored = next(n for n, dtype in FLOAT_DTYPES.items() if dtype == made[0].keys.dtype)
    layers: dict[Any, list[int]] = {}
    for index, (window, (k, v)) in enumerate(zip(windows, shapes, strict=True)):
        layers.setdefault((k[1], k[3], v[3], window), []).append(index)
    groups = tuple(LayerGroup(tuple(found), *facts) for facts, found in layers.items())
    params = ModelCacheParams(len(made), groups=groups)
    made_for = getattr(getattr(model, "args", None), "max_position_embeddings", None)
    config = make_config(
        params,
        capacity or made_for or MOST_TOKENS,
        kv_dtype or stored,
        window_slack=rollback,
    )
    shared = MlxRunCache(config)
    of_layer = [shared.steps.groups[shared.steps.group_of(index)] for index in range(len(made))]
    ours = iter(
        _layer_class(group, config.kv)(shared, index, stored, has_states=len(made) < len(leaves))
        for index, group in enumerate(of_layer)
    )
    return [_with_ours(one, ours) for one in theirs.make_prompt_cache(model)]


def load_prompt_cache(
    file_name: str | Path,
    model: Any,
    return_metadata: bool = False,
    **options: Any,
) -> Any:
    """Make a cache of ours from a file that mlx-lm's ``save_prompt_cache`` wrote.

    Args:
        file_name: the ``.safetensors`` file.
        model: that it is for.
        return_metadata: return the file's metadata too.
        options: as ``make_prompt_cache`` takes them.

    Returns:
        The cache, or (cache, metadata).

    Raises:
        ConfigError: it is of a model with other layers, or of a cache with a hole in its history.
        RewindError: it lacks tokens that a layer of this model attends.
        CacheFullError: it holds more than ``capacity``.
    """
    load: Any = theirs.load_prompt_cache
    found, metadata = load(str(file_name), return_metadata=True)
    cache = make_prompt_cache(model, **options)
    theirs_and_ours = list(zip(_leaves(found), _leaves(cache), strict=False))
    if len(found) != len(cache) or any(
        (type(old) is theirs.ArraysCache) != (type(new) is theirs.ArraysCache)
        for old, new in theirs_and_ours
    ):
        raise ConfigError(
            f"{file_name} has {len(found)} layers and this model {len(cache)}, or of other kinds; "
            f"load it with the model that it was made with"
        )
    for old, new in theirs_and_ours:
        if type(new) is theirs.ArraysCache:
            new.state = old.state
    histories = [(old, new) for old, new in theirs_and_ours if isinstance(new, _Layer)]
    if histories[0][0].offset:
        shared: MlxRunCache = histories[0][1]._shared
        rows = [_in_order(old, new._window, str(file_name)) for old, new in histories]
        shared.adopt_rows(histories[0][0].offset, rows)
    return (cache, metadata) if return_metadata else cache


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """Yield caches, in place of lists of them what is inside."""
    for one in caches:
        if isinstance(one, theirs.CacheList):
            yield from _leaves(one.caches)
        else:
            yield one


def _with_ours(one: Any, ours: Iterator[_Layer]) -> Any:
    """Return a cache of a model with the next of ours in place of each that keeps K and V."""
    if isinstance(one, theirs.CacheList):
        return theirs.CacheList(*(_with_ours(leaf, ours) for leaf in one.caches))  # type: ignore[no-untyped-call]
    return one if type(one) is theirs.ArraysCache else next(ours)


class _Layer(theirs._BaseCache):
    """One layer's view of a cache that all layers share: mlx-lm's protocol."""

    step = 256
    """Tokens by which mlx-lm's caches grow; ours double."""

    def __init__(self, shared: MlxRunCache, layer: int, dtype: str, *, has_states: bool) -> None:
        self._shared = shared
        self._layer = layer
        self._dtype = dtype
        self._has_states = has_states

    @property
    def offset(self) -> int:
        """Tokens that this layer holds."""
        return self._shared.length_in(self._layer)

    @property
    def _window(self) -> int | None:
        return self._shared.steps.groups[self._shared.steps.group_of(self._layer)].window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store ``[1, n_kv_heads, T, dim]``; return what the T queries read together."""
        return self._shared.update_run(self._layer, keys, values)

    def make_mask(
        self,
        N: int,  # noqa: N803
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        """Return the mask of the next N tokens, over what ``update_and_fetch`` will return.

        Each token sees the last ``window_size`` ones, itself among them, of those that the layer
        keeps; None: all that it keeps.
        """
        own = self._window
        held = self.offset if own is None else min(self.offset, own - 1)
        window = min((w for w in (own, window_size) if w is not None), default=None)
        if window is not None and held + N > window:
            return create_causal_mask(N, held, window_size=window)
        if return_array:
            return create_causal_mask(N, held)
        return None if N == 1 else "causal"

    @property
    def bits(self) -> int:
        """Not there: by it mlx-lm's attention would take K and V for packed ones.

        Raises:
            NoBitsError: always; it is an AttributeError, so ``hasattr`` says no.
        """
        raise NoBitsError(
            "our caches give the model K and V as numbers, however they are stored; kv_dtype of "
            "make_prompt_cache says in how many bits that is"
        )

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Refuse: what is stored stays as it is.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"a cache of ours has K and V of the bits that it was made with; give "
            f"make_prompt_cache(model, kv_dtype='int{bits}') in place of kv_bits"
        )

    def is_trimmable(self) -> bool:
        """Return false if the model has states, which cannot follow; how far, ``trim`` says."""
        return not self._has_states

    def trim(self, n: int) -> int:
        """Cut back by ``n`` tokens, in all layers that are still longer; returns how many.

        Raises:
            RewindError: a window has let go of what it would need, or recurrent layers have states
                that cannot be cut back; nothing was changed.
        """
        n = min(self.offset, n)
        if n and self._has_states:
            raise RewindError(
                f"trim({n}): the states of this model's recurrent layers cannot be cut back; make "
                f"a new cache and read the text again"
            )
        if not self._layer:
            self._shared.rewind(self._shared.check_resume(self.offset - n, "trim"))
        return n

    def size(self) -> int:
        """Tokens that the layer can still attend."""
        return self.offset if self._window is None else min(self.offset, self._window)

    def empty(self) -> bool:
        """Return true if there are no tokens."""
        return not self.offset

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated for this layer."""
        return self._shared.pools.of_layer[self._layer].size_bytes

    @property
    def keys(self) -> mx.array | None:
        """K of the tokens that can still be attended, as the model computes it."""
        return self._numbers_of(0)

    @property
    def values(self) -> mx.array | None:
        """V of the same."""
        return self._numbers_of(1)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """Make a batch of mlx-lm's own, with copies of what these hold: for ``batch_generate``."""
        return theirs.BatchKVCache.merge(caches)  # type: ignore[no-untyped-call]

    def _numbers_of(self, side: int) -> mx.array | None:
        n = self.size()
        return joined([self._last(n)[side]], FLOAT_DTYPES[self._dtype]) if n else None

    def _last(self, n: int) -> tuple[Stored, Stored]:
        return self._shared.read_last(self._layer, n)


class NoBitsError(ConfigError, AttributeError):
    """A cache of ours has no attribute ``bits``."""


class KVCache(_Layer):
    """A layer that sees all of the history. Named as mlx-lm's, so that its files name it so."""

    @property  # type: ignore[misc]
    def state(self) -> Any:
        """State as mlx-lm's class of this name has it: K, V and the length."""
        n = self.offset
        return (*(map(_numbers, self._last(n)) if n else (None, None)), n)


class QuantizedKVCache(_Layer):
    """Layer whose K and V have as many bits in the same groups, which mlx-lm can read."""

    @property
    def group_size(self) -> int:
        """Numbers that share a scale."""
        group = self._shared.steps.groups[self._shared.steps.group_of(self._layer)]
        return self._shared.config.kv.k.group_of(group.head_dim)

    @property  # type: ignore[misc]
    def state(self) -> Any:
        """State as mlx-lm's class has it: packed K and V, length, group size and bits."""
        n = self.offset
        sides = [s for s in self._last(n) if isinstance(s, Quantised)]
        k, v = ([s.packed, s.scales, s.biases] for s in sides)
        return k, v, n, sides[0].group_size, sides[0].bits


class RotatingKVCache(_Layer):
    """A layer with a window. Named as mlx-lm's, so that its files name it so."""

    keep = 0
    """First tokens that stay whatever the window: none, the window is all that is seen."""

    def make_mask(  # type: ignore[override]
        self,
        N: int,  # noqa: N803
        window_size: int | None = None,
        return_array: bool = False,
    ) -> Any:
        """Make a mask as without a window; the arguments' order is that of mlx-lm's class."""
        return super().make_mask(N, return_array, window_size)

    @property
    def max_size(self) -> int:
        """The window."""
        assert self._window is not None
        return self._window

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """Make a batch as a layer without a window does."""
        return theirs.BatchRotatingKVCache.merge(caches)  # type: ignore[no-untyped-call]

    def _temporal_order(self, rows: mx.array) -> mx.array:
        return rows

    @property  # type: ignore[misc]
    def state(self) -> Any:
        """State as mlx-lm's class of this name has it, in the order of time."""
        window, n = self.max_size, self.offset
        held = min(self._shared.held(self._layer), window)
        k, v = map(_numbers, self._last(held)) if n else (None, None)
        return k, v, n, 0, window, held


def _numbers(rows: Stored) -> mx.array:
    return rows.numbers(mx.float16) if isinstance(rows, Quantised) else rows


def _layer_class(group: LayerGroup, kv: KvDtype) -> type[_Layer]:
    """Return the class that has the name of mlx-lm's for a layer of this group."""
    if group.window is not None:
        return RotatingKVCache
    sizes = {
        (side.name, side.group_of(dim))
        for side, dim in ((kv.k, group.head_dim), (kv.v, group.v_head_dim))
        if side.is_quantised
    }
    is_plain = not (kv.k.is_rotated or kv.exact_first or kv.exact_last)
    if is_plain and kv.k.is_quantised and kv.v.is_quantised and len(sizes) == 1:
        return QuantizedKVCache if sizes.pop()[1] in GROUP_SIZES else KVCache
    return KVCache


def _in_order(layer: Any, window: int | None, name: str) -> tuple[mx.array, mx.array]:
    """K and V of the last tokens that a cache of mlx-lm holds, oldest first."""
    sides: list[mx.array] = []
    for side in (layer.keys, layer.values):
        if isinstance(layer, theirs.RotatingKVCache):
            if layer.keep and layer.offset > layer.max_size:
                raise ConfigError(
                    f"{name} holds the first {layer.keep} tokens and the last ones, and not those "
                    f"between; a history with a hole cannot go on exactly"
                )
            rows = layer._temporal_order(side)  # type: ignore[no-untyped-call]
        elif isinstance(layer, theirs.QuantizedKVCache):
            dim = side[1].shape[-1] * layer.group_size
            rows = Quantised(side[0], side[1], side[2], dim, layer.bits).numbers(mx.float32)
            rows = rows[:, :, : layer.offset]
        elif isinstance(layer, theirs.KVCache):
            rows = side[:, :, : layer.offset]
        else:
            raise ConfigError(f"{name} holds a {type(layer).__name__}, which is not K and V alone")
        sides.append(rows if window is None else rows[:, :, -window:])
    return sides[0], sides[1]
