"""Flat batches of many sequences: forks, cuts, holes, windows, compaction."""

from __future__ import annotations

import numpy as np

from kvcellar.errors import (
    CacheFullError,
    RewindError,
    SequenceConflictError,
    UnknownSequenceError,
)
from kvcellar.testing.cases import CASES, Case, group
from kvcellar.testing.opening import open_driver
from kvcellar.testing.suite.scenarios import Scenarios, once_per_bookkeeping


class ManySequences(Scenarios):
    """Flat batches of many sequences: forks, cuts, holes, windows, compaction."""

    def test_a_flat_batch_mixes_prefill_and_decode_of_many_sequences(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((10, 5))
            d.forward((10, 1), (11, 8))
            d.forward((11, 1), (12, 6), (10, 1))
            d.forward((10, 3), (11, 1), (12, 1), (4, 1))
            for _ in range(6):
                d.forward((12, 1), (10, 1), (4, 1), (11, 1))

    @once_per_bookkeeping
    def test_a_sequence_may_come_in_several_stretches_of_one_batch(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((0, 3), (1, 2), (0, 4), (1, 1), (0, 1))
            d.forward((1, 1), (0, 1), (1, 1), (0, 9), (1, 5))

    @once_per_bookkeeping
    def test_positions_may_come_as_a_column_for_many_sequences_too(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.column_positions = True
            d.forward((0, 3), (1, 2))
            d.forward((0, 1), (1, 1))

    @once_per_bookkeeping
    def test_sequences_do_not_see_each_other(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((1, 3))
            for n in (1, 4, 1):
                ids, tokens = d.begin((2, n), (1, n), (3, 1))
                inputs = d.random_inputs(len(ids))
                for part in (*inputs.k, *inputs.v):  # the others shout
                    part[:, [i for i, s in enumerate(ids) if s != 1]] *= 1000.0
                d.store(tokens, inputs)
                seen = d.visibility(ids, tokens)
                mine = [i for i, s in enumerate(ids) if s == 1]
                for layer in range(d.n_layers):
                    got = d.attend(layer, tokens, inputs, case.in_dtype)
                    want = d.dense(layer, ids, tokens, inputs.q[layer], seen)
                    atol = self.adapter.tolerance(case.in_dtype, case.kv_dtype)
                    np.testing.assert_allclose(got[:, mine], want[:, mine], rtol=0, atol=atol)
                d.complete(ids, tokens)

    def test_a_fork_shares_the_trunk_and_then_diverges(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((0, 14))
            size_bytes = d.cache.usage().size_bytes
            d.cp(0, 1)
            d.cp(0, 2)
            assert d.cache.usage().size_bytes == size_bytes
            d.forward((1, 1), (0, 1), (2, 5))
            d.forward((2, 1), (1, 3), (0, 1))
            d.cp(2, 3)
            d.rm(0)
            d.forward((3, 2), (1, 1), (2, 1))

    def test_a_fork_of_a_prefix_goes_on_from_there(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind, window_slack=20) as d:
            d.forward((0, 16))
            d.cp(0, 1, 0, 11)
            d.forward((1, 4), (0, 1))
            d.forward((1, 1), (0, 1))

    @once_per_bookkeeping
    def test_a_fork_of_a_middle_range_attends_that_range_alone(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind, window_slack=40) as d:
            d.forward((0, 20))
            d.cp(0, 1, 4, 18)
            d.forward((1, 1), (0, 1))
            d.forward((1, 5))
            d.forward((2, 3))
            d.cp(0, 2, 3, 20)  # grafted behind tokens of its own
            d.forward((2, 2), (1, 1))

    @once_per_bookkeeping
    def test_a_fork_onto_other_tokens_is_refused(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((0, 8), (1, 8))
            with d.refuses(SequenceConflictError):
                d.cp(0, 1)
            with d.refuses(UnknownSequenceError):
                d.cp(5, 1)
            d.forward((0, 1), (1, 1))

    def test_a_rollback_is_forgotten_and_generation_goes_on(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind, window_slack=16) as d:
            d.forward((0, 9), (1, 3))
            d.cp(0, 2)
            for length in (7, 4, 1):
                d.run_poisoned((0, 3))
                d.rm(0, length)
                d.forward((0, 2), (1, 1))
                d.forward((0, 1), (2, 1))
            d.rm(0)
            d.forward((0, 2), (2, 1))

    @once_per_bookkeeping
    def test_a_hole_in_a_history_is_not_attended(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((0, 12), (1, 2))
            d.cp(0, 2)
            d.rm(0, 3, 6)
            d.rm(0, 9, 11)
            d.forward((0, 1), (2, 1))
            d.forward((0, 5), (1, 1))
            d.rm(0, 0, 2)
            d.forward((1, 1), (0, 3))
            d.forward((0, 1), (2, 2))

    @once_per_bookkeeping
    def test_keeping_one_sequence_drops_the_others(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((0, 6), (1, 5))
            d.cp(1, 2)
            d.forward((2, 2), (0, 1))
            d.keep(2)
            d.forward((2, 1), (0, 3))
            with d.refuses(UnknownSequenceError):
                d.keep(9)

    def test_freed_cells_are_used_again_and_nothing_of_them_is_seen(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind, capacity=24, window_slack=24) as d:
            d.forward((0, 8))
            for _ in range(4):
                d.run_poisoned((1, 9), (2, 7))
                with d.refuses(CacheFullError):
                    d.begin((0, 1))
                d.rm(1)
                d.forward((3, 6), (0, 1))
                d.rm(2)
                d.forward((4, 4), (3, 1), (0, 1))
                d.keep(0)
                d.rm(0, 8)
            assert d.cache.usage().groups[0].live == 8

    def test_cells_behind_a_window_serve_other_sequences(self, windowed: Case, kind: str) -> None:
        with open_driver(self.adapter, windowed, kind, window_slack=0, capacity=200) as d:
            d.forward((0, 70))
            d.forward((1, 70), (0, 1))
            for _ in range(5):
                d.forward((1, 3), (0, 1), (2, 2))
            d.cp(0, 3)
            for _ in range(5):
                d.forward((3, 1), (0, 2), (1, 1), (2, 1))
            sliding = [g for g in d.cache.usage().groups if g.window is not None]
            assert all(g.live < 100 for g in sliding)

    def test_the_lowest_length_that_a_cut_accepts_goes_on_exactly(
        self, windowed: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, windowed, kind, window_slack=3) as d:
            d.forward((0, 90), (1, 2))
            d.forward((0, 1), (1, 1))
            d.cache.end_step()
            low = d.cache.resumable_from(0)
            assert 0 < low < 91
            with d.refuses(RewindError):
                d.cp(0, 2, 0, low - 1)
            d.cp(0, 2, 0, low)
            assert d.rm(0, low) == low
            d.forward((0, 1), (2, 2))
            d.forward((2, 1), (0, 3))
            assert d.rm(0, low - 1) == 0
            d.forward((2, 1), (0, 3))

    def test_a_cut_to_where_a_chunk_begins_needs_nothing_before_it(self, kind: str) -> None:
        case = Case("chunks", 4, (group((0,), 2), group((1,), 1, chunk=8)), window_slack=0)
        with open_driver(self.adapter, case, kind) as d:
            d.forward((0, 90), (1, 2))
            d.forward((0, 1), (1, 1))
            d.cache.end_step()
            assert d.cache.resumable_from(0) == 88
            assert [d.cache.resume_at(0, n) for n in (87, 80, 9, 7)] == [80, 80, 8, 0]
            d.cp(0, 2, 0, 48)
            assert d.rm(0, 43) == 40
            d.forward((0, 3), (2, 9), (1, 1))
            d.cache.end_step()
            assert d.cache.can_resume(0, 42)
            d.rm(0, 42)
            d.forward((0, 1), (2, 1))

    def test_a_full_sliding_pool_lets_go_behind_its_windows(self, kind: str) -> None:
        case = next(c for c in CASES if c.name == "two-windows-no-slack")
        with open_driver(self.adapter, case, kind, capacity=16) as d:
            for _ in range(12):
                d.forward((0, 2), (1, 3))
                d.forward((0, 1), (1, 4))

    def test_many_short_runs_are_one_history(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind, capacity=120) as d:
            for i in range(0, 40, 8):
                d.forward(*((seq, 1 + seq % 2) for seq in range(i, i + 8)))
            for i in range(0, 40, 2):
                d.rm(i)
            d.forward((50, 40), (1, 1), (3, 1), (5, 2))
            d.forward((50, 1), (7, 1), (50, 3))
            d.cp(50, 51)
            d.forward((50, 1), (51, 2), (9, 1), (11, 1), (13, 1), (15, 1))

    def test_short_runs_are_copied_together_and_nobody_sees_a_difference(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind, capacity=64) as d:
            for i in range(0, 20, 5):
                d.forward(*((seq, 2) for seq in range(i, i + 5)))
            for i in range(0, 20, 2):
                d.rm(i)
            d.forward((30, 30), (1, 3))
            d.cp(30, 31, 0, 30)
            for i in range(3, 20, 2):
                d.rm(i)
            assert d.compact() or d.cache.block_size > 1, "a block's cells stay where they are"
            d.forward((30, 2), (31, 1), (1, 1))
            d.cancel()
            d.forward((31, 3), (1, 1), (30, 1))
            assert not d.compact() or not d.compact(), "at some time nothing is left to gather"

    @once_per_bookkeeping
    def test_a_cleared_cache_is_as_new(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.run_poisoned((0, 6), (1, 9))
            d.clear()
            d.agrees()
            assert all(g.live == 0 for g in d.cache.usage().groups)
            d.forward((1, 5), (0, 3))
            d.abort(1, (1, 2))
            d.clear()
            d.forward((2, 4))

    @once_per_bookkeeping
    def test_a_cleared_single_sequence_is_as_new(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            d.run_poisoned((0, 60))
            d.clear()
            d.agrees()
            d.forward((0, 5))
            d.forward((0, 1))

    @once_per_bookkeeping
    def test_two_sessions_do_not_meet(self, case: Case) -> None:
        with (
            open_driver(self.adapter, case, "seq", "a") as a,
            open_driver(self.adapter, case, "tree", "b") as b,
            open_driver(self.adapter, case, "decode", "c") as c,
        ):
            a.forward((0, 4))
            b.forward((0, 6), (1, 2))
            c.forward((0, 5))
            _, tokens = a.begin((0, 1))
            inputs = a.random_inputs(1)
            a.cache.cancel_step()
            for _ in range(3):
                a.forward((0, 2))
                c.forward((0, 1))
                b.forward((1, 1), (0, 1))
            a.begin((0, 2))  # one is between begin_step and its forward while another runs
            b.forward((0, 2))
            c.forward((0, 2))
            a.cancel()
            assert len(tokens) == inputs.q[0].shape[1]
            a.forward((0, 1))

    @once_per_bookkeeping
    def test_layers_of_two_sessions_may_take_turns(self, case: Case) -> None:
        with (
            open_driver(self.adapter, case, "seq", "a") as a,
            open_driver(self.adapter, case, "seq", "b") as b,
        ):
            a.forward((0, 4))
            b.forward((0, 9), (1, 1))
            runs = [(d, *d.begin(*batch)) for d, batch in ((a, ((0, 3),)), (b, ((1, 2), (0, 1))))]
            inputs = [d.random_inputs(len(ids)) for d, ids, _ in runs]
            for (d, _, tokens), brought in zip(runs, inputs, strict=True):
                d.store(tokens, brought)
            seen = [d.visibility(ids, tokens) for d, ids, tokens in runs]
            for layer in range(a.n_layers):
                for (d, ids, tokens), brought, who in zip(runs, inputs, seen, strict=True):
                    got = d.attend(layer, tokens, brought, "float32")
                    want = d.dense(layer, ids, tokens, brought.q[layer], who)
                    atol = self.adapter.tolerance(case.in_dtype, case.kv_dtype)
                    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
            for d, ids, tokens in runs:
                d.complete(ids, tokens)
            a.forward((0, 1))
            b.forward((0, 1), (1, 1))
