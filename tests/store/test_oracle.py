"""Any mixture of verbs gives what a dict of histories would."""

from __future__ import annotations

import shutil
import tempfile

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcellar.errors import StoreError
from kvcellar.states import StateGroup
from kvcellar.store import EventKind, Store, StoreConfig
from tests.store.fakes import CHUNK, FULL, QUICK, STATE, WINDOW, History, fork, load_all, make_key

NAMES = st.sampled_from(["a", "b", "c", "d"])
TOKENS = st.lists(st.integers(0, 1), max_size=12)


class StoreAgainstDicts(RuleBasedStateMachine):
    """The oracle: one dict, name -> (tokens, parent)."""

    @initialize(
        groups=st.sampled_from([[FULL], [FULL, WINDOW], [FULL, CHUNK], [CHUNK], [CHUNK, WINDOW]]),
        state=st.sampled_from([None, STATE]),
        warm_bytes=st.sampled_from([0, 3000, 1 << 20]),
        cold_bytes=st.sampled_from([6000, 20_000, 1 << 30]),
    )
    def open(
        self, groups: list, state: StateGroup | None, warm_bytes: int, cold_bytes: int
    ) -> None:
        self.folder = tempfile.mkdtemp(dir=QUICK)
        self.config = StoreConfig(warm_bytes=warm_bytes, cold_bytes=cold_bytes)
        self.store = Store(self.folder, self.config)
        self.key = make_key(groups=groups, block_tokens=4, state=state)
        self.want: dict[str, list[int]] = {}
        self.computed: set[int] = set()
        self.parents: dict[str, tuple[str | None, int | None]] = {}

    def history(self, tokens: list[int]) -> History:
        return History(self.key, tokens)

    @rule(name=NAMES, keep=st.integers(0, 20), tokens=TOKENS)
    def save(self, name: str, keep: int, tokens: list[int]) -> None:
        new = [*self.want.get(name, [])[:keep], *tokens]
        self.computed |= {keep, len(new)}
        ticket = self.store.save(name, self.key, new, self.history(new), boundaries=(keep,))
        if ticket.wait(60) == "published":
            assert not ticket.is_partial
            self.want[name] = new
            if self.key.layout.has_boundaries:
                kept = {boundary.length for boundary in self.store.get(name).boundaries}
                assert kept >= {n for n in (keep, len(new)) if 0 < n <= len(new)}
            self.parents.setdefault(name, (None, None))
        else:
            assert "limit" in ticket.reason
            assert self.config.cold_bytes <= 20_000

    @rule(name=NAMES, new_name=NAMES, at=st.integers(0, 20))
    def fork(self, name: str, new_name: str, at: int) -> None:
        if name not in self.want or new_name in self.want or at > len(self.want[name]):
            return
        try:
            fork(self.store, self.key, name, new_name, at)
        except StoreError as error:
            assert "limit" in str(error)
        else:
            self.want[new_name] = self.want[name][:at]
            self.parents[new_name] = (name, at)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        try:
            self.store.delete(name)
        except KeyError:
            assert name not in self.want
        else:
            del self.want[name], self.parents[name]

    @rule()
    def collect(self) -> None:
        self.store.gc()

    @rule(is_losing_catalogue=st.booleans())
    def reopen(self, is_losing_catalogue: bool) -> None:
        self.store.close()
        if is_losing_catalogue:
            for suffix in ("", "-wal", "-shm"):
                (self.store.path / f"catalogue.sqlite{suffix}").unlink(missing_ok=True)
        self.store = Store(self.folder, self.config)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=30))
    def load_anything(self, tokens: list[int]) -> None:
        load_all(self.store, self.history(tokens))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        assert {row.name for row in self.store.references()} == self.want.keys()
        for name, tokens in self.want.items():
            self.store.flush()  # what left RAM is on its way to disk, and takes room there
            ref = self.store.get(name)
            assert list(ref.tokens) == tokens
            assert (ref.parent, ref.parent_position) == self.parents[name]
            n = load_all(self.store, self.history(tokens))
            if not ref.is_evicted and not self.key.layout.has_boundaries:
                assert n == len(tokens)
            if not ref.is_evicted and ref.boundaries:
                assert n >= ref.boundaries[-1].length
            if self.key.layout.state is not None and n:
                assert n in self.computed
        stats = self.store.stats()
        assert stats.cold.size_bytes <= self.config.cold_bytes
        assert stats.warm.size_bytes <= self.config.warm_bytes
        for event in self.store.take_events():
            rebuilt = event.kind == EventKind.CATALOGUE_REBUILT and "missing" in event.detail
            room = event.kind in (EventKind.EVICTED, EventKind.WRITE_FAILED)
            assert rebuilt or (room and self.config.cold_bytes <= 20_000), event

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestStoreAgainstDicts = StoreAgainstDicts.TestCase
TestStoreAgainstDicts.settings = settings(max_examples=25, stateful_step_count=25)
pytestmark = pytest.mark.filterwarnings("error")
