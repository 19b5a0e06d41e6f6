"""A guide that ends a thought after so many tokens, and one that holds what comes behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.dialects import ReasoningMarks
from kvcellar.engine import Guide
from kvcellar.engine.loop.token_bytes import TokenBytes, token_bytes
from kvcellar.hosting.host import ModelHost
from kvcellar.models.text.templates import text_of_templates


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
        eos_ids: tokens with which its answers end.
    """

    n_tokens: int
    begin: str
    end: str
    end_ids: tuple[int, ...]
    names: TokenBytes
    vocab_size: int
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, n_tokens: int | None, marks: ReasoningMarks, host: ModelHost) -> ThoughtBound:
        """Bound a model's thoughts between marks; the end is as the chat template writes it.

        Args:
            n_tokens: the most that a thought may have; None: any number.
            marks: around a thought.
            host: the model.
        """
        tokenizer: Any = host.tokenizer
        begin, end = marks.begin.strip(), marks.end.strip()
        is_on_a_line = any(f"{line}{end}" in text_of_templates(tokenizer) for line in ("\n", "\\n"))
        said = f"\n{end}" if is_on_a_line else end
        return cls(
            1 << 31 if n_tokens is None else n_tokens,
            begin,
            end,
            tuple(tokenizer.encode(said, add_special_tokens=False)),
            token_bytes(tokenizer),
            host.engine.runner.vocab_size,
            tuple(host.eos_token_ids),
        )

    @cached_property
    def anything(self) -> NDArray[np.bool_]:
        """Every token, ``[vocab]``."""
        return np.ones(self.vocab_size, dtype=np.bool_)

    @cached_property
    def all_but_ends(self) -> NDArray[np.bool_]:
        """Every token with which no answer ends, ``[vocab]``."""
        found = self.anything.copy()
        found[list(self.eos_ids)] = False
        return found

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
        is_inner_behind: whether the other one holds what comes behind the thought alone.
    """

    bound: ThoughtBound
    inner: Guide | None
    is_in_thought: bool
    is_inner_behind: bool = False
    _is_over: bool = False
    _said: bytes = b""
    """Bytes of the answer before its thought, then the last of the thought."""
    _n: int = 0
    """Tokens of the thought."""
    _n_forced: int = 0

    @property
    def is_complete(self) -> bool:
        """True where nothing can follow."""
        return self._inner is not None and self._inner.is_complete

    @property
    def end_id(self) -> int | None:
        """The end of the answer, where the other guide offers it."""
        return None if self._inner is None or self._forced() is not None else self._inner.end_id

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, ``[vocab]``."""
        every = self._every()
        forced = self._forced()
        if forced is None or not every[forced]:
            return every
        alone = np.zeros_like(every)
        alone[forced] = True
        return alone

    def accept(self, token_id: int) -> None:
        """Go on with a token."""
        forced = self._forced()
        if self._inner is not None:
            self._inner.accept(token_id)
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

    @property
    def _inner(self) -> Guide | None:
        return self.inner if self._is_over or not self.is_inner_behind else None

    def _every(self) -> NDArray[np.bool_]:
        """Return what may come as far as the thought's length does not matter."""
        if self._inner is not None:
            return self._inner.allowed()
        return self.bound.all_but_ends if self.is_inner_behind else self.bound.anything

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
