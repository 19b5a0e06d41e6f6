"""Rows and states between a card and main memory: the plain path's bytes, beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import kvcellar as kv  # noqa: E402
from kvcellar import LayerGroup, ModelCacheParams  # noqa: E402
from kvcellar.backends.torch.gpu import choice  # noqa: E402
from kvcellar.backends.torch.gpu.attend import stores  # noqa: E402
from kvcellar.backends.torch.gpu.transfer.side import SideStream  # noqa: E402
from kvcellar.backends.torch.gpu.transfer.transfers import RowTransfers  # noqa: E402
from kvcellar.errors import ShapeError  # noqa: E402
from kvcellar.states import StateGroup, StateShape  # noqa: E402
from tests.backends.gpu.deferred import DeferredCard  # noqa: E402
from tests.backends.gpu.interpreter import hasten  # noqa: E402
from tests.stretches import stretches  # noqa: E402

CPU = torch.device("cpu")
HEADS = LayerGroup((0, 1), 2, 16, 24)
WINDOW = LayerGroup((2,), 1, 32, 32, window=6)
ODD = LayerGroup((0, 1), 3, 13, 7)
LATENT = LayerGroup((0, 1), 1, 16, 32, is_latent=True)
STATES = StateGroup(
    (
        (StateShape("convolution", (3, 5)), StateShape("recurrent", (2, 40, 33))),
        (StateShape("convolution", (7, 1)), StateShape("recurrent", (1, 9, 4))),
    )
)
BLOCKS = {"layout": "block_first", "block_size": 4}

CACHES: dict[str, tuple[tuple[LayerGroup, ...], dict[str, Any]]] = {
    "bfloat16": ((HEADS, WINDOW), {"kv_dtype": "bfloat16"}),
    "float16-odd-rows": ((ODD,), {"kv_dtype": "float16"}),
    "float32": ((HEADS,), {}),
    "int8-window": ((HEADS, WINDOW), {"kv_dtype": "int8"}),
    "int4": ((HEADS,), {"kv_dtype": "int4"}),
    "int4-odd-rows": ((ODD,), {"kv_dtype": "int4"}),
    "k8v4": ((HEADS,), {"kv_dtype": "k8v4"}),
    "fp8": ((HEADS,), {"kv_dtype": "fp8"}),
    "exact": ((HEADS,), {"kv_dtype": "int8:first4:last8"}),
    "blocks": ((HEADS,), {"kv_dtype": "float16", **BLOCKS}),
    "blocks-int4": ((HEADS,), {"kv_dtype": "int4", **BLOCKS}),
    "latent": ((LATENT,), {"kv_dtype": "bfloat16"}),
    "latent-blocks-int8": ((LATENT,), {"kv_dtype": "int8", **BLOCKS}),
}
ROOMS = {"whole": 1 << 24, "planes": 1500, "tokens": 130}
"""Bytes of a buffer that holds all, some planes, or some tokens of a plane."""


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    hasten()
    yield


@contextmanager
def opened(name: str, capacity: int = 64, min_chunk: int = 8) -> Iterator[Any]:
    groups, settings = CACHES[name]
    params = ModelCacheParams(sum(len(g.layers) for g in groups), groups=groups)
    make = kv.make_paged_session if "layout" in settings else kv.make_seq_session
    config = kv.make_config(params, capacity, min_chunk=min_chunk, **settings)
    with make("torch", config) as session:
        yield session.cache


def fill(cache: Any, n: int, seq_id: int = 0, seed: int = 0) -> None:
    """Bring tokens of random K and V to a cache, by the CPU's own way."""
    generator = torch.Generator().manual_seed(seed)
    cache.begin_step([(seq_id, n)])
    for group in cache.pools.groups:
        for layer in group.layers:
            k, v = (
                torch.randn(1, group.n_kv_heads, n, dim, generator=generator)
                for dim in (group.head_dim, group.v_head_dim)
            )
            cache.update_and_fetch(layer, None, k, v)
    cache.end_step()


def put(cache: Any, monkeypatch: Any, card: DeferredCard, room: int = 1 << 24) -> None:
    """Have a cache lie on a card from now on."""
    monkeypatch.setattr(choice, "ON_CPU", True)
    monkeypatch.setattr(stores, "copy_planes", card)
    cache.pools._of_card = RowTransfers(SideStream(CPU, card), room)


def same(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            for array, expected in zip(one, other, strict=True):
                assert array.dtype == expected.dtype
                np.testing.assert_array_equal(array, expected)


CASES = [(name, "whole") for name in CACHES] + [
    (name, room) for name in ("bfloat16", "k8v4", "blocks-int4") for room in ("planes", "tokens")
]


@pytest.mark.parametrize(("name", "room"), CASES)
def test_rows_come_and_go_as_the_cpu_moves_them(name: str, room: str, monkeypatch: Any) -> None:
    card = DeferredCard(stores.copy_planes)
    with opened(name) as cache, card:
        fill(cache, 21)
        tables = [table[table >= 0][[3, 1, 2, -1, -2]] for table in cache.seq_table(0)]
        wanted, none = cache.read_rows(tables), [table[:0] for table in tables]
        put(cache, monkeypatch, card, ROOMS[room])
        found, landing = cache.begin_read(tables)
        same(cache.read_rows(none), cache.begin_read(none).rows)
        landing.arrival.wait()
        same(found, wanted)
        other = [np.arange(40, 45)[:: (-1) ** i].copy() for i, _ in enumerate(tables)]  # pools grow
        cache.write_rows(other, found)
        same(cache.read_rows(other), wanted)
        with pytest.raises(ShapeError, match="5 rows for 4 cells"):
            cache.write_rows([one[:4] for one in other], found)
        parts = [tuple(tuple(part[:, :, 1:4] for part in side) for side in g) for g in found]
        cache.write_rows([one[2:5] for one in other], parts)
        wanted = [
            tuple(tuple(p[:, :, [0, 1, 1, 2, 3]] for p in side) for side in g) for g in wanted
        ]
        same(cache.read_rows(other), wanted)
        monkeypatch.setattr(choice, "ON_CPU", False)
        cache.pools._of_card = None
        same(cache.read_rows(other), wanted)


def test_states_come_and_go_as_the_cpu_moves_them(monkeypatch: Any) -> None:
    params = ModelCacheParams(2, groups=(HEADS,), state=STATES)
    card, rng = DeferredCard(stores.copy_planes), np.random.default_rng(1)
    with kv.make_seq_session("torch", kv.make_config(params, 64, n_slots=9)) as session, card:
        cache = session.cache
        given = [
            [rng.standard_normal((3, *shape), np.float32) for shape in shapes]
            for shapes in cache.pools.states.shapes
        ]
        for room in ROOMS.values():
            put(cache, monkeypatch, card, room)
            before = card.n_launches
            cache.write_states([5, 0, 2], given)
            found = cache.read_states([0, 2, 5])
            assert room < 1 << 20 or card.n_launches - before == 2
            for layer, wanted in zip(found, given, strict=True):
                for one, other in zip(layer, wanted, strict=True):
                    np.testing.assert_array_equal(one, other[[1, 2, 0]])
            for states in cache.pools.states.of_layer:
                for state in states:
                    state.zero_()
        assert cache.read_states([])[0][0].shape == (0, 3, 5)


def test_all_layers_are_one_launch_and_one_copy_however_many_tokens(monkeypatch: Any) -> None:
    counts, tables = set(), [np.arange(5), np.arange(40)[::-1]]
    for name in ("bfloat16", "blocks", "latent"):
        card = DeferredCard(stores.copy_planes)
        with opened(name) as cache, card:
            fill(cache, 40)
            put(cache, monkeypatch, card)
            for table in tables:
                cells = [table if g.is_full else table[:0] for g in cache.pools.groups]
                before = card.n_launches, card.n_copies
                rows, landing = cache.begin_read(cells)
                counts.add((card.n_launches - before[0], card.n_copies - before[1]))
                landing.arrival.wait()
                before = card.n_launches, card.n_copies
                cache.write_rows(cells, rows)
                counts.add((card.n_launches - before[0], card.n_copies - before[1]))
            card.finish()
    assert counts == {(1, 1)}


def test_a_buffer_s_launches_and_copies_are_those_of_the_bytes_and_nobody_waits(
    monkeypatch: Any,
) -> None:
    card = DeferredCard(stores.copy_planes)
    with opened("bfloat16", 64) as cache, card:
        fill(cache, 40)
        put(cache, monkeypatch, card, room=2000)
        (tables, _) = cache.seq_table(0)
        rows, landing = cache.begin_read([tables, tables[:0]])
        n_bytes = sum(part.nbytes for side in rows[0] for part in side)
        assert card.n_launches == card.n_copies <= 2 * -(-n_bytes // 2000)
        assert card.log == ["copies waits for what computes so far"]
        assert landing.arrival.took_s is None
        landing.arrival.wait()
        assert card.log[1:] == ["the host waits for what copies so far"]
        assert landing.arrival.took_s == 2.0
        card.log.clear()
        cache.write_rows([tables, tables[:0]], rows)
        assert card.log == ["copies waits for what computes so far"]
        card.finish()


# Order: what steps and transfers owe each other ---------------------------------------------------


def step(cache: Any, card: DeferredCard, seq_ids: list[int], number: float) -> list[int]:
    """A step that fills the K of its cells with a number, on the card; return these cells."""
    cache.begin_step(stretches(seq_ids))
    (plan,) = cache.steps.plan_all(len(seq_ids), None)
    cache.pools.before_step(0, plan)
    cells = plan.write_cells.tolist()
    for layer in cache.pools.of_layer:
        layer.ensure(plan.n_cells, CPU)
        k = layer.k.parts[0]
        card.now.give(lambda k=k: k.index_fill_(2, torch.tensor(cells), number))
    cache.steps.wrote_all()
    cache.end_step()
    return cells


ORDERS = pytest.mark.parametrize("prefers", ["copies", "computes"])


@ORDERS
def test_rows_are_what_they_were_though_a_step_takes_their_cells(
    prefers: str, monkeypatch: Any
) -> None:
    card = DeferredCard(stores.copy_planes, prefers)
    with opened("float32", 64, 64) as cache, card:
        fill(cache, 20)
        put(cache, monkeypatch, card, room=700)
        tables = cache.seq_table(0)
        wanted = cache.read_rows(tables)
        step(cache, card, [0], 5.0)  # what is read is behind that
        card.log.clear()
        found, landing = cache.begin_read(cache.seq_table(0))
        step(cache, card, [0], 6.0)
        step(cache, card, [1], 6.0)
        assert card.log == ["copies waits for what computes so far"]  # other cells
        cache.seq_rm(0)
        cells = step(cache, card, [2] * 25, 7.0)
        assert set(cells) & set(tables[0].tolist())
        assert card.log[1:] == ["computes waits for what copies so far"]
        step(cache, card, [2], 8.0)
        assert len(card.log) == 2  # once
        landing.arrival.wait()
        card.finish()
        same([[(part[:, :, :20],) for (part,) in side] for side in [found[0]]], wanted)
        assert (found[0][0][0][:, :, 20] == 5.0).all()
        again = cache.read_rows([np.array(cells)])
        assert (again[0][0][0] == 7.0).all()


@ORDERS
def test_a_step_reads_rows_that_are_on_their_way_and_others_go_on(
    prefers: str, monkeypatch: Any
) -> None:
    card = DeferredCard(stores.copy_planes, prefers)
    with opened("float32") as cache, card:
        fill(cache, 20)
        put(cache, monkeypatch, card, room=700)
        rows = cache.read_rows(cache.seq_table(0))
        (cells,) = cache.seq_claim(1, [np.zeros(20, np.int64)])
        cache.pools.of_layer[0].ensure(64, CPU)
        cache.pools.of_layer[1].ensure(64, CPU)
        card.log.clear()
        cache.write_rows([cells], rows)
        step(cache, card, [0], 5.0)
        assert card.log == ["copies waits for what computes so far"]
        seen: list[Any] = []
        step(cache, card, [1], 6.0)
        assert card.log[1:] == ["computes waits for what copies so far"]
        k = cache.pools.of_layer[0].k.parts[0]
        card.now.give(lambda: seen.append(k[0][:, torch.from_numpy(cells)].numpy().copy()))
        card.finish()
        np.testing.assert_array_equal(seen[0], rows[0][0][0][0])


@ORDERS
def test_rows_that_leave_and_come_back_in_one_go_are_whole_though_pools_grow(
    prefers: str, monkeypatch: Any
) -> None:
    card = DeferredCard(stores.copy_planes, prefers)
    with opened("float32", 128) as cache, card:
        fill(cache, 16)
        put(cache, monkeypatch, card, room=700)
        wanted = cache.read_rows(cache.seq_table(0))
        found, landing = cache.begin_read(cache.seq_table(0))
        real: Callable[..., Any] = type(cache.pools.of_layer[0]).ensure
        grown: list[int] = []

        def ensure(pool: Any, n_cells: int, device: Any) -> None:
            if n_cells > pool.n_cells:
                card.finish()  # a copy of all cells, behind all that computes
                grown.append(n_cells)
            real(pool, n_cells, device)

        monkeypatch.setattr(type(cache.pools.of_layer[0]), "ensure", ensure)
        cache.seq_rm(0)
        card.log.clear()
        step(cache, card, [3] * 60, 9.0)
        assert grown and set(card.log) == {"computes waits for what copies so far"}  # once for each
        landing.arrival.wait()
        same(found, wanted)
        (cells,) = cache.seq_claim(4, [np.zeros(16, np.int64)])
        cache.write_rows([cells], found)
        same(cache.read_rows([cells]), wanted)


def test_what_moves_is_held_until_it_has_moved(monkeypatch: Any) -> None:
    card = DeferredCard(stores.copy_planes)
    with opened("float32") as cache, card:
        fill(cache, 20)
        put(cache, monkeypatch, card)
        tables = cache.seq_table(0)
        cache.begin_read(tables)
        side = cache.pools._of_card._side
        assert len(side._held) == 1
        cache.pools._of_card = None
        del side  # who lets the stream go waits for it
    assert card.log[-1] == "the host waits for what copies so far"
