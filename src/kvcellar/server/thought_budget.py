"""A guide that ends a thought after so many tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.engine import Guide
from kvcellar.engine.token_bytes import TokenBytes, token_bytes
from kvcellar.server.dialects import ReasoningMarks


@dataclass(frozen=True)
class ThoughtBound:
    """A bound for the thoughts of one model.

    Attributes:
        n_tokens: the most that a thought may have.
        begin: mark of a thought.
        end: mark of its end.
        end_ids: tokens that end it in its middle.
        names: of the model's tokens.
        vocab_size: of the model.
    """

    n_tokens: int
    begin: str
    end: str
    end_ids: tuple[int, ...]
    names: TokenBytes
    vocab_size: int

    @classmethod
    def of(
        cls, n_tokens: int, marks: ReasoningMarks, tokenizer: Any, vocab_size: int
    ) -> ThoughtBound:
        """Bound thoughts between these marks; the end is written as the chat template writes it."""
        template = str(tokenizer.chat_template)
        is_on_a_line = any(f"{line}{marks.end}" in template for line in ("\n", "\\n"))
        said = f"\n{marks.end}" if is_on_a_line else marks.end
        ids = tuple(tokenizer.encode(said, add_special_tokens=False))
        return cls(n_tokens, marks.begin, marks.end, ids, token_bytes(tokenizer), vocab_size)

    @cached_property
    def anything(self) -> NDArray[np.bool_]:
        """Every token, ``[vocab]``."""
        return np.ones(self.vocab_size, dtype=np.bool_)

    def text_of(self, token_id: int) -> bytes:
        """Return what a token adds to a text, marks that are special tokens included."""
        return self.names.of(token_id) or self.names.name(token_id).encode()


@dataclass(slots=True)
class ThoughtBudget:
    """Guide that ends the thought at the beginning of an answer, and else is as another one.

    Attributes:
        bound: how long it may be.
        inner: decides besides which tokens may come; None: all may.
        is_in_thought: whether the thought has begun.
    """

    bound: ThoughtBound
    inner: Guide | None
    is_in_thought: bool
    _is_over: bool = False
    _said: bytes = b""
    """Bytes of the answer before its thought, then the last of the thought."""
    _n: int = 0
    """Tokens of the thought."""
    _n_forced: int = 0

    @property
    def is_complete(self) -> bool:
        """True where nothing can follow."""
        return self.inner is not None and self.inner.is_complete

    @property
    def end_id(self) -> int | None:
        """The end of the answer, where the other guide offers it."""
        return None if self.inner is None or self._forced() is not None else self.inner.end_id

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, ``[vocab]``."""
        every = self.bound.anything if self.inner is None else self.inner.allowed()
        forced = self._forced()
        if forced is None or not every[forced]:
            return every
        alone = np.zeros_like(every)
        alone[forced] = True
        return alone

    def accept(self, token_id: int) -> None:
        """Go on with a token."""
        forced = self._forced()
        if self.inner is not None:
            self.inner.accept(token_id)
        if self._is_over:
            return
        self._said += self.bound.text_of(token_id)
        if not self.is_in_thought:
            self._begin()
        elif forced is not None:
            self._n_forced += 1
            self._is_over = token_id != forced or self._n_forced == len(self.bound.end_ids)
        else:
            end = self.bound.end.encode()
            self._n += 1
            self._is_over = end in self._said
            self._said = self._said[-len(end) :]

    def fork(self) -> ThoughtBudget:
        """Return a copy that goes on by itself."""
        return replace(self, inner=None if self.inner is None else self.inner.fork())

    def _begin(self) -> None:
        """Find out whether the answer begins with a thought; it is a thought nowhere else."""
        said, mark = self._said.strip(), self.bound.begin.encode()
        self.is_in_thought = said.startswith(mark)
        self._is_over = not mark.startswith(said) and not self.is_in_thought

    def _forced(self) -> int | None:
        """Return the token that has to come, where the thought was long enough."""
        if self._is_over or not self.is_in_thought or self._n < self.bound.n_tokens:
            return None
        return self.bound.end_ids[self._n_forced]
