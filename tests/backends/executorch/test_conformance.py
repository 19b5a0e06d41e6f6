"""The one conformance suite, through the op's kernel in ExecuTorch's registry."""

from __future__ import annotations

from kvcellar.testing import ConformanceSuite
from tests.backends.adapters import ExecutorchAdapter, ExecutorchThroughPython


class TestExecutorch(ConformanceSuite):
    adapter = ExecutorchAdapter()


class TestExecutorchThroughPython(ConformanceSuite):
    adapter = ExecutorchThroughPython()
