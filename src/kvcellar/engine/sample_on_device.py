"""From logits that a backend keeps to verdicts: all rows of a step are sampled there at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from kvcellar.engine.requests.batch import Batch, BatchPart, Verdict
from kvcellar.engine.sampler.sampling import Choice, SamplingState, TokenLogprob
from kvcellar.engine.speculate.verify import states_of, walk
from kvcellar.models.kept_logits import (
    KeptLogits,
    RowChoice,
    RowSampling,
    no_probabilities,
    nothing_may_come,
)


class _SampledRows(NamedTuple):
    """Rows of a part that are sampled: behind its last known token, and behind every guess."""

    part: BatchPart
    first: int
    states: list[SamplingState | None]

    def asked(self) -> list[RowSampling]:
        """Return how those are sampled that may be reached; a guide may raise."""
        rows = enumerate(self.states, self.first)
        return [state.row_sampling(row) for row, state in rows if state is not None]

    def verdict(self, found: Mapping[int, RowChoice]) -> Verdict:
        """Return what the part's sequence goes on with, or why nothing could be chosen."""
        try:
            return walk(
                self.part.draft,
                self.states,
                lambda i: choice_of(self.first + i, found[self.first + i]),
            )
        except Exception as error:
            return Verdict(error=error)


def choose_kept(batch: Batch, logits: KeptLogits) -> list[Verdict]:
    """Do what ``choose`` does; only tokens and wanted log probabilities come to main memory."""
    verdicts = [Verdict()] * len(batch.parts)
    asked: list[RowSampling] = []
    sampled: dict[int, _SampledRows] = {}
    stop = 0
    for i, part in enumerate(batch.parts):
        stop += part.n_rows
        try:
            if len(part.targets):
                verdicts[i] = Verdict(scores=_scores(part, logits, stop - part.n_rows))
            if part.is_last:
                states = states_of(part.draft, part.sequence.state)
                rows = _SampledRows(part, stop - len(states), states)
                asked += rows.asked()
                sampled[i] = rows
        except Exception as error:  # no numbers, or its guide: nobody else's trouble
            verdicts[i] = Verdict(error=error)
    chosen = logits.sample(asked) if asked else []
    found = {ask.row: choice for ask, choice in zip(asked, chosen, strict=True)}
    for i, rows in sampled.items():
        verdicts[i] = rows.verdict(found)._replace(scores=verdicts[i].scores)
    return verdicts


def _scores(part: BatchPart, logits: KeptLogits, first: int) -> tuple[Choice, ...]:
    """Return the log probabilities of a prompt's tokens, from a row on.

    Raises:
        ModelError: the logits were no numbers.
    """
    n_top = part.sequence.request.prompt_logprobs or 0
    found = logits.score(first, part.targets, n_top)
    return tuple(choice_of(row, chosen) for row, chosen in enumerate(found))


def choice_of(row: int, chosen: RowChoice) -> Choice:
    """Return a row's choice in the engine's words.

    Raises:
        ModelError: its logits were no numbers, or nothing may come.
    """
    if not math.isfinite(chosen.best):
        raise no_probabilities(row, chosen.best)
    if chosen.token_id < 0:
        raise nothing_may_come(row)
    top = tuple(TokenLogprob(*each) for each in chosen.top)
    return Choice(chosen.token_id, chosen.logprob, top)
