"""Distances between the snapshots of states within a long prompt, besides those at its end."""

from __future__ import annotations

import math

from kvcellar.cache_config import CacheConfig
from kvcellar.engine.speculate.step_costs import blend

_WEIGHTS = (0.1, 0.2)
"""Of one more step that took longer than believed, and of one that took less."""


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
