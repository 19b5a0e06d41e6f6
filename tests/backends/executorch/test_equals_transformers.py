"""One unchanged program, whatever the cache and however tokens come: the logits of transformers."""

from __future__ import annotations

import os

import pytest

from tests.backends.executorch.programs import EACH_TIME, FEW_LAYERS
from tests.models.players import Player
from tests.models.test_equals_transformers import (
    test_32_decode_steps_choose_the_same_tokens,
    test_a_fork_shares_its_trunk_and_then_goes_its_own_way,
    test_a_prompt_in_chunks_gives_the_logits_of_the_whole,
    test_a_tree_is_verified_and_its_chain_committed_as_if_decoded,
    test_a_window_that_has_wrapped_still_sees_what_it_should,
    test_after_a_rollback_the_same_text_comes_again_and_another_can,
    test_one_prefill_gives_the_logits_of_every_token,
    test_three_sequences_in_flat_batches_do_not_see_each_other,
    test_two_trees_and_a_plain_sequence_go_through_one_forward,
)

__all__ = [
    "test_32_decode_steps_choose_the_same_tokens",
    "test_a_fork_shares_its_trunk_and_then_goes_its_own_way",
    "test_a_prompt_in_chunks_gives_the_logits_of_the_whole",
    "test_a_tree_is_verified_and_its_chain_committed_as_if_decoded",
    "test_a_window_that_has_wrapped_still_sees_what_it_should",
    "test_after_a_rollback_the_same_text_comes_again_and_another_can",
    "test_one_prefill_gives_the_logits_of_every_token",
    "test_three_sequences_in_flat_batches_do_not_see_each_other",
    "test_two_trees_and_a_plain_sequence_go_through_one_forward",
]

FAMILIES = FEW_LAYERS if "KVCELLAR_ALL_CASES" in os.environ else EACH_TIME
pytestmark = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def play(loaded, family, kind):
    """Open a session of this kind for this family's program."""
    return lambda **policy: Player(loaded(family), kind, **policy)
