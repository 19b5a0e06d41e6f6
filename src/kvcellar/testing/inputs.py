"""Inputs of a forward of the conformance suite, and wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvcellar.testing.dense import Array


@dataclass(frozen=True)
class Inputs:
    """Inputs of a forward: per layer q, k and v, ``[heads, n_tok, dim]`` float32."""

    q: list[Array]
    k: list[Array]
    v: list[Array]

    def columns(self, start: int, stop: int) -> Inputs:
        """Return the tokens from ``start`` to ``stop`` of the same forward."""
        q, k, v = ([part[:, start:stop] for part in side] for side in (self.q, self.k, self.v))
        return Inputs(q, k, v)


def misshapen(inputs: Inputs) -> Iterator[Inputs]:
    """Yield the same forward with one thing wrong in layer 0, for each thing that can be."""

    def wider(x: Array) -> Array:
        return np.concatenate([x, x[:, :, :1]], axis=2)

    def taller(x: Array) -> Array:
        return np.concatenate([x, x[:1]], axis=0)

    def longer(x: Array) -> Array:
        return np.concatenate([x, x[:, :1]], axis=1)

    q, k, v = inputs.q[0], inputs.k[0], inputs.v[0]
    for wrong_q, wrong_k, wrong_v in (
        (q, taller(k), v),
        (q, k, taller(v)),
        (q, taller(k), taller(v)),
        (q, wider(k), v),
        (q, k, wider(v)),
        (wider(q), k, v),
        (q, k, longer(v)),
        (longer(q), k, v),
        (q[None], k[None], v[None]),
        (q[0], k[0], v[0]),
    ):
        yield Inputs([wrong_q], [wrong_k], [wrong_v])
    if k.shape[0] > 1:
        yield Inputs([np.concatenate([q, q[:1]], axis=0)], [k], [v])
