"""How the conformance suite speaks to each backend: NumPy in, NumPy out."""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from kvcellar.kv_dtype import FLOAT_KV_DTYPES
from tests.backends.cases import CASES, Case
from tests.backends.dense import rounded

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
)
"""Cases in which every way to cut a read is met."""


FEW = ("mixed-three-groups", "bf16-gqa", "int4-window-sinks", "k8v4-odd-rows-softcap")
"""Cases for what differs in the choice of a path alone."""


def named(*names: str) -> tuple[Case, ...]:
    return tuple(case for case in CASES if case.name in names)


WALKED = CASES if "KVCELLAR_ALL_CASES" in os.environ else named(*FEW)
"""Cases of the random walks of backends whose bookkeeping the others have walked through."""


class Adapter(ABC):
    """One backend as the suite sees it.

    Attributes:
        name: what the tests print.
        backend: its id for ``make_decode_session`` and the others.
        cases: the models and settings that it runs.
        walked: those of them that random walks go through, too.
    """

    name: ClassVar[str]
    backend: ClassVar[str]
    cases: ClassVar[tuple[Case, ...]] = CASES
    walked: ClassVar[tuple[Case, ...]] = CASES

    @contextmanager
    def settings(self) -> Iterator[None]:
        """What holds for as long as one of this backend's tests lasts."""
        yield

    @abstractmethod
    def tolerance(self, in_dtype: str, kv_dtype: str) -> float:
        """Largest absolute error of an output, where q, k and v come as ``in_dtype`` and K and V
        are stored as ``kv_dtype``.

        Values are standard normal, and the oracle knows what the pool rounds: what is left is the
        arithmetic's own error and the result's rounding.
        """

    @abstractmethod
    def attend(
        self,
        cache: Any,
        layer: int,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        position: Any,
        scale: float,
        sinks: np.ndarray | None,
        out_dtype: str,
        in_dtype: str = "float32",
    ) -> np.ndarray:
        """Call the cache's op as a model of ``in_dtype`` would, assert that the result is of
        ``out_dtype``, and return it in float64."""


class ReferenceAdapter(Adapter):
    name = "reference"
    backend = "reference"

    def tolerance(self, in_dtype: str, kv_dtype: str) -> float:
        return {"float32": 1e-6, "bfloat16": 1.6e-2, "float16": 2e-3}[in_dtype]

    def attend(
        self, cache, layer, q, k, v, position, scale, sinks, out_dtype, in_dtype="float32"
    ) -> np.ndarray:
        out = cache.update_and_attend(q, k, v, position, layer, scale, out_dtype, sinks)
        if out_dtype == "bfloat16":
            assert out.dtype == np.float32
            finite = out[np.isfinite(out)]
            assert np.array_equal(finite, rounded(finite, "bfloat16"))
        else:
            assert out.dtype == np.dtype(out_dtype)
        return out.astype(np.float64)


class TorchAdapter(Adapter):
    name = "torch"
    backend = "torch"

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
                self._heads_last(q, dtype),
                self._heads_last(k, dtype),
                self._heads_last(v, dtype),
                torch.as_tensor(np.asarray(position)),
                layer,
                scale,
                getattr(torch, out_dtype),
                None if sinks is None else torch.from_numpy(sinks).to(dtype),
            )
        assert out.dtype == getattr(torch, out_dtype)
        return out.double().numpy()

    @staticmethod
    def _heads_last(values: np.ndarray, dtype: Any) -> Any:
        """The strides of a model's projection: ``[1, n_tok, n_heads, dim]``, then transposed."""
        import torch

        tensor = torch.from_numpy(values)
        if tensor.dim() != 4:
            return tensor.to(dtype)
        return tensor.transpose(1, 2).contiguous().transpose(1, 2).to(dtype)


class TorchHalfByKernel(TorchAdapter):
    """Reads of two queries by the CPU kernel and longer ones by matrix multiplications."""

    name = "torch-half-by-kernel"
    cases = named(*FEW)

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.torch import kernel

        with super().settings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "most_queries", lambda kv, dtype: 2)
            yield


class TorchWithoutKernel(TorchAdapter):
    """As on a machine where the CPU kernel is not built, or on another device."""

    name = "torch-without-kernel"
    cases = named(*FEW)

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.torch import kernel

        with super().settings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "takes", lambda device: False)
            yield


class TorchInSmallPieces(TorchWithoutKernel):
    """Without the kernel, and every threshold so low that short histories cross all of them."""

    name = "torch-small-pieces"
    cases = named(*SPLITTABLE)

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.torch import attention, caches
        from kvcellar.bookkeeping import reads

        with super().settings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(caches, "LONG_RUN", 2)
            patch.setattr(caches, "FEW_RUNS", 1)
            patch.setattr(attention, "FEW_ROWS", 2)
            patch.setattr(attention, "FEW_NUMBERS", 30)
            patch.setattr(attention, "CAST_TILE", 3)
            patch.setattr(attention, "PLAIN_LOGITS", 1)
            patch.setattr(reads, "TILE", 5)
            yield


class MlxAdapter(Adapter):
    name = "mlx"
    backend = "mlx"
    walked = WALKED

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

    name = "mlx-small-pieces"
    cases = named(*FEW)

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.mlx import attention, caches
        from kvcellar.bookkeeping import reads

        with super().settings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(caches, "LONG_RUN", 2)
            patch.setattr(caches, "FEW_RUNS", 1)
            patch.setattr(attention, "FEW_QUERIES", 3)
            patch.setattr(attention, "MOST_LOGITS", 60)
            patch.setattr(reads, "TILE", 5)
            yield


class ExecutorchAdapter(Adapter):
    """The op's kernel, called through the runtime's registry as a program calls it."""

    name = "executorch"
    backend = "executorch"
    walked = WALKED

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
        from kvcellar.backends.executorch.single import SingleOp

        if getattr(cache, "_single_op", None) is None:
            cache._single_op = SingleOp(cache)
        return cache._single_op


class ExecutorchThroughPython(ExecutorchAdapter):
    """Every cache as one that is written in Python alone: tensors go to it through DLPack."""

    name = "executorch-through-python"
    cases = named("mixed-three-groups", "int4-window-sinks")

    @contextmanager
    def settings(self) -> Iterator[None]:
        from kvcellar.backends.executorch.forward import Forwards

        with super().settings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Forwards, "can_run", staticmethod(lambda cache: False))
            yield


def quantised(adapter: type[Adapter], kv_dtype: str) -> type[Adapter]:
    """The same backend with every model of float storage in another storage type."""
    floats = [case for case in CASES if case.kv_dtype in FLOAT_KV_DTYPES]
    cases = tuple(
        replace(case, name=f"{case.name}-{kv_dtype}", kv_dtype=kv_dtype) for case in floats
    )
    return type(f"{adapter.__name__}Of{kv_dtype}", (adapter,), {"cases": cases, "walked": cases})
