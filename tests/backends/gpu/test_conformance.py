"""Caches whose layers are Triton's, by scenarios of the conformance suite, interpreted."""

from __future__ import annotations

import os

import pytest

from kvcellar.testing import CASES, Case, ConformanceSuite
from kvcellar.testing.cases import group
from kvcellar.testing.suite.scenarios import Scenarios
from tests.backends.adapters import TritonAdapter

pytest.importorskip("triton")

MIXED = Case(
    "k8v4-mixed", 4, (group((0,), 2, 8, 6, softcap=2.0), group((1,), 1, 16, window=5)),
    has_sinks=True, kv_dtype="k8v4", window_slack=4,
)  # fmt: skip
BRAINS = Case("bf16-gqa", 4, (group((0,), 2, 16),), kv_dtype="bfloat16", in_dtype="bfloat16")


class Few(Scenarios):
    """Scenarios in which each part of a cache's way to the kernels is taken once."""

    adapter = TritonAdapter((BRAINS, MIXED))
    suite = ConformanceSuite
    test_prompts_and_tokens = suite.test_a_flat_batch_mixes_prefill_and_decode_of_many_sequences
    test_forks = suite.test_a_fork_shares_the_trunk_and_then_diverges
    test_trees = suite.test_many_trees_and_plain_sequences_share_one_forward
    test_moves = suite.test_short_runs_are_copied_together_and_nobody_sees_a_difference
    test_raised = suite.test_a_forward_that_raised_midway_is_taken_back_and_repeated
    test_shapes = suite.test_wrong_shapes_are_refused_and_the_right_ones_go_on


class All(ConformanceSuite):
    """The whole suite: an hour, interpreted."""

    adapter = TritonAdapter(CASES)


@pytest.mark.slow
class TestTriton(All if "KVCELLAR_ALL_CASES" in os.environ else Few):  # type: ignore[misc]
    pass
