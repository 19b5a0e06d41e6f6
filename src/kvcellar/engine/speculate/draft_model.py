"""Guesses of a smaller model with the same vocabulary, in a cache of its own.

The method: Leviathan et al., 2023 (arXiv:2211.17192); here the draft model always says its
likeliest token, so a guess is right as often as the target would have sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.cache import SeqCache
from kvcellar.engine.speculate.drafter import NO_DRAFT, Ask, Draft
from kvcellar.errors import CacheFullError, ConfigError
from kvcellar.models import Runner

__all__ = ["DraftModel"]


class DraftModel:
    """One sequence of the draft's cache for each sequence of the engine.

    Where the draft's cache is full the sequences that were not asked about give way; what does not
    fit even then gets no guesses.
    """

    is_free = False

    def __init__(self, runner: Runner, cache: SeqCache, vocab_size: int) -> None:
        """Nothing computed.

        Args:
            runner: the draft model, bound to the session of ``cache``.
            cache: its cache; nobody else uses it.
            vocab_size: of the target.

        Raises:
            ConfigError: the two do not have one vocabulary.
        """
        if runner.vocab_size != vocab_size:
            raise ConfigError(
                f"the draft model has {runner.vocab_size} tokens and the target {vocab_size}; a "
                f"draft model needs the target's own vocabulary"
            )
        self._runner = runner
        self._cache = cache
        self._known: dict[int, list[int]] = {}
        """Per request the tokens whose KV the draft's cache holds."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Greedy continuations: one forward for what is new, then one per further token."""
        going = [ask for ask in asks if self._make_room(ask, asks)]
        if not going:
            return [NO_DRAFT] * len(asks)
        guesses: dict[int, list[int]] = {ask.request_id: [] for ask in going}
        fresh = {ask.request_id: self._catch_up(ask) for ask in going}
        active = going
        try:
            while active:
                found = self._forward(active, fresh)
                for ask, token in zip(active, found, strict=True):
                    guesses[ask.request_id].append(token)
                    fresh[ask.request_id] = [token]
                active = [ask for ask in active if len(guesses[ask.request_id]) < ask.limit]
        except CacheFullError:
            pass  # what was guessed so far is good
        return [
            Draft(tuple(guesses[ask.request_id]), "draft model")
            if guesses.get(ask.request_id)
            else NO_DRAFT
            for ask in asks
        ]

    def ended(self, request_id: int) -> None:
        """Free its cells."""
        if self._known.pop(request_id, None):
            self._cache.seq_rm(request_id)

    def _catch_up(self, ask: Ask) -> list[int]:
        """Take back what turned out otherwise; the tokens that the draft has not seen."""
        known = self._known.setdefault(ask.request_id, [])
        n = min(len(known), len(ask.tokens) - 1)
        n_same = n
        if known[:n] != ask.tokens[:n]:
            n_same = next(i for i in range(n) if known[i] != ask.tokens[i])
        if n_same < len(known):
            if n_same and not self._cache.can_resume(ask.request_id, n_same):
                n_same = 0  # a window has moved on
            self._cache.seq_rm(ask.request_id, n_same)
            del known[n_same:]
        return ask.tokens[n_same:]

    def _forward(self, asks: Sequence[Ask], fresh: dict[int, list[int]]) -> list[int]:
        """The likeliest token behind each sequence's fresh ones."""
        tokens = [token for ask in asks for token in fresh[ask.request_id]]
        seq_ids = [ask.request_id for ask in asks for _ in fresh[ask.request_id]]
        rows = np.cumsum([len(fresh[ask.request_id]) for ask in asks]) - 1
        try:
            positions = self._cache.begin_step(seq_ids)
            logits = self._runner.forward(tokens, positions, rows)
        except BaseException:
            self._cache.cancel_step()
            raise
        self._cache.end_step()
        for ask in asks:
            self._known[ask.request_id] += fresh[ask.request_id]
        found: list[int] = logits.argmax(axis=1).tolist()
        return found

    def _make_room(self, ask: Ask, asks: Sequence[Ask]) -> bool:
        """Whether the sequence and its guesses fit, others having given way."""
        need = len(ask.tokens) + ask.limit - len(self._known.get(ask.request_id, ()))
        asked = {other.request_id for other in asks}
        for request_id in list(self._known):
            if self._cache.can_extend(max(1, need)):
                return True
            if request_id not in asked:
                self.ended(request_id)
        return self._cache.can_extend(max(1, need))
