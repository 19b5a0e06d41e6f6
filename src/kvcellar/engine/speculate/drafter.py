"""Protocol of a drafter: the requests that it is given and the guesses that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvcellar.engine.requests.draft import Draft
from kvcellar.history import History
from kvcellar.space import SHARED, Space

if TYPE_CHECKING:
    from kvcellar.models.runner import FloatArray


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Request to a drafter: guesses of the next tokens of one sequence.

    Attributes:
        request_id: whose.
        tokens: its history; it is not to be changed, and it grows by itself.
        limit: guesses behind each other that can be of use at most; at least 1.
        n_nodes: guesses in all, at most; 0: as many as ``limit``, and only in one chain.
        min_reach: how likely one of a level's guesses has to be right for a further level to be
            worth its time.
        space: of the history, which others' may not be guessed from.
    """

    request_id: int
    tokens: History
    limit: int
    n_nodes: int = 0
    min_reach: float = 0.0
    space: Space = SHARED


class Drafter(Protocol):
    """Guesses the next tokens of sequences, which one forward of the model then verifies.

    Attributes:
        is_free: guessing takes no time worth counting, so that it can be asked at every step, if
            only to learn how often it is right.
    """

    is_free: bool

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        """Return guesses for each sequence, at most ``limit`` deep and ``n_nodes`` in all.

        A call is part of a step that others wait for: where there is much to read before a
        sequence's first guess, a drafter reads a part of it and answers ``LATER``.
        """
        ...

    def ended(self, request_id: int) -> None:
        """Let go of what is held for a sequence alone, which goes on no more."""
        ...


@runtime_checkable
class FeatureReader(Protocol):
    """Drafter that guesses from what the model's own layers say of the tokens before.

    Attributes:
        feature_layers: which of them, as ``LoadedModel.bind`` takes them.
    """

    feature_layers: tuple[int, ...]

    def saw(self, request_id: int, start: int, features: FloatArray) -> None:
        """Take the features of tokens that the model has computed, wrong guesses left out.

        Args:
            request_id: whose.
            start: position of the first one. It follows on, except where KV was reused, whose
                features are not known, or is computed again after a preemption.
            features: ``[n, n_features]`` of the tokens at ``start`` and the positions behind.
        """
        ...
