"""One sequence in one run per layer group: the verbs of the cache's face."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvcellar.bookkeeping.cells.growth import Growth
from kvcellar.bookkeeping.face import StepFace
from kvcellar.bookkeeping.layouts.drafts import Drafts
from kvcellar.bookkeeping.layouts.frozen import frozen_spans
from kvcellar.bookkeeping.layouts.layout import Bytes, NoBytes, Stretch
from kvcellar.bookkeeping.layouts.one_run import OneRun
from kvcellar.bookkeeping.layouts.reads import ReadsOf, reads_of
from kvcellar.bookkeeping.layouts.slots import make_slots
from kvcellar.bookkeeping.steps import Positions, Steps
from kvcellar.cache_config import CacheConfig
from kvcellar.checks import whole, wholes
from kvcellar.errors import CacheFullError, PositionError, RewindError, StepError
from kvcellar.types import IntArray


class OneSequence(StepFace):
    """The length of one history, and where each layer group keeps it.

    A forward needs no ``begin_step``: it brings the tokens that follow.
    """

    def __init__(
        self, config: CacheConfig, pools: Bytes | None = None, *, reads: ReadsOf = reads_of
    ) -> None:
        """Create an empty history.

        Args:
            config: capacity, layer groups, budget.
            pools: the bytes; None for bookkeeping that stands alone.
            reads: what the queries of a step read.

        Raises:
            ConfigError: the budget holds no token.
        """
        budget = config.budget
        growth = None if budget is None else Growth(config, budget, has_one_run=True)
        capacity = config.capacity if growth is None else growth.n_fitting
        lengths: dict[int, int] = {}
        self.layouts = [
            OneRun(
                lengths,
                sight=group.sight,
                slack=config.window_slack,
                min_chunk=config.min_chunk,
                capacity=capacity,
                reads=reads,
                origin=config.origin,
                frozen=frozen_spans(config, index),
            )
            for index, group in enumerate(config.params.groups)
        ]
        self.slots = make_slots(config, lengths, Drafts())
        super().__init__(
            Steps(
                config,
                self.layouts,
                lengths,
                NoBytes() if pools is None else pools,
                growth=growth,
                unasked=partial(_begin_next, self.layouts),
                slots=self.slots,
            )
        )

    @property
    def capacity(self) -> int:
        """The most tokens of the history: cells, or what a memory budget holds."""
        growth = self.steps.growth
        return self.config.capacity if growth is None else growth.n_fitting

    @property
    def length(self) -> int:
        """Tokens in the history: the position that the next token gets."""
        return self.steps.lengths.get(0, self.steps.origin)

    def can_extend(self, n: int = 1) -> bool:
        """Return true if ``n`` more tokens fit; with a budget, in steps of ``STEP_TOKENS``."""
        n, start, growth = whole(n, "n"), self.length, self.steps.growth
        most = self.steps.origin + self.config.capacity
        lacks = [] if self.slots is None else [self.slots.n_missing(n, {})]
        if growth is None or start + n > most:
            return start + n <= most and not any(n_missing > 0 for n_missing in lacks)
        needed = zip(self.layouts, growth.cells_for(start + n), growth.sizes, strict=False)
        return growth.can_add(
            [min(start + n - one.base_at(start), most) - size for one, most, size in needed] + lacks
        )

    def resumable_from(self) -> int:
        """Return the length from which on ``rewind`` can cut back to any, up to the last."""
        if self.slots is not None:
            return self.length
        return max(self.steps.origin, *(layout.low for layout in self.layouts))

    def keep_point(self, length: int) -> None:
        """Keep what is needed to rewind to ``length`` until the history is cut back below it.

        Of states it keeps a slot, see ``drop_point``.

        Raises:
            RewindError: it cannot be rewound there any more; nothing was changed.
        """
        length = self.check_resume(length, "keep_point")
        for keeper in self.steps.keepers:
            keeper.keep_point(0, length)

    def drop_point(self, length: int) -> None:
        """Keep what is needed to rewind to ``length`` no longer; a no-op where it is no point."""
        length = whole(length, "length", RewindError)
        self.steps.settle()
        for keeper in self.steps.keepers:
            keeper.drop_point(0, length)

    def rewind(self, new_length: int) -> int:
        """Cut the history back to its first ``new_length`` tokens. Moves no bytes.

        Where a layer group cannot go on from there, it is cut back further, to the greatest length
        from which all can: what follows is to be computed again.

        Returns:
            The length that the history has now.

        Raises:
            RewindError: it would grow, or lose a part of its frozen prefix; nothing was changed.
        """
        at = self.steps.resume_at(0, self._checked("rewind", new_length))
        for keeper in self.steps.keepers:
            keeper.cut(0, at, self.length)
        self.steps.lengths[0] = at
        return at

    def check_resume(self, length: int, verb: str) -> int:
        """Return a length that the history can be cut back to and go on from exactly.

        Raises:
            RewindError: it cannot; ``verb`` names who asks.
        """
        length = self._checked(verb, length)
        near = self.steps.resume_at(0, length)
        if near != length:
            raise RewindError(
                f"{verb} to {length}: {self.steps.narrow} has let go of what was before; this "
                f"history resumes from {near} or from {self.resumable_from()} to {self.length}; "
                f"{self.steps.keeps_more}"
            )
        return length

    def _checked(self, verb: str, length: int) -> int:
        """Return a length of a part of the history, behind what is frozen.

        Raises:
            RewindError: it is none.
        """
        length = whole(length, "new_length", RewindError)
        self.steps.settle()
        if not 0 <= length <= self.length:
            raise RewindError(
                f"{verb} to {length}: the cache holds {self.length} tokens and rewinding "
                f"cannot grow; ask for 0 to {self.length}"
            )
        if length < self.steps.origin:
            raise RewindError(
                f"{verb} to {length}: the first {self.steps.origin} tokens are frozen and shared "
                f"with other caches; ask for {self.steps.origin} to {self.length}"
            )
        return length

    def rows_to_freeze(self, seq_id: int, length: int | None) -> tuple[int, list[IntArray]]:
        """Return how many first tokens to freeze, and their cells per layer group.

        A window's last ones alone. Errors as in ``freeze_prefix``.
        """
        self.steps.settle()
        n = self.check_resume(self.length if length is None else length, "freeze_prefix")
        if seq_id != 0 or self.steps.origin or not n:
            raise RewindError(
                f"freeze_prefix of {n} tokens of sequence {seq_id}: a contiguous cache freezes "
                f"tokens of sequence 0 that were computed in it"
            )
        pairs = zip(self.layouts, self.steps.groups, strict=True)
        return n, [
            np.arange(group.first_seen(n) - layout.base, n - layout.base) for layout, group in pairs
        ]

    def length_in(self, layer: int) -> int:
        """Return the tokens that a layer has been given: in a forward, they come one by one."""
        n_seen = self.steps.n_seen(layer)
        return self.length + (n_seen or 0)

    def held(self, layer: int) -> int:
        """Return how many of the last tokens a layer holds, those that it sees no more included."""
        return self.length - self.layouts[self.steps.group_of(layer)].base

    def adopt(self, length: int, held: Sequence[int]) -> None:
        """Start a history whose bytes come from elsewhere: they are in the cells from 0 on.

        Args:
            length: tokens of the history; where layers are recurrent, its states come to the slot
                that its sequence holds then.
            held: per layer group, how many of the last of them are there.

        Raises:
            RewindError: the cache is not empty, or a group would lack tokens that it attends;
                nothing was changed.
            CacheFullError: it does not fit; nothing was changed.
        """
        self.steps.settle()
        if self.length:
            raise RewindError(
                f"a history of {length} tokens cannot start here: the cache holds {self.length}; "
                f"clear it first"
            )
        for group, n in zip(self.steps.groups, held, strict=True):
            least = length - group.first_seen(length)
            if not least <= n <= length:
                raise RewindError(
                    f"a history of {length} tokens needs the last {least} in layers "
                    f"{group.layers}, and {n} are there; it cannot go on exactly"
                )
        if not _has_room(self.steps, self.layouts, 0, length):
            raise CacheFullError(
                f"a history of {length} tokens, {self.capacity} cells; {self.config.more_room}"
            )
        self.steps.lengths[0] = length
        if self.slots is not None and length:
            self.slots.claim_at(0, [length])
        for layout, n in zip(self.layouts, held, strict=True):
            layout.base = length - n


def _begin_next(
    layouts: Sequence[OneRun], steps: Steps, who: str, n_tokens: int, positions: Positions
) -> None:
    """Begin a forward with the tokens that follow the history.

    Raises:
        StepError: it brings none.
        PositionError: it brings others.
        CacheFullError: they do not fit; nothing was changed.
    """
    steps.settle()
    start = steps.lengths.get(0, steps.origin)
    if n_tokens < 1:
        raise StepError(f"a step needs at least one token; the forward brings {n_tokens}")
    expected = [start] if n_tokens == 1 else list(range(start, start + n_tokens))
    if positions is not None and not (n_tokens == len(positions) == 1 and positions[0] == start):
        _check_positions(wholes(positions, "positions", PositionError), expected)
    if not _has_room(steps, layouts, start, n_tokens):
        capacity = steps.config.capacity if steps.growth is None else steps.growth.n_fitting
        slots, states = steps.slots, ""
        if slots is not None:
            n_free = f"{slots.n_free} free of {slots.n_slots} (n_slots)"
            states = f", and {slots.in_words(1)}, {n_free}; drop points"
        raise CacheFullError(
            f"step needs {n_tokens} cells, {max(0, capacity + steps.origin - start)} free of "
            f"{capacity}{states}; rewind, clear, or {steps.config.more_room}"
        )
    steps.begin((Stretch(0, 0, n_tokens, start),), expected)


def _check_positions(asked: list[int], expected: list[int]) -> None:
    """Raise PositionError unless a forward's positions are those that follow the history."""
    start = expected[0]
    if len(asked) != len(expected):
        raise PositionError(
            f"the forward brings {len(expected)} tokens and {len(asked)} positions; give every "
            f"token one position"
        )
    if asked != expected:
        shown = f"{asked[:8]}{' ...' if len(asked) > 8 else ''}"
        raise PositionError(
            f"this cache holds positions 0 to {start - 1} of one sequence, so the next tokens "
            f"are {start}, {start + 1}, ...; the forward brings {shown}; call rewind to go back"
            if start
            else f"this cache is empty, so its tokens start at position 0 and follow each "
            f"other; the forward brings {shown}"
        )


def _has_room(steps: Steps, layouts: Sequence[OneRun], start: int, n_tokens: int) -> bool:
    """Have cells for a step in every group, and a slot; false, with nothing changed, without."""
    if start + n_tokens > steps.origin + steps.config.capacity:
        return False
    growth, slots = steps.growth, steps.slots
    lacks = [] if slots is None else [slots.n_missing(1, {})]
    if growth is None:
        return not any(n_missing > 0 for n_missing in lacks)
    sizes = zip(layouts, growth.sizes, strict=False)
    missing = [start + n_tokens - one.base_at(start) - size for one, size in sizes]
    if not growth.add(missing + lacks):
        return False
    if slots is not None:
        slots.grant(growth.sizes[-1])
    return True
