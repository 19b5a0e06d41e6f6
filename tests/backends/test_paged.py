"""Paged caches prove what every cache of many sequences proves, in both layouts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from kvcellar import (
    CacheSession,
    LayerGroup,
    ModelCacheParams,
    make_config,
    make_paged_session,
    make_seq_session,
)
from kvcellar.cache import TreeSeqCache
from kvcellar.cache_config import LAYOUTS, CacheConfig
from kvcellar.errors import CacheFullError, ConfigError
from kvcellar.testing import STATE_CASES, BackendAdapter, ConformanceSuite, NumpyAdapter, opening
from kvcellar.testing.cases import Case
from kvcellar.testing.opening import open_driver
from kvcellar.testing.suite.scenarios import chosen
from kvcellar.testing.suite.trees import Trees
from kvcellar.testing.walks import BATCH, BOUND, FATES, NODES, SEQ, SequenceWalk, Walk
from tests.backends.adapters import (
    MlxAdapter,
    MlxInSmallPieces,
    TorchAdapter,
    TorchInSmallPieces,
    needs_mlx,
)

BLOCK_SIZES = {"layer_first": 4, "block_first": 3}


def make_session_of(layout: str) -> Any:
    """What opens a session of this layout with small blocks, as many as the scenario wants cells.

    So a scenario that fits into token cells fits into blocks, whatever it leaves of each unused.
    """

    def make(backend: str, config: CacheConfig) -> CacheSession[TreeSeqCache]:
        size = BLOCK_SIZES[layout]
        config = replace(config, layout=layout, block_size=size, capacity=size * config.capacity)
        return make_paged_session(backend, config)

    return make


class PagedWalk(SequenceWalk):
    """The walks over the verbs, in fewer cells; what fits is asked of the batch."""

    def __init__(self, adapter: BackendAdapter, case: Case, kind: str) -> None:
        Walk.__init__(self, adapter, case, kind, capacity=24, min_chunk=4, window_slack=6)

    @rule(drawn=BATCH, fate=FATES, n_layers=st.integers(0, 3))
    def forward(self, drawn, fate, n_layers):
        d = self.d
        batch = self.batch(drawn)
        if not batch:
            return
        d.cache.end_step()
        if d.cache.can_begin_step(batch):
            self.step(batch, fate, n_layers)
        else:
            assert isinstance(self.refused(d.begin, *batch), CacheFullError)

    @rule(seq=SEQ, draws=NODES)
    def propose(self, seq, draws):
        """Propose as in the other walks; what fits depends on the sequence's last block."""
        tree = self.d.trees.get(seq)
        if tree is None or not tree.is_pending:
            n_nodes = len(tree.parents) if tree else 0
            parents = [draw % (n_nodes + i + 1) - 1 for i, draw in enumerate(draws)]
            error = self.refused(self.d.propose, parents, seq)
            assert error is None or isinstance(error, CacheFullError)

    @rule(pick=st.integers(0, 9), dst=SEQ, p0=st.just(0) | BOUND, p1=st.none() | BOUND)
    def cp(self, pick, dst, p0, p1):
        """Copy as in the other walks, but for parts of blocks that may find no block to meet in."""
        try:
            super().cp(pick, dst, p0, p1)
        except AssertionError:
            with pytest.raises(CacheFullError, match="blocks to join"):
                self.d.cache.seq_cp(self.seq(pick), dst, p0, p1)

    @rule(pick=st.integers(0, 8), dst=SEQ, fate=FATES, n_layers=st.integers(0, 3))
    def fork_and_append_to_both(self, pick, dst, fate, n_layers):
        src = self.seq(pick)
        if src in self.d.histories and src != dst:
            self.fork(pick, dst)
            self.forward([(dst, 1), (src, 1)], fate, n_layers)


class PagedConformance(ConformanceSuite):
    """The scenarios for many sequences. ``kind`` is the layout; cases take turns with it."""

    turn: ClassVar[int]
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names = ("windowed", "recurrent", "walked")
        name = next((name for name in names if name in metafunc.fixturenames), "case")
        of_name = {"recurrent": self.adapter.state_cases, "walked": self.adapter.walked}
        cases = chosen(of_name.get(name, self.adapter.cases), metafunc.function)
        if name not in metafunc.fixturenames:
            metafunc.parametrize("kind", self.layouts)
            return
        n = len(self.layouts)
        turns = [(case, self.layouts[(i + self.turn) % n]) for i, case in enumerate(cases)]
        turns = [turn for turn in turns if name != "windowed" or turn[0].has_window]
        ids = [f"{case.name}-{layout}" for case, layout in turns]
        metafunc.parametrize((name, "kind"), turns, ids=ids)

    @pytest.fixture(autouse=True)
    def _settings(self) -> Iterator[None]:
        with self.adapter.settings(), pytest.MonkeyPatch.context() as patch:
            for layout in LAYOUTS:
                patch.setitem(opening.MAKERS, layout, make_session_of(layout))
            yield

    def test_freed_cells_are_used_again_and_nothing_of_them_is_seen(
        self, case: Case, kind: str
    ) -> None:
        size = BLOCK_SIZES[kind]
        slack = 9 * size
        with open_driver(self.adapter, case, kind, capacity=7, window_slack=slack) as d:
            d.forward((0, 2 * size))
            for _ in range(4):
                d.run_poisoned((1, 2 * size + 1), (2, 2 * size))
                with d.refuses(CacheFullError):
                    d.begin((0, 1))
                with d.refuses(CacheFullError):
                    d.begin((1, size))
                d.run_poisoned((1, size - 1))
                d.rm(1)
                d.forward((3, size + 1), (0, 1))
                d.rm(2)
                d.forward((4, size), (3, size), (0, 1))
                d.keep(0)
                d.rm(0, 2 * size)
            assert d.cache.usage().groups[0].live == 2 * size

    def test_a_fork_at_any_place_of_a_block_is_copied_before_it_is_written(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind, window_slack=30) as d:
            for length in range(1, 2 * BLOCK_SIZES[kind] + 2):
                d.forward((0, length))
                for seq in (1, 2, 3):
                    d.cp(0, seq)
                d.forward((2, 1), (0, 1), (2, 1))
                d.forward((1, 3), (2, 1), (0, 2), (3, 1))
                d.rm(2, length)
                d.forward((2, 2), (3, 1))
                d.clear()

    def test_a_step_that_copied_blocks_is_taken_back(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((0, 5))
            for seq in (1, 2, 3):
                d.cp(0, seq)
            d.cache.end_step()
            before = d.state()
            batch = ((2, 2), (0, 1), (3, 4), (1, 1))
            for n_layers in range(d.n_layers):
                d.abort(n_layers, *batch)
                d.cancel()
                assert d.state()[0].groups == before[0].groups and d.state()[1:] == before[1:]
            inputs = d.random_inputs(8)
            first = d.forward(*batch, inputs=inputs)
            d.cancel()
            d.abort(d.n_layers - 1, *batch)
            for a, b in zip(first, d.forward(*batch, inputs=inputs), strict=True):
                np.testing.assert_array_equal(a, b)

    def test_parts_of_two_blocks_are_joined(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind, window_slack=60) as d:
            for at in range(1, 9):
                d.forward((0, 14), (1, at))
                d.cp(1, 2)
                d.cp(0, 1, at)  # behind tokens that sequence 2 has too
                d.cp(0, 2, at + 1, 12)  # the last one to join has the block to itself
                d.forward((1, 1), (0, 1), (2, 2))
                d.clear()

    def test_no_sequence_of_verbs_parts_a_paged_session_from_the_oracle(
        self, walked: Case, kind: str
    ) -> None:
        profile = settings.default
        assert profile is not None
        n = max(3, profile.max_examples // 6)
        run_state_machine_as_test(
            lambda: PagedWalk(self.adapter, walked, kind),
            settings=settings(max_examples=n, stateful_step_count=40),
        )


for name, scenario in inspect.getmembers(ConformanceSuite, inspect.isfunction):
    if name.startswith("test_") and "kind" not in inspect.signature(scenario).parameters:
        setattr(PagedConformance, name, None)  # one sequence, or trees


class TreesInBlocks(Trees):
    """The scenarios of trees, where their nodes live in blocks of two cells."""

    layout: ClassVar[str]

    test_a_tree_in_a_pool_full_of_holes_is_compacted_right = None  # cells of a block stay in it

    @pytest.fixture(autouse=True)
    def _settings(self) -> Iterator[None]:
        def make(backend: str, config: CacheConfig) -> CacheSession[TreeSeqCache]:
            n_cells = config.capacity + 2  # for the half of a block that is not used
            in_blocks = replace(config, capacity=n_cells, block_size=2, layout=self.layout)
            return make_paged_session(backend, in_blocks)

        with self.adapter.settings(), pytest.MonkeyPatch.context() as patch:
            patch.setitem(opening.MAKERS, "tree", make)
            yield


class TestReferenceTreesInBlocks(TreesInBlocks):
    adapter = NumpyAdapter("reference")
    layout = "block_first"


class TestTorchTreesInBlocks(TreesInBlocks):
    adapter = TorchAdapter()
    layout = "layer_first"


class TestTorchTreesInBlocksInSmallPieces(TreesInBlocks):
    adapter = TorchInSmallPieces()
    layout = "block_first"


@needs_mlx
class TestMlxTreesInBlocks(TreesInBlocks):
    adapter = MlxAdapter()
    layout = "layer_first"


class TestReferencePaged(PagedConformance):
    adapter = NumpyAdapter("reference", state_cases=STATE_CASES)
    turn = 0


class TestTorchPaged(PagedConformance):
    adapter = TorchAdapter(state_cases=STATE_CASES)
    turn = 1


class TestTorchPagedInSmallPieces(PagedConformance):
    adapter = TorchInSmallPieces()
    turn = 0


@needs_mlx
class TestMlxPaged(PagedConformance):
    adapter = MlxInSmallPieces()
    turn = 0
    layouts = ("layer_first",)


# Bytes --------------------------------------------------------------------------------------------

TWO_GROUPS = ModelCacheParams(
    3, 2, 8, 6, (LayerGroup((0, 2), 2, 8, 6), LayerGroup((1,), 4, 8, 8, window=9))
)


def tensors(n_tok: int, layer: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    group = TWO_GROUPS.groups[layer % 2]
    make = torch.Generator().manual_seed(100 * seed + layer)
    heads = (4, group.n_kv_heads, group.n_kv_heads)
    dims = (8, group.head_dim, group.v_head_dim)
    return tuple(
        torch.randn(1, n, n_tok, dim, generator=make) for n, dim in zip(heads, dims, strict=True)
    )


def run(cache: Any, *batch: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    positions = cache.begin_step(batch)
    outputs = []
    for layer in range(3):
        q, k, v = tensors(len(positions), layer, seed)
        outputs.append(cache.update_and_attend(q, k, v, positions, layer, 0.3, torch.float32))
    return outputs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_are_in_place_and_growth_doubles_up_to_whole_blocks(layout: str) -> None:
    config = make_config(TWO_GROUPS, 70, min_chunk=8, block_size=4, layout=layout, window_slack=70)
    per_cell = 4 * (2 * 2 * (8 + 6) + 4 * (8 + 8))
    with make_paged_session("torch", config) as session:
        cache = session.cache
        assert cache.capacity == 68
        places, sizes = [], []
        for n in (5, 1, 1, 9, 1, 30, 20, 1):
            run(cache, (0, n))
            read = cache.pools.of_layer[0].read(0, 1)[0]
            places.append(read.data_ptr())
            sizes.append(cache.usage().size_bytes // per_cell)
        most = 70 if layout == "layer_first" else 68
        assert sizes == [8, 8, 8, 16, 32, 64, most, most]
        assert len(set(places)) <= len(set(sizes)), "bytes move only to grow"


def test_block_first_keeps_what_a_block_holds_together() -> None:
    config = make_config(TWO_GROUPS, 64, min_chunk=8, block_size=4, layout="block_first")
    with make_paged_session("torch", config) as session:
        run(session.cache, (0, 6))
        first, _, last = session.cache.pools.of_layer
        blocks = first._blocks
        assert last._blocks is blocks
        (k_part,), (v_part,) = blocks.k, blocks.v
        assert k_part.shape == (2, 2, 2, 4, 8) and v_part.shape == (2, 2, 2, 4, 6)
        assert k_part.is_contiguous() and v_part.is_contiguous()
        for index, layer in enumerate((0, 2)):
            _, k, v = tensors(6, layer)
            assert torch.equal(k_part[0, index], k[0, :, :4])
            assert torch.equal(v_part[1, index, :, :2], v[0, :, 4:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_have_the_shapes_of_token_cells(layout: str) -> None:
    config = make_config(TWO_GROUPS, 64, block_size=4, layout=layout)
    with make_paged_session("torch", config) as paged, make_seq_session("torch", config) as seq:
        for session in (paged, seq):
            run(session.cache, (0, 11))
        for a, b in zip(paged.cache.pools.of_layer, seq.cache.pools.of_layer, strict=True):
            for start, length in ((0, 11), (1, 2), (3, 6), (4, 4), (5, 0), (10, 1)):
                for mine, theirs in zip(a.read(start, length), b.read(start, length), strict=True):
                    assert torch.equal(mine, theirs)
            cells = torch.tensor([7, 0, 3, 10])
            for mine, theirs in zip(a.gather(cells), b.gather(cells), strict=True):
                assert torch.equal(mine, theirs)


def test_the_reference_keeps_what_a_block_holds_together_too() -> None:
    config = make_config(TWO_GROUPS, 64, min_chunk=8, block_size=4, layout="block_first")
    with make_paged_session("reference", config) as session:
        for pool, index in zip(session.cache.pools.of_layer, (0, 0, 1), strict=True):
            assert pool.index == index
        session.cache.begin_step([(0, 6)])
        for layer in range(3):
            rows = [t.numpy() for t in tensors(6, layer)]
            session.cache.update_and_attend(*rows, range(6), layer, 0.3, "float32")
        blocks = session.cache.pools.of_layer[2].blocks
        assert session.cache.pools.of_layer[0].blocks is blocks
        (k_part,), (v_part,) = blocks.k, blocks.v
        assert k_part.shape == (2, 2, 2, 4, 8) and v_part.shape == (2, 2, 2, 4, 6)
        np.testing.assert_array_equal(v_part[1, 1, :, :2], tensors(6, 2)[2][0, :, 4:])


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cells_are_all_read_before_any_is_written(backend: str, layout: str) -> None:
    config = make_config(TWO_GROUPS, 64, block_size=4, layout=layout)
    with make_paged_session(backend, config) as session:
        _, k, v = tensors(11, 0)
        cells = np.array([0, 3, 4, 1, 9, 8])
        if backend == "torch":
            pool = session.cache.pools.of_layer[0]
            pool.ensure(11, k.device)
            pool.write_run(0, k, v)
            pool.gather_into(2, torch.as_tensor(cells))
            got = [part[0].numpy() for part in pool.read(0, 11)]
        else:
            pool = session.cache.pools.of_layer[0]
            pool.ensure(11)
            pool.write_run(0, k[0].numpy(), v[0].numpy())
            pool.gather_into(2, cells)
            got = list(pool.read(0, 11))
        order = [0, 1, *cells, 8, 9, 10]
        for part, rows in zip(got, (k, v), strict=True):
            np.testing.assert_array_equal(part, rows[0].numpy()[:, order])


def held(tables: Any) -> list[Any]:
    """The cells of some tables, without the places of those that are gone."""
    return [table[table >= 0] for table in tables]


@pytest.mark.parametrize("kv_dtype", ["float32", "k8v4", "k4v32:rot"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_were_taken_out_come_back_bit_for_bit(layout: str, kv_dtype: str) -> None:
    config = make_config(TWO_GROUPS, 64, kv_dtype, block_size=4, layout=layout, window_slack=3)
    with make_paged_session("torch", config) as session:
        cache = session.cache
        run(cache, (0, 11))
        cache.seq_cp(0, 1)
        run(cache, (1, 2), (0, 3), seed=1)
        expected = run(cache, (0, 1), seed=2)
        cache.cancel_step()
        tables = cache.seq_table(0)
        rows = cache.read_rows(held(tables))
        cache.seq_rm(0)
        run(cache, (5, 9), seed=3)
        new = cache.seq_claim(0, tables)
        cache.write_rows(held(new), rows)
        for back, saved in zip(cache.read_rows(held(new)), rows, strict=True):
            for mine, theirs in zip(back, saved, strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    np.testing.assert_array_equal(a, b)
        for a, b in zip(run(cache, (0, 1), seed=2), expected, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_settings_of_pages_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size must be at least 1"):
        make_config(TWO_GROUPS, 64, block_size=0)
    with pytest.raises(ConfigError, match="choose one of layer_first, block_first"):
        make_config(TWO_GROUPS, 64, layout="head_first")
    with pytest.raises(ConfigError, match="capacity of 15 cells holds no block of 16"):
        make_paged_session("torch", make_config(TWO_GROUPS, 15))
