"""A grammar's state along one sequence: after each token, which tokens may come next."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from kvcellar.errors import PromptError


class TokenGuide:
    """A grammar's state along one sequence."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_ids: NDArray[np.int64],
        *,
        ends_early: bool = False,
        may_let_go: bool = False,
        troubles: list[str] | None = None,
    ) -> None:
        """Stand at the beginning of the grammar, or where the matcher is.

        Args:
            matcher: the grammar.
            vocab_size: of the model.
            eos_ids: tokens with which an answer ends.
            ends_early: wherever the answer may end, end it unless the model itself wants what else
                is allowed.
            may_let_go: allow everything where the grammar breaks down, instead of failing.
            troubles: where to say that it did; shared with copies.
        """
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._ends_early = ends_early
        self._may_let_go = may_let_go
        self.troubles = [] if troubles is None else troubles
        self._allowed: NDArray[np.bool_] | None = None

    @property
    def is_complete(self) -> bool:
        """True where nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def end_id(self) -> int | None:
        """The end, where the grammar only offers what the model may not want; else None."""
        is_offer = self._ends_early and self._matcher.is_accepting()
        return int(self._eos_ids[0]) if is_offer else None

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, ``[vocab]``.

        Raises:
            PromptError: the grammar became too large on the way, or the model has no token for what
                has to come, and it must not be let go.
        """
        if self._allowed is None:
            self._allowed = self._asked()
        return self._allowed

    def _asked(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, bitorder="little").astype(np.bool_)
            n = min(len(allowed), self._vocab_size)
            mask[:n] = allowed[:n]
        if mask.any() and not self._matcher.is_error():
            return mask
        trouble = (
            _clause(self._matcher.get_error()) or "the model has no token for what has to come"
        )
        if not self._may_let_go:
            raise PromptError(
                f"the answer could not be held to its schema any longer: {trouble}; use "
                f"simpler patterns and lower bounds"
            )
        if not self.troubles:
            self.troubles.append(f"calls were held to no schema from some token on: {trouble}")
        return np.ones(self._vocab_size, dtype=np.bool_)

    def accept(self, token_id: int) -> None:
        """Go on with a token."""
        self._allowed = None
        if not (self._matcher.is_stopped() or self.troubles):
            self._matcher.consume_token(token_id)

    def fork(self) -> TokenGuide:
        """Return a copy that goes on by itself."""
        return TokenGuide(
            self._matcher.deep_copy(),
            self._vocab_size,
            self._eos_ids,
            ends_early=self._ends_early,
            may_let_go=self._may_let_go,
            troubles=self.troubles,
        )


GuideFn = Callable[[], TokenGuide]


def _clause(text: str) -> str:
    """Take the first clause of an error of the library's; its parser's state follows."""
    return re.split(r"[(;\[{<]|, ", one_line(text))[0].strip()[:160]


def one_line(text: str) -> str:
    """Return an error of the library's in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^\t")]
    return " ".join(lines)[:300]
