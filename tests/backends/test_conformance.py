"""Every backend runs the one conformance suite. A new backend adds its adapter and three lines."""

from __future__ import annotations

import pytest

from kvcellar.kernel import levels
from kvcellar.testing import STATE_CASES, ConformanceSuite, NumpyAdapter
from tests.backends.adapters import (
    SHARED_OR_CHUNKED,
    SPLITTABLE,
    MlxAdapter,
    MlxInSmallPieces,
    NativeAdapter,
    TorchAdapter,
    TorchHalfByKernel,
    TorchInSmallPieces,
    TorchQuantised,
    TorchWithoutKernel,
    needs_mlx,
    unless_all,
    walked,
)


class TestReference(ConformanceSuite):
    adapter = NumpyAdapter(
        "reference",
        walked=walked(unless_all(*SPLITTABLE, *SHARED_OR_CHUNKED)),
        state_cases=STATE_CASES,
    )


class TestTorch(ConformanceSuite):
    adapter = TorchAdapter(state_cases=STATE_CASES)


class TestTorchInt8(ConformanceSuite):
    adapter = TorchQuantised("int8")


class TestTorchInt4(ConformanceSuite):
    adapter = TorchQuantised("int4")


class TestTorchHalfByKernel(ConformanceSuite):
    adapter = TorchHalfByKernel()


class TestTorchWithoutKernel(ConformanceSuite):
    adapter = TorchWithoutKernel()


class TestTorchInSmallPieces(ConformanceSuite):
    adapter = TorchInSmallPieces()


@pytest.mark.skipif(not levels.is_available(), reason="needs the CPU kernel")
class TestNative(ConformanceSuite):
    adapter = NativeAdapter()


@needs_mlx
class TestMlx(ConformanceSuite):
    adapter = MlxAdapter(state_cases=STATE_CASES)


@needs_mlx
class TestMlxInSmallPieces(ConformanceSuite):
    adapter = MlxInSmallPieces()
