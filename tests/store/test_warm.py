"""Blocks in RAM against a list: what waits for a write stays, the rest is bounded, oldest first."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcellar.store.values.blocks import Info, Kind, Unsealed
from kvcellar.store.warm import WarmTier
from tests.store.fakes import make_key

KEY = make_key()
PLACES = [(n, n % 2, kind) for n, kind in enumerate([Kind.BLOCK, Kind.BLOCK, Kind.BOUNDARY] * 2)]
PARENTS = [bytes([100 + n]) * 16 for n in range(2)]
ITEMS = st.tuples(st.sampled_from(PLACES), st.booleans(), st.integers(0, 4))


def item_of(place: tuple[int, int, Kind], is_exact: bool, size: int) -> Unsealed:
    n, parent, kind = place
    address = bytes([n]) * 16
    tokens = np.arange(1)
    info = Info(kind, address, KEY.root, PARENTS[parent], 0, tokens, 0, is_exact, size, "")
    return Unsealed(KEY, info)


class WarmTierAgainstAList(RuleBasedStateMachine):
    """The oracle: address, item and queued writes, the least recently used first."""

    @initialize(limit=st.integers(0, 12))
    def open(self, limit: int) -> None:
        self.tier = WarmTier(limit)
        self.want: dict[bytes, tuple[Unsealed, int]] = {}

    def idle_bytes(self) -> int:
        return sum(item.size_bytes for item, n_queued in self.want.values() if not n_queued)

    @rule(drawn=st.lists(ITEMS, max_size=3))
    def hold(self, drawn: list[Any]) -> None:
        items = [item_of(*one) for one in drawn]
        self.tier.hold(items)
        for item in items:
            have, n_queued = self.want.get(item.info.address, (item, 0))
            better = item.info.is_exact and not have.info.is_exact
            self.want[item.info.address] = item if better else have, n_queued + 1

    @rule(drawn=ITEMS, stays=st.booleans())
    def release(self, drawn: Any, stays: bool) -> None:
        item = item_of(*drawn)
        address = item.info.address
        have, n_queued = self.want.get(address, (item, 0))
        if not n_queued:
            return
        self.tier.release(address, item if stays else None)
        self.want[address] = item if stays else have, n_queued - 1
        if n_queued > 1:
            return
        if not stays:
            del self.want[address]
        for old in [a for a, (_, n) in self.want.items() if not n]:
            if stays and self.idle_bytes() > self.tier.limit_bytes:
                del self.want[old]

    @rule(place=st.sampled_from(PLACES))
    def discard(self, place: tuple[int, int, Kind]) -> None:
        address = item_of(place, True, 0).info.address
        self.tier.discard(address)
        if not self.want.get(address, (None, 1))[1]:
            del self.want[address]

    @rule(place=st.sampled_from(PLACES))
    def get(self, place: tuple[int, int, Kind]) -> None:
        address = item_of(place, True, 0).info.address
        held = self.want.pop(address, None)
        if held is not None:
            self.want[address] = held
        assert self.tier.get(address) is (held and held[0])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tier"):
            return
        for place in PLACES:
            address = item_of(place, True, 0).info.address
            entry, want = self.tier.entry(address), self.want.get(address)
            assert (entry and (entry.item, entry.n_queued)) == want
        for kind in Kind:
            for parents in ([], PARENTS[:1], PARENTS):
                found = [info.address for info in self.tier.children(parents, kind)]
                infos = [item.info for item, _ in self.want.values()]
                want_found = [i.address for i in infos if i.parent in parents and i.kind is kind]
                assert sorted(found) == sorted(want_found)
        stats = self.tier.stats()
        idle = [item for item, n_queued in self.want.values() if not n_queued]
        assert (stats.n_blocks, stats.size_bytes) == (len(idle), self.idle_bytes())
        assert stats.size_bytes <= stats.limit_bytes == self.tier.limit_bytes
        assert len(self.tier._children) <= len(self.want), "nothing is left of what is gone"


TestWarmTierAgainstAList = WarmTierAgainstAList.TestCase
TestWarmTierAgainstAList.settings = settings(max_examples=50, stateful_step_count=30)
