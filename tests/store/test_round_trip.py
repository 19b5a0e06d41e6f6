"""What is saved comes back bit for bit, for every storage type and shape."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.backends.host_memory import Landing
from kvcellar.errors import ShapeError, StoreError
from kvcellar.history import History as TokenHistory
from kvcellar.kv_dtype import SideDtype
from kvcellar.states import StateGroup
from kvcellar.store import Side, Store, StoreConfig, WindowRows
from kvcellar.store.values.blocks import (
    boundary_link,
    chain,
    unsealed_block,
    unsealed_boundary,
)
from kvcellar.store.values.layout import GroupRows
from kvcellar.store.values.precision import _narrowed, as_floats, stored_dtype
from kvcellar.types import LayerGroup
from tests.store.fakes import (
    FULL,
    QUICK,
    STATE,
    WINDOW,
    History,
    load_all,
    make_key,
    save,
    tokens_of,
)

DTYPES = ["float32", "float16", "bfloat16", "fp8", "int8", "int4", "k8v4", "k16v8", "int4:rot"]


@st.composite
def histories(draw: st.DrawFn) -> History:
    n_layers = draw(st.integers(1, 4))
    n_groups = draw(st.integers(1, min(2, n_layers)))
    groups = [
        LayerGroup(
            tuple(range(index, n_layers, n_groups)),
            draw(st.integers(1, 3)),
            draw(st.sampled_from([1, 4, 7, 32, 64])),
            draw(st.sampled_from([1, 4, 7, 32, 64])),
            window=draw(st.sampled_from([None, 1, 3, 20])),
        )
        for index in range(n_groups)
    ]
    dtype = draw(st.sampled_from(DTYPES))
    state = draw(st.sampled_from([None, STATE]))
    key = make_key("m", groups, dtype, draw(st.integers(1, 9)), state)
    tokens = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=30))
    return History(key, tokens, slack=draw(st.integers(0, 3)))


@settings(max_examples=60)
@given(histories(), st.booleans())
def test_every_byte_comes_back_from_disk_and_from_ram(history: History, is_warm: bool) -> None:
    with tempfile.TemporaryDirectory(dir=QUICK) as folder:
        with Store(folder, StoreConfig(warm_bytes=1 << 20 if is_warm else 0)) as store:
            save(store, "a", history)
            assert load_all(store, history) == len(history.tokens)
            assert not store.take_events()
        with Store(folder) as store:
            assert load_all(store, history) == len(history.tokens)
            match = store.match(history.key, history.tokens)
            assert match.is_exact
            assert not store.take_events()


@settings(max_examples=30)
@given(histories())
def test_float_rows_in_eight_bits_come_back_within_half_a_step(history: History) -> None:
    layout = history.key.layout
    config = StoreConfig(warm_bytes=0, cold_precision="int8")
    with tempfile.TemporaryDirectory(dir=QUICK) as folder, Store(folder, config) as store:
        save(store, "a", history)
        match = store.match(history.key, history.tokens)
        assert match.n_tokens == len(history.tokens)
        for piece in store.load(match, 0, match.n_tokens):
            want = history.read_rows(piece.start, piece.stop)
            for got_group, want_group in zip(piece.rows, want, strict=True):
                for side, dtype in zip(range(2), (layout.kv.k, layout.kv.v), strict=True):
                    got, exact = got_group[side].data, want_group[side].data
                    assert (got.dtype, got.shape) == (exact.dtype, exact.shape)
                    if dtype.is_quantised:
                        assert np.array_equal(got, exact)
                        continue
                    if dtype.name == "bfloat16":
                        got, exact = (
                            (a.astype(np.uint32) << 16).view(np.float32) for a in (got, exact)
                        )
                    # rows lie in [-1, 1]: half a step of 2/255, and what bfloat16 rounds away
                    error = np.abs(got.astype(np.float32) - exact.astype(np.float32))
                    assert error.max() <= 1.1 / 255 + (
                        2**-8 if dtype.name == "bfloat16" else 2**-10
                    )
            sides = layout.kv.k, layout.kv.v
            is_small = all(side.is_quantised or side.name == "fp8" for side in sides)
            assert piece.is_exact is is_small


def test_blocks_in_eight_bits_are_smaller_and_said_not_to_be_exact(tmp_path: Path) -> None:
    key = make_key(groups=[LayerGroup((0, 1), 4, 64, 64)], kv_dtype="bfloat16", block_tokens=64)
    history = History(key, tokens_of(0, 640))
    sizes = []
    for precision in ("exact", "int8"):
        config = StoreConfig(warm_bytes=0, cold_precision=precision)
        with Store(tmp_path / precision, config) as store:
            save(store, "a", history)
            sizes.append(store.stats().cold.size_bytes)
            assert store.match(key, history.tokens).is_exact is (precision == "exact")
    assert sizes[1] < 0.6 * sizes[0]


def test_an_exact_save_takes_the_place_of_one_in_eight_bits_and_not_the_other_way(
    tmp_path: Path,
) -> None:
    history = History(make_key(), tokens_of(0, 20))
    for precision, is_exact in (("int8", False), ("exact", True), ("int8", True)):
        with Store(tmp_path, StoreConfig(warm_bytes=0, cold_precision=precision)) as store:
            save(store, "a", history)
            match = store.match(history.key, history.tokens)
            assert match.n_tokens == 20
            assert match.is_exact is is_exact
    with Store(tmp_path) as store:
        assert load_all(store, history) == 20


@pytest.mark.parametrize("warm_precision", ["int8", "exact"])
@pytest.mark.parametrize("state", [None, STATE])
def test_what_ram_still_has_is_written_again_as_it_was(
    tmp_path: Path, warm_precision: str, state: StateGroup | None
) -> None:
    """Where a disk has lost it; what is in 8 bits already goes through them no second time."""
    key = make_key(groups=[FULL, WINDOW], state=state)
    history = History(key, tokens_of(0, 20))
    config = StoreConfig(warm_precision=warm_precision, cold_precision="int8")
    with Store(tmp_path, config) as store:
        save(store, "a", history)
        files = [*(tmp_path / "blocks").iterdir(), *(tmp_path / "windows").iterdir()]
        before = {path: path.read_bytes() for path in files}
        store.delete("a")
        for path in files:
            path.unlink()
        store.gc()
        n_read = history.n_read
        save(store, "a", history)
        assert history.n_read == n_read and {path: path.read_bytes() for path in files} == before


def test_ram_in_eight_bits_beside_an_exact_disk(tmp_path: Path) -> None:
    history = History(make_key(), tokens_of(0, 20))
    config = StoreConfig(warm_precision="int8")
    with Store(tmp_path, config) as store:
        save(store, "a", history)
        match = store.match(history.key, history.tokens)
        pieces = list(store.load(match))
        assert {piece.tier for piece in pieces} == {"warm"}
        assert not any(piece.is_exact for piece in pieces)
    with Store(tmp_path) as store:
        assert load_all(store, history) == 20
        assert store.match(history.key, history.tokens).is_exact


@pytest.mark.parametrize("state", [None, STATE])
def test_boundary_states_in_ram_in_eight_bits_beside_an_exact_disk(
    tmp_path: Path, state: StateGroup | None
) -> None:
    """States and tokens are never stored in eight bits: they come back bit for bit."""
    key = make_key(groups=[FULL, WINDOW], state=state)
    history = History(key, tokens_of(0, 20))
    with Store(tmp_path, StoreConfig(warm_precision="int8")) as store:
        save(store, "a", history)
        save(store, "b", History(key, history.tokens[:12]))  # in RAM already, and not exact there
        loaded = store.load_boundary(store.match(key, history.tokens))
        assert loaded is not None and (loaded.tier, loaded.is_exact) == ("warm", False)
        (got,), (want,) = loaded.windows, history.read_window(20)
        assert np.array_equal(got.positions, want.positions)
        for ours, exact in zip(got.rows, want.rows, strict=True):
            assert 0 < np.abs(ours.data - exact.data).max() <= 1.1 / 255
        history.check_boundary(replace(loaded, windows=(want,)))
    with Store(tmp_path) as store:
        assert load_all(store, history) == 20
        loaded = store.load_boundary(store.match(key, history.tokens[:12]))
        assert loaded is not None and loaded.is_exact and loaded.tier == "cold"


class Arriving:
    """Bytes that are there once somebody has waited for them, as a card's copies are."""

    took_s = None

    def __init__(self, coming: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self._coming = coming

    def wait(self) -> None:
        for there, bits in self._coming:
            there[...] = bits


class Late(History):
    """A history whose rows are zeros until they have landed."""

    coming: list[tuple[np.ndarray, np.ndarray]]

    def rows(self, index: int, positions: np.ndarray) -> GroupRows:
        return GroupRows(*map(self._late, super().rows(index, positions)))

    def _late(self, side: Side) -> Side:
        pairs = [(np.zeros_like(part), part) for part in side.parts()]
        self.coming = [*getattr(self, "coming", []), *pairs]
        return Side(*(there for there, _ in pairs))

    def landing(self) -> Landing:
        coming, self.coming = self.coming, []
        return Landing(Arriving(coming))


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("is_written", [False, True])
def test_rows_that_land_later_are_waited_for_before_anybody_reads_them(
    tmp_path: Path, kv_dtype: str, is_written: bool
) -> None:
    key = make_key(groups=[FULL, WINDOW], kv_dtype=kv_dtype, state=STATE)
    history, go = History(key, tokens_of(0, 20)), threading.Event()
    with Store(tmp_path, StoreConfig(warm_bytes=0)) as store:
        store._writer.offer(lambda: go.wait(60) and None, 0)
        ticket = store.save("a", key, history.tokens, Late(key, history.tokens))
        if is_written:
            go.set()
            assert ticket.wait(60) == "published"
        assert load_all(store, history) == 20
        go.set()
        assert ticket.wait(60) == "published" and load_all(store, history) == 20


def test_what_waits_counts_all_of_its_bytes() -> None:
    key = make_key(groups=[FULL, WINDOW], state=STATE)
    history, tokens = History(key, tokens_of(0, 20)), TokenHistory(tokens_of(0, 20))
    link = next(chain(key, tokens))
    block = unsealed_block(key, link, tokens[:8], history.read_rows(0, 8))
    assert block.size_bytes == 8 * 8 + key.layout.rows_bytes(8)
    assert block.info.is_exact and (block.info.start, block.info.stop, block.info.first) == (
        0,
        8,
        0,
    )
    windows, states = history.read_window(20), history.read_states(20)
    link = boundary_link(key, tokens)
    n_bytes = 4 * 8 + 5 * 8 + 5 * 2 * (8 + 8) * 4  # tokens behind the blocks, positions, rows
    end = unsealed_boundary(key, link, tokens[16:], windows, states)
    assert end.size_bytes == n_bytes + key.layout.slot_bytes
    info = end.info
    assert info.is_exact and (info.start, info.stop, info.first) == (16, 20, 20)


def test_rows_of_another_shape_are_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    history = History(make_key(groups=[FULL, WINDOW]), tokens_of(0, 20))

    class Wrong(History):
        def read_rows(self, p0: int, p1: int):  # type: ignore[no-untyped-def]
            (rows,) = super().read_rows(p0, p1)
            return (GroupRows(rows.k, Side(rows.v.data[:, :, :-1])),)

    class TooFew(History):
        def read_window(self, n: int):  # type: ignore[no-untyped-def]
            (window,) = super().read_window(n)
            rows = GroupRows(*(Side(side.data[:, :, 1:]) for side in window.rows))
            return [window._replace(positions=window.positions[1:], rows=rows)]

    class Elsewhere(History):
        def read_window(self, n: int):  # type: ignore[no-untyped-def]
            (window,) = super().read_window(n)
            return [window._replace(positions=window.positions - 1)]

    class Nowhere(History):
        def read_window(self, n: int):  # type: ignore[no-untyped-def]
            return [WindowRows(np.arange(0), self.rows(1, np.arange(0)))]

    class Missing(History):
        def read_window(self, n: int):  # type: ignore[no-untyped-def]
            return []

    with Store(tmp_path) as store:
        for kind, said in (
            (Elsewhere, r"positions up to 19; layer group 1 brings 5 from 14 to 18$"),
            (Nowhere, r"could be resumed from 25 on at the earliest"),
            (Missing, r"the layout has 1 sliding-window layer groups, rows of 0 came"),
        ):
            with pytest.raises(StoreError, match=said):
                store.save("a", history.key, history.tokens, kind(history.key, history.tokens))
        wrong = Wrong(history.key, history.tokens)
        with pytest.raises(ShapeError, match="V of layer group 0"):
            store.save("a", history.key, history.tokens, wrong)
        with pytest.raises(StoreError, match="lacks positions that the next token sees"):
            too_few = TooFew(history.key, history.tokens)
            store.save("a", history.key, history.tokens, too_few)
        store.flush()
        assert store.references() == []
        assert store.stats().cold.n_blocks == 0


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=20))
def test_a_number_becomes_the_nearest_bfloat16_and_of_two_the_even_one(numbers: list) -> None:
    floats = np.array([*numbers, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 0.0, -0.0], np.float32)
    below = floats.view(np.uint32) >> 16
    both = [(bits << 16).view(np.float32).astype(np.float64) for bits in (below, below + 1)]
    off = [np.abs(one - floats.astype(np.float64)) for one in both]
    is_up = (off[1] < off[0]) | ((off[1] == off[0]) & (below % 2 == 1))
    assert np.array_equal(_narrowed(floats), np.where(is_up, below + 1, below))
    assert _narrowed(floats).dtype == np.uint16


@pytest.mark.parametrize(
    ("kv_dtype", "bound"),
    [
        ("float32", 0.0),
        ("float16", 2**-11),
        ("bfloat16", 2**-7),  # the fakes cut it off
        ("fp8", 2**-4),
        ("int8", 1.1 / 255),
        ("int4", 1.1 / 15),
        ("k8v4", 1.1 / 15),
        ("k16v8", 1.1 / 255),
    ],
)
def test_rows_of_any_type_are_read_as_the_numbers_that_they_stand_for(
    kv_dtype: str, bound: float
) -> None:
    tokens, positions = tokens_of(0, 20), np.arange(20)
    exact = History(make_key(), tokens).rows(0, positions)
    key = make_key(kv_dtype=kv_dtype)
    found = as_floats(History(key, tokens).rows(0, positions), FULL, key.layout.kv)
    for got, want in zip(found, exact, strict=True):
        assert (got.dtype, got.shape) == (np.float32, want.data.shape)
        assert np.abs(got - want.data).max() <= bound
    assert stored_dtype(key.layout.kv, "exact") == key.layout.kv
    eight = stored_dtype(key.layout.kv, "int8")
    for old, new in zip((key.layout.kv.k, key.layout.kv.v), (eight.k, eight.v), strict=True):
        assert new == (SideDtype("int8") if old.bits > 8 else old)
