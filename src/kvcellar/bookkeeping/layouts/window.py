"""Windows and chunks: positions that each sequence has let go of, and those that it must keep."""

from __future__ import annotations

from collections.abc import Mapping

from kvcellar.sight import Sight


class Window:
    """The part of a history that one layer group's queries see: what its sequences need no longer.

    Kept is what the next query sees, and what it would see if the sequence were up to ``slack``
    positions shorter. Besides, what a query at each *point* sees that ``keep_point`` was told of.
    """

    def __init__(
        self, sight: Sight, slack: int, block_size: int, lengths: Mapping[int, int]
    ) -> None:
        """Create a window that has let go of nothing.

        Args:
            sight: how much of its history a query sees; not all of it.
            slack: positions by which a sequence can be cut back and go on.
            block_size: cells that are freed together.
            lengths: the sequences' lengths, read whenever they are needed.
        """
        self.sight = sight
        self._slack = slack
        self._block_size = block_size
        self._lengths = lengths
        self._let_go: dict[int, int] = {}  # one past the highest position that was let go of
        self._points: dict[int, list[int]] = {}  # ascending

    def floor(self, seq_id: int) -> int:
        """Return the lowest position that must be kept, or one before it: where a block begins."""
        floor = self.sight.first_seen(max(0, self._lengths.get(seq_id, 0) - self._slack))
        return floor - floor % self._block_size

    def passed(self, seq_id: int) -> list[tuple[int, int]]:
        """Return the ranges of positions that no query sees any more: whole blocks, no point's."""
        size, floor = self._block_size, self.floor(seq_id)
        if seq_id not in self._points:
            return [(0, floor)] if floor else []
        at, ranges = 0, []
        for point in self._points[seq_id]:
            low = self.sight.first_seen(point)
            if low == point:  # a query that sees itself alone needs nothing
                continue
            ranges.append((at, min(low - low % size, floor)))
            at = -(-point // size) * size
        ranges.append((at, floor))
        return [(p0, p1) for p0, p1 in ranges if p0 < p1]

    def low(self, seq_id: int) -> int:
        """Return the length from which on a sequence can go on wherever it is cut back to."""
        return self.sight.first_clear_of(self._let_go.get(seq_id, 0))

    def resume_at(self, seq_id: int, length: int) -> int:
        """Return the greatest length up to ``length`` that a sequence can go on from."""
        at = self.sight.resume_at(length, self._let_go.get(seq_id, 0))
        return max([at, *(point for point in self._points.get(seq_id, ()) if point <= length)])

    def keep_point(self, seq_id: int, length: int) -> None:
        """Keep what a query at ``length`` sees, until the sequence is cut back below it."""
        points = self._points.setdefault(seq_id, [])
        if length not in points:
            points.append(length)
            points.sort()

    def drop_point(self, seq_id: int, length: int) -> None:
        """Keep what a query at ``length`` sees no longer, unless it is seen otherwise."""
        points = [at for at in self._points.pop(seq_id, ()) if at != length]
        if points:
            self._points[seq_id] = points

    def let_go(self, seq_id: int) -> int:
        """Return one past the highest position that was let go of, 0 where nothing was."""
        return self._let_go.get(seq_id, 0)

    def set_let_go(self, seq_id: int, stop: int) -> None:
        """Note one past the highest position that a sequence lacks; 0 for none."""
        if stop:
            self._let_go[seq_id] = stop
        else:
            self._let_go.pop(seq_id, None)

    def cut(self, seq_id: int, p0: int, p1: int) -> None:
        """Follow a sequence that drops ``[p0, p1)``; its length is still the old one."""
        if p1 >= self._lengths.get(seq_id, 0) and seq_id in self._points:
            points = self._points.pop(seq_id)
            kept = [at for at in points if at <= p0]
            if kept:
                self._points[seq_id] = kept
                if kept[-1] == p0 < self.low(seq_id):
                    self._let_go[seq_id] = self.sight.first_seen(p0)
        if p0 < self._let_go.get(seq_id, 0) <= p1:
            self._let_go[seq_id] = p0

    def forget(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._let_go.pop(seq_id, None)
        self._points.pop(seq_id, None)

    def clear(self) -> None:
        """Forget every sequence."""
        self._let_go.clear()
        self._points.clear()

    def check(self) -> None:
        """Assert that no sequence let go of its future."""
        for seq_id, stop in self._let_go.items():
            assert 0 <= stop <= self._lengths[seq_id], f"sequence {seq_id} let go of its future"
