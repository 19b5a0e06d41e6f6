"""What one step runs, and what came out of it: immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvcellar.engine.draft import NO_DRAFT, Draft
from kvcellar.engine.sampling import Choice

if TYPE_CHECKING:
    from kvcellar.models.runner import FloatArray

__all__ = ["BatchOutput", "ScheduledBatch", "ScheduledTokens", "Verdict"]


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Consecutive tokens of one sequence in a batch.

    Attributes:
        request_id: whose.
        seq_id: its sequence in the cache.
        token_ids: the tokens to compute; guesses at the end.
        is_last: whether the sequence has caught up with them, so that a token is sampled.
        draft: the guesses among them, to be verified.
        targets: the tokens that follow the first of them in the prompt, where their log
            probabilities are wanted; then there are no guesses.
        n_top: the most likely tokens that come with each of them.
    """

    request_id: int
    seq_id: int
    token_ids: tuple[int, ...]
    is_last: bool
    draft: Draft = NO_DRAFT
    targets: tuple[int, ...] = ()
    n_top: int = 0

    @property
    def n_known(self) -> int:
        """Tokens that are no guesses."""
        return len(self.token_ids) - len(self.draft)

    @property
    def is_tree(self) -> bool:
        """Whether guesses exclude each other, so that they must not see each other."""
        return not self.draft.is_chain

    @property
    def parents(self) -> tuple[int, ...]:
        """Per token the index of the one before it, -1 for the sequence: what a cache proposes."""
        last = self.n_known - 1
        return (*range(-1, last), *(last + 1 + parent for parent in self.draft.parents))

    @property
    def n_rows(self) -> int:
        """Tokens whose logits are wanted: the last ones, or all where there are targets."""
        if self.targets:
            return len(self.token_ids)
        return 1 + len(self.draft) if self.is_last else 0


@dataclass(frozen=True)
class ScheduledBatch:
    """The flat batch of one step; its parts stand in the order of the token axis."""

    parts: tuple[ScheduledTokens, ...]

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """``[T]``: all tokens."""
        return tuple(token for part in self.parts for token in part.token_ids)

    @cached_property
    def seq_ids(self) -> tuple[int, ...]:
        """``[T]``: whose token each is."""
        return tuple(part.seq_id for part in self.parts for _ in part.token_ids)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """``[R]``: the tokens whose logits are wanted; several per part that has drafted tokens."""
        rows: list[int] = []
        stop = 0
        for part in self.parts:
            stop += len(part.token_ids)
            rows.extend(range(stop - part.n_rows, stop))
        return tuple(rows)

    @property
    def n_tokens(self) -> int:
        """Tokens in the batch."""
        return len(self.token_ids)


class Verdict(NamedTuple):
    """What one sequence goes on with.

    Attributes:
        choices: the tokens: none where it has not caught up; one, or one more than guesses were
            right.
        accepted: the guesses that were right, a path of the draft.
        error: why nothing could be chosen, where that is so: this sequence alone ends with it.
        scores: of the part's targets.
    """

    choices: tuple[Choice, ...] = ()
    accepted: tuple[int, ...] = ()
    error: Exception | None = None
    scores: tuple[Choice, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """What was chosen, part by part of the batch.

    Attributes:
        verdicts: per part what its sequence goes on with.
        features: ``[T, n_features]`` of all tokens, where a drafter reads them.
    """

    verdicts: tuple[Verdict, ...]
    features: FloatArray | None = None
