"""Lengths at which a sequence leaves what others can go on from, in a model that is not cut back.

A layer with a window, a chunk or a state lets go of its past: a history can be resumed only where
somebody published it when that was its end. So the chunks of a prompt end where one is likely to
be wanted, and a sequence that gets tokens over blocks keeps the newest whole number of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcellar.cache import SeqCache, TreeSeqCache
from kvcellar.engine.kv.spacing import Spacing
from kvcellar.engine.requests.draft import Draft
from kvcellar.engine.requests.request import Sequence
from kvcellar.prefix import PrefixIndex
from kvcellar.types import MOST_CELLS

MIN_AHEAD = 16
"""Tokens behind the last place from which a request can go on, for another to be worth it."""

MIN_AGAIN = 128
"""Tokens behind that place for one more forward, so that the prompt can be asked again."""


class Snapshots:
    """Says where sequences are published, and keeps states that they may have to go back to."""

    def __init__(self, cache: SeqCache, index: PrefixIndex) -> None:
        """Create the snapshots of a cache's sequences, whose tokens an index stores in blocks."""
        params = cache.config.params
        self._cache = cache
        self._block_size = index.block_size
        self._is_cut_anywhere = all(sight.is_full for sight in params.sights)
        self.has_states = params.state is not None
        self.lack_states_alone = self.has_states and all(group.is_full for group in params.groups)
        """True if a history whose rows are there can lack nothing but states."""
        self.has_nodes = self.has_states and isinstance(cache, TreeSeqCache)
        """Guesses are nodes of a tree, each with a slot of its own: none is computed again."""
        self.spacing = Spacing(cache.config) if self.has_states else None
        self.slots_per_sequence = 2 + (index.block_size > 1) if self.has_states else 0
        """Slots of a running sequence: one that a step reads, one that it writes, one kept."""

    # Prompts -----------------------------------------------------------------------------------

    def publish_at(self, sequence: Sequence, n_matched: int) -> set[int]:
        """Return the lengths ahead at which a sequence that enters is to be published.

        Where later requests are said to go on otherwise, where an earlier one did (a few tokens
        behind another such place are not worth a forward and a slot), at the end of the prompt, and
        before its last token, whose logits are wanted by whoever asks the same again: whole blocks
        of the index.

        Args:
            sequence: it has what could be reused.
            n_matched: leading tokens that are stored, whether they could be resumed or not.
        """
        if self._is_cut_anywhere:
            return set()
        wanted = {n for n in sequence.request.snapshots_at if n > sequence.n_computed}
        near = max((n for n in wanted if n <= n_matched), default=sequence.n_computed)
        if not self.has_states or n_matched - near >= MIN_AHEAD:
            wanted.add(n_matched)
        if self.has_states:
            again = sequence.n_prompt - 1
            near = max((n for n in wanted if n <= again), default=sequence.n_computed)
            wanted.add(sequence.n_prompt)
            if again - near >= MIN_AGAIN:
                wanted.add(again)
        return {n for n in map(self.aligned, wanted) if n > sequence.n_computed}

    def aligned(self, length: int) -> int:
        """Return a length without a rest that fills no block of the index."""
        return length - length % self._block_size

    def chunk(self, sequence: Sequence, n_tokens: int, n_running: int) -> int:
        """Return how many of so many tokens a step computes, so that it ends where it is wanted."""
        at, ahead = sequence.n_computed, self._next_stop(sequence)
        n = min(n_tokens, ahead - at) if ahead > at else n_tokens
        if self.spacing is None or at >= sequence.n_prompt:
            return n
        interval = self._interval(sequence, n_running)
        if self.spacing.is_measured and ahead - at >= 2 * interval:
            n = min(n, interval)
        return n if at + n >= ahead else max(0, self.aligned(at + n) - at) or n

    def is_due(self, sequence: Sequence, n_running: int) -> bool:
        """Return true if a prompt is to be published where a chunk of it has ended."""
        n = sequence.n_computed
        if n in sequence.publish_at:
            return True
        if self.spacing is None or n % self._block_size:
            return False
        interval = self._interval(sequence, n_running)
        behind, ahead = n - sequence.resumable_at, self._next_stop(sequence) - n
        return behind >= interval and ahead >= interval

    def _next_stop(self, sequence: Sequence) -> int:
        """Return where a sequence that reads a prompt is published next: at its end, or before."""
        ahead = [stop for stop in sequence.publish_at if stop > sequence.n_computed]
        return min(ahead, default=sequence.n_prompt)

    def _interval(self, sequence: Sequence, n_running: int) -> int:
        assert self.spacing is not None
        n = self.spacing.interval(sequence.n_prompt, self._cache.capacity, n_running)
        return n + -n % self._block_size

    # Answers -----------------------------------------------------------------------------------

    def keep_newest(self, sequence: Sequence) -> None:
        """Keep the states of a sequence that has whole blocks now, in place of those before.

        Its end is published in whole blocks; without this, nobody could go on from there.
        """
        n = sequence.n_computed
        if self._block_size == 1 or not self.has_states or n % self._block_size or not n:
            return
        if n != sequence.point:
            self._cache.keep_point(sequence.seq_id, n)
            self.give_up_point(sequence)
            sequence.point = n

    def give_up_point(self, sequence: Sequence) -> bool:
        """Keep the states of whole blocks no longer, for want of slots; true: there were any."""
        has_point = sequence.point > 0
        if has_point:
            self._cache.drop_point(sequence.seq_id, sequence.point)
        sequence.point = 0
        return has_point

    # Guesses -----------------------------------------------------------------------------------

    def is_tree(self, draft: Draft) -> bool:
        """Return true if guesses are to be the nodes of a tree."""
        return not draft.is_chain or (self.has_nodes and len(draft) > 0)

    def most_nodes(self, decoding: Iterable[Sequence], n_running: int) -> int:
        """Return how many guesses each sequence may have verified, for their slots.

        Half of the slots go to guesses for a step, those of the running sequences among them, so
        that half of the snapshots stay: a guess saves a moment, a snapshot perhaps a prompt.
        """
        n_guessing = sum(len(sequence.draft) > 0 for sequence in decoding)
        if not self.has_nodes or not n_guessing:
            return MOST_CELLS
        n_slots = self._cache.config.n_slots // 2 - self.slots_per_sequence * n_running
        return max(0, n_slots // n_guessing)

    def before_guesses(self, sequence: Sequence) -> None:
        """Keep the states that a sequence goes back to if one of its guesses is wrong."""
        if self.has_states:
            self._cache.keep_point(sequence.seq_id, sequence.n_computed)

    def after_guesses(self, sequence: Sequence, length: int) -> None:
        """Keep the states before the guesses no longer, which were behind ``length`` tokens."""
        if self.has_states and length != sequence.point:
            self._cache.drop_point(sequence.seq_id, length)
