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
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from kvcellar.backends.mlx.caches import MlxCache
from kvcellar.types import IntArray


class Forward:
    """State that wrapped modules and the layers' caches share during a forward.

    Attributes:
        positions: ``[T]``, of the flat batch.
        start: position of the first token, where the others follow it; else None.
        offsets: the positions as the rope takes them, where they do not.
        rows: ``[R]`` tokens whose logits are wanted; None: of one token, its own.
        attended: what a layer's cache has attended, until the output projection takes it.
        wanted: layers whose inputs are to be kept.
        inputs: what was kept, ``[1, T, hidden]`` by layer.
    """

    __slots__ = ("attended", "inputs", "offsets", "positions", "rows", "start", "wanted")

    positions: IntArray
    start: int | None
    offsets: mx.array | None
    rows: mx.array | None
    attended: mx.array | None

    def __init__(self) -> None:
        """Keeps no inputs."""
        self.wanted: tuple[int, ...] = ()
        self.inputs: dict[int, mx.array] = {}

    def begin(self, positions: IntArray, rows: IntArray | None) -> None:
        """Begin a forward of tokens at ``positions [T]``; ``rows`` as a runner takes them."""
        n_tok = len(positions)
        self.positions, self.attended = positions, None
        self.rows = self.offsets = None
        if n_tok == 1 and rows is None:
            self.start = int(positions[0])
            return
        self.rows = mx.array([n_tok - 1]) if rows is None else mx.array(rows)
        if (positions[1:] - positions[:-1] == 1).all():
            self.start = int(positions[0])
        else:
            self.start, self.offsets = None, mx.array(positions.astype("int32"))


class LayerCache:
    """Cache of one layer as a model sees it: mlx-lm's protocol, for a flat batch."""

    __slots__ = ("_cache", "_forward", "_layer", "_queries", "_scale", "_sinks")

    def __init__(self, cache: MlxCache, layer: int, forward: Forward, module: Any) -> None:
        """Stand in for the cache of one layer, whose attention is ``module``."""
        self._cache = cache
        self._layer = layer
        self._forward = forward
        self._scale = float(getattr(module, "sm_scale", None) or module.scale)
        self._sinks: mx.array | None = module.get("sinks")
        self._queries: mx.array | None = None

    @property
    def offset(self) -> LayerCache:
        """Offset for the model's rope: this object, which knows each token's position."""
        return self

    def rotate(self, rope: Any, x: mx.array) -> mx.array:
        """Rotate ``x [1, heads, T, dim]``, each token by its own position; queries come first."""
        forward = self._forward
        if forward.offsets is None:
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
        queries, self._queries = self._queries, None
        assert queries is not None, "a rotation of the queries comes before"
        self._forward.attended = self._cache.update_and_attend(
            queries,
            keys,
            values,
            self._forward.positions,
            self._layer,
            self._scale,
            queries.dtype,
            self._sinks,
        )
        return keys, values

    def forget(self) -> None:
        """Let go of what a forward that raised has left."""
        self._queries = None


_running = threading.local()


class Running:
    """Lets wrapped modules know the forward of this thread while a ``with`` lasts."""

    __slots__ = ("_forward",)

    def __init__(self, forward: Forward) -> None:
        """Mark the attention of this forward."""
        self._forward = forward

    def __enter__(self) -> None:
        """Make this the forward that the layers of this thread run in."""
        _running.forward = self._forward

    def __exit__(self, *error: object) -> None:
        """Leave the forward."""
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
        """Rotate ``x [B, heads, T, dim]``; ``offset``: an int, or a cache that knows positions."""
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
        """Project ``[B, T, heads * dim] -> [B, T, hidden]``."""
        forward = _current()
        if forward is not None and forward.attended is not None:
            attended, forward.attended = forward.attended, None
            x = attended.swapaxes(1, 2).flatten(2)
        out: mx.array = self.projection(x)
        return out


class LastNorm(nn.Module):  # type: ignore[misc, name-defined]
    """A last norm that passes on the rows whose logits are wanted."""

    def __init__(self, norm: Any, n_layers: int) -> None:
        """Around the model's own, behind so many layers."""
        super().__init__()
        self.norm = norm
        self.n_layers = n_layers

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise ``[1, T, hidden] -> [1, R, hidden]`` in a forward of ours, or all rows."""
        forward = _current()
        if forward is not None and self.n_layers in forward.wanted:
            forward.inputs[self.n_layers] = x
        if forward is not None and forward.rows is not None:
            x = mx.take(x, forward.rows, axis=1)
        out: mx.array = self.norm(x)
        return out


class FirstNorm(nn.Module):  # type: ignore[misc, name-defined]
    """The first norm of a layer, which sees what the layer is given."""

    def __init__(self, norm: Any, layer: int) -> None:
        """Around the model's own, of ``layer``."""
        super().__init__()
        self.norm = norm
        self.layer = layer

    def __call__(self, x: mx.array) -> mx.array:
        """Run ``[1, T, hidden] -> [1, T, hidden]``."""
        forward = _current()
        if forward is not None and self.layer in forward.wanted:
            forward.inputs[self.layer] = x
        out: mx.array = self.norm(x)
        return out


def text_model(model: Any) -> Any:
    """Return the part of a model of mlx-lm that has embedding, layers and last norm."""
    return getattr(model, "language_model", model).model


def hidden_size(model: Any) -> int:
    """Numbers per token between layers, of a wrapped model."""
    return int(text_model(model).norm.norm.weight.shape[0])


def wrap(model: Any) -> None:
    """Wrap a model's ropes, output projections and last norm in place."""
    inner = text_model(model)
    for layer in inner.layers:
        attention = layer.self_attn
        attention.rope = PerTokenRope(attention.rope)
        attention.o_proj = OutputProjection(attention.o_proj)
    inner.norm = LastNorm(inner.norm, len(inner.layers))


def wrap_first_norms(model: Any, layers: Iterable[int]) -> None:
    """Wrap the first norms of some layers of a wrapped model, where they are not yet."""
    blocks = text_model(model).layers
    for layer in layers:
        if layer < len(blocks) and not isinstance(blocks[layer].input_layernorm, FirstNorm):
            blocks[layer].input_layernorm = FirstNorm(blocks[layer].input_layernorm, layer)


def layer_caches(model: Any, cache: MlxCache, forward: Forward) -> list[LayerCache]:
    """Make what a wrapped model is called with as its ``cache``, in every forward of a session."""
    return [
        LayerCache(cache, layer, forward, block.self_attn)
        for layer, block in enumerate(text_model(model).layers)
    ]
