"""The warm tier: blocks in host RAM that are on disk too, and those that wait to be written."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcellar.store.values.blocks import Info, Kind, Sealed, Unsealed
from kvcellar.store.values.reports import TierStats

Item = Unsealed | Sealed


@dataclass(slots=True, eq=False)
class WarmBlock:
    """One block in RAM.

    Attributes:
        item: the block.
        n_queued: writes that wait for it; while there are any it stays, and the queue's limit
            counts it instead of this tier's.
    """

    item: Item
    n_queued: int = 0


class WarmTier:
    """Blocks by address, least recently used first. For any thread.

    Invariant: what is here and waits for no write takes at most ``limit_bytes``.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Create an empty tier."""
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._entries: OrderedDict[bytes, WarmBlock] = OrderedDict()
        self._children: dict[tuple[bytes, Kind], set[bytes]] = {}
        self._lock = threading.Lock()

    def get(self, address: bytes) -> Item | None:
        """Return a block, which counts as used now."""
        with self._lock:
            entry = self._entries.get(address)
            if entry is None:
                return None
            self._entries.move_to_end(address)
            return entry.item

    def entry(self, address: bytes) -> WarmBlock | None:
        """Return what is known of a block here; that does not count as a use."""
        return self._entries.get(address)

    def children(self, parents: Sequence[bytes], kind: Kind) -> list[Info]:
        """Return blocks or boundary states that follow any of these addresses."""
        with self._lock:
            return [
                self._entries[address].item.info
                for parent in parents
                for address in self._children.get((parent, kind), ())
            ]

    def hold(self, items: Iterable[Item]) -> None:
        """Take in what waits to be written to disk; until ``release`` it stays, limit or not."""
        with self._lock:
            for item in items:
                entry = self._entries.get(item.info.address)
                if entry is None:
                    entry = self._insert(item)
                elif not entry.n_queued:
                    self.size_bytes -= entry.item.size_bytes
                if item.info.is_exact and not entry.item.info.is_exact:
                    entry.item = item
                entry.n_queued += 1

    def release(self, address: bytes, item: Item | None) -> None:
        """End one hold on a block, for whose room others may have to leave.

        Args:
            address: what was held.
            item: what may stay in place of what was held, since it is on disk; None: nothing may.
        """
        with self._lock:
            entry = self._entries[address]
            entry.n_queued -= 1
            if item is not None:
                entry.item = item
            if entry.n_queued:
                return
            self.size_bytes += entry.item.size_bytes
            if item is None:
                self._remove(address)
            else:
                self._shrink()

    def discard(self, address: bytes) -> None:
        """Forget a block that is bad, unless it waits for a write."""
        with self._lock:
            entry = self._entries.get(address)
            if entry is not None and not entry.n_queued:
                self._remove(address)

    def stats(self) -> TierStats:
        """Return blocks and bytes, without those that wait for a write."""
        with self._lock:
            n = sum(not entry.n_queued for entry in self._entries.values())
            return TierStats(n, self.size_bytes, self.limit_bytes)

    def _insert(self, item: Item) -> WarmBlock:
        info = item.info
        entry = self._entries[info.address] = WarmBlock(item)
        self._children.setdefault((info.parent, info.kind), set()).add(info.address)
        return entry

    def _remove(self, address: bytes) -> None:
        entry = self._entries.pop(address)
        self.size_bytes -= entry.item.size_bytes
        info = entry.item.info
        siblings = self._children[info.parent, info.kind]
        siblings.discard(address)
        if not siblings:
            del self._children[info.parent, info.kind]

    def _shrink(self) -> None:
        """Drop until the limit is kept: the least recently used first."""
        if self.size_bytes <= self.limit_bytes:
            return
        idle = [address for address, entry in self._entries.items() if not entry.n_queued]
        for address in idle:
            if self.size_bytes <= self.limit_bytes:
                break
            self._remove(address)
