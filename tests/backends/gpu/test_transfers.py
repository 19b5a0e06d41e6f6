"""Rows between a card and main memory: what goes comes back, by copies beside the computation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import kvcellar as kv  # noqa: E402
from kvcellar import LayerGroup, ModelCacheParams  # noqa: E402
from kvcellar.backends import host_memory  # noqa: E402
from kvcellar.backends.torch.gpu.transfer import pinned  # noqa: E402
from kvcellar.backends.torch.gpu.transfer.pinned import PinnedMemory  # noqa: E402
from kvcellar.store.values.format import Tensor, pack  # noqa: E402
from tests.backends.gpu.interpreter import hasten  # noqa: E402

HEADS = LayerGroup((0, 1), 2, 16, 24)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hasten()
    yield


def test_rows_that_come_before_any_forward_go_to_the_device_of_the_model() -> None:
    params = ModelCacheParams(2, groups=(HEADS,))
    with kv.make_seq_session("torch", kv.make_config(params, 64)) as session:
        session.cache.pools.place(torch.device("meta"))
        assert session.cache.pools.home.type == "meta"


def test_pieces_of_pinned_memory_take_turns_and_none_is_given_twice() -> None:
    slabs: list[int] = []

    def pin(n: int) -> Any:
        slabs.append(n)
        return np.empty(n, np.uint8)

    memory = PinnedMemory(2 * pinned.SLAB, pin)
    sizes = [pinned.LEAST, 3 << 20, (3 << 20) + 5]
    for _ in range(50):
        taken = [memory.empty(n) for n in sizes]
        for at, array in enumerate(taken):
            array[:] = at
        assert [len(array) for array in taken] == sizes
        assert all((array == at).all() for at, array in enumerate(taken))
        views = [array[5:9].view(np.uint16) for array in taken]
        del taken, array
        del views
    assert slabs == [pinned.SLAB]


def test_memory_that_is_pinned_ahead_is_given_out_first() -> None:
    slabs: list[int] = []

    def pin(n: int) -> Any:
        slabs.append(n)
        return np.empty(n, np.uint8)

    memory = PinnedMemory(3 * pinned.SLAB, pin)
    memory.pin_ahead(2 * pinned.SLAB)
    memory.pin_ahead(2 * pinned.SLAB)
    assert slabs == [pinned.SLAB] * 2
    held = [memory.empty(pinned.SLAB) for _ in range(2)]
    assert slabs == [pinned.SLAB] * 2
    held.append(memory.empty(pinned.SLAB))
    memory.pin_ahead(9 * pinned.SLAB)
    assert slabs == [pinned.SLAB] * 3 and memory.size_bytes == 3 * pinned.SLAB


def test_where_no_more_may_be_pinned_memory_is_plain() -> None:
    memory = PinnedMemory(pinned.SLAB, lambda n: np.empty(n, np.uint8))
    held = [memory.empty(16 << 20) for _ in range(6)]
    assert memory.size_bytes == pinned.SLAB and all(len(one) == 16 << 20 for one in held)

    def refuses(n: int) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    assert len(PinnedMemory(1 << 40, refuses).empty(1 << 20)) == 1 << 20


def test_blocks_of_the_store_lie_where_a_device_copies_from(monkeypatch) -> None:
    memory = PinnedMemory(1 << 30, lambda n: np.empty(n, np.uint8))
    monkeypatch.setattr(host_memory, "_given", memory)
    file = pack({"k.0": Tensor("BF16", np.zeros((2, 2, 64, 256), np.uint16))}, {})
    assert memory.size_bytes == pinned.SLAB
    assert file.tensors["k.0"].flags.writeable  # else it would be copied before it is sent
