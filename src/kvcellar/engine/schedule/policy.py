"""Policies: which sequences a step serves, and how many tokens of each at most.

A policy decides on counts alone. Whether cells can be found for them, and who has to give way, is
the scheduler's; ``Scheduler._batch`` ends a prompt's part sooner where a snapshot is due, or where
tokens of the prompt are scored.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from kvcellar.engine.requests.batch import BatchPart
from kvcellar.engine.requests.request import Sequence
from kvcellar.errors import ConfigError


class Policy(Protocol):
    """Decides whom a step serves."""

    def may_admit(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> bool:
        """Return true if waiting sequences may join now."""
        ...

    def allot(self, running: Seq[Sequence], budget: int) -> list[BatchPart]:
        """Divide at most ``budget`` tokens of the next step, drafted ones included."""
        ...

    def ran(self, n_prefill: int, started: float, took_s: float) -> None:
        """Learn from a step that had so many tokens of prompts and took so long."""
        ...


class Mixed:
    """Decodes and chunks of prefill share every step: nobody waits for a whole prompt.

    Every decoding sequence gets its token first; what is left of the budget is divided evenly over
    the prompts in prefill, so that a long one neither holds up a short one nor starves beside many.
    Where there are more decoding sequences than budget, those that waited longest go first.
    """

    def __init__(self, min_prefill: int = 16, max_beside: int | None = None) -> None:
        """Create a policy that keeps some of each step for prompts.

        Args:
            min_prefill: tokens of a full budget that go to prompts, at least, where there are any.
            max_beside: tokens of prompts beside decodes, at most, so that they go on evenly; None:
                no limit.
        """
        self._min_prefill = min_prefill
        self._max_beside = max_beside

    def may_admit(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> bool:
        """Return true: anybody may join at any time."""
        return True

    def allot(self, running: Seq[Sequence], budget: int) -> list[BatchPart]:
        """Give every decode its token, then the prompts even shares of what is left."""
        decodes = sorted((s for s in running if s.is_decoding), key=lambda s: s.last_step)
        prefills = sorted((s for s in running if not s.is_decoding), key=lambda s: s.order)
        reserved = min(self._min_prefill, budget // 2) if prefills else 0
        parts = _decodes(decodes, budget - reserved)
        left = budget - sum(part.n_tokens for part in parts)
        if parts and self._max_beside is not None:
            left = min(left, self._max_beside)
        return parts + _even_shares(prefills, left)

    def ran(self, n_prefill: int, started: float, took_s: float) -> None:
        """Learn nothing: shares depend on counts alone."""


class PrefillFirst:
    """All prefill before any decode, as in ATOM's scheduler: best for throughput in bursts.

    With a ``delay_factor`` above 0 new prompts are let in only when the oldest has waited that many
    times as long as the last prefill took, so that more of them run together; an idle engine waits
    for nothing.
    """

    def __init__(self, delay_factor: float = 0.0) -> None:
        """Create a policy.

        Raises:
            ConfigError: a delay below 0.
        """
        if delay_factor < 0:
            raise ConfigError(f"delay_factor must be 0 or more, got {delay_factor}")
        self._delay_factor = delay_factor
        self._last_prefill_s = 0.0

    def may_admit(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> bool:
        """Return true if the oldest prompt has waited long enough, or nothing else runs."""
        if not self._delay_factor or not waiting or not running:
            return True
        oldest = min(sequence.arrived_s for sequence in waiting)
        return now - oldest > self._delay_factor * self._last_prefill_s

    def allot(self, running: Seq[Sequence], budget: int) -> list[BatchPart]:
        """Give the prompts, in their order, as much as fits; without any, the decodes."""
        parts: list[BatchPart] = []
        for sequence in sorted((s for s in running if not s.is_decoding), key=lambda s: s.order):
            n = min(sequence.n_left, budget)
            if n:
                parts.append(BatchPart(sequence, n))
                budget -= n
        return parts or _decodes(sorted(running, key=lambda s: s.last_step), budget)

    def ran(self, n_prefill: int, started: float, took_s: float) -> None:
        """Remember how long a prefill takes."""
        if n_prefill:
            self._last_prefill_s = took_s


def _decodes(sequences: Seq[Sequence], budget: int) -> list[BatchPart]:
    """Give each sequence what it has left, with its drafted ones as far as the budget goes."""
    parts = []
    for i, sequence in enumerate(sequences):
        if budget < 1:
            break
        room = budget - (len(sequences) - i - 1)  # a token for everyone before drafts for some
        n = min(sequence.n_left + len(sequence.draft), max(1, room))
        parts.append(BatchPart(sequence, n))
        budget -= n
    return parts


def _even_shares(prefills: Seq[Sequence], budget: int) -> list[BatchPart]:
    """Divide the budget evenly; what a short prompt does not need goes to the others."""
    shares: dict[int, int] = {}
    for i, sequence in enumerate(sorted(prefills, key=lambda s: s.n_left)):
        share = min(sequence.n_left, -(-budget // (len(prefills) - i)))
        shares[sequence.request_id] = share
        budget -= share
    return [BatchPart(s, shares[s.request_id]) for s in prefills if shares[s.request_id]]


POLICIES = ("mixed", "prefill-first")


def make_policy(
    name: str, delay_factor: float = 0.0, max_prefill_beside: int | None = None
) -> Policy:
    """Create the policy of that name.

    Raises:
        ConfigError: there is none, or a delay is asked of one that has none.
    """
    if delay_factor and name != "prefill-first":
        raise ConfigError(
            f"delay_factor {delay_factor} is for the policy prefill-first, not {name}; leave it out"
        )
    if name == "mixed":
        return Mixed(max_beside=max_prefill_beside)
    if name == "prefill-first":
        return PrefillFirst(delay_factor)
    raise ConfigError(f"policy {name!r} is unknown; there are: {', '.join(POLICIES)}")
