"""Guesses for what a sequence says next, as a tree: what drafters make and steps verify."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses for the tokens that follow a sequence: a tree, of which a chain is the narrowest.

    Attributes:
        tokens: the guesses, level by level; siblings differ. None where none is worth making.
        kind: how they were made: guesses of one kind are believed to be equally often right.
        parents: per guess the index of the guess before it, a lower one, or -1 where it follows
            the sequence itself. Left out: each follows the one before.
        beliefs: per guess how likely its drafter holds it to be, given the one before it. Left out
            where the drafter does not say.
    """

    tokens: tuple[int, ...]
    kind: str
    parents: tuple[int, ...] = ()
    beliefs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.parents:
            object.__setattr__(self, "parents", tuple(range(-1, len(self.tokens) - 1)))
        assert len(self.parents) == len(self.tokens), "a parent per guess"
        assert not self.beliefs or len(self.beliefs) == len(self.tokens), "a belief per guess"

    def __len__(self) -> int:
        """Return the number of guesses."""
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True if each guess follows the one before."""
        n = len(self.parents)
        return not n or (self.parents[-1] == n - 2 and self.parents == tuple(range(-1, n - 1)))

    @property
    def depth(self) -> int:
        """Guesses of the longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return max(depths, default=0)

    def children(self, node: int) -> Iterator[int]:
        """Return the guesses that follow a guess, or the sequence itself (-1)."""
        return (i for i, parent in enumerate(self.parents) if parent == node)

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """Return the path of guesses that say the same as ``tokens``, as far as there is one."""
        path: list[int] = []
        for token in tokens:
            above = path[-1] if path else -1
            node = next((i for i in self.children(above) if self.tokens[i] == token), None)
            if node is None:
                break
            path.append(node)
        return path

    def first(self, n: int) -> Draft:
        """Return the first ``n`` guesses; none is without the one that it follows."""
        return self if n >= len(self) else self.keep(range(n))

    def keep(self, nodes: Sequence[int]) -> Draft:
        """Return some of the guesses, in ascending order, each with the one that it follows."""
        if not nodes:
            return NO_DRAFT
        new = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            self.kind,
            tuple(new[self.parents[node]] for node in nodes),
            tuple(self.beliefs[node] for node in nodes) if self.beliefs else (),
        )


NO_DRAFT = Draft((), "")

LATER = Draft((), "later")
"""No guesses yet: their drafter has still to read what the sequence says."""
