"""One sequence in a contiguous cache: chunks, rewinds, windows, growth, refusals."""

from __future__ import annotations

import numpy as np

from kvcellar.errors import (
    CacheFullError,
    PositionError,
    RewindError,
    ShapeError,
)
from kvcellar.testing.cases import Case, bytes_per_cell, group
from kvcellar.testing.inputs import misshapen
from kvcellar.testing.opening import open_driver
from kvcellar.testing.suite.scenarios import Scenarios, once_per_bookkeeping


class SingleHistory(Scenarios):
    """One sequence in a contiguous cache: chunks, rewinds, windows, growth, refusals."""

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
                part = inputs.columns(start, start + n)
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

    def test_a_rewind_beyond_the_window_goes_back_to_the_start(self, windowed: Case) -> None:
        with open_driver(self.adapter, windowed, "decode", window_slack=2) as d:
            d.forward((0, 60))
            d.forward((0, 60))
            with d.refuses(RewindError):
                d.rewind(121)
            d.forward((0, 1))
            assert d.rewind(30) == 0
            d.forward((0, 9))

    def test_the_lowest_length_that_a_rewind_accepts_goes_on_exactly(self, windowed: Case) -> None:
        with open_driver(self.adapter, windowed, "decode", window_slack=3) as d:
            for n in (40, 35, 1):
                d.forward((0, n))
            low = d.cache.resumable_from()
            assert 0 < low < 76
            assert d.rewind(low) == low
            d.forward((0, 1))
            d.forward((0, 3))
            assert d.rewind(low - 1) == 0
            d.forward((0, 3))

    def test_a_window_wraps_many_times_by_single_tokens(self, windowed: Case) -> None:
        with open_driver(self.adapter, windowed, "decode", min_chunk=4) as d:
            for _ in range(70):
                d.forward((0, 1))

    def test_a_window_wraps_many_times_by_chunks(self, windowed: Case) -> None:
        with open_driver(self.adapter, windowed, "decode", min_chunk=4) as d:
            for n in (3, 30, 1, 1, 17, 2, 40, 5, 1):
                d.forward((0, n))

    def test_a_rewind_to_where_a_chunk_begins_needs_nothing_before_it(self) -> None:
        case = Case("chunks", 4, (group((0,), 2), group((1,), 1, chunk=8)), window_slack=0)
        with open_driver(self.adapter, case, "decode", min_chunk=4) as d:
            d.forward((0, 90))
            for _ in range(20):
                d.forward((0, 1))
            assert d.rewind(53) == 48
            for n in (1, 9, 1):
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
            n_cells = [70 if g.is_full else None for g in case.groups]
            if None not in n_cells:
                assert sizes[-1] == 70 * bytes_per_cell(case)
                assert sizes[1] == 4 * bytes_per_cell(case)
            with d.refuses(CacheFullError):
                d.attend(0, d.begin((0, 1))[1], d.random_inputs(1), "float32")

    @once_per_bookkeeping
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

    @once_per_bookkeeping
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

    @once_per_bookkeeping
    def test_wrong_shapes_are_refused_and_the_right_ones_go_on(self, case: Case) -> None:
        with open_driver(self.adapter, case, "decode") as d:
            d.forward((0, 3))
            _, tokens = d.begin((0, 2))
            for wrong in misshapen(d.random_inputs(2)):
                with d.refuses(ShapeError):
                    d.attend(0, tokens, wrong, "float32")
            d.forward((0, 2))
            d.forward((0, 1))
