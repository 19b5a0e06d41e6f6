"""The batch that one step runs, and its outcome. Nothing changes these once the step runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcellar.engine.requests.draft import Draft
from kvcellar.engine.sampler.sampling import Choice
from kvcellar.models.seeing import SeenPicture
from kvcellar.pictures.tokens import ids_of
from kvcellar.space import Space
from kvcellar.types import IntArray

if TYPE_CHECKING:
    from kvcellar.engine.requests.request import Sequence


@dataclass(slots=True, eq=False)
class BatchPart:
    """Consecutive tokens of one sequence in a batch: those that come next, guesses at the end.

    Attributes:
        sequence: whose; it stays as it is until the step is recorded.
        n_tokens: tokens to compute, guesses among them; given: the most of them.
        is_tree: its tokens are the nodes of a tree: guesses exclude each other, so that they must
            not see each other, or each keeps the states behind it.
        known: ``[n_known]``: the tokens to compute that are no guesses, a view of its history.
        draft: the guesses behind them, to be verified.
        is_last: the sequence has caught up with them, so that a token is sampled.
        targets: the tokens that follow the first of them in the prompt, where their log
            probabilities are wanted; then there are no guesses.
        n_known: tokens that are no guesses.
        n_rows: tokens whose logits are wanted: the last ones, or all where there are targets.
    """

    sequence: Sequence
    n_tokens: int
    is_tree: bool = False
    known: IntArray = field(init=False)
    draft: Draft = field(init=False)
    is_last: bool = field(init=False)
    targets: IntArray = field(init=False)
    n_known: int = field(init=False)
    n_rows: int = field(init=False)

    def __post_init__(self) -> None:
        sequence, most = self.sequence, self.n_tokens
        at = sequence.n_computed
        self.known = sequence.tokens[at : at + most]
        self.n_known = len(self.known)
        self.draft = sequence.draft.first(most - self.n_known)
        self.n_tokens = self.n_known + len(self.draft)
        self.is_last = self.n_known == sequence.n_left and sequence.is_sampled
        self.targets = sequence.unscored(self.n_tokens)
        self.n_rows = (1 + len(self.draft)) * self.is_last
        if len(self.targets):
            self.n_rows = self.n_tokens

    @property
    def parents(self) -> tuple[int, ...]:
        """Per token the index of the one before it, -1 for the sequence: what a cache proposes."""
        last = self.n_known - 1
        return (*range(-1, last), *(last + 1 + parent for parent in self.draft.parents))


@dataclass(frozen=True, eq=False)
class Batch:
    """The flat batch of one step; its parts stand in the order of the token axis."""

    parts: tuple[BatchPart, ...]

    @cached_property
    def token_ids(self) -> IntArray:
        """``[T]``: ids of all tokens."""
        tokens: list[IntArray | tuple[int, ...]] = []
        for part in self.parts:
            tokens.append(part.known)
            if part.n_tokens > part.n_known:
                tokens.append(part.draft.tokens)
        found: IntArray = np.concatenate(tokens, dtype=np.int64)
        return ids_of(found) if any(part.sequence.pictures for part in self.parts) else found

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """(seq_id, n_tokens) of each part, as a cache begins a step with them."""
        return [(part.sequence.seq_id, part.n_tokens) for part in self.parts]

    @cached_property
    def rows(self) -> list[int]:
        """``[R]``: the tokens whose logits are wanted; several per part that has guesses."""
        rows: list[int] = []
        stop = 0
        for part in self.parts:
            stop += part.n_tokens
            rows.extend(range(stop - part.n_rows, stop))
        return rows

    @property
    def pictures(self) -> list[tuple[tuple[SeenPicture, ...], int]]:
        """Pictures before the end of each part, and its tokens; see ``models.seeing``."""
        return [
            (part.sequence.seen(part.sequence.n_computed + part.n_tokens), part.n_tokens)
            for part in self.parts
        ]

    @property
    def spaces(self) -> list[tuple[Space, int]]:
        """Spaces of the tokens in their order, each with how many; see ``in_spaces``."""
        return [(part.sequence.space, part.n_tokens) for part in self.parts]

    @property
    def n_tokens(self) -> int:
        """Tokens in the batch."""
        return sum(part.n_tokens for part in self.parts)


class Verdict(NamedTuple):
    """Tokens that the sequence of one part of a batch goes on with.

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
