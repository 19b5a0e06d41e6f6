"""How the conformance suite speaks to the backends of this package."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcellar.kv_dtype import FLOAT_KV_DTYPES
from kvcellar.testing import (
    CASES,
    STATE_CASES,
    BackendAdapter,
    Case,
    NumpyAdapter,
    cases_named,
)
from tests.backends.gpu.interpreter import hasten

needs_mlx = pytest.mark.skipif(
    importlib.util.find_spec("mlx") is None, reason="needs mlx: pip install 'kvcellar[mlx]'"
)

SPLITTABLE = (
    "mha",
    "mqa-window-softcap",
    "gqa-sinks-window",
    "mixed-three-groups",
    "mixed-shapes-sinks",
    "bf16-gqa",
    "bf16-kv-of-a-fp32-model",
    "int4-window-sinks",
    "k8v4-odd-rows-softcap",
    "int4-rotated",
    "latent",
    "latent-window-sinks-softcap",
)
"""Cases in which every way to cut a read is met."""

SHARED_OR_CHUNKED = (
    "chunk-of-one-sinks-softcap",
    "int8-chunk-and-window",
    "shared-full-and-window",
    "bf16-shared-chunk-softcap",
    "latent-beside-heads",
)
"""Cases of what the cases above have none of."""

TWO_ROWS = ("latent-int8-rotated",)
"""Cases whose latent and rotary rows are stored each in its own way."""

FEW = (
    "mixed-three-groups",
    "bf16-gqa",
    "int4-window-sinks",
    "k8v4-odd-rows-softcap",
    "latent-window-sinks-softcap",
)
"""Cases for what differs in the choice of a path alone."""


def unless_all(*names: str) -> tuple[Case, ...]:
    """Return the cases of these names, or all where ``KVCELLAR_ALL_CASES`` is set."""
    return CASES if "KVCELLAR_ALL_CASES" in os.environ else cases_named(*names)


WALKED = unless_all(*FEW)
"""Cases of the random walks of backends whose bookkeeping the others have walked through."""


def walked(cases: Sequence[Case]) -> list[Case]:
    """Cases of random walks: of latent rows one, since cells do not know what rows are."""
    return [case for case in cases if "latent" not in case.name or "window" in case.name]


class TorchAdapter(BackendAdapter):
    """Torch, with tensors on a device."""

    def __init__(
        self,
        cases: Sequence[Case] = CASES,
        state_cases: Sequence[Case] = (),
        device: str = "cpu",
    ) -> None:
        ours = [case for case in walked(cases) if case in WALKED]
        super().__init__("torch", cases=cases, walked=ours, state_cases=state_cases)
        self.device = device

    @contextmanager
    def settings(self) -> Iterator[None]:
        """One thread: tensors this small are slower on two."""
        torch = pytest.importorskip("torch")
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(n_threads)

    def tolerance(self, in_dtype: str, kv_dtype: str) -> float:
        # Quantised rows are multiplied in 16 bits; their own error is larger by far.
        least = 1e-5 if kv_dtype in FLOAT_KV_DTYPES else 5e-4
        return {"float32": least, "bfloat16": 8e-2, "float16": 4e-3}[in_dtype]

    def attend(
        self, cache, layer, q, k, v, position, scale, sinks, out_dtype, in_dtype="float32"
    ) -> np.ndarray:
        import torch

        dtype = getattr(torch, in_dtype)
        with torch.no_grad():
            out = cache.update_and_attend(
                *(self._heads_last(rows, dtype).to(self.device) for rows in (q, k, v)),
                torch.as_tensor(np.asarray(position)),
                layer,
                scale,
                getattr(torch, out_dtype),
                None if sinks is None else torch.from_numpy(sinks).to(self.device, dtype),
            )
        assert out.dtype == getattr(torch, out_dtype)
        return out.double().cpu().numpy()

    @staticmethod
    def _heads_last(values: np.ndarray, dtype: Any) -> Any:
        """The strides of a model's projection: ``[1, n_tok, n_heads, dim]``, then transposed."""
        import torch

        tensor = torch.from_numpy(values)
        if tensor.dim() != 4:
            return tensor.to(dtype)
        return tensor.transpose(1, 2).contiguous().transpose(1, 2).to(dtype)


class NativeAdapter(NumpyAdapter):
    """NumPy arrays and the CPU kernel, of what it reads: no fp8, latent rows stored as one."""

    def __init__(self) -> None:
        there = unless_all(*SPLITTABLE, *SHARED_OR_CHUNKED)
        ours = [case for case in there if "fp8" not in case.name and case.name not in TWO_ROWS]
        super().__init__(
            "native",
            cases=ours,
            walked=[case for case in ours if case in WALKED],
            state_cases=STATE_CASES,
        )

    def tolerance(self, in_dtype: str, kv_dtype: str) -> float:
        return TorchAdapter().tolerance(in_dtype, kv_dtype)


class TorchHalfByKernel(TorchAdapter):
    """Reads of two queries by the CPU kernel and longer ones by matrix multiplications."""

    def __init__(self) -> None:
        super().__init__(cases_named(*FEW))

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.torch.cache import kernel

        with super().settings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "most_queries", lambda kv, dtype: 2)
            yield


class TorchWithoutKernel(TorchAdapter):
    """Torch where the CPU kernel is not built, or on another device."""

    def __init__(self) -> None:
        super().__init__(cases_named(*FEW))

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.torch.cache import kernel

        with super().settings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "takes", lambda *_: False)
            yield


class TorchInSmallPieces(TorchWithoutKernel):
    """Without the kernel, and every threshold so low that short histories cross all of them."""

    def __init__(self) -> None:
        TorchAdapter.__init__(self, cases_named(*SPLITTABLE))

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.torch.cache import attention, caches
        from kvcellar.bookkeeping.layouts import reads

        with super().settings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(caches, "LONG_RUN", 2)
            patch.setattr(caches, "FEW_RUNS", 1)
            patch.setattr(attention, "FEW_ROWS", 2)
            patch.setattr(attention, "FEW_NUMBERS", 30)
            patch.setattr(attention, "CAST_TILE", 3)
            patch.setattr(attention, "PLAIN_LOGITS", 1)
            patch.setattr(reads, "TILE", 5)
            yield


class TritonAdapter(TorchAdapter):
    """Triton's kernels as its interpreter runs them, in tiles so small that histories fill some."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__(cases)
        self.walked = ()

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.torch.gpu import choice
        from kvcellar.backends.torch.gpu.attend import launch, lists, plans

        def tiling(n_heads: int, pool: Any, dtype: Any, device: Any) -> plans.Tiling:
            n_kv_heads = pool.k.data.shape[1]
            return plans.Tiling(n_heads // n_kv_heads, n_kv_heads, 16, 16, 8, 2, 8)

        hasten()
        patches = pytest.MonkeyPatch.context()
        with super().settings(), warnings.catch_warnings(), patches as patch:
            warnings.simplefilter("ignore", RuntimeWarning)  # of what tiles throw away, and NaN
            patch.setattr(choice, "ON_CPU", True)
            patch.setattr(launch, "tiling_of", tiling)
            patch.setattr(lists, "LEAST_SHARED", 2)
            patch.setattr(plans, "SHORT_RUN", 2)
            patch.setattr(plans, "FEW_ROWS", 12)
            yield


class MlxAdapter(BackendAdapter):
    def __init__(
        self,
        cases: Sequence[Case] = unless_all(*SPLITTABLE, *SHARED_OR_CHUNKED, *TWO_ROWS),
        walked: Sequence[Case] | None = WALKED,
        state_cases: Sequence[Case] = (),
    ) -> None:
        super().__init__("mlx", cases=cases, walked=walked, state_cases=state_cases)

    def tolerance(self, in_dtype: str, kv_dtype: str) -> float:
        return {"float32": 1e-5, "bfloat16": 8e-2, "float16": 8e-3}[in_dtype]

    def attend(
        self, cache, layer, q, k, v, position, scale, sinks, out_dtype, in_dtype="float32"
    ) -> np.ndarray:
        import mlx.core as mx

        dtype = getattr(mx, in_dtype)
        out = cache.update_and_attend(
            self._heads_last(q, dtype),
            self._heads_last(k, dtype),
            self._heads_last(v, dtype),
            mx.array(np.asarray(position)),
            layer,
            scale,
            getattr(mx, out_dtype),
            None if sinks is None else mx.array(sinks).astype(dtype),
        )
        assert out.dtype == getattr(mx, out_dtype)
        return np.asarray(out.astype(mx.float32)).astype(np.float64)

    @staticmethod
    def _heads_last(values: np.ndarray, dtype: Any) -> Any:
        """The strides of a model's projection: ``[1, n_tok, n_heads, dim]``, then transposed."""
        import mlx.core as mx

        array = mx.array(values)
        if array.ndim != 4:
            return array.astype(dtype)
        return mx.contiguous(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3).astype(dtype)


class MlxInSmallPieces(MlxAdapter):
    """Every threshold so low that short histories cross all of them."""

    def __init__(self) -> None:
        super().__init__(cases_named(*FEW), walked=WALKED)

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.mlx.cache import attention, caches
        from kvcellar.bookkeeping.layouts import reads

        with super().settings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(caches, "LONG_RUN", 2)
            patch.setattr(caches, "FEW_RUNS", 1)
            patch.setattr(attention, "FEW_QUERIES", 3)
            patch.setattr(attention, "MOST_LOGITS", 60)
            patch.setattr(reads, "TILE", 5)
            yield


class ExecutorchAdapter(BackendAdapter):
    """The op's kernel, called through the runtime's registry as a program calls it."""

    def __init__(self, cases: Sequence[Case] = unless_all(*SPLITTABLE, *SHARED_OR_CHUNKED)) -> None:
        super().__init__("executorch", cases=cases, walked=[c for c in cases if c in WALKED])

    def tolerance(self, in_dtype: str, kv_dtype: str) -> float:
        return TorchAdapter().tolerance(in_dtype, kv_dtype)

    def attend(
        self, cache, layer, q, k, v, position, scale, sinks, out_dtype, in_dtype="float32"
    ) -> np.ndarray:
        import torch

        dtype = getattr(torch, in_dtype)
        out = self._op_of(cache)(
            torch.from_numpy(q).to(dtype),
            torch.from_numpy(k).to(dtype),
            torch.from_numpy(v).to(dtype),
            torch.as_tensor(np.asarray(position)),
            layer,
            scale,
            getattr(torch, out_dtype),
            None if sinks is None else torch.from_numpy(sinks),
        )
        assert out.dtype == getattr(torch, out_dtype)
        return out.double().numpy()

    def _op_of(self, cache: Any) -> Any:
        from tests.backends.executorch.single_op import SingleOp

        if getattr(cache, "_single_op", None) is None:
            cache._single_op = SingleOp(cache)
        return cache._single_op


class ExecutorchThroughPython(ExecutorchAdapter):
    """Every cache as one that is written in Python alone: tensors go to it through DLPack."""

    def __init__(self) -> None:
        super().__init__(cases_named("mixed-three-groups", "int4-window-sinks"))

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.executorch.forward import Forwards

        with super().settings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Forwards, "can_run", staticmethod(lambda cache: False))
            yield


class TorchQuantised(TorchAdapter):
    """Models of float storage in another storage type."""

    def __init__(self, kv_dtype: str) -> None:
        super().__init__(in_storage(kv_dtype, unless_all(*SPLITTABLE, *SHARED_OR_CHUNKED)))
        self.walked = walked(in_storage(kv_dtype, WALKED))


def in_storage(kv_dtype: str, cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return the cases of float storage in another storage type."""
    return tuple(
        replace(case, name=f"{case.name}-{kv_dtype}", kv_dtype=kv_dtype)
        for case in cases
        if case.kv_dtype in FLOAT_KV_DTYPES
    )
