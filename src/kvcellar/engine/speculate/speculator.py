"""How many guesses pay: a drafter asked for guesses, and as many verified as save time.

A forward of a few tokens takes little more than one of a single token, for as long as it is the
weights that have to be read. How much more is measured here, step by step; so is how often guesses
of each kind are right. Of all guesses for all sequences of a step those are verified that bring
most tokens per second; none, where that is no more than without. Guesses that are not verified are
compared with what came instead, so it is known when they begin to pay again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvcellar.engine.request import Sequence
from kvcellar.engine.speculate.drafter import Ask, Draft, Drafter
from kvcellar.engine.speculate.step_costs import StepCosts

__all__ = ["Speculator"]

MARGIN = 1.02
"""Tokens per second have to be believed so many times those without guesses."""

PROBE_SHARE = 0.01
"""Of all time: what guesses that are made only to learn may take, where to guess takes time."""

_DECAY = 0.97
_PRIOR = 4.0
_UNKNOWN = 0.6


@dataclass(slots=True)
class Rate:
    """How often guesses of one kind are right; the latest count most."""

    hits: float = 0.0
    tries: float = 0.0

    def learn(self, is_right: bool) -> None:
        """One more guess was compared."""
        self.hits = _DECAY * self.hits + is_right
        self.tries = _DECAY * self.tries + 1

    def value(self, prior: float) -> float:
        """Between what was seen and a prior that few guesses do not outweigh."""
        return (self.hits + _PRIOR * prior) / (self.tries + _PRIOR)


@dataclass(slots=True, eq=False)
class Speculator:
    """Chooses what is guessed and verified. One per engine.

    Attributes:
        drafter: who guesses.
        max_drafted: guesses per sequence and step, at most.
        is_adaptive: verify what pays; otherwise all that is guessed.
        costs: what steps take.
        draft_s_per_token: what guessing takes, per token guessed.
    """

    drafter: Drafter
    max_drafted: int = 8
    is_adaptive: bool = True
    costs: StepCosts = field(default_factory=StepCosts)
    draft_s_per_token: float = 0.0
    _kinds: dict[str, Rate] = field(default_factory=dict)
    _of_request: dict[int, dict[str, Rate]] = field(default_factory=dict)
    _pending: dict[int, Draft] = field(default_factory=dict)
    _last_kind: str = ""
    _total_s: float = 0.0
    _probe_s: float = 0.0

    def propose(self, sequences: Seq[Sequence], n_others: int) -> None:
        """Set ``drafted`` of some decoding sequences.

        Args:
            sequences: those that have one token left to compute.
            n_others: tokens that the next step computes besides theirs.
        """
        self._pending.clear()
        asks = {s.request_id: ask for s in sequences if (ask := self._ask(s)) is not None}
        for sequence in sequences:
            sequence.drafted = ()
        if not asks or not self._may_ask(len(sequences), n_others, len(asks)):
            return
        started = time.perf_counter()
        drafts = dict(zip(asks, self.drafter.propose(list(asks.values())), strict=True))
        took_s = time.perf_counter() - started
        self._learn_drafting(took_s, sum(len(draft.tokens) for draft in drafts.values()))
        lengths = self._lengths(drafts, len(sequences), n_others)
        if not any(lengths.values()):
            self._probe_s += took_s
        for sequence in sequences:
            draft = drafts.get(sequence.request_id)
            if draft is not None and draft.tokens:
                self._pending[sequence.request_id] = draft
                sequence.drafted = draft.tokens[: lengths[sequence.request_id]]

    def learn(self, request_id: int, chosen: Seq[int]) -> None:
        """Compare what was guessed with what was sampled, verified or not."""
        draft = self._pending.pop(request_id, None)
        if draft is None:
            return
        mine = self._of_request.setdefault(request_id, {}).setdefault(draft.kind, Rate())
        everybodys = self._kinds.setdefault(draft.kind, Rate())
        self._last_kind = draft.kind
        for guess, token in zip(draft.tokens, chosen, strict=False):
            mine.learn(guess == token)
            everybodys.learn(guess == token)
            if guess != token:
                break

    def ran(self, n_tokens: int, seconds: float) -> None:
        """A step has run."""
        self._total_s += seconds
        self.costs.learn(n_tokens, seconds)

    def ended(self, request_id: int) -> None:
        """A sequence goes on no more."""
        self._pending.pop(request_id, None)
        self._of_request.pop(request_id, None)
        self.drafter.ended(request_id)

    def rate(self, request_id: int, kind: str) -> float:
        """How often the next guess of this kind is believed to be right for this sequence."""
        general = self._kinds.get(kind, Rate()).value(_UNKNOWN)
        mine = self._of_request.get(request_id, {}).get(kind)
        return general if mine is None else mine.value(general)

    def _ask(self, sequence: Sequence) -> Ask | None:
        limit = self.max_drafted
        most = sequence.request.params.max_tokens
        if most is not None:
            limit = min(limit, most - len(sequence.sampled) - 1)
        return Ask(sequence.request_id, sequence.tokens, limit) if limit > 0 else None

    def _may_ask(self, n_sequences: int, n_others: int, n_asks: int) -> bool:
        """Whether guesses are worth the time that it takes to make them."""
        if not self.is_adaptive or self.drafter.is_free or not self._last_kind:
            return True
        imagined = Draft((0,) * self.max_drafted, self._last_kind)
        lengths = self._lengths(dict.fromkeys(range(-n_asks, 0), imagined), n_sequences, n_others)
        return any(lengths.values()) or self._probe_s < PROBE_SHARE * self._total_s

    def _lengths(self, drafts: dict[int, Draft], n_sequences: int, n_others: int) -> dict[int, int]:
        """Guesses to verify per sequence, beside a token for each and what others compute."""
        if not self.is_adaptive:
            return {request_id: len(draft.tokens) for request_id, draft in drafts.items()}
        lengths = dict.fromkeys(drafts, 0)
        n_tokens = n_sequences + n_others
        before = self.costs.seconds(n_tokens)
        if before is None:
            return lengths
        gains: list[tuple[float, int]] = []
        for request_id, draft in drafts.items():
            right = self.rate(request_id, draft.kind)
            gains += [(right ** (i + 1), request_id) for i in range(len(draft.tokens))]
        gains.sort(key=lambda gain: -gain[0])
        # Sequences that decode bring a token each; those in prefill none, and take their time.
        expected = float(n_sequences)
        best, n_best = MARGIN * expected / before, 0
        for n, (gain, _) in enumerate(gains, 1):
            expected += gain
            seconds = self.costs.seconds(n_tokens + n) or before
            per_second = expected / (seconds + n * self._draft_s)
            if per_second > best:
                best, n_best = per_second, n
        for _, request_id in gains[:n_best]:
            lengths[request_id] += 1
        return lengths

    @property
    def _draft_s(self) -> float:
        return 0.0 if self.drafter.is_free else self.draft_s_per_token

    def _learn_drafting(self, seconds: float, n_tokens: int) -> None:
        if n_tokens:
            new = seconds / n_tokens
            old = self.draft_s_per_token or new
            self.draft_s_per_token = old + 0.1 * (min(new, 4 * old) - old)
