"""A model of mlx-lm whose attention runs on our caches. The model's own code stays as it is.

A model calls its caches by mlx-lm's protocol: ``offset`` for the positions, ``make_mask``, and
``update_and_fetch`` with K and V. That suits one sequence. For a flat batch two things are missing,
and both come from modules that are wrapped in place, in one model and not in mlx-lm:

- The *rope* of each attention gives every token its own position, and lets the cache see the
  queries, since what a token may read cannot be said by one mask for all.
- The *output projection* takes what the cache has attended in place of what the model attends after
  it. MLX is lazy: the model's own attention, of this step's tokens alone, is never computed.

The last norm is wrapped too: it passes on the rows whose logits are wanted, so the LM head runs on
those alone. With caches of mlx-lm's own the wrapped model does what it always did.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from kvcellar.backends.mlx.caches import MlxBytes
from kvcellar.types import IntArray


class Forward:
    """One forward: what the wrapped modules and the layers' caches tell each other."""

    def __init__(self, positions: IntArray, rows: IntArray | None) -> None:
        """Of tokens at ``positions [T]``; ``rows`` as a runner takes them."""
        first, n_tok = int(positions[0]), len(positions)
        self.start: int | None = None
        """Position of the first token, where the others follow it."""
        if int(positions[-1]) == first + n_tok - 1 and (positions[1:] > positions[:-1]).all():
            self.start = first
        self.positions = positions
        self.offsets = mx.array(positions.astype("int32"))
        self.rows = mx.array([n_tok - 1] if rows is None else rows.astype("int32"))
        self.attended: mx.array | None = None
        """What a layer's cache has attended, until the output projection takes it."""


class LayerCache:
    """What a model sees as the cache of one layer, for one forward: mlx-lm's protocol."""

    def __init__(self, cache: MlxBytes, layer: int, forward: Forward, module: Any) -> None:
        """Of ``module``, the attention of ``layer``."""
        self._cache = cache
        self._layer = layer
        self._forward = forward
        self._scale = float(getattr(module, "sm_scale", None) or module.scale)
        self._sinks: mx.array | None = module.get("sinks")
        self._queries: mx.array | None = None

    @property
    def offset(self) -> LayerCache:
        """What the model hands its rope: this, which knows each token's position."""
        return self

    def rotate(self, rope: Any, x: mx.array) -> mx.array:
        """Rotate ``x [1, heads, T, dim]``, each token by its own position; queries come first."""
        forward = self._forward
        if forward.start is not None:
            x = rope(x, offset=forward.start)
        else:
            x = rope(x.swapaxes(0, 2), offset=forward.offsets).swapaxes(0, 2)
        if self._queries is None:
            self._queries = x
        return x

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """None: the cache is the mask."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store K and V, attend the queries; what is returned here is never read."""
        assert self._queries is not None, "a rotation of the queries comes before"
        self._forward.attended = self._cache.update_and_attend(
            self._queries,
            keys,
            values,
            self._forward.positions,
            self._layer,
            self._scale,
            self._queries.dtype,
            self._sinks,
        )
        return keys, values


_running = threading.local()


@contextmanager
def running(forward: Forward) -> Iterator[None]:
    """Let wrapped modules know the forward of this thread while the block lasts."""
    _running.forward = forward
    try:
        yield
    finally:
        _running.forward = None


def _current() -> Forward | None:
    return getattr(_running, "forward", None)


class PerTokenRope(nn.Module):  # type: ignore[misc, name-defined]
    """A rope that turns each token of a flat batch by its own position."""

    def __init__(self, rope: Any) -> None:
        """Around the model's own."""
        super().__init__()
        self.rope = rope

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """``x [B, heads, T, dim]``; ``offset`` is mlx-lm's, or a cache that knows positions."""
        if isinstance(offset, LayerCache):
            return offset.rotate(self.rope, x)
        out: mx.array = self.rope(x, offset=offset)
        return out


class OutputProjection(nn.Module):  # type: ignore[misc, name-defined]
    """An output projection that takes what our cache has attended, where one has."""

    def __init__(self, projection: Any) -> None:
        """Around the model's own."""
        super().__init__()
        self.projection = projection

    def __call__(self, x: mx.array) -> mx.array:
        """``[B, T, heads * dim] -> [B, T, hidden]``."""
        forward = _current()
        if forward is not None and forward.attended is not None:
            attended, forward.attended = forward.attended, None
            x = attended.swapaxes(1, 2).flatten(2)
        out: mx.array = self.projection(x)
        return out


class LastNorm(nn.Module):  # type: ignore[misc, name-defined]
    """A last norm that passes on the rows whose logits are wanted."""

    def __init__(self, norm: Any) -> None:
        """Around the model's own."""
        super().__init__()
        self.norm = norm

    def __call__(self, x: mx.array) -> mx.array:
        """``[1, T, hidden] -> [1, R, hidden]`` in a forward of ours, else all rows."""
        forward = _current()
        if forward is not None:
            x = mx.take(x, forward.rows, axis=1)
        out: mx.array = self.norm(x)
        return out


def text_model(model: Any) -> Any:
    """The part of a model of mlx-lm that has embedding, layers and last norm."""
    return getattr(model, "language_model", model).model


def wrap(model: Any) -> None:
    """Wrap a model's ropes, output projections and last norm in place."""
    inner = text_model(model)
    for layer in inner.layers:
        attention = layer.self_attn
        attention.rope = PerTokenRope(attention.rope)
        attention.o_proj = OutputProjection(attention.o_proj)
    inner.norm = LastNorm(inner.norm)


def layer_caches(model: Any, cache: MlxBytes, forward: Forward) -> list[LayerCache]:
    """What to call a wrapped model with, as its ``cache``, for one forward."""
    return [
        LayerCache(cache, layer, forward, block.self_attn)
        for layer, block in enumerate(text_model(model).layers)
    ]
