"""Models with recurrent layers: states move from slot to slot, and are shared, kept and freed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvcellar.errors import CacheFullError, RewindError
from kvcellar.testing.cases import Case
from kvcellar.testing.opening import open_driver
from kvcellar.testing.recurrence import read_slot
from kvcellar.testing.suite.scenarios import Scenarios


class RecurrentStates(Scenarios):
    """Models with recurrent layers: states move from slot to slot, are shared, kept and freed."""

    def test_states_go_on_by_chunks_and_by_tokens(self, recurrent: Case) -> None:
        with open_driver(self.adapter, recurrent, "decode") as d:
            d.run_poisoned((0, 5))
            assert d.rewind(0) == 0
            for n in (9, 1, 1, 20, 1):
                d.forward((0, n))
                d.agrees()

    def test_one_sequence_goes_back_to_where_it_was_told_to_keep_its_states(
        self, recurrent: Case
    ) -> None:
        with open_driver(self.adapter, recurrent, "decode") as d:
            d.forward((0, 12))
            d.keep_point()
            d.forward((0, 3))
            d.forward((0, 1))
            assert d.rewind(14) == 12
            d.forward((0, 2))
            d.keep_point()
            d.forward((0, 2))
            d.drop_point(14)
            assert d.rewind(15) == 12
            d.forward((0, 1))
            assert d.rewind(11) == 0
            d.forward((0, 3))

    def test_states_of_a_flat_batch_do_not_mix(self, recurrent: Case, kind: str) -> None:
        with open_driver(self.adapter, recurrent, kind) as d:
            d.forward((0, 5), (1, 2), (2, 7))
            d.forward((1, 1), (0, 1), (2, 1), (3, 4))
            d.forward((0, 2), (1, 1), (0, 3))  # what one stretch wrote, the next goes on from
            d.agrees()
            for _ in range(4):
                d.forward((2, 1), (0, 1), (1, 1), (3, 1))
            d.agrees()

    def test_forks_share_states_and_part_without_a_copy(self, recurrent: Case, kind: str) -> None:
        with open_driver(self.adapter, recurrent, kind) as d:
            d.forward((0, 8))
            for seq in (1, 2, 3):
                d.cp(0, seq)
            d.cache.end_step()
            assert d.cache.usage().slots.live == 1
            d.forward((2, 1), (0, 3), (1, 1))
            d.agrees()
            d.forward((3, 2), (2, 1))

    def test_a_forward_that_was_taken_back_leaves_the_states_of_before(
        self, recurrent: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, recurrent, kind) as d:
            d.forward((0, 4))
            d.forward((0, 3), (1, 2))
            d.cancel()
            for n_turns in range(len(d.turns)):
                d.abort(n_turns, (0, 2), (1, 3))
                d.agrees()
            d.forward((0, 1), (1, 2))

    def test_a_cut_goes_back_to_the_deepest_states_that_are_held(
        self, recurrent: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, recurrent, kind) as d:
            d.forward((0, 6))
            d.keep_point(0)
            d.forward((0, 6))
            with d.refuses(RewindError):
                d.rm(0, 2, 4)
            with d.refuses(RewindError):
                d.cp(0, 1, 0, 9)
            d.cp(0, 1, 0, 6)
            assert d.rm(0, 9) == 6
            d.forward((0, 2), (1, 4))
            assert d.rm(1, 5) == 0
            d.forward((0, 1), (1, 1))

    def test_slots_of_a_table_outlive_their_sequence(self, recurrent: Case, kind: str) -> None:
        with open_driver(self.adapter, recurrent, kind) as d:
            d.forward((0, 6))
            d.keep_point(0)
            d.forward((0, 3))
            history = list(d.histories[0])
            tables = d.cache.seq_table(0)
            d.cache.retain_cells(tables)
            d.rm(0)
            d.run_poisoned((1, 9), (2, 9))
            for n in (6, 9):
                d.cache.seq_map(5, [table[:n] for table in tables])
                d.histories[5], d.lengths[5] = history[:n], n
                d.agrees()
                d.forward((5, 2))
                d.rm(5)
            d.cache.release_cells(tables)
            d.rm(1)
            d.rm(2)
            d.cache.check()
            assert d.cache.usage().slots.live == 0

    def test_states_that_come_back_are_the_bits_that_were_read(
        self, recurrent: Case, kind: str
    ) -> None:
        with open_driver(self.adapter, recurrent, kind) as d:
            d.forward((0, 5))
            d.cache.end_step()
            (slot,) = d.cache.slots.table(0, 5)[4:]
            states = d.cache.read_states(np.array([slot, slot]))
            tables = [np.arange(5), *[np.arange(5)] * (len(d.case.groups) - 1), np.full(5, -1)]
            tables[-1][[2, 4]] = 0
            claimed = d.cache.seq_claim(1, tables)
            d.cache.write_states(claimed[-1][[2, 4]], states)
            d.cache.check()
            for at in (2, 4):
                for want, got in zip(
                    read_slot(d.cache, slot), read_slot(d.cache, claimed[-1][at]), strict=True
                ):
                    for one, other in zip(want, got, strict=True):
                        assert one.dtype == np.float32
                        np.testing.assert_array_equal(one, other)
            d.cache.seq_rm(1)

    def test_each_node_of_a_tree_goes_on_from_its_parent(self, recurrent: Case) -> None:
        with open_driver(self.adapter, recurrent, "tree") as d:
            d.forward((0, 3), (1, 2))
            n = d.propose([-1, 0, 0, 1, -1])
            d.forward((1, 1), (0, n))
            n = d.propose([3, 2])
            d.forward((0, n), (1, 1))
            d.commit([0, 1, 3, 5])
            d.agrees()
            d.forward((0, 1))
            n = d.propose([-1, 0])
            d.forward((0, n))
            d.commit([])
            d.agrees()
            d.forward((0, 2), (1, 1))
            d.cache.check()

    def test_without_a_free_slot_nothing_is_begun(self, recurrent: Case, kind: str) -> None:
        with open_driver(self.adapter, recurrent, kind, n_slots=3) as d:
            d.forward((0, 5), (1, 2))
            with d.refuses(CacheFullError):
                d.cache.begin_step([(0, 1), (1, 1)])
            d.forward((1, 2))
            d.forward((0, 1))
            d.keep_point(0)
            d.forward((0, 1))
            assert not d.cache.can_extend(1)
            with d.refuses(CacheFullError):
                d.cache.begin_step([(0, 1)])
            d.drop_point(6)
            d.forward((0, 1))

    def test_pools_of_states_hold_as_many_slots_as_were_needed(self, recurrent: Case) -> None:
        assert recurrent.state is not None
        sizes = []
        for case in (recurrent, replace(recurrent, state=None)):
            with open_driver(self.adapter, case, "seq") as d:
                assert d.cache.usage().size_bytes == 0
                d.forward(*[(seq, 1) for seq in range(6)])
                d.forward(*[(seq, 1) for seq in range(6)])
                sizes.append(d.cache.usage().size_bytes)
        n_slots, rest = divmod(sizes[0] - sizes[1], recurrent.state.slot_bytes)
        assert not rest
        assert 12 <= n_slots <= 24
