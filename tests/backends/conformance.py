"""What every backend must prove: the same numbers as dense attention, whatever is asked of it.

A backend passes by a subclass of :class:`Conformance` that names its adapter. ``kind`` is the
session that a scenario opens; scenarios for many sequences run in a session with trees as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvcellar import make_config, make_seq_session
from kvcellar.errors import (
    CacheFullError,
    PositionError,
    ProposalError,
    RewindError,
    SequenceConflictError,
    ShapeError,
    StepError,
    UnknownSequenceError,
)
from tests.backends.adapters import Adapter
from tests.backends.cases import CASES, Case
from tests.backends.dense import row_bytes, stored
from tests.backends.driver import Inputs, open_driver
from tests.backends.walks import walk_one_sequence, walk_sequences


class Conformance:
    """One suite for every backend."""

    adapter: ClassVar[Adapter]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every scenario in every case; with trees in the session, in every second one."""
        cases = list(self.adapter.cases)
        wanted = set(metafunc.fixturenames)
        case = next((name for name in ("windowed", "walked") if name in wanted), "case")
        if case == "windowed":
            cases = [c for c in cases if c.has_window]
        elif case == "walked":
            cases = [c for c in cases if c in self.adapter.walked]
        if {case, "kind"} <= wanted:
            pairs = [(c, "seq") for c in cases] + [(c, "tree") for c in cases[::2]]
            ids = [f"{c.name}-{kind}" for c, kind in pairs]
            metafunc.parametrize((case, "kind"), pairs, ids=ids)
        elif case in wanted:
            metafunc.parametrize(case, cases, ids=[c.name for c in cases])
        elif "kind" in wanted:
            metafunc.parametrize("kind", ["seq", "tree"])

    @pytest.fixture(autouse=True)
    def _settings(self) -> Iterator[None]:
        with self.adapter.settings():
            yield

    # One sequence ------------------------------------------------------------------------------

    def test_a_prefill_and_decode_are_causal(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            d.forward((0, 13))
            for _ in range(12):
                d.forward((0, 1))

    def test_a_prompt_of_one_token_attends_itself(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            d.forward((0, 1))

    def test_a_prefill_in_chunks_gives_the_same_numbers_as_one_at_once(self, case: Case) -> None:
        with (
            open_driver(self.adapter, case, "decode") as whole,
            open_driver(self.adapter, case, "decode") as chunked,
        ):
            inputs = whole.random_inputs(29)
            at_once = whole.forward((0, 29), inputs=inputs)
            start = 0
            for n in (1, 7, 8, 2, 11):
                part = _columns(inputs, start, start + n)
                for layer, out in enumerate(chunked.forward((0, n), inputs=part)):
                    np.testing.assert_allclose(
                        out,
                        at_once[layer][:, start : start + n],
                        rtol=0,
                        atol=2 * self.adapter.tolerance(case.in_dtype, case.kv_dtype),
                    )
                start += n

    def test_a_rewind_then_other_tokens_leaves_no_trace(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            d.run_poisoned((0, 5))
            d.rewind(0)
            d.forward((0, 10))
            for _ in range(3):
                kept = d.cache.length
                d.forward((0, 3))
                d.forward((0, 1))
                if kept >= d.cache.resumable_from():
                    d.rewind(kept)
                d.forward((0, 2))

    def test_a_rewind_within_the_slack_is_exact_after_the_window_wrapped(
        self, windowed: Case
    ) -> None:
        with open_driver(self.adapter, windowed, "decode", window_slack=7) as d:
            for _ in range(8):
                d.forward((0, 9))
                d.rewind(d.cache.length - 6)
                d.forward((0, 1))

    def test_a_rewind_beyond_the_window_is_refused(self, windowed: Case) -> None:
        with open_driver(self.adapter, windowed, "decode", window_slack=2) as d:
            d.forward((0, 60))
            d.forward((0, 60))
            with d.refuses(RewindError):
                d.rewind(30)
            d.forward((0, 1))
            d.rewind(0)
            d.forward((0, 9))

    def test_the_lowest_length_that_a_rewind_accepts_goes_on_exactly(self, windowed: Case) -> None:
        with open_driver(self.adapter, windowed, "decode", window_slack=3) as d:
            for n in (40, 35, 1):
                d.forward((0, n))
            low = d.cache.resumable_from()
            assert 0 < low < 76
            with d.refuses(RewindError):
                d.rewind(low - 1)
            d.rewind(low)
            d.forward((0, 1))
            d.forward((0, 3))

    def test_a_window_wraps_many_times_by_single_tokens(self, windowed: Case) -> None:
        with open_driver(self.adapter, windowed, "decode", min_chunk=4) as d:
            for _ in range(70):
                d.forward((0, 1))

    def test_a_window_wraps_many_times_by_chunks(self, windowed: Case) -> None:
        with open_driver(self.adapter, windowed, "decode", min_chunk=4) as d:
            for n in (3, 30, 1, 1, 17, 2, 40, 5, 1):
                d.forward((0, n))

    def test_a_pool_grows_by_doubling_up_to_capacity_and_keeps_its_bytes(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode", capacity=70, min_chunk=4) as d:
            sizes = [d.cache.usage().size_bytes]
            for n in (1, 3, 1, 20, 1, 40, 1, 1, 1, 1):
                d.forward((0, n))
                sizes.append(d.cache.usage().size_bytes)
            assert d.cache.length == 70
            assert sizes == sorted(sizes)
            assert sizes[0] == 0
            n_cells = [70 if g.window is None else None for g in case.groups]
            if None not in n_cells:
                assert sizes[-1] == 70 * _bytes_per_cell(case)
                assert sizes[1] == 4 * _bytes_per_cell(case)
            with d.refuses(CacheFullError):
                d.attend(0, d.begin((0, 1))[1], d.random_inputs(1), "float32")

    def test_positions_may_come_as_a_row_or_as_a_column(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            for n in (6, 1, 3, 1):
                d.column_positions = not d.column_positions
                d.forward((0, n))

    def test_the_result_has_the_type_that_was_asked(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            for out_dtype in ("float32", "bfloat16", "float16"):
                d.forward((0, 4), out_dtype=out_dtype)
                d.forward((0, 1), out_dtype=out_dtype)

    def test_wrong_positions_are_refused_and_the_right_ones_go_on(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            for good in (4, 1, 3):
                d.forward((0, good))
                _, tokens = d.begin((0, 2))
                for shift in ((1, 1), (-1, -1), (0, 1), (1, 0), (0, -1)):
                    for token, by in zip(tokens, shift, strict=True):
                        token.pos += by
                    with d.refuses(PositionError):
                        d.attend(0, tokens, d.random_inputs(2), "float32")
                    for token, by in zip(tokens, shift, strict=True):
                        token.pos -= by
            d.forward((0, 2))

    def test_wrong_shapes_are_refused_and_the_right_ones_go_on(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            d.forward((0, 3))
            _, tokens = d.begin((0, 2))
            for wrong in _misshapen(d.random_inputs(2)):
                with d.refuses(ShapeError):
                    d.attend(0, tokens, wrong, "float32")
            d.forward((0, 2))
            d.forward((0, 1))

    # Steps that fail ---------------------------------------------------------------------------

    def test_a_forward_that_raised_midway_is_taken_back_and_repeated(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            d.forward((0, 11))
            for n in (3, 1, 9, 1):
                for n_layers in range(1, d.n_layers):
                    d.abort(n_layers, (0, n))
                    d.cancel()
                    d.agrees()
                d.forward((0, n))

    def test_a_whole_step_can_be_taken_back_until_the_next_verb(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            for n in (5, 1, 8, 1, 2):
                inputs = d.random_inputs(n)
                first = d.forward((0, n), inputs=inputs)
                d.cancel()
                d.agrees()
                for a, b in zip(first, d.forward((0, n), inputs=inputs), strict=True):
                    np.testing.assert_array_equal(a, b)

    def test_a_seq_step_that_raised_midway_is_taken_back_and_repeated(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((1, 9), (2, 4))
            d.cp(1, 3)
            batch = ((2, 1), (3, 4), (1, 1), (7, 3), (2, 2))
            d.cache.end_step()
            before = d.state()
            for n_layers in range(d.n_layers):
                d.abort(n_layers, *batch)
                d.cancel()
                after = d.state()
                assert after[0].groups == before[0].groups
                assert after[1:] == before[1:]
            inputs = d.random_inputs(11)
            first = d.forward(*batch, inputs=inputs)
            d.cancel()
            for a, b in zip(first, d.forward(*batch, inputs=inputs), strict=True):
                np.testing.assert_array_equal(a, b)
            d.forward((7, 1), (1, 1), (2, 1), (3, 1))

    def test_a_forward_that_was_left_half_done_is_undone_by_the_next_verb(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((1, 6), (2, 6))
            d.abort(d.n_layers - 1, (1, 2), (3, 2))
            d.forward((2, 1), (1, 1))
            d.abort(d.n_layers - 1, (1, 2), (3, 2))
            d.cp(1, 4)
            d.forward((4, 2), (1, 1))

    def test_layers_without_a_step_or_with_another_number_of_tokens_are_refused(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind) as d:
            if kind == "tree":  # with sequence 0 alone, a forward means sequence 0
                d.forward((3, 2))
            tokens = d._new_tokens([5, 5])
            with d.refuses(StepError):
                d.attend(0, tokens, d.random_inputs(2), "float32")
            d.forward((5, 2))
            with d.refuses(StepError):
                d.attend(0, d._new_tokens([5, 5]), d.random_inputs(2), "float32")
            _, tokens = d.begin((5, 2), (6, 1))
            with d.refuses(StepError, in_step=True):
                d.attend(0, tokens[:2], d.random_inputs(2), "float32")
            for wrong in _misshapen(d.random_inputs(3)):
                with d.refuses(ShapeError, in_step=True):
                    d.attend(0, tokens, wrong, "float32")
            tokens[2].pos += 1
            with d.refuses(PositionError, in_step=True):
                d.attend(0, tokens, d.random_inputs(3), "float32")
            d.cancel()
            d.forward((5, 2), (6, 1))

    def test_a_batch_that_was_refused_can_still_be_brought_right(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((1, 4))
            ids, tokens = d.begin((1, 2), (2, 3))
            inputs = d.random_inputs(5)
            with d.refuses(PositionError, in_step=True):
                d.attend(0, tokens[::-1], inputs, "float32")
            with d.refuses(ShapeError, in_step=True):
                d.attend(0, tokens, next(_misshapen(inputs)), "float32")
            d._store(tokens, inputs)
            seen = d._visibility(ids, tokens)
            for layer in range(d.n_layers):
                got = d.attend(layer, tokens, inputs, "float32")
                want = d._dense(layer, ids, tokens, inputs.q[layer], seen)
                atol = self.adapter.tolerance(case.in_dtype, case.kv_dtype)
                np.testing.assert_allclose(got, want, rtol=0, atol=atol)
            d._complete(ids, tokens)
            d.forward((2, 1), (1, 1))

    # Many sequences ----------------------------------------------------------------------------

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

    def test_a_sequence_may_come_in_several_stretches_of_one_batch(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((0, 3), (1, 2), (0, 4), (1, 1), (0, 1))
            d.forward((1, 1), (0, 1), (1, 1), (0, 9), (1, 5))

    def test_positions_may_come_as_a_column_for_many_sequences_too(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.column_positions = True
            d.forward((0, 3), (1, 2))
            d.forward((0, 1), (1, 1))

    def test_sequences_do_not_see_each_other(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind) as d:
            d.forward((1, 3))
            for n in (1, 4, 1):
                ids, tokens = d.begin((2, n), (1, n), (3, 1))
                inputs = d.random_inputs(len(ids))
                for part in (*inputs.k, *inputs.v):  # the others shout
                    part[:, [i for i, s in enumerate(ids) if s != 1]] *= 1000.0
                d._store(tokens, inputs)
                seen = d._visibility(ids, tokens)
                mine = [i for i, s in enumerate(ids) if s == 1]
                for layer in range(d.n_layers):
                    got = d.attend(layer, tokens, inputs, case.in_dtype)
                    want = d._dense(layer, ids, tokens, inputs.q[layer], seen)
                    atol = self.adapter.tolerance(case.in_dtype, case.kv_dtype)
                    np.testing.assert_allclose(got[:, mine], want[:, mine], rtol=0, atol=atol)
                d._complete(ids, tokens)

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

    def test_a_fork_of_a_middle_range_attends_that_range_alone(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind, window_slack=40) as d:
            d.forward((0, 20))
            d.cp(0, 1, 4, 18)
            d.forward((1, 1), (0, 1))
            d.forward((1, 5))
            d.forward((2, 3))
            d.cp(0, 2, 3, 20)  # grafted behind tokens of its own
            d.forward((2, 2), (1, 1))

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
                d.rm(0, low - 1)
            with d.refuses(RewindError):
                d.cp(0, 2, 0, low - 1)
            d.cp(0, 2, 0, low)
            d.rm(0, low)
            d.forward((0, 1), (2, 2))
            d.forward((2, 1), (0, 3))

    def test_a_full_sliding_pool_lets_go_behind_its_windows(self, kind: str) -> None:
        case = next(c for c in CASES if c.name == "two-windows-no-slack")
        with open_driver(self.adapter, case, kind, capacity=16) as d:
            for _ in range(12):
                d.forward((0, 2), (1, 3))
                d.forward((0, 1), (1, 4))

    def test_many_short_runs_are_one_history(self, case: Case, kind: str) -> None:
        with open_driver(self.adapter, case, kind, capacity=120) as d:
            for i in range(40):
                d.forward((i, 1 + i % 2))
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
            for i in range(20):
                d.forward((i, 2))
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

    def test_a_cleared_single_sequence_is_as_new(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            d.run_poisoned((0, 60))
            d.clear()
            d.agrees()
            d.forward((0, 5))
            d.forward((0, 1))

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
                d._store(tokens, brought)
            seen = [d._visibility(ids, tokens) for d, ids, tokens in runs]
            for layer in range(a.n_layers):
                for (d, ids, tokens), brought, who in zip(runs, inputs, seen, strict=True):
                    got = d.attend(layer, tokens, brought, "float32")
                    want = d._dense(layer, ids, tokens, brought.q[layer], who)
                    atol = self.adapter.tolerance(case.in_dtype, case.kv_dtype)
                    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
            for d, ids, tokens in runs:
                d._complete(ids, tokens)
            a.forward((0, 1))
            b.forward((0, 1), (1, 1))

    # Trees -------------------------------------------------------------------------------------

    def test_a_tree_is_proposed_level_by_level_and_verified_on_the_way(self, case: Case) -> None:
        with open_driver(self.adapter, case, "tree") as d:
            d.forward((0, 7))
            for accepted in ([0, 4, 7], [1], [], [2, 5, 9]):
                d.forward((0, d.propose([-1, -1, -1])))
                d.forward((0, d.propose([1, 0, 2, 0])))  # nodes 3 to 6
                d.forward((0, d.propose([4, 3, 5])))  # nodes 7 to 9
                _accept(d, accepted)
                d.forward((0, 1))
                d.forward((0, 3))

    def test_a_whole_tree_is_verified_at_once(self, case: Case) -> None:
        with open_driver(self.adapter, case, "tree") as d:
            d.forward((0, 5))
            for accepted in ([0, 1, 4], [3], [0, 2, 5, 6], []):
                d.forward((0, d.propose([-1, 0, 0, -1, 1, 2, 5, 3])))
                d.commit(accepted)
                d.forward((0, 2))

    def test_a_chain_is_a_tree_too(self, case: Case) -> None:
        with open_driver(self.adapter, case, "tree") as d:
            d.forward((0, 5))
            for n_accepted in (4, 0, 2, 1):
                d.forward((0, d.propose([-1, 0, 1, 2])))
                d.commit(list(range(n_accepted)))
                d.forward((0, 1))

    def test_a_tree_may_hang_off_an_empty_history(self, case: Case) -> None:
        with open_driver(self.adapter, case, "tree") as d:
            d.forward((0, d.propose([-1, -1, 0, 1])))
            d.commit([1, 3])
            d.forward((0, 2))

    def test_many_trees_and_plain_sequences_share_one_forward(self, case: Case) -> None:
        with open_driver(self.adapter, case, "tree") as d:
            d.forward((0, 5), (1, 9), (2, 3))
            d.cp(1, 3)
            a = d.propose([-1, -1, 0], 0)
            b = d.propose([-1, 0, 0, 1], 3)
            d.forward((2, 1), (0, a), (1, 2), (3, b), (4, 5))
            a = d.propose([2, 1, 2], 0)
            d.forward((0, a), (2, 1), (1, 1))
            d.commit([0, 2, 3], 0)
            b = d.propose([3], 3)
            d.forward((0, 1), (3, b), (1, 1))
            d.commit([0, 1, 3, 4], 3)
            d.forward((0, 1), (1, 1), (2, 1), (3, 3), (4, 1))

    def test_a_step_with_trees_is_taken_back_and_repeated(self, case: Case) -> None:
        with open_driver(self.adapter, case, "tree") as d:
            d.forward((0, 5), (1, 4))
            n = d.propose([-1, -1, 1])
            for n_layers in range(d.n_layers):
                d.abort(n_layers, (1, 1), (0, n), (7, 2))
                d.cancel()
            inputs = d.random_inputs(n + 3)
            first = d.forward((1, 1), (0, n), (7, 2), inputs=inputs)
            d.cancel()
            again = d.forward((1, 1), (0, n), (7, 2), inputs=inputs)
            for x, y in zip(first, again, strict=True):
                np.testing.assert_array_equal(x, y)
            n = d.propose([2, 0])
            d.abort(d.n_layers - 1, (0, n))
            d.cancel()
            d.forward((0, n), (7, 1))
            d.commit([1, 2, 3])
            d.forward((0, 1), (1, 1), (7, 1))

    def test_what_is_no_tree_is_refused(self, case: Case) -> None:
        with open_driver(self.adapter, case, "tree", capacity=12) as d:
            d.forward((0, 4), (1, 2))
            with d.refuses(ProposalError):
                d.cache.propose([])
            with d.refuses(ProposalError):
                d.cache.propose([-1, 1])
            with d.refuses(ProposalError):
                d.cache.commit([0])
            with d.refuses(CacheFullError):
                d.cache.propose([-1] * 13)
            n = d.propose([-1, -1, 0])
            with d.refuses(ProposalError):
                d.cache.propose([0])
            with d.refuses(ProposalError):
                d.cache.commit([0])
            with d.refuses(StepError):
                d.begin((0, 2))
            with d.refuses(CacheFullError):
                d.cache.begin_step([1] * 12)
            d.forward((0, n), (1, 2))
            with d.refuses(ProposalError):
                d.cache.commit([0, 1])
            with d.refuses(ProposalError):
                d.cache.commit([2])
            with d.refuses(StepError):
                d.cache.begin_step([0])
            d.commit([0, 2])
            d.forward((0, 1), (1, 1))

    def test_rejected_nodes_leave_cells_that_others_use(self, case: Case) -> None:
        with open_driver(self.adapter, case, "tree", capacity=20, window_slack=20) as d:
            d.forward((0, 4), (1, 3))
            for accepted in ([0], [], [3]):
                d.run_poisoned((0, d.propose([-1, -1, -1, -1, 0, 1])))
                d.commit([])
                d.forward((0, d.propose([-1, -1, -1, -1, 0, 1])))
                d.commit(accepted)
                d.forward((1, 2), (0, 1))

    def test_a_tree_in_a_pool_full_of_holes_is_compacted_right(self, case: Case) -> None:
        with open_driver(self.adapter, case, "tree", capacity=30, window_slack=30) as d:
            for i in range(24):
                d.forward((i, 1))
            for i in range(1, 24, 2):
                d.rm(i)
            d.forward((0, d.propose([-1, -1, 0, 1, 3, 4, 2, 5, 7])))
            d.commit([1, 3, 4, 5, 7, 8])
            d.forward((0, 1), (2, 2))
            d.forward((0, d.propose([-1, 0, 0])), (4, 1))
            d.commit([0, 2])
            d.forward((0, 3))

    # Bytes -------------------------------------------------------------------------------------

    def test_long_histories_in_long_runs_are_read_whole(self) -> None:
        case = next(c for c in CASES if c.name == "mixed-shapes-sinks")
        with open_driver(self.adapter, case, "seq", capacity=6000, min_chunk=512) as d:
            d.forward((0, 700))
            d.cp(0, 1)
            d.forward((1, 300), (0, 600), (2, 40))
            d.forward((1, 300), (0, 1))
            d.forward((0, 1), (1, 1), (2, 1))
            d.cp(1, 3)
            d.forward((3, 2), (1, 2), (0, 300))
            d.rm(0, 100, 650)
            d.forward((0, 2), (3, 1))

    def test_a_long_window_is_banded_over_many_tiles(self) -> None:
        base = next(c for c in CASES if c.name == "gqa-sinks-window")
        groups = (base.groups[0].__class__((0, 1), 2, 8, 8, window=300),)
        case = Case("long-window", 4, groups, window_slack=10, capacity=3000)
        for kind in ("decode", "seq"):
            with open_driver(self.adapter, case, kind) as d:
                for n in (400, 1, 900, 30, 1):
                    d.forward((0, n))

    def test_stored_values_are_rounded_to_the_storage_type_and_no_more(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            inputs = d.random_inputs(1)
            (out, *_) = d.forward((0, 1), inputs=inputs, out_dtype="float32")
            if case.has_sinks:
                return
            repeats = case.n_q_heads // case.group(0).n_kv_heads
            want = stored(np.repeat(inputs.v[0], repeats, axis=0), case.kv_dtype, "v")
            np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)

    def test_a_session_reports_the_bytes_that_its_pools_hold(self, case: Case) -> None:
        config = make_config(case.params, 64, case.kv_dtype, 16)
        with make_seq_session(self.adapter.backend, config) as session:
            assert session.cache.usage().size_bytes == 0
        with open_driver(self.adapter, case, "seq", capacity=64, min_chunk=16) as d:
            d.forward((0, 5))
            assert d.cache.usage().size_bytes == 16 * _bytes_per_cell(case)

    # Random walks ------------------------------------------------------------------------------

    def test_no_sequence_of_verbs_parts_a_session_with_trees_from_the_oracle(
        self, walked: Case
    ) -> None:
        walk_sequences(self.adapter, walked, "tree")

    def test_no_sequence_of_verbs_parts_a_seq_session_from_the_oracle(self, walked: Case) -> None:
        walk_sequences(self.adapter, walked, "seq")

    def test_no_sequence_of_verbs_parts_a_decode_session_from_the_oracle(
        self, walked: Case
    ) -> None:
        walk_one_sequence(self.adapter, walked)


def _accept(d: Any, accepted: list[int]) -> None:
    """Commit, refusing first what is no chain."""
    if len(accepted) > 1:
        with d.refuses(ProposalError):
            d.cache.commit(accepted[::-1])
    d.commit(accepted)


def _columns(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Some of the tokens of a forward."""
    q, k, v = ([part[:, start:stop] for part in parts] for parts in (inputs.q, inputs.k, inputs.v))
    return Inputs(q, k, v)


def _bytes_per_cell(case: Case) -> int:
    """K and V of one token in all layers."""
    total = 0
    for g in case.groups:
        row = row_bytes(case.kv_dtype, "k", g.head_dim) + row_bytes(
            case.kv_dtype, "v", g.v_head_dim
        )
        total += len(g.layers) * g.n_kv_heads * row
    return total


def _misshapen(inputs: Inputs) -> Iterator[Inputs]:
    """The same forward with one thing wrong in layer 0."""

    def wider(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, x[:, :, :1]], axis=2)

    def taller(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, x[:1]], axis=0)

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, x[:, :1]], axis=1)

    q, k, v = inputs.q[0], inputs.k[0], inputs.v[0]
    for wrong_q, wrong_k, wrong_v in (
        (q, taller(k), v),
        (q, k, taller(v)),
        (q, taller(k), taller(v)),
        (q, wider(k), v),
        (q, k, wider(v)),
        (wider(q), k, v),
        (q, k, longer(v)),
        (longer(q), k, v),
        (q[None], k[None], v[None]),
        (q[0], k[0], v[0]),
    ):
        yield Inputs([wrong_q], [wrong_k], [wrong_v])
    if k.shape[0] > 1:
        yield Inputs([np.concatenate([q, q[:1]], axis=0)], [k], [v])
