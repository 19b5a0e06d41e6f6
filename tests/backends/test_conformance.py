"""Every backend runs the one conformance suite. A new backend adds its adapter and three lines."""

from __future__ import annotations

from tests.backends.adapters import (
    MlxAdapter,
    MlxInSmallPieces,
    ReferenceAdapter,
    TorchAdapter,
    TorchHalfByKernel,
    TorchInSmallPieces,
    TorchWithoutKernel,
    needs_mlx,
    quantised,
)
from tests.backends.conformance import Conformance


class TestReference(Conformance):
    adapter = ReferenceAdapter()


class TestTorch(Conformance):
    adapter = TorchAdapter()


class TestTorchInt8(Conformance):
    adapter = quantised(TorchAdapter, "int8")()


class TestTorchInt4(Conformance):
    adapter = quantised(TorchAdapter, "int4")()


class TestTorchHalfByKernel(Conformance):
    adapter = TorchHalfByKernel()


class TestTorchWithoutKernel(Conformance):
    adapter = TorchWithoutKernel()


class TestTorchInSmallPieces(Conformance):
    adapter = TorchInSmallPieces()


@needs_mlx
class TestMlx(Conformance):
    adapter = MlxAdapter()


@needs_mlx
class TestMlxInSmallPieces(Conformance):
    adapter = MlxInSmallPieces()
