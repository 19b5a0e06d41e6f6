"""Trees of guesses that grow level by level, in a draft's own cache: one forward per level.

The shape is that of EAGLE-2 (Li et al., 2024, arXiv:2406.16858): the likeliest few paths go on, and
of all guesses behind them the likeliest are given in the end, whether they went on or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcellar.cache import SeqCache, TreeCache
from kvcellar.engine.requests.draft import Draft
from kvcellar.engine.speculate.drafter import DraftRequest
from kvcellar.models.runner import FloatArray
from kvcellar.types import IntArray

MIN_PATH = 0.01
"""Nothing is guessed behind paths that are held to be less likely, but for a level's likeliest."""


@dataclass(slots=True, eq=False)
class GrowingTree:
    """The guesses for one sequence while they grow."""

    ask: DraftRequest
    kind: str
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    beliefs: list[float] = field(default_factory=list)
    paths: list[float] = field(default_factory=list)
    level: list[int] = field(default_factory=list)
    """The guesses that came last and may go on: the likeliest."""
    cached: list[int] = field(default_factory=list)
    """The guesses that the draft's cache holds, in its order."""
    n_levels: int = 0

    def grow(self, above: Sequence[int], tokens: IntArray, beliefs: FloatArray, width: int) -> None:
        """Add a level: the likeliest tokens behind some guesses.

        Args:
            above: the guesses, -1 for the sequence itself.
            tokens: ``[len(above), k]``, behind each of them.
            beliefs: ``[len(above), k]``, how likely each is there.
            width: guesses that may go on, at most.
        """
        found: list[tuple[float, float, int, int]] = []
        for parent, row, weights in zip(above, tokens.tolist(), beliefs.tolist(), strict=True):
            path = self.paths[parent] if parent >= 0 else 1.0
            for token, belief in zip(row, weights, strict=True):
                found.append((path * belief, belief, parent, token))
        found.sort(key=lambda guess: -guess[0])
        first = len(self.tokens)
        for path, belief, parent, token in found[: max(width, self.ask.n_nodes)]:
            self.tokens.append(token)
            self.parents.append(parent)
            self.beliefs.append(belief)
            self.paths.append(path)
        others = range(first + 1, min(first + width, len(self.tokens)))
        self.level = [first, *(node for node in others if self.paths[node] >= MIN_PATH)]
        self.n_levels += 1

    @property
    def reach(self) -> float:
        """Believed probability that one of the last level's guesses is right."""
        return sum(self.paths[node] for node in self.level)

    @property
    def n_wanted(self) -> int:
        """Guesses that were asked for."""
        return max(self.ask.n_nodes, self.ask.limit)

    def draft(self) -> Draft:
        """Return the likeliest of all guesses, as many as were asked for."""
        whole = Draft(tuple(self.tokens), self.kind, tuple(self.parents), tuple(self.beliefs))
        order = sorted(range(len(whole)), key=lambda node: (-self.paths[node], node))
        return whole.keep(sorted(order[: self.n_wanted]))


def make_room(
    cache: SeqCache,
    needs: Sequence[tuple[DraftRequest, int]],
    others: Iterable[int],
    let_go: Callable[[int], None],
) -> list[DraftRequest]:
    """Return the requests that fit together in a draft's cache, after others gave way.

    Args:
        cache: the draft's.
        needs: requests, and the cells that each of them needs.
        others: ids of sequences that may give way.
        let_go: frees the cells of such a sequence.
    """
    giving_way = iter(others)
    going: list[DraftRequest] = []
    n_taken = 0
    for ask, n in needs:
        while not (fits := cache.can_extend(n_taken + n)):
            other = next(giving_way, None)
            if other is None:
                break
            let_go(other)
        if fits:
            n_taken += n
            going.append(ask)
    return going


def propose_levels(
    cache: TreeCache, trees: Sequence[GrowingTree]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Append every tree's last level to its tree in a draft's cache, for one forward of them all.

    Returns:
        The tokens of the flat batch, and its stretches: a tree after the other.

    Raises:
        CacheFullError: trees before the one that found no room have their level in the cache.
    """
    tokens: list[int] = []
    stretches: list[tuple[int, int]] = []
    for tree in trees:
        at = {node: i for i, node in enumerate(tree.cached)}
        parents = [at.get(tree.parents[node], -1) for node in tree.level]
        cache.propose(parents, tree.ask.request_id)
        tree.cached += tree.level
        tokens += [tree.tokens[node] for node in tree.level]
        stretches.append((tree.ask.request_id, len(tree.level)))
    return tokens, stretches


def drop_trees(cache: TreeCache, trees: Sequence[GrowingTree]) -> None:
    """Free the cells of all their guesses in a draft's cache."""
    for tree in trees:
        if cache.has_tree(tree.ask.request_id):
            cache.commit([], tree.ask.request_id)
