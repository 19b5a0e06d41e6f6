"""Kernels of other packages for recurrent layers: called with a card's tensors, and no others."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcellar.backends.torch.load import recurrent_kernels
from kvcellar.backends.torch.load.recurrent_kernels import choose_by_device

SOURCE = """
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

@use_kernel_func_from_hub_with_fallback("step", "a_package_of_kernels")
def step(x, state=None):
    return "transformers"

@use_kernel_func_from_hub_with_fallback("other", "a_package_that_is_not_there")
def other(x):
    return "transformers"

class Network:
    def run(self, *given, **named):
        return step(*given, **named), other(given[0])
"""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of a module of transformers' kind, beside a package that has one of its kernels."""
    package, module = ModuleType("a_package_of_kernels"), ModuleType("modeling_of_a_test")
    package.step = lambda x, state=None, cu_seqlens=None: "package"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(SOURCE, vars(module))
    return module.Network


def test_a_package_s_kernel_is_for_16_bits_on_a_card(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = torch.zeros(1, dtype=torch.bfloat16)
    assert network().run(half) == ("package", "transformers"), "as transformers has it"
    for _ in range(2):
        choose_by_device([network])
    assert network().run(half, cu_seqlens=None) == ("transformers", "transformers")
    monkeypatch.setattr(recurrent_kernels, "_KERNEL_DEVICES", ("meta",))
    on_card = half.to("meta")
    assert network().run(on_card, cu_seqlens=None) == ("package", "transformers")
    assert network().run(on_card.float()) == ("transformers", "transformers")
