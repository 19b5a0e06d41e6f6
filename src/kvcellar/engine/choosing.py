"""From a batch's logits to a verdict for each of its parts: what its sequence goes on with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.engine.requests.batch import Batch, BatchPart, Verdict
from kvcellar.engine.sampler.sampling import sample, score
from kvcellar.engine.speculate import verify
from kvcellar.errors import ModelError

if TYPE_CHECKING:
    from kvcellar.models.runner import FloatArray


def choose(batch: Batch, logits: FloatArray) -> list[Verdict]:
    """Choose tokens for every part that has caught up; verify guesses on the way.

    Where a sequence's logits are no numbers, or its grammar raises, its verdict has the error.

    Args:
        batch: what was computed.
        logits: ``[R, vocab]``: of the batch's ``rows``.
    """
    verdicts = [Verdict()] * len(batch.parts)
    plain: list[tuple[int, int]] = []  # part, row
    row = 0
    for i, part in enumerate(batch.parts):
        rows = slice(row, row + part.n_rows)
        row = rows.stop
        if len(part.targets):
            verdicts[i] = _scored(part, logits[rows])
        if part.is_last and not verdicts[i].error:
            if part.draft:
                verdicts[i] = _verified(part, logits[rows])
            else:
                plain.append((i, row - 1))
    if plain:
        _choose_plain(batch, logits, plain, verdicts)
    return verdicts


def _scored(part: BatchPart, logits: FloatArray) -> Verdict:
    """Return the log probabilities of a prompt's tokens, or why there are none."""
    n_top = part.sequence.request.prompt_logprobs or 0
    try:
        return Verdict(scores=score(logits, part.targets.tolist(), n_top))
    except ModelError as error:
        return Verdict(error=error)


def _verified(part: BatchPart, logits: FloatArray) -> Verdict:
    """Verify a part's guesses, or say why that cannot be done."""
    try:
        return verify(logits, part.draft, part.sequence.state)
    except Exception as error:
        return Verdict(error=error)


def _choose_plain(
    batch: Batch, logits: FloatArray, plain: list[tuple[int, int]], verdicts: list[Verdict]
) -> None:
    """Choose one token for each of some parts; set their verdicts.

    Args:
        batch: what was computed.
        logits: of the batch's rows.
        plain: parts, and the row of each one's last token.
        verdicts: of all parts.
    """
    states = [batch.parts[i].sequence.state for i, _ in plain]
    wanted = logits if len(plain) == len(logits) else logits[[row for _, row in plain]]
    try:
        choices = sample(wanted, states)
    except Exception:  # somebody's: the others' choices are the same without it
        for (i, row), state in zip(plain, states, strict=True):
            try:
                (choice,) = sample(logits[row][None], [state])
                verdicts[i] = verdicts[i]._replace(choices=(choice,))
            except Exception as error:
                verdicts[i] = Verdict(error=error)
    else:
        for (i, _), choice in zip(plain, choices, strict=True):
            verdicts[i] = verdicts[i]._replace(choices=(choice,))
