"""What a drafter is asked and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["NO_DRAFT", "Ask", "Draft", "Drafter"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence that could use guesses.

    Attributes:
        request_id: whose.
        tokens: all that is known of it; not to be changed, and it grows by itself.
        limit: guesses that can be of use at most; at least 1.
    """

    request_id: int
    tokens: list[int]
    limit: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses for the tokens that follow a sequence, in their order.

    Attributes:
        tokens: the guesses; none where there is none worth making.
        kind: how they were made: guesses of one kind are believed to be equally often right.
    """

    tokens: tuple[int, ...]
    kind: str


NO_DRAFT = Draft((), "")


class Drafter(Protocol):
    """Guesses the next tokens of sequences, which one forward of the model then verifies.

    Attributes:
        is_free: whether to guess takes no time worth counting, so that it can be asked at every
            step, if only to learn how often it is right.
    """

    is_free: bool

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Guesses for some sequences, at most ``limit`` each."""
        ...

    def ended(self, request_id: int) -> None:
        """A sequence goes on no more; what was held for it alone can go."""
        ...
