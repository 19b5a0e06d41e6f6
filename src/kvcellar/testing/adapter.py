"""Adapters between the conformance suite and a backend: NumPy in, NumPy out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvcellar.testing.cases import CASES, Case
from kvcellar.testing.dense import Array, rounded


class BackendAdapter(ABC):
    """One backend as the suite sees it.

    Attributes:
        backend: its id for ``make_decode_session`` and the others.
        cases: the models and settings that it runs.
        walked: those of them that random walks go through, too.
        state_cases: models with recurrent layers; none where the backend's caches keep no states.
            A cache that does has ``read_states(slots)``, which gives per recurrent layer and state
            the numbers ``[n, *shape]`` as NumPy arrays, and ``write_states(slots, states)``.
    """

    def __init__(
        self,
        backend: str,
        *,
        cases: Sequence[Case] = CASES,
        walked: Sequence[Case] | None = None,
        state_cases: Sequence[Case] = (),
    ) -> None:
        """Describe a backend; None: random walks go through all of its cases."""
        self.backend = backend
        self.cases = tuple(cases)
        self.walked = self.cases if walked is None else tuple(walked)
        self.state_cases = tuple(state_cases)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Hold what a backend's tests need, for as long as one of them lasts."""
        yield

    @abstractmethod
    def tolerance(self, in_dtype: str, kv_dtype: str) -> float:
        """Return the largest absolute error of an output.

        Values are standard normal, and the oracle knows what the pool rounds: what is left is the
        arithmetic's own error and the result's rounding.

        Args:
            in_dtype: the type that q, k and v come in.
            kv_dtype: how K and V are stored.
        """

    @abstractmethod
    def attend(
        self,
        cache: Any,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        position: Any,
        scale: float,
        sinks: Array | None,
        out_dtype: str,
        in_dtype: str = "float32",
    ) -> Array:
        """Call the cache's op as a model of ``in_dtype`` does.

        Args:
            cache: of the backend.
            layer: whose K and V.
            q: ``[1, n_q_heads, n_tok, head_dim]``, in float32 with values that ``in_dtype`` holds.
            k: ``[1, n_kv_heads, n_tok, head_dim]``.
            v: ``[1, n_kv_heads, n_tok, v_head_dim]``.
            position: ``[n_tok]`` or ``[n_tok, 1]``.
            scale: factor of the logits.
            sinks: ``[n_q_heads]``, or None.
            out_dtype: type of the result; assert that it is.
            in_dtype: the model's own type.

        Returns:
            ``[1, n_q_heads, n_tok, v_head_dim]`` in float64.
        """


class NumpyAdapter(BackendAdapter):
    """A backend whose caches take and return NumPy arrays.

    bfloat16, which NumPy lacks, comes back as float32 with values that bfloat16 can hold.
    """

    def tolerance(self, in_dtype: str, kv_dtype: str) -> float:
        """Return what rounding to the type of the result allows."""
        return {"float32": 1e-6, "bfloat16": 1.6e-2, "float16": 2e-3}[in_dtype]

    def attend(
        self,
        cache: Any,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        position: Any,
        scale: float,
        sinks: Array | None,
        out_dtype: str,
        in_dtype: str = "float32",
    ) -> Array:
        """Hand the arrays to the cache; see :meth:`BackendAdapter.attend`."""
        out: Array = cache.update_and_attend(q, k, v, position, layer, scale, out_dtype, sinks)
        if out_dtype == "bfloat16":
            assert out.dtype == np.float32
            finite = out[np.isfinite(out)]
            assert np.array_equal(finite, rounded(finite, "bfloat16"))
        else:
            assert out.dtype == np.dtype(out_dtype)
        return out.astype(np.float64)
