"""Rows between a card and main memory: what goes comes back, by copies beside the computation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import kvcellar as kv  # noqa: E402
from kvcellar import LayerGroup, ModelCacheParams  # noqa: E402
from kvcellar.backends import host_memory  # noqa: E402
from kvcellar.backends.torch.gpu import choice, pinned  # noqa: E402
from kvcellar.backends.torch.gpu.pinned import PinnedMemory  # noqa: E402
from kvcellar.backends.torch.gpu.side import SideStream  # noqa: E402
from kvcellar.store.format import Tensor, pack  # noqa: E402
from tests.backends.gpu.interpreter import hasten  # noqa: E402

CPU = torch.device("cpu")
HEADS = LayerGroup((0, 1), 2, 16, 24)
WINDOW = LayerGroup((2,), 1, 32, 32, window=6)
LATENT = LayerGroup((0, 1), 1, 16, 32, is_latent=True)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hasten()
    yield


def filled(cache: Any, params: ModelCacheParams, n: int, seed: int = 0) -> None:
    """Bring tokens of random K and V to a cache, by the CPU's own way."""
    generator = torch.Generator().manual_seed(seed)
    cache.begin_step([0] * n)
    for group in params.groups:
        for layer in group.layers:
            k = torch.randn(1, group.n_kv_heads, n, group.head_dim, generator=generator)
            v = torch.randn(1, group.n_kv_heads, n, group.v_head_dim, generator=generator)
            cache.update_and_fetch(layer, None, k, v)
    cache.end_step()


CACHES = {
    "bfloat16": ((HEADS, WINDOW), kv.make_seq_session, {"kv_dtype": "bfloat16"}),
    "float32": ((HEADS,), kv.make_seq_session, {}),
    "k8v4": ((HEADS,), kv.make_seq_session, {"kv_dtype": "k8v4"}),
    "blocks": (
        (HEADS,), kv.make_paged_session,
        {"kv_dtype": "float16", "layout": "block_first", "block_size": 4},
    ),
    "latent": ((LATENT,), kv.make_seq_session, {"kv_dtype": "bfloat16"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
def test_rows_come_and_go_as_the_cpu_moves_them(name: str, monkeypatch) -> None:
    groups, make, settings = CACHES[name]
    params = ModelCacheParams(sum(len(g.layers) for g in groups), groups=groups)
    with make("torch", kv.make_config(params, 64, min_chunk=8, **settings)) as session:
        cache = session.cache
        filled(cache, params, 21)
        tables = [table[table >= 0][[3, 1, 2, -1, -2]] for table in cache.seq_table(0)]
        wanted = cache.read_rows(tables)
        monkeypatch.setattr(choice, "ON_CPU", True)
        found = cache.read_rows(tables)
        assert cache.pools._of_card is not None
        same(found, wanted)
        other = [np.arange(40, 45) for _ in groups]  # the pools grow for these
        cache.write_rows(other, found)
        same(cache.read_rows(other), wanted)
        monkeypatch.setattr(choice, "ON_CPU", False)
        same(cache.read_rows(other), wanted)
        same(cache.read_rows(tables), wanted)


def same(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            for array, expected in zip(one, other, strict=True):
                np.testing.assert_array_equal(array, expected)


def test_rows_that_come_before_any_forward_go_to_the_device_of_the_model() -> None:
    params = ModelCacheParams(2, groups=(HEADS,))
    with kv.make_seq_session("torch", kv.make_config(params, 64)) as session:
        session.cache.pools.place(torch.device("meta"))
        assert session.cache.pools.home.type == "meta"


class FakeStreams:
    """Functions of ``torch.cuda`` that write down what they were asked."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_done = False
        self._now = "computes"

    def Stream(self, device: Any) -> Any:  # noqa: N802
        return FakeStream(self, "copies")

    def Event(self) -> Any:  # noqa: N802
        return FakeEvent(self)

    def current_stream(self) -> Any:
        return FakeStream(self, self._now)

    def stream(self, stream: FakeStream) -> Any:
        return stream


class FakeStream:
    def __init__(self, of: FakeStreams, name: str) -> None:
        self.of, self.name = of, name

    def __enter__(self) -> None:
        self.of._now = self.name
        self.of.log.append(f"{self.name}:")

    def __exit__(self, *error: object) -> None:
        self.of._now = "computes"

    def wait_event(self, event: FakeEvent) -> None:
        self.of.log.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    name = "nothing"

    def __init__(self, of: FakeStreams) -> None:
        self.of = of

    def record(self, stream: FakeStream) -> None:
        self.name = f"what {stream.name} so far"

    def query(self) -> bool:
        return self.of.is_done

    def synchronize(self) -> None:
        self.of.log.append(f"the host waits for {self.name}")


def test_what_computes_waits_for_what_was_sent_and_not_the_other_way() -> None:
    streams = FakeStreams()
    side = SideStream(CPU, streams)
    side.sent([np.zeros(4, np.float32)])
    assert streams.log == ["copies:", "computes waits for what copies so far"]


def test_rows_are_fetched_behind_what_computes_them_and_waited_for() -> None:
    streams, target = FakeStreams(), np.zeros(3, np.float16)
    SideStream(CPU, streams).fetch([torch.tensor([1.0, 2, 3]).half().view(torch.int16)], [target])
    assert streams.log == [
        "copies:",
        "copies waits for what computes so far",
        "the host waits for what copies so far",
    ]
    assert target.tolist() == [1, 2, 3]


def test_what_is_sent_is_held_until_it_was_read() -> None:
    memory = PinnedMemory(1 << 30, lambda n: np.empty(n, np.uint8))
    streams = FakeStreams()
    side = SideStream(CPU, streams)
    rows = memory.empty(pinned.LEAST)
    address = rows.ctypes.data
    side.sent([rows])
    del rows
    assert memory.empty(pinned.LEAST).ctypes.data != address
    streams.is_done = True
    side.sent([np.zeros(1, np.int64)])
    gc.collect()
    assert memory.empty(pinned.LEAST).ctypes.data == address


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
