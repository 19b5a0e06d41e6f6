"""Scenarios of stored rows: long reads, rounding to the storage type, bytes."""

from __future__ import annotations

import numpy as np

from kvcellar import make_config, make_seq_session
from kvcellar.testing.cases import CASES, Case, bytes_per_cell
from kvcellar.testing.dense import stored
from kvcellar.testing.opening import open_driver
from kvcellar.testing.suite.scenarios import Scenarios


class RowStorage(Scenarios):
    """Scenarios of stored rows: long reads, rounding to the storage type, bytes."""

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

    def test_cells_move_as_if_all_were_read_before_any_is_written(
        self, case: Case, kind: str
    ) -> None:
        """Cells may overlap; what reads all of a history does not mind where its tokens lie."""
        with open_driver(self.adapter, case, kind) as d:
            d.forward((0, 9))
            d.cache.end_step()
            for index, (group, cells) in enumerate(
                zip(case.groups, d.cache.seq_table(0), strict=True)
            ):
                for shift in (1, -3):
                    if group.is_full:
                        d.cache.steps.move(index, [(int(cells[0]), np.roll(cells, shift))])
            d.forward((0, 1))

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
            assert d.cache.usage().size_bytes == 16 * bytes_per_cell(case)
