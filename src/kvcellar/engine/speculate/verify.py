"""Verifies guesses: right are those that sampling chooses, walked from the root downwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.engine.batch import Verdict
from kvcellar.engine.draft import Draft
from kvcellar.engine.sampling import Choice, SamplingState, sample

if TYPE_CHECKING:
    from kvcellar.models.runner import FloatArray


def verify(logits: FloatArray, draft: Draft, state: SamplingState) -> Verdict:
    """Sample on for as long as some guess says what comes; one token more than guesses are right.

    A guess is right when it is the very token that sampling would have chosen there, with the same
    random draw. So the text is what it would have been without guesses; and of several guesses for
    one token one is right as often as any of them is sampled, which is as often as rejection
    sampling could accept them.

    Args:
        logits: ``[1 + n, vocab]``: behind the last known token, and behind every guess.
        draft: the ``n`` guesses.
        state: of the sequence; it is not changed.
    """
    trial = state.fork()
    choices: list[Choice] = []
    path: list[int] = []
    all_rows = None
    if state.params.is_greedy and not state.adjusts_logits:  # what came before changes nothing
        all_rows = sample(logits, [state] * len(logits))
    while True:
        above = path[-1] if path else -1
        row = above + 1
        choice = sample(logits[row][None], [trial])[0] if all_rows is None else all_rows[row]
        choices.append(choice)
        trial.record(choice.token_id)
        right = (node for node in draft.children(above) if draft.tokens[node] == choice.token_id)
        node = next(right, None)
        if node is None or trial.is_complete:
            return Verdict(tuple(choices), tuple(path))
        path.append(node)
