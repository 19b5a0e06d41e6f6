"""Guesses of an EAGLE-3 head, from what the target's own layers say of the tokens before.

The method: Li et al., 2025 (arXiv:2503.01840). The head's cache holds pairs: the target's features
of a token, and the token behind it. Guesses go on from the head's own hidden states, in the cells
of a tree; once it is known which of them were right, they come again with true features, so the
tree is dropped and the pairs computed anew, in the forward that makes the next first level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcellar.cache import TreeSeqCache
from kvcellar.engine.requests.draft import LATER, NO_DRAFT, Draft
from kvcellar.engine.speculate.drafter import DraftRequest
from kvcellar.engine.speculate.growing import GrowingTree, drop_trees, make_room, propose_levels
from kvcellar.errors import CacheFullError
from kvcellar.pictures.tokens import ids_of

if TYPE_CHECKING:
    from kvcellar.backends.torch.eagle3.head import Eagle3Runner, Guesses
    from kvcellar.models.runner import FloatArray

MAX_PAIRS = 512
"""Pairs that the head takes in one step; what is more waits for the next."""

MANY_FEATURES = 64
"""So many features that wait are joined: they take a third of the memory then."""


@dataclass(slots=True, eq=False)
class _Pairs:
    """Features of one sequence: those in the head's cache, and those that wait to go there.

    Attributes:
        first: position of the first token whose features are known.
        n_pairs: pairs that are in the head's cache.
        features: what waits: ``[n, n_features]`` each.
        n_features: rows of it in all.
        joined: what waits and came before these, joined.
        last: the joined features of the last pair that is in the head's cache.
    """

    first: int
    n_pairs: int = 0
    features: list[FloatArray] = field(default_factory=list)
    n_features: int = 0
    joined: Any = None
    last: Any = None

    @property
    def n_joined(self) -> int:
        """Rows that are joined."""
        return 0 if self.joined is None else len(self.joined)

    @property
    def end(self) -> int:
        """Position behind the last token whose features are known."""
        return self.first + self.n_pairs + self.n_joined + self.n_features


class Eagle3Drafter:
    """One sequence of the head's cache for each sequence of the engine, with a tree at its end.

    Where the head's cache is full the sequences that were not asked about give way; what does not
    fit even then gets no guesses. A sequence whose features are not known from its first token on
    (they were reused, or had to give way) begins with the first one that is.
    """

    is_free = False

    def __init__(
        self,
        runner: Eagle3Runner,
        cache: TreeSeqCache,
        *,
        width: int = 4,
        max_depth: int = 6,
        min_reach: float = 0.1,
    ) -> None:
        """Create a drafter that has computed nothing.

        Args:
            runner: the head, bound to the session of ``cache``.
            cache: its cache; nobody else uses it.
            width: guesses per level and sequence, at most.
            max_depth: levels, at most.
            min_reach: no further level where it is held to be less likely that one of a level's
                guesses is right.
        """
        self.feature_layers: tuple[int, ...] = runner.feature_layers
        self._runner = runner
        self._cache = cache
        self._width = width
        self._max_depth = max_depth
        self._min_reach = min_reach
        self._known: dict[int, _Pairs] = {}

    def saw(self, request_id: int, start: int, features: FloatArray) -> None:
        """Take features of computed tokens; see ``FeatureReader``."""
        known = self._known.get(request_id)
        if known is None or start > known.end:
            self.ended(request_id)
            known = self._known[request_id] = _Pairs(start)
        fresh = features[known.end - start :]
        if len(fresh):
            known.features.append(fresh)
            known.n_features += len(fresh)
        if known.n_features >= MANY_FEATURES:
            self._join(known)

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        """Return the likeliest continuations; ``LATER`` where a step cannot take all new pairs.

        It takes one forward for new pairs, and one per further level.
        """
        drafts = dict.fromkeys((ask.request_id for ask in asks), NO_DRAFT)
        growing: list[GrowingTree] = []
        try:
            going = self._caught_up(self._with_room(asks), drafts)
            growing += [GrowingTree(ask, "eagle3") for ask in going]
            if growing:
                self._grow(growing)
        except CacheFullError:
            pass  # what was guessed so far is good
        finally:
            drop_trees(self._cache, growing)
        drafts |= {tree.ask.request_id: tree.draft() for tree in growing}
        return [drafts[ask.request_id] for ask in asks]

    def ended(self, request_id: int) -> None:
        """Free the cells of a sequence, which goes on no more."""
        self._known.pop(request_id, None)
        if self._cache.has_seq(request_id):
            self._cache.seq_rm(request_id)

    def _caught_up(
        self, asks: Sequence[DraftRequest], drafts: dict[int, Draft]
    ) -> list[DraftRequest]:
        """Return the requests whose new pairs are few enough for this step, the fewest first.

        Of the first other one a part is taken. The others' drafts are ``LATER``.
        """
        for ask in asks:
            known = self._known[ask.request_id]
            self._join(known)
            if not known.n_joined:
                self._take_back(ask.request_id, known)
        going = []
        room = MAX_PAIRS
        for ask in sorted(asks, key=lambda ask: self._known[ask.request_id].n_joined):
            known = self._known[ask.request_id]
            if known.n_joined <= room:
                going.append(ask)
                room -= known.n_joined
                continue
            drafts[ask.request_id] = LATER
            if room:
                self._compute(ask, known, room)
                room = 0
        return going

    def _grow(self, trees: Sequence[GrowingTree]) -> None:
        guesses = self._read(trees)
        rows = [{-1: i} for i in range(len(trees))]
        """Per tree in which row of the last guesses those behind each of its guesses are."""
        growing = list(range(len(trees)))
        for i in growing:
            self._take(trees[i], [-1], guesses, i)
        while growing := [i for i in growing if self._is_worth_more(trees[i])]:
            above = [rows[i][trees[i].parents[node]] for i in growing for node in trees[i].level]
            tokens, stretches = propose_levels(self._cache, [trees[i] for i in growing])
            positions = self._cache.begin_step(stretches)
            guesses = self._runner.go_on(tokens, guesses, above, positions, self._width)
            start = 0
            for i in growing:
                level = trees[i].level
                rows[i] = {node: start + j for j, node in enumerate(level)}
                self._take(trees[i], level, guesses, start)
                start += len(level)

    def _take(self, tree: GrowingTree, above: list[int], guesses: Guesses, start: int) -> None:
        rows = slice(start, start + len(above))
        width = self._width if tree.ask.n_nodes else 1
        tree.grow(above, guesses.tokens[rows], guesses.beliefs[rows], width)

    def _is_worth_more(self, tree: GrowingTree) -> bool:
        """Return true if a level behind the last one may be of use."""
        most = min(tree.ask.limit, self._max_depth)
        return tree.n_levels < most and tree.reach >= max(self._min_reach, tree.ask.min_reach)

    def _read(self, trees: Sequence[GrowingTree]) -> Guesses:
        """Take all pairs that are new; return what the head says behind each sequence's last."""
        tokens: list[int] = []
        stretches: list[tuple[int, int]] = []
        rows: list[int] = []
        parts = []
        for tree in trees:
            known = self._known[tree.ask.request_id]
            at = known.first + known.n_pairs + 1
            tokens += ids_of(tree.ask.tokens[at : at + known.n_joined]).tolist()
            stretches.append((tree.ask.request_id, known.n_joined))
            rows.append(len(tokens) - 1)
            parts.append(known.joined)
        positions = self._cache.begin_step(stretches)
        guesses = self._runner.read(tokens, parts, positions, rows, self._width)
        for tree in trees:
            known = self._known[tree.ask.request_id]
            known.n_pairs += known.n_joined
            known.last, known.joined = known.joined[-1:], None
        return guesses

    def _take_back(self, request_id: int, known: _Pairs) -> None:
        """Drop the last pair, to take it once more: nothing was chosen since it was taken.

        As when a sequence had to give way before its guesses were verified.
        """
        known.n_pairs -= 1
        kept = self._cache.seq_rm(request_id, known.n_pairs)
        assert kept == known.n_pairs, "a head attends over all of its history"
        known.joined = known.last

    def _compute(self, ask: DraftRequest, known: _Pairs, n: int) -> None:
        """Take the next ``n`` pairs of a sequence that has many."""
        at = known.first + known.n_pairs + 1
        positions = self._cache.begin_step([(ask.request_id, n)])
        tokens = ids_of(ask.tokens[at : at + n]).tolist()
        self._runner.read(tokens, [known.joined[:n]], positions, [], 1)
        known.n_pairs += n
        known.joined = known.joined[n:]

    def _join(self, known: _Pairs) -> None:
        if known.features:
            known.joined = self._runner.join(known.features, known.joined)
            known.features, known.n_features = [], 0

    def _with_room(self, asks: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Return the requests with new pairs that fit with their guesses; others give way."""
        needs = []
        for ask in asks:
            known = self._known.get(ask.request_id)
            if known is None or not known.first < known.end == len(ask.tokens) - 1:
                continue  # features of its last tokens are not known
            n_new = known.end - known.first - known.n_pairs
            needs.append((ask, n_new + (ask.limit - 1) * (self._width if ask.n_nodes else 1)))
        asked = {ask.request_id for ask in asks}
        others = [held for held in self._known if held not in asked]
        return make_room(self._cache, needs, others, self.ended)
