"""The op alone, called through the runtime's registry as a program does: to test and to measure."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from kvcellar.backends.executorch import native
from kvcellar.backends.executorch.forward import Forwards
from kvcellar.backends.executorch.values import put_value
from kvcellar.errors import StepError
from kvcellar.registry import use_cache


class SingleOp:
    """Calls the op on one cache, a layer at a time."""

    def __init__(self, cache: Any) -> None:
        """Take a cache as :meth:`Program.load_method` does."""
        self._lib = native.library()
        self._cache = cache
        self._forwards = Forwards(cache) if Forwards.can_run(cache) else None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        layer_id: int,
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Arguments, result and errors as of :func:`kvcellar.op.eager_update_and_attend`."""
        out, _ = self._call((q, k, v, position), layer_id, scale, out_dtype, sinks, (1, 1))
        return out

    def time_ns(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        layer_id: int,
        n_times: int,
        n_kernel_times: int = 1,
    ) -> float:
        """Nanoseconds of one call natively, on the average of many that write the same cells.

        Args:
            q: and the three after it as above.
            k: the new keys.
            v: the new values.
            position: of the tokens.
            layer_id: which layer.
            n_times: calls.
            n_kernel_times: how often each runs the kernel: many for what that alone takes.

        Raises:
            StepError: the cache is not one that runs natively.
        """
        if self._forwards is None:
            raise StepError("only a cache that runs natively can be timed call by call")
        args = (q, k, v, position)
        repeats = n_times, n_kernel_times
        _, times = self._call(args, layer_id, 1.0, q.dtype, None, repeats)
        return float(times.run_ns / n_times)

    def _call(
        self,
        args: tuple[Tensor, Tensor, Tensor, Tensor],
        layer_id: int,
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None,
        repeats: tuple[int, int],
    ) -> tuple[Tensor, native.Times]:
        q, _, v, _ = args
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)
        given = [*args, out] if sinks is None else [*args, out, sinks]
        values = (native.Value * len(given))()
        kept = [put_value(value, one) for value, one in zip(values, given, strict=True)]
        times, forwards = native.Times(), self._forwards
        with ExitStack() as stack:
            stack.enter_context(use_cache(self._cache))
            stack.enter_context(native.planning(None if forwards is None else forwards.plan_for))
            failed = self._lib.kvc_call_op(
                values,
                len(given),
                layer_id,
                scale,
                None if forwards is None else forwards.address,
                *repeats,
                ctypes.byref(times),
            )
            del kept
            if failed:
                raise native.run_error(self._lib, f"layer {layer_id}")
            if forwards is not None:
                forwards.finish()
        return out, times
