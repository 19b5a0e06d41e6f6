"""Weights in large pages: the same numbers, and no more bytes than before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvcellar.backends import kernels
from kvcellar.backends.torch import memory
from kvcellar.backends.torch.linears import KernelLinear
from kvcellar.backends.torch.memory import LINE, Arena


def test_copies_are_the_same_numbers_in_storages_of_their_own(monkeypatch):
    monkeypatch.setattr(memory, "_CHUNK", 1 << 16)
    tensors = [
        torch.randn(300, 7),
        torch.randn(5, 1000).bfloat16()[:, ::3],
        torch.arange(201, dtype=torch.uint8),
        torch.randn(3, 40_000),  # larger than what is taken at a time
        torch.randn(0, 4),
        torch.tensor(3.5),
        torch.randn(90, 90),
    ]
    arena = Arena()
    copies = [arena.copy(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        assert copy.data_ptr() % LINE == 0
    copies[0].zero_()
    for tensor, copy in zip(tensors[1:], copies[1:], strict=True):
        assert torch.equal(tensor, copy)


def test_copies_outlive_their_arena():
    tensor = torch.randn(1000)
    copy = Arena().copy(tensor)
    assert torch.equal(copy, tensor)


def test_weights_that_are_tied_stay_tied():
    embedding = nn.Embedding(10, 4)
    head = nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head])
    before = embedding.weight.detach().clone()
    Arena().move(model.parameters())
    assert head.weight is embedding.weight
    assert torch.equal(head.weight, before)


@pytest.mark.skipif(not kernels.is_available(), reason=kernels.why_not())
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_weights_lie_there(bits):
    linear = nn.Linear(64, 40, bias=False, dtype=torch.bfloat16)
    x = torch.randn(3, 64)
    kernel = KernelLinear(linear, bits, None, Arena())
    assert kernel.weight.data_ptr() % LINE == 0
    assert torch.equal(kernel(x), KernelLinear(linear, bits, None)(x))
