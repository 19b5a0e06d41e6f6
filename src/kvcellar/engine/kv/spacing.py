"""Distances between the snapshots of states within a long prompt, and the costs behind them."""

from __future__ import annotations

import math

from kvcellar.cache_config import CacheConfig
from kvcellar.engine.speculate.step_costs import blend

_WEIGHTS = (0.1, 0.2)
"""Weights of a new measurement in a running mean: one above the mean, and one below it."""

_ANSWER_WEIGHT = 0.1
"""Weight of a new answer in the running mean of their lengths."""


class Spacing:
    """Derives the tokens between two snapshots of a long prompt from what they cost and save.

    - *Seconds.* A snapshot ends a chunk of prefill early, which costs one more forward: the f
      seconds of a step without prompts. Somebody who leaves the prompt anywhere in its N tokens
      computes half an interval d again, at p seconds for a token of a prompt. N/d * f + d/2 * p is
      least at d = sqrt(2 * N * f / p), as for checkpoints of a program that fails once (Young,
      1974). Both f and p are measured here, step by step.
    - *Bytes.* A slot takes no more memory than the rows of the tokens before it, so d is at least
      a slot's bytes over those of a token.
    - *Room.* Where the cache is full of histories there is a slot for each interval of them: d is
      at least the cache's tokens over the slots that running sequences leave.

    The largest of the three is taken. Before the first steps there are no seconds: the others hold,
    and snapshots are taken where chunks end anyway.
    """

    def __init__(self, config: CacheConfig) -> None:
        """Create a spacing without measurements.

        Args:
            config: of a cache with recurrent layers.
        """
        state = config.params.state
        assert state is not None, "only states need snapshots"
        self._n_slots = config.n_slots
        self._per_rows = state.slot_bytes // max(
            1, sum(group.cell_bytes(config.kv) for group in config.params.groups)
        )
        self._forward_s: float | None = None
        self._token_s: float | None = None
        self._n_answer: float | None = None

    @property
    def is_measured(self) -> bool:
        """True if it is known what a forward and a token of a prompt cost."""
        return self._forward_s is not None and self._token_s is not None

    def ran(self, n_tokens: int, n_prefill: int, seconds: float) -> None:
        """Learn from a step of so many tokens, some of them of prompts.

        Steps of both kinds of tokens say little of either.
        """
        if not n_prefill:
            self._forward_s = _blended(self._forward_s, seconds)
        elif 2 * n_prefill > n_tokens:
            self._token_s = _blended(self._token_s, seconds / n_tokens)

    def answered(self, n_tokens: int) -> None:
        """Learn from an answer of so many tokens, 1 or more, how long others may be."""
        old = n_tokens if self._n_answer is None else self._n_answer
        self._n_answer = old + _ANSWER_WEIGHT * (n_tokens - old)

    def answer_left(self, most: int, n_done: int = 0) -> int:
        """Return the tokens that an answer may still have, going by those before it.

        One that is longer than they were is expected to become as long again.

        Args:
            most: tokens that it may have in all.
            n_done: tokens that it has.
        """
        n_left = most if self._n_answer is None else math.ceil(self._n_answer) - n_done
        return max(0, min(max(n_left, n_done), most - n_done))

    def prompt_tokens(self, n_forwards: float) -> float:
        """Return the tokens of prompts that take as long as so many forwards; 0: not yet known."""
        if self._forward_s is None or not self._token_s:
            return 0
        return n_forwards * self._forward_s / self._token_s

    def interval(self, n_prompt: int, n_capacity: int, n_running: int) -> int:
        """Return the tokens from one snapshot to the next.

        Args:
            n_prompt: tokens of the prompt.
            n_capacity: the most tokens that the cache holds.
            n_running: sequences that run, each of which takes two slots.
        """
        n_room = max(1, self._n_slots - 2 * n_running)
        least = max(1, self._per_rows, -(-n_capacity // n_room))
        if self._forward_s is None or not self._token_s:
            return least
        return max(least, math.ceil(math.sqrt(2 * n_prompt * self._forward_s / self._token_s)))


def _blended(old: float | None, new: float) -> float:
    return new if old is None else blend(old, new, *_WEIGHTS)
