"""Separate caches that begin with one frozen prefix, which nobody writes to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvcellar.cache_config import SharedPrefix
from kvcellar.errors import ConfigError, RewindError
from kvcellar.registry import FreezableCache, freeze_prefix
from kvcellar.testing.cases import CASES, Case
from kvcellar.testing.driver import Driver
from kvcellar.testing.opening import open_driver
from kvcellar.testing.suite.scenarios import Scenarios, once_per_bookkeeping

LENGTH = 21
"""Tokens that are frozen: of two or three windows, and no whole number of blocks."""


class FrozenPrefixes(Scenarios):
    """Caches that share a frozen prefix; a backend whose caches cannot be frozen skips them."""

    def test_caches_that_share_a_prefix_each_go_on_from_it(self, case: Case, kind: str) -> None:
        with self.frozen(case, kind) as (prefix, source):
            source.forward((0, 3))  # whoever it was taken from goes on by itself
            with self.sharing(source, prefix) as left, self.sharing(source, prefix) as right:
                left.forward((0, 5))
                right.forward((3, 1), (4, 7))
                source.forward((0, 1))
                for _ in range(3):
                    left.forward((0, 1), (1, 2))
                    right.forward((4, 1), (3, 1))
                left.forward((1, 9), (0, 1))

    def test_one_sequence_goes_on_from_a_prefix(self, case: Case) -> None:
        with (
            self.frozen(case, "decode") as (prefix, source),
            self.sharing(source, prefix) as d,
        ):
            d.forward((0, 1))
            for n in (4, 1, 13, 1, 1):
                d.forward((0, n))
            for _ in range(2):
                d.rewind(max(LENGTH, d.cache.resumable_from()))
                d.forward((0, 2))
                d.forward((0, 1))
            with d.refuses(RewindError):
                d.rewind(LENGTH - 1)
            d.forward((0, 40))
            d.rewind(LENGTH)  # wherever windows are: it begins behind the prefix again
            d.forward((0, 3))
            d.clear()
            d.forward((0, 3))

    @once_per_bookkeeping
    def test_forks_and_cuts_leave_the_prefix_where_it_is(self, case: Case, kind: str) -> None:
        with (
            self.frozen(case, kind) as (prefix, source),
            self.sharing(source, prefix) as d,
        ):
            d.forward((0, 6))
            d.cp(0, 1)
            d.forward((1, 2), (0, 1))
            d.rm(0, LENGTH + 3)
            d.forward((0, 1), (1, 1))
            for length in (1, LENGTH - 1):
                with d.refuses(RewindError):
                    d.rm(0, length)
            with d.refuses(RewindError):
                d.rm(0, 0, LENGTH - 2)
            d.rm(1)
            d.forward((1, 4), (0, 1))  # it begins behind the prefix again
            d.rm(0, LENGTH)
            d.forward((0, 2))
            for _ in range(14):
                d.forward((0, 3), (1, 1))
            d.rm(0, LENGTH)  # wherever windows are
            assert not d.cache.has_seq(0)
            d.forward((0, 2), (1, 1))

    @once_per_bookkeeping
    def test_no_cut_goes_through_a_prefix_of_one_token(self, case: Case, kind: str) -> None:
        with (
            self.frozen(case, kind, 1) as (prefix, source),
            self.sharing(source, prefix) as d,
        ):
            d.forward((0, 6))
            with d.refuses(RewindError):
                d.rm(0, 0, 3)
            d.rm(0, 1, 3)
            d.forward((0, 1))

    def test_trees_hang_off_a_prefix(self, case: Case) -> None:
        with (
            self.frozen(case, "tree") as (prefix, source),
            self.sharing(source, prefix) as d,
        ):
            d.forward((0, d.propose((-1, -1, 0, 1))))
            d.commit((0, 2))
            d.forward((0, 1))
            d.forward((0, d.propose((-1, 0, 0))), (1, 2))
            d.commit(())
            d.forward((0, 1), (1, 1))

    def test_a_step_behind_a_prefix_can_be_taken_back(self, case: Case, kind: str) -> None:
        with (
            self.frozen(case, kind) as (prefix, source),
            self.sharing(source, prefix) as d,
        ):
            d.abort(1, (0, 4))
            d.cancel()
            d.forward((0, 3))
            d.abort(1, (0, 2), (1, 2))
            d.cancel()
            d.forward((1, 2), (0, 1))

    def test_a_prefix_takes_no_cells_and_is_freed_with_its_last_cache(self, kind: str) -> None:
        case = CASES[0]
        with self.frozen(case, kind) as (prefix, source):
            assert prefix.size_bytes > 0
            alive = weakref.ref(prefix)
            with self.sharing(source, prefix) as left:
                left.forward((0, 2))
                assert left.cache.usage().groups[0].live < LENGTH
                with self.sharing(source, prefix, capacity=case.capacity // 2) as right:
                    del prefix
                    right.forward((0, 2))
                del right
            gc.collect()
            assert alive() is not None, "a cache holds it"
            del left
        gc.collect()
        assert alive() is None

    def test_a_prefix_of_another_model_or_type_is_refused(self, kind: str) -> None:
        case = CASES[0]
        other = next(c for c in CASES if c.name == "bf16-gqa")
        with (
            self.frozen(case, kind) as (prefix, source),
            pytest.raises(ConfigError, match="freeze a prefix of the same model"),
            open_driver(source.adapter, other, kind, prefix=prefix),
        ):
            pass

    @contextmanager
    def frozen(
        self, case: Case, kind: str, length: int = LENGTH
    ) -> Iterator[tuple[SharedPrefix, Driver]]:
        """Compute a history, freeze its first tokens, and yield them with its driver."""
        with open_driver(self.adapter, case, kind, "prefix", window_slack=30) as d:
            if not isinstance(d.cache, FreezableCache):
                pytest.skip("caches of this backend cannot be frozen")
            d.forward((0, LENGTH - 4))
            for _ in range(6):
                d.forward((0, 1))
            yield freeze_prefix(d.cache, length), d

    @contextmanager
    def sharing(self, source: Driver, prefix: SharedPrefix, **settings: Any) -> Iterator[Driver]:
        """Open another cache whose sequences begin with the prefix."""
        tokens = source.histories[0][: prefix.length]
        opened = open_driver(
            source.adapter, source.case, source.kind, prefix=prefix, begin=tokens, **settings
        )
        with opened as d:
            yield d
