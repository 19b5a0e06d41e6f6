"""Steps that end midway, are taken back, or are refused."""

from __future__ import annotations

import numpy as np

from kvcellar.errors import (
    PositionError,
    ShapeError,
    StepError,
)
from kvcellar.testing.cases import Case
from kvcellar.testing.inputs import misshapen
from kvcellar.testing.opening import open_driver
from kvcellar.testing.suite.scenarios import Scenarios, once_per_bookkeeping


class FailedSteps(Scenarios):
    """Steps that end midway, are taken back, or are refused."""

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

    @once_per_bookkeeping
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

    @once_per_bookkeeping
    def test_layers_without_a_step_or_with_another_number_of_tokens_are_refused(
        self, case: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, case, kind) as d:
            if d.has_trees:  # with sequence 0 alone, a forward means sequence 0
                d.forward((3, 2))
            tokens = d.new_tokens([5, 5])
            with d.refuses(StepError):
                d.attend(0, tokens, d.random_inputs(2), "float32")
            d.forward((5, 2))
            with d.refuses(StepError):
                d.attend(0, d.new_tokens([5, 5]), d.random_inputs(2), "float32")
            _, tokens = d.begin((5, 2), (6, 1))
            with d.refuses(StepError, in_step=True):
                d.attend(0, tokens[:2], d.random_inputs(2), "float32")
            for wrong in misshapen(d.random_inputs(3)):
                with d.refuses(ShapeError, in_step=True):
                    d.attend(0, tokens, wrong, "float32")
            tokens[2].pos += 1
            with d.refuses(PositionError, in_step=True):
                d.attend(0, tokens, d.random_inputs(3), "float32")
            d.cancel()
            d.forward((5, 2), (6, 1))

    @once_per_bookkeeping
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
                d.attend(0, tokens, next(misshapen(inputs)), "float32")
            d.store(tokens, inputs)
            seen = d.visibility(ids, tokens)
            for layer in range(d.n_layers):
                got = d.attend(layer, tokens, inputs, "float32")
                want = d.dense(layer, ids, tokens, inputs.q[layer], seen)
                atol = self.adapter.tolerance(case.in_dtype, case.kv_dtype)
                np.testing.assert_allclose(got, want, rtol=0, atol=atol)
            d.complete(ids, tokens)
            d.forward((2, 1), (1, 1))
