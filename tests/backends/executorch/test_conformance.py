"""The one conformance suite, through the op's kernel in ExecuTorch's registry."""

from __future__ import annotations

from tests.backends.adapters import ExecutorchAdapter, ExecutorchThroughPython
from tests.backends.conformance import Conformance


class TestExecutorch(Conformance):
    adapter = ExecutorchAdapter()


class TestExecutorchThroughPython(Conformance):
    adapter = ExecutorchThroughPython()
