"""The conformance suite with its tensors on a GPU, where there is one, and kernels compiled."""

from __future__ import annotations

import os

import pytest

from kvcellar.testing import ConformanceSuite, cases_named
from tests.backends.adapters import FEW, TorchAdapter

torch = pytest.importorskip("torch")

if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
    pytest.skip("needs a GPU, and TRITON_INTERPRET=0", allow_module_level=True)


class TestOnCard(ConformanceSuite):
    adapter = TorchAdapter(cases_named(*FEW), device="cuda")
