"""Verifies guesses: right are those that sampling chooses, walked from the root downwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcellar.engine.requests.batch import Verdict
from kvcellar.engine.requests.draft import Draft
from kvcellar.engine.sampler.sampling import Choice, SamplingState, sample

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


def states_of(draft: Draft, state: SamplingState) -> list[SamplingState | None]:
    """Return the state behind the last known token and behind every guess, if it were right.

    None where a guess cannot be right, or nothing follows it. ``state`` is not changed.
    """
    states: list[SamplingState | None] = [state]
    for token_id, parent in zip(draft.tokens, draft.parents, strict=True):
        above, here = states[parent + 1], None
        if above is not None and above.may_sample(token_id):
            here = above.fork()
            try:
                here.record(token_id)
            except Exception:  # its guide: the sequence meets it where the guess is right
                here = None
        states.append(None if here is None or here.is_complete else here)
    return states


def walk(
    draft: Draft, states: Sequence[SamplingState | None], chosen: Callable[[int], Choice]
) -> Verdict:
    """Return the verdict of ``verify`` where all rows were sampled beforehand.

    Args:
        draft: the ``n`` guesses.
        states: of the ``1 + n`` rows, as ``states_of`` returns them.
        chosen: the choice in a row; what it raises goes on to the caller.
    """
    choices: list[Choice] = []
    path: list[int] = []
    while True:
        above = path[-1] if path else -1
        choices.append(chosen(above + 1))
        token_id = choices[-1].token_id
        right = (node for node in draft.children(above) if draft.tokens[node] == token_id)
        node = next(right, None)
        if node is None or states[node + 1] is None:
            return Verdict(tuple(choices), tuple(path))
        path.append(node)
