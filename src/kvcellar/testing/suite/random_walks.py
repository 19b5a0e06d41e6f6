"""Random sequences of verbs, against the oracle."""

from __future__ import annotations

from kvcellar.testing.cases import Case
from kvcellar.testing.suite.scenarios import Scenarios
from kvcellar.testing.walks import walk_one_sequence, walk_sequences


class RandomWalks(Scenarios):
    """Random sequences of verbs, against the oracle."""

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

    def test_no_sequence_of_verbs_parts_states_of_many_sequences_from_the_oracle(
        self, recurrent: Case, kind: str
    ) -> None:
        walk_sequences(self.adapter, recurrent, kind)

    def test_no_sequence_of_verbs_parts_states_of_one_sequence_from_the_oracle(
        self, recurrent: Case
    ) -> None:
        walk_one_sequence(self.adapter, recurrent)
