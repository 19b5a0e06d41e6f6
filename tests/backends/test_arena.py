"""Weights and pools in large pages: the same numbers, and no more bytes than before."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kvcellar.backends.torch.cache import memory
from kvcellar.backends.torch.cache.memory import LARGE_PAGE, LINE, Arena
from kvcellar.backends.torch.cache.pools import make_side
from kvcellar.backends.torch.cpu.modules.linears import KernelLinear
from kvcellar.kernel import levels
from kvcellar.kv_dtype import parse_kv_dtype


def test_copies_are_the_same_numbers_in_storages_of_their_own(monkeypatch):
    monkeypatch.setattr(memory, "CHUNK", 1 << 16)
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


@pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_weights_lie_there(bits):
    linear = nn.Linear(64, 40, bias=False, dtype=torch.bfloat16)
    x = torch.randn(3, 64)
    kernel = KernelLinear(linear, bits, None, Arena())
    assert kernel.weight.data_ptr() % LINE == 0
    assert torch.equal(kernel(x), KernelLinear(linear, bits, None)(x))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_pools_that_fill_large_pages_lie_in_them_and_keep_their_rows(kv_dtype):
    cpu, n_cells = torch.device("cpu"), 3 * LARGE_PAGE // (2 * 64)
    rows = make_side(2, parse_kv_dtype(kv_dtype).k, 64)
    rows.grow(100, cpu)
    written = torch.randn(1, 2, 100, 64)
    rows.write_run(0, written)
    kept = [part.clone() for part in rows.parts]
    rows.grow(n_cells, cpu)
    assert rows.parts[0].data_ptr() % LARGE_PAGE == 0
    for part, before in zip(rows.parts, kept, strict=True):
        assert part.shape[2] == n_cells
        assert part.untyped_storage().nbytes() == part.nbytes
        assert torch.equal(part[:, :, :100], before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_system_has_large_pages_back_when_their_tensor_is_gone():
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * mmap.PAGESIZE

    n_bytes = 1 << 30  # of addresses; few of them are written to
    before = mapped()
    rows = memory.empty((n_bytes,), torch.uint8, torch.device("cpu"))
    view = rows[: 1 << 20].view(2, -1)
    view.fill_(7)
    del rows
    assert mapped() >= before + n_bytes
    assert view.sum() == 7 << 20
    del view
    assert mapped() < before + n_bytes // 2
