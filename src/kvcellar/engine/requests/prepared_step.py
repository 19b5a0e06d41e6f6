"""The step behind the one that runs: begun, and made ready, while a device works.

Where all sequences of a batch decode, the next step most likely brings one token of each again.
Which tokens is known when these are sampled; where they lie, and what they read, is known before.
Whatever else happens to the cache takes the step back, since any verb undoes a step that did not
run; then the next one begins as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvcellar.cache import SeqCache
from kvcellar.engine.requests.batch import Batch, BatchPart
from kvcellar.models.kept_logits import PreparingRunner


class Ahead:
    """A step that is begun before it is known to come, or none."""

    def __init__(self, cache: SeqCache, runner: PreparingRunner) -> None:
        """Begin nothing yet."""
        self._cache, self._runner = cache, runner
        self._stretches: list[tuple[int, int]] = []
        self._positions: list[int] = []
        self.n_used = 0
        """Steps that were begun ahead and ran."""

    def begin(self, batch: Batch) -> bool:
        """Begin the step behind a batch that has run, if it is likely to come; true if it did.

        The batch's own step counts then, and cannot be taken back by ``cancel_step`` any more.
        """
        stretches = batch.stretches
        if self._cache.is_step_open or not all(map(_goes_on, batch.parts)):
            return False
        if not self._cache.can_begin_step(stretches):
            return False
        self._positions = self._cache.begin_step(stretches)
        self._stretches = stretches
        self._runner.prepare(self._positions, batch.rows)
        return True

    def is_for(self, stretches: Seq[tuple[int, int]]) -> bool:
        """Return true if a step of these stretches is begun: it has its cells."""
        is_open = bool(self._stretches) and self._cache.is_step_open
        return is_open and self._stretches == list(stretches)

    def take(self, stretches: Seq[tuple[int, int]]) -> list[int] | None:
        """Return the positions of a step of these stretches; None: it is to be begun."""
        found = self._positions if self.is_for(stretches) else None
        self._stretches = []
        self.n_used += found is not None
        return found

    def take_back(self, batch: Batch) -> None:
        """Take back what was begun, and what the batch before it brought."""
        self._cache.cancel_step()
        if self._stretches:
            self._stretches = []
            for part in batch.parts:
                self._cache.seq_rm(part.sequence.seq_id, part.sequence.n_computed)


def _goes_on(part: BatchPart) -> bool:
    """Return true if a part is one token, and what is sampled behind it is not the last."""
    sequence = part.sequence
    is_at_end = len(sequence.sampled) + 1 == sequence.request.params.max_tokens
    is_text = not sequence.pictures  # behind one a model may turn positions otherwise
    return part.n_tokens == 1 and part.is_last and is_text and not is_at_end
