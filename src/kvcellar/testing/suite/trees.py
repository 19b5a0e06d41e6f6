"""Draft trees: proposed level by level, verified, committed."""

from __future__ import annotations

import numpy as np

from kvcellar.errors import (
    CacheFullError,
    ProposalError,
    StepError,
)
from kvcellar.testing.cases import Case
from kvcellar.testing.driver import Driver
from kvcellar.testing.opening import open_driver
from kvcellar.testing.suite.scenarios import Scenarios, once_per_bookkeeping


class Trees(Scenarios):
    """Draft trees: proposed level by level, verified, committed."""

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

    @once_per_bookkeeping
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
                d.cache.begin_step([(1, 12)])
            d.forward((0, n), (1, 2))
            with d.refuses(ProposalError):
                d.cache.commit([0, 1])
            with d.refuses(ProposalError):
                d.cache.commit([2])
            with d.refuses(StepError):
                d.cache.begin_step([(0, 1)])
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


def _accept(d: Driver, accepted: list[int]) -> None:
    """Commit nodes, after the same in an order that is no chain was refused."""
    if len(accepted) > 1:
        with d.refuses(ProposalError):
            d.cache.commit(accepted[::-1])
    d.commit(accepted)
