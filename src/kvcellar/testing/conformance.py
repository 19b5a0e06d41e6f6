"""Conformance suite: a backend gives the numbers of dense attention, whatever is asked of it."""

from __future__ import annotations

from kvcellar.testing.suite.failed_steps import FailedSteps
from kvcellar.testing.suite.frozen_prefixes import FrozenPrefixes
from kvcellar.testing.suite.many_sequences import ManySequences
from kvcellar.testing.suite.one_sequence import SingleHistory
from kvcellar.testing.suite.random_walks import RandomWalks
from kvcellar.testing.suite.recurrent_states import RecurrentStates
from kvcellar.testing.suite.stored_rows import RowStorage
from kvcellar.testing.suite.trees import Trees


class ConformanceSuite(
    SingleHistory,
    FailedSteps,
    ManySequences,
    Trees,
    FrozenPrefixes,
    RowStorage,
    RecurrentStates,
    RandomWalks,
):
    """All scenarios. A backend passes by a subclass that pytest collects and that has its adapter.

    ::

        class TestMyBackend(ConformanceSuite):
            adapter = MyAdapter()
    """
