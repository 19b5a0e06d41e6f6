"""Speculation: asks a drafter for guesses, and verifies as many as save time.

A forward of a few tokens takes little more than one of a single token, for as long as it is the
weights that have to be read. How much more is measured here, step by step; so is how often guesses
of each kind are right. Of all guesses for all sequences of a step those are verified that bring
most tokens per second; none, where that is no more than without. Guesses that are not verified are
compared with what came instead, so it is known when they begin to pay again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcellar.engine.requests.draft import LATER, NO_DRAFT, Draft
from kvcellar.engine.requests.request import Sequence
from kvcellar.engine.speculate.drafter import Drafter, DraftRequest, FeatureReader
from kvcellar.engine.speculate.rates import HitRate, Rates
from kvcellar.engine.speculate.step_costs import StepCosts, blend

if TYPE_CHECKING:
    from kvcellar.models.runner import FloatArray

log = logging.getLogger("kvcellar.engine")

MARGIN = 1.02
"""Tokens per second have to be believed so many times those without guesses."""

PROBE_SHARE = 0.01
"""Of all time: what guesses that are made, or verified, only to learn may take."""

PROBE_DEPTH = 4
"""Levels of guesses that are made only to learn."""

PROBE_GAIN = 0.3
"""Guesses that are right so often are verified now and then, whatever steps seem to cost."""

LEVEL_WEIGHTS = (0.1, 0.2)
"""Of one more time that guesses were made: where a level took longer than believed, and less."""


@dataclass(slots=True, eq=False)
class Speculator:
    """Chooses what is guessed and verified. One per engine.

    Whatever the drafter raises costs nobody more than guesses: the sequences that it was called for
    go on without it until they end.

    Attributes:
        drafter: who guesses.
        max_drafted: guesses per sequence and step, at most.
        is_adaptive: verify what pays; otherwise all that is guessed.
        has_trees: several guesses for one token can be verified in one forward; otherwise the
            likeliest chain is.
        runs_again: where one of a chain is wrong, the next step computes those before it again.
        clock: seconds.
        costs: what steps take.
        level_s: what it takes to guess one level for all sequences; None before the first time.
        n_failures: times that the drafter raised.
    """

    drafter: Drafter
    max_drafted: int = 8
    is_adaptive: bool = True
    has_trees: bool = False
    runs_again: bool = False
    clock: Callable[[], float] = time.perf_counter
    costs: StepCosts = field(default_factory=StepCosts)
    level_s: float | None = None
    n_failures: int = 0
    _rates: Rates = field(default_factory=Rates)
    _levels: list[HitRate] = field(default_factory=list)
    """Per level how often one of its guesses was right, where one of the level above was."""
    _per_level: float = 1.0
    """Guesses that were verified per level and sequence."""
    _pending: dict[int, Draft] = field(default_factory=dict)
    _asked: dict[int, int] = field(default_factory=dict)
    """Tokens of each sequence when its guesses were made the last time."""
    _without: set[int] = field(default_factory=set)
    """Sequences for which the drafter has failed."""
    _min_reach: float = 0.0
    _total_s: float = 0.0
    _probe_s: float = 0.0
    _guessing_s: float = 0.0
    _is_probe: bool = False
    """This step's guesses were made only to learn."""
    _plain_s: float | None = None
    """What this step is believed to take without the guesses that it verifies only to learn."""
    _reader: FeatureReader | None = None

    def __post_init__(self) -> None:
        self._reader = self.drafter if isinstance(self.drafter, FeatureReader) else None

    def propose(self, sequences: Seq[Sequence], n_others: int) -> None:
        """Set ``draft`` of some decoding sequences.

        Args:
            sequences: those that have one token left to compute.
            n_others: tokens that the next step computes besides theirs.
        """
        self._pending.clear()
        self._guessing_s, self._plain_s = 0.0, None
        for sequence in sequences:
            sequence.draft = NO_DRAFT
        n_tokens = len(sequences) + n_others
        depth, self._is_probe = self._depth(len(sequences), n_tokens)
        asks = {s.request_id: ask for s in sequences if (ask := self._ask(s, depth)) is not None}
        if not asks:
            return
        started = self.clock()
        try:
            drafts = dict(zip(asks, self.drafter.propose(list(asks.values())), strict=True))
        except Exception as error:
            self._failed(asks, error)
            drafts = {}
        self._guessed(asks, drafts, self.clock() - started)
        if not any(drafts.values()):
            return
        if not self.has_trees:
            drafts = {request_id: self._chain(request_id, d) for request_id, d in drafts.items()}
        kept = self._worth_it(drafts, len(sequences), n_tokens)
        for sequence in sequences:
            draft = drafts.get(sequence.request_id)
            if draft:
                self._pending[sequence.request_id] = draft
                sequence.draft = draft.keep(kept[sequence.request_id])
                if sequence.draft:
                    ratio = len(sequence.draft) / sequence.draft.depth
                    self._per_level += 0.1 * (ratio - self._per_level)

    def learn(self, request_id: int, chosen: list[int]) -> None:
        """Compare what was guessed with what was sampled, verified or not."""
        draft = self._pending.pop(request_id, None)
        if draft is None:
            return
        for level, is_right in enumerate(self._rates.learn(request_id, draft, chosen)):
            if level == len(self._levels):
                self._levels.append(HitRate())
            self._levels[level].learn(is_right)

    def saw(self, request_id: int, start: int, features: FloatArray) -> None:
        """Tell a drafter that reads features what the model's layers said of computed tokens."""
        assert self._reader is not None, "only a reader's engine computes features"
        if request_id in self._without:
            return
        try:
            self._reader.saw(request_id, start, features)
        except Exception as error:
            self._failed((request_id,), error)

    def ran(self, n_tokens: int, seconds: float) -> None:
        """Count a step that has run, in so much time from before it was proposed for."""
        self._total_s += seconds
        seconds = max(0.0, seconds - self._guessing_s)
        if self._plain_s is not None:
            self._probe_s += max(0.0, seconds - self._plain_s)
        self.costs.learn(n_tokens, seconds)

    def ended(self, request_id: int) -> None:
        """Forget a sequence, which goes on no more."""
        self._pending.pop(request_id, None)
        self._asked.pop(request_id, None)
        self._rates.ended(request_id)
        if request_id not in self._without:
            try:
                self.drafter.ended(request_id)
            except Exception as error:
                self._failed((), error)
        self._without.discard(request_id)

    def _failed(self, request_ids: Iterable[int], error: Exception) -> None:
        """Take these sequences away from the drafter, which has raised for them."""
        if not self.n_failures:
            log.error(
                "%s cannot guess; the requests that it was asked for go on without guesses, and "
                "further failures are only counted",
                type(self.drafter).__name__,
                exc_info=error,
            )
        self.n_failures += 1
        for request_id in request_ids:
            self._without.add(request_id)
            with contextlib.suppress(Exception):
                self.drafter.ended(request_id)

    def _ask(self, sequence: Sequence, depth: int) -> DraftRequest | None:
        if sequence.request_id in self._without:
            return None
        most = sequence.request.params.max_tokens
        if most is not None:
            n_sampled = len(sequence.tokens) - sequence.n_prompt
            depth = min(depth, most - n_sampled - 1)
        n_nodes = self.max_drafted if self.has_trees else 0
        if depth <= 0:
            return None
        request_id, space = sequence.request_id, sequence.request.space
        return DraftRequest(request_id, sequence.tokens, depth, n_nodes, self._min_reach, space)

    def _depth(self, n_sequences: int, n_tokens: int) -> tuple[int, bool]:
        """Return how many levels are worth the time to guess them, and if that is only to learn.

        Where some are, they may be twice as many: how sure a drafter is of its guesses says better
        than any mean when to stop, and what a level's time is worth says how sure it has to be.
        """
        self._min_reach = 0.0
        if not self.is_adaptive or self.drafter.is_free:
            return self.max_drafted, False
        before = self.costs.seconds(n_tokens)
        if before is None:
            return 0, False
        if self.level_s is None:
            return min(PROBE_DEPTH, self.max_drafted), False
        best, n_best = MARGIN * n_sequences / before, 0
        expected, right, rate, n_again = float(n_sequences), 1.0, 0.6, 0.0
        for depth in range(1, self.max_drafted + 1):
            if depth <= len(self._levels):
                rate = self._levels[depth - 1].value(rate)
            above, right = right, right * rate
            expected += n_sequences * right
            n_again += self._n_again(depth, above, right)
            n_guesses = round(n_sequences * depth * self._per_level)
            n_more = n_guesses + n_sequences * n_again
            seconds = self._seconds(n_tokens + n_more, before) + depth * self.level_s
            per_second = expected / seconds
            if per_second > best:
                best, n_best = per_second, depth
        if n_best:
            self._min_reach = best * self.level_s / (n_sequences * rate)
            return min(2 * n_best, self.max_drafted), False
        if not self._may_probe:
            return 0, False
        return min(PROBE_DEPTH, self.max_drafted), True

    def _chain(self, request_id: int, draft: Draft) -> Draft:
        """Return the likeliest guess of every level, each behind the one before."""
        if draft.is_chain:
            return draft
        paths = self._rates.paths(request_id, draft)
        chain: list[int] = []
        while children := list(draft.children(chain[-1] if chain else -1)):
            chain.append(max(children, key=paths.__getitem__))
        return draft.keep(chain)

    def _worth_it(
        self, drafts: Mapping[int, Draft], n_sequences: int, n_tokens: int
    ) -> dict[int, list[int]]:
        """Return the guesses to verify per sequence, in a step that has ``n_tokens`` without them.

        The likeliest first, of all sequences; a guess is never likelier than the one before it.
        Likely ones that do not pay by what steps have cost are verified now and then all the same:
        those steps may have been held up, and no other would tell.
        """
        if not self.is_adaptive:
            return {request_id: list(range(len(draft))) for request_id, draft in drafts.items()}
        kept: dict[int, list[int]] = {request_id: [] for request_id in drafts}
        before = self.costs.seconds(n_tokens)
        if before is None:
            return kept
        gains: list[tuple[float, int, int, float]] = []
        for request_id, draft in drafts.items():
            paths = self._rates.paths(request_id, draft)
            above = [1.0, *paths]
            again = [self._n_again(i + 1, above[i], gain) for i, gain in enumerate(paths)]
            found = [(-gain, node, request_id, again[node]) for node, gain in enumerate(paths)]
            if len(found) > self.max_drafted:
                found = sorted(found)[: self.max_drafted]
            gains += found
        if not gains:
            return kept
        gains.sort()
        # Sequences that decode bring a token each; those in prefill none, and take their time.
        expected = float(n_sequences)
        best, n_best = MARGIN * expected / before, 0
        most = expected - sum(gain for gain, *_ in gains)
        n_again = 0.0
        for n, (gain, _, _, again_for_it) in enumerate(gains, 1):
            if most <= best * before:
                break  # not even if all that are left were for nothing
            expected -= gain
            n_again += again_for_it
            per_second = expected / self._seconds(n_tokens + n + n_again, before)
            if per_second > best:
                best, n_best = per_second, n
        n_likely = sum(-gain >= PROBE_GAIN for gain, *_ in gains)
        if n_best < n_likely and (self._is_probe or self._may_probe):
            self._plain_s = self._seconds(n_tokens + n_best, before)
            n_best = n_likely
        for _, node, request_id, _ in gains[:n_best]:
            kept[request_id].append(node)
        return {request_id: sorted(nodes) for request_id, nodes in kept.items()}

    def _n_again(self, depth: int, above: float, right: float) -> float:
        """Return how many more tokens one more guess of a chain has computed again, on average.

        If the guess at ``depth`` is the first wrong one, with the guesses before it goes the token
        that they follow: ``depth`` tokens come again.

        Args:
            depth: of the guess, 1 for the first.
            above: how likely all before it are right.
            right: how likely it is, too.
        """
        return depth * (above - right) if self.runs_again else 0.0

    @property
    def _may_probe(self) -> bool:
        return self._probe_s < PROBE_SHARE * self._total_s

    def _seconds(self, n_tokens: float, before: float) -> float:
        """Return what a step with guesses takes: no less than without, whatever was measured.

        Args:
            n_tokens: of the step; a part of one for what comes again now and then.
            before: seconds of the step without guesses.
        """
        low = int(n_tokens)
        seconds = max(before, self.costs.seconds(low) or before)
        if low == n_tokens:
            return seconds
        above = max(seconds, self.costs.seconds(low + 1) or seconds)
        return seconds + (n_tokens - low) * (above - seconds)

    def _guessed(
        self, asks: Mapping[int, DraftRequest], drafts: Mapping[int, Draft], seconds: float
    ) -> None:
        """Count what guessing took; where a drafter had to catch up, that says little of levels."""
        if self.drafter.is_free:
            return
        caught_up = {r: len(asks[r].tokens) for r, draft in drafts.items() if draft is not LATER}
        self._guessing_s = seconds
        if self._is_probe:
            self._probe_s += seconds
        is_usual = len(caught_up) == len(asks) and all(
            n - self._asked.get(request_id, 0) <= self.max_drafted + 1
            for request_id, n in caught_up.items()
        )
        self._asked.update(caught_up)
        depth = max((draft.depth for draft in drafts.values()), default=0)
        if depth and is_usual:
            new, old = seconds / depth, self.level_s
            self.level_s = new if old is None else blend(old, new, *LEVEL_WEIGHTS)
