"""What one step runs, and what came out of it: immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvcellar.engine.sampling import Choice

__all__ = ["BatchOutput", "ScheduledBatch", "ScheduledTokens"]


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Consecutive tokens of one sequence in a batch.

    Attributes:
        request_id: whose.
        seq_id: its sequence in the cache.
        token_ids: the tokens to compute; drafted ones at the end.
        n_drafted: how many of them are guesses of a drafter, to be verified.
        is_last: whether the sequence has caught up with them, so that a token can be sampled.
    """

    request_id: int
    seq_id: int
    token_ids: tuple[int, ...]
    n_drafted: int
    is_last: bool

    @property
    def n_rows(self) -> int:
        """Tokens whose logits are wanted."""
        return 1 + self.n_drafted if self.is_last else 0


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


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """What was chosen, part by part of the batch.

    Attributes:
        choices: per part the tokens that the sequence goes on with: none where it has not caught
            up; one, or more where drafted tokens were right.
    """

    choices: tuple[tuple[Choice, ...], ...]
