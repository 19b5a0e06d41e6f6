"""Guesses of a smaller model with the same vocabulary, in a cache of its own.

The method: Leviathan et al., 2023 (arXiv:2211.17192), with trees as in EAGLE-2 (Li et al., 2024,
arXiv:2406.16858): level by level the likeliest tokens behind the likeliest paths, one forward per
level whatever its width. The guesses are the draft model's likeliest tokens, so one of several is
right as often as the target samples any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcellar.cache import TreeSeqCache
from kvcellar.engine.requests.draft import LATER, NO_DRAFT, Draft
from kvcellar.engine.speculate.drafter import DraftRequest
from kvcellar.engine.speculate.growing import GrowingTree, drop_trees, make_room, propose_levels
from kvcellar.errors import CacheFullError, ConfigError
from kvcellar.history import History
from kvcellar.models import Runner
from kvcellar.models.runner import FloatArray, step_limit
from kvcellar.pictures.tokens import ids_of
from kvcellar.space import Space
from kvcellar.types import IntArray

MAX_TOKENS = 512
"""Tokens of one forward of the draft model, and tokens of texts that it reads in one step."""

MIN_SHARED = 32
"""Tokens at least that a new sequence shares with another one's."""


class DraftModel:
    """One sequence of the draft's cache for each sequence of the engine, with a tree at its end.

    The tree of the guesses stays until it is known which of them were right: those are committed
    and need no other forward. A sequence that begins as another one does shares its cells.

    Where the draft's cache is full the sequences that were not asked about give way; what does not
    fit even then gets no guesses.
    """

    is_free = False

    def __init__(
        self, runner: Runner, cache: TreeSeqCache, vocab_size: int, *, width: int = 4
    ) -> None:
        """Create a drafter that has computed nothing.

        Args:
            runner: the draft model, bound to the session of ``cache``.
            cache: its cache; nobody else uses it.
            vocab_size: of the target.
            width: guesses per level and sequence, at most.

        Raises:
            ConfigError: the two do not have one vocabulary.
        """
        if runner.vocab_size != vocab_size:
            raise ConfigError(
                f"the draft model has {runner.vocab_size} tokens and the target {vocab_size}; a "
                f"draft model needs the target's own vocabulary"
            )
        self._runner = runner
        self._cache = cache
        self._max_tokens = step_limit(runner, MAX_TOKENS)
        self._width = min(width, self._max_tokens)
        self._known: dict[int, int] = {}
        """Per request how many of its tokens are in the draft's cache."""
        self._tokens: dict[int, History] = {}
        self._spaces: dict[int, Space] = {}
        self._trees: dict[int, GrowingTree] = {}
        """Guesses that are in the draft's cache and await what is chosen."""

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        """Return the likeliest continuations; ``LATER`` where more is new than one step reads.

        It takes one forward for what is new, then one per further level.
        """
        for ask in asks:
            self._commit(ask)
        trees = {ask.request_id: GrowingTree(ask, "draft model") for ask in self._with_room(asks)}
        drafts = dict.fromkeys((ask.request_id for ask in asks), NO_DRAFT)
        try:
            for tree in self._catch_up(list(trees.values())):
                drafts[tree.ask.request_id] = LATER
                del trees[tree.ask.request_id]
            growing = list(trees.values())
            while growing := [t for t in growing if _is_worth_more(t)]:
                self._next_level(growing)
        except CacheFullError:
            pass  # what was guessed so far is good
        drafts |= {request_id: tree.draft() for request_id, tree in trees.items()}
        return [drafts[ask.request_id] for ask in asks]

    def ended(self, request_id: int) -> None:
        """Free the cells of a sequence, which goes on no more."""
        self._trees.pop(request_id, None)
        self._tokens.pop(request_id, None)
        self._spaces.pop(request_id, None)
        self._known.pop(request_id, None)
        if self._cache.has_seq(request_id):
            self._cache.seq_rm(request_id)

    def _commit(self, ask: DraftRequest) -> None:
        """Keep the guesses that were right; drop the others, and the last token if it is held.

        It is held where nothing was chosen since the last time; its logits are wanted.
        """
        request_id = ask.request_id
        tree = self._trees.pop(request_id, None)
        if tree is not None:
            held = Draft(tuple(tree.tokens), "", tuple(tree.parents)).keep(tree.cached)
            right = held.follow(ask.tokens[self._known[request_id] : -1])
            self._cache.commit(right, request_id)
            self._known[request_id] += len(right)
        n = len(ask.tokens) - 1
        if self._known.get(request_id, 0) > n:
            self._known[request_id] = self._cache.seq_rm(request_id, n)

    def _with_room(self, asks: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Return the requests that fit together with their guesses, after others gave way."""
        needs = []
        for ask in asks:
            self._share(ask)
            n_new = len(ask.tokens) - self._known.get(ask.request_id, 0)
            needs.append((ask, n_new + (ask.limit - 1) * self._width_of(ask)))
        asked = {ask.request_id for ask in asks}
        others = [held for held in self._known if held not in asked]
        return make_room(self._cache, needs, others, self.ended)

    def _share(self, ask: DraftRequest) -> None:
        """Let a new sequence begin on the cells of the one that begins most as it does."""
        if ask.request_id in self._known or len(ask.tokens) <= MIN_SHARED:
            return
        best, source = MIN_SHARED - 1, -1
        for request_id, tokens in self._tokens.items():
            most = min(self._known[request_id], len(ask.tokens) - 1)
            if most > best and self._spaces[request_id] == ask.space:
                n = tokens.common_prefix(ask.tokens[:most])
                if n > best and self._cache.can_resume(request_id, n):
                    best, source = n, request_id
        if source >= 0:
            self._cache.seq_cp(source, ask.request_id, 0, best)
            self._known[ask.request_id] = best
            self._tokens[ask.request_id] = ask.tokens
            self._spaces[ask.request_id] = ask.space

    def _catch_up(self, trees: Sequence[GrowingTree]) -> list[GrowingTree]:
        """Compute tokens that the draft has not seen; where that is all of them, the first level.

        No more than ``MAX_TOKENS`` in all, those first who wait for the least: a long prompt is
        read in several steps, and holds nobody up.

        Returns:
            The trees that have to wait.
        """
        stops: dict[int, int] = {}
        left = MAX_TOKENS
        for tree in sorted(trees, key=self._n_missing):
            n = min(left, self._n_missing(tree))
            left -= n
            stops[tree.ask.request_id] = self._n_known(tree) + n
        waiting = [
            tree for tree in trees if self._known.get(r := tree.ask.request_id, 0) < stops[r]
        ]
        while waiting:
            parts: list[tuple[GrowingTree, IntArray]] = []
            room = self._max_tokens
            for tree in waiting:
                request_id = tree.ask.request_id
                start = self._n_known(tree)
                part = tree.ask.tokens[start : min(start + room, stops[request_id])]
                if len(part):
                    parts.append((tree, part))
                    room -= len(part)
            tokens = ids_of(np.concatenate([part for _, part in parts]))
            stretches = [(tree.ask.request_id, len(part)) for tree, part in parts]
            rows = np.cumsum([len(part) for _, part in parts]) - 1
            logits = self._forward(tokens, stretches, rows.tolist())
            for (tree, part), row in zip(parts, logits, strict=True):
                request_id = tree.ask.request_id
                known = self._known[request_id] = self._n_known(tree) + len(part)
                self._tokens[request_id] = tree.ask.tokens
                self._spaces[request_id] = tree.ask.space
                if known == stops[request_id]:
                    waiting.remove(tree)
                if known == len(tree.ask.tokens):
                    width = self._width_of(tree.ask)
                    tree.grow([-1], *_likeliest(row[None], width), width)
        return [tree for tree in trees if self._n_missing(tree)]

    def _n_known(self, tree: GrowingTree) -> int:
        """Return how many tokens of its sequence the draft has seen."""
        return self._known.get(tree.ask.request_id, 0)

    def _n_missing(self, tree: GrowingTree) -> int:
        """Return how many tokens of its sequence the draft has not seen."""
        return len(tree.ask.tokens) - self._n_known(tree)

    def _next_level(self, trees: Sequence[GrowingTree]) -> None:
        """Compute every tree's last level, as many trees in one forward as it takes."""
        n = max(1, self._max_tokens // self._width)
        for first in range(0, len(trees), n):
            self._compute_level(trees[first : first + n])

    def _compute_level(self, trees: Sequence[GrowingTree]) -> None:
        """Run one forward of every tree's last level and grow the next from it."""
        try:
            tokens, stretches = propose_levels(self._cache, trees)
            logits = self._forward(tokens, stretches, range(len(tokens)))
        except BaseException:
            for tree in trees:
                self._trees.pop(tree.ask.request_id, None)
            drop_trees(self._cache, trees)
            raise
        start = 0
        for tree in trees:
            level = tree.level
            self._trees[tree.ask.request_id] = tree
            width = self._width_of(tree.ask)
            tree.grow(level, *_likeliest(logits[start : start + len(level)], width), width)
            start += len(level)

    def _forward(
        self,
        tokens: Sequence[int] | IntArray,
        stretches: Sequence[tuple[int, int]],
        rows: Sequence[int],
    ) -> FloatArray:
        try:
            positions = self._cache.begin_step(stretches)
            logits = self._runner.forward(tokens, positions, rows)
        except BaseException:
            self._cache.cancel_step()
            raise
        self._cache.end_step()
        return logits

    def _width_of(self, ask: DraftRequest) -> int:
        """Return the number of guesses per level."""
        return self._width if ask.n_nodes else 1


def _is_worth_more(tree: GrowingTree) -> bool:
    """Return true if a level behind the last one may be of use."""
    return bool(tree.level) and tree.n_levels < tree.ask.limit and tree.reach >= tree.ask.min_reach


def _likeliest(logits: FloatArray, n: int) -> tuple[IntArray, FloatArray]:
    """Return the ``n`` likeliest tokens of each row ``[R, vocab]``, and their probabilities."""
    if n == 1:
        tokens = logits.argmax(axis=1)[:, None]
    else:
        some = np.argpartition(logits, -min(n, logits.shape[1]), axis=1)[:, -n:]
        order = np.argsort(-np.take_along_axis(logits, some, 1), axis=1, kind="stable")
        tokens = np.take_along_axis(some, order, 1)
    logits = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(logits).sum(axis=1, keepdims=True)
    return tokens, np.exp(np.take_along_axis(logits, tokens, 1)) / total
