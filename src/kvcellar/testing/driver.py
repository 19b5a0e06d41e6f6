"""A cache and its oracle side by side: every verb goes to both, every output is compared."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from kvcellar.cache import TreeCache
from kvcellar.testing.adapter import BackendAdapter
from kvcellar.testing.cases import Case
from kvcellar.testing.dense import Array, Token, Tree, attend_dense, rounded, stored
from kvcellar.testing.inputs import Inputs
from kvcellar.testing.recurrence import Recurrence, StateForward, read_slot


class Driver:
    """One open session, the histories it should hold, and the random model that feeds it."""

    def __init__(
        self, adapter: BackendAdapter, case: Case, kind: str, cache: Any, salt: str = ""
    ) -> None:
        self.adapter = adapter
        self.case = case
        self.kind = kind
        self.cache = cache
        self.n_layers = case.params.n_layers
        self.sources = dict(case.shared)  # of layers without rows of their own
        self.recurrence = None if case.state is None else Recurrence(case.state)
        n_states = 0 if case.state is None else len(case.state.layers)
        turns = zip_longest(range(n_states), range(self.n_layers))
        self.turns = [turn for state, row in turns for turn in (("states", state), ("rows", row))]
        self.turns = [(kind, layer) for kind, layer in self.turns if layer is not None]
        self.rng = np.random.default_rng(zlib.crc32(f"{case.name} {salt}".encode()))
        self.histories: dict[int, list[Token]] = {}
        self.lengths: dict[int, int] = {}  # more than the tokens that are held, where holes are
        self.begin_with: list[Token] = []  # what every history begins with
        self.trees: dict[int, Tree] = {}
        self.points: dict[int, set[int]] = {}
        self.last_step: tuple[dict[int, list[Token]], dict[int, int], set[int]] | None = None
        self.column_positions = False
        self.sinks: list[Array | None] = [
            self._random(case.n_q_heads) if case.has_sinks else None for _ in range(self.n_layers)
        ]

    @property
    def has_trees(self) -> bool:
        """True if sequences may have draft trees."""
        return isinstance(self.cache, TreeCache)

    def length_of(self, seq: int) -> int:
        """Return the position of a sequence's next token."""
        return self.lengths.get(seq, len(self.begin_with))

    # Forwards ----------------------------------------------------------------------------------

    def begin(self, *batch: tuple[int, int]) -> tuple[list[int], list[Token]]:
        """Claim cells for ``(seq_id, n_tok)`` stretches and check the positions that come back."""
        ids = [seq for seq, n in batch for _ in range(n)]
        tokens = self.new_tokens(ids)
        self.last_step = None
        if self.kind != "decode":
            assert list(self.cache.begin_step(batch)) == [t.pos for t in tokens]
        return ids, tokens

    def forward(
        self, *batch: tuple[int, int], inputs: Inputs | None = None, out_dtype: str | None = None
    ) -> list[Array]:
        """Run a whole forward, compare every layer's output with the oracle's, and return them."""
        ids, tokens = self.begin(*batch)
        inputs = inputs or self.random_inputs(len(ids))
        self.store(tokens, inputs)
        seen = self.visibility(ids, tokens)
        out_dtype = out_dtype or self.case.in_dtype
        outputs = []
        forward = self.begin_states(ids, tokens)
        for kind, layer in self.turns:
            if kind == "states":
                forward.run(layer)
                continue
            got = self.attend(layer, tokens, inputs, out_dtype)
            want = self.dense(layer, ids, tokens, inputs.q[layer], seen)
            assert got.shape == want.shape
            tolerance = max(
                self.adapter.tolerance(self.case.in_dtype, self.case.kv_dtype),
                self.adapter.tolerance(out_dtype, self.case.kv_dtype),
            )
            if not (np.abs(got - want) <= tolerance).all():  # quickly; NaN is never within it
                np.testing.assert_allclose(
                    got, want, rtol=0, atol=tolerance, err_msg=f"layer {layer}, batch {batch}"
                )
            outputs.append(got)
        self.complete(ids, tokens)
        return outputs

    def abort(self, n_layers: int, *batch: tuple[int, int], inputs: Inputs | None = None) -> None:
        """Begin a forward that ends after ``n_layers`` layers; the oracle does not learn of it.

        Without ``inputs`` its tokens are NaN, so that whoever reads them shows it.
        """
        ids, tokens = self.begin(*batch)
        inputs = inputs or self.poison(len(ids))
        forward = self.begin_states(ids, tokens, float("nan"))
        for kind, layer in self.turns[:n_layers]:
            if kind == "states":
                forward.run(layer)
            else:
                self.attend(layer, tokens, inputs, self.case.in_dtype)
        self.last_step = None

    def cancel(self) -> None:
        """Take the last forward back, whole or not, in the cache and in the oracle."""
        self.cache.cancel_step()
        if self.last_step is not None:
            self.histories, self.lengths, drafting = self.last_step
            for seq in drafting:
                self.trees[seq].is_pending = True
        self.last_step = None

    def begin_states(
        self, ids: Sequence[int], tokens: Sequence[Token], poison: float | None = None
    ) -> StateForward:
        """Give every token the states after it, in the oracle; return the cache's way to them."""
        if self.recurrence is None:
            return StateForward(self.cache, None, (), ())
        numbers = [poison or float(n) for n in self.rng.standard_normal(len(ids))]
        for i, token in enumerate(tokens):
            before = self._before(i, ids, tokens)
            states = before.states if before is not None else self.recurrence.zeros()
            token.states = self.recurrence.steps(states, numbers[i])
        return StateForward(self.cache, self.recurrence, tokens, numbers)

    def _before(self, i: int, ids: Sequence[int], tokens: Sequence[Token]) -> Token | None:
        """Return the token that token ``i`` of a batch follows; None: it is the first."""
        seq, history = ids[i], self.histories.get(ids[i], [])
        mine = [j for j in range(i) if ids[j] == seq]
        last = history[-1] if history else None
        tree = self.trees.get(seq)
        if tree is None:
            return tokens[mine[-1]] if mine else last
        parent = tree.parents[tree.frontier + len(mine)]
        if parent < 0:
            return last
        at = parent - tree.frontier
        return tree.tokens[parent] if at < 0 else tokens[mine[at]]

    def attend(self, layer: int, tokens: Sequence[Token], inputs: Inputs, out_dtype: str) -> Array:
        """Call the op of one layer; return ``[n_q_heads, n_tok, v_head_dim]`` in float64."""
        positions = np.array([t.pos for t in tokens])
        out = self.adapter.attend(
            self.cache,
            layer,
            inputs.q[layer][None],
            inputs.k[layer][None],
            inputs.v[layer][None],
            positions[:, None] if self.column_positions else positions,
            self.scale(layer),
            self.sinks[layer],
            out_dtype,
            self.case.in_dtype,
        )
        assert out.ndim == 4 and out.shape[0] == 1
        heads: Array = out[0]
        return heads

    def scale(self, layer: int) -> float:
        """Return a layer's factor of the logits, larger than usual, so that single tokens weigh."""
        return float(1.5 * self.case.group(layer).q_dim ** -0.5)

    def random_inputs(self, n_tok: int) -> Inputs:
        """Standard normal q, k and v of the model's type; NaN for K and V that nobody looks at."""
        q, k, v = [], [], []
        for layer in range(self.n_layers):
            g = self.case.group(layer)
            q.append(self._random(self.case.n_q_heads, n_tok, g.q_dim))
            k.append(self._random(g.n_kv_heads, n_tok, g.head_dim))
            v.append(self._random(g.n_kv_heads, n_tok, g.v_head_dim))
            if layer in self.sources:
                k[-1].fill(np.nan)
                v[-1].fill(np.nan)
        return Inputs(q, k, v)

    def poison(self, n_tok: int) -> Inputs:
        """NaN for K and V."""
        inputs = self.random_inputs(n_tok)
        for part in (*inputs.k, *inputs.v):
            part.fill(np.nan)
        return inputs

    def run_poisoned(self, *batch: tuple[int, int]) -> None:
        """Run a forward of NaN tokens and compare nothing: their cells are poison once freed."""
        ids, tokens = self.begin(*batch)
        inputs = self.poison(len(ids))
        self.store(tokens, inputs)
        forward = self.begin_states(ids, tokens, float("nan"))
        for kind, layer in self.turns:
            if kind == "states":
                forward.run(layer)
            else:
                self.attend(layer, tokens, inputs, self.case.in_dtype)
        self.complete(ids, tokens)

    # Verbs -------------------------------------------------------------------------------------

    def cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> None:
        """Fork positions ``p0`` to ``p1`` of a sequence, in the cache and in the oracle."""
        self.cache.seq_cp(src, dst, p0, p1)
        mine = {t.pos: t for t in self.histories.get(dst, [])}
        theirs = {t.pos: t for t in self._range(src, p0, p1)}
        merged = theirs | mine
        if theirs:
            self.histories[dst] = [merged[p] for p in sorted(merged)]
            stop = self.lengths[src] if p1 is None else min(p1, self.lengths[src])
            self.lengths[dst] = max(self.lengths.get(dst, 0), stop)
        self.last_step = None

    def rm(self, seq: int, p0: int = 0, p1: int | None = None) -> int:
        """Remove positions ``p0`` to ``p1`` of a sequence, in the cache and in the oracle.

        Returns:
            The length that the sequence has then, which may be less than asked for.
        """
        length = self.lengths.get(seq, 0)
        at = int(self.cache.seq_rm(seq, p0, p1))
        self._cut_points(seq, at, min(p0, length) if p1 is None else at)
        if p0 < length and (p1 is None or p1 >= length):
            assert at <= max(p0, len(self.begin_with))
            p0 = at
        gone = {t.pos for t in self._range(seq, p0, p1)}
        if seq in self.trees:
            del self.trees[seq]
        kept = [t for t in self.histories.get(seq, []) if t.pos not in gone]
        if kept[len(self.begin_with) :]:
            self.histories[seq] = kept
            if p1 is None or p1 >= self.lengths[seq]:
                self.lengths[seq] = min(self.lengths[seq], p0)
        else:
            self.histories.pop(seq, None)
            self.lengths.pop(seq, None)
        self.last_step = None
        return at

    def keep(self, seq: int) -> None:
        """Remove all sequences but one, in the cache and in the oracle."""
        self.cache.seq_keep(seq)
        self.histories = {seq: self.histories[seq]}
        self.lengths = {seq: self.lengths[seq]}
        self.trees = {s: t for s, t in self.trees.items() if s == seq}
        self.points = {s: at for s, at in self.points.items() if s == seq}
        self.last_step = None

    def rewind(self, asked: int) -> int:
        """Cut the sequence of a contiguous cache back, in the cache and in the oracle.

        Returns:
            The length that it has then, which may be less than asked for.
        """
        length = int(self.cache.rewind(asked))
        assert length <= asked
        self._cut_points(0, length, asked)
        self.histories = {0: self.histories.get(0, [])[:length]}
        self.lengths = {0: length}
        self.last_step = None
        return length

    def keep_point(self, seq: int = 0) -> None:
        """Make a point of where a sequence is now, in the cache and in the oracle."""
        length = self.lengths[seq]
        at = (length,) if self.kind == "decode" else (seq, length)
        self.cache.keep_point(*at)
        self.points.setdefault(seq, set()).add(length)
        self.last_step = None

    def drop_point(self, length: int, seq: int = 0) -> None:
        """Keep a point no longer, in the cache and in the oracle."""
        self.cache.drop_point(*((length,) if self.kind == "decode" else (seq, length)))
        self.points.get(seq, set()).discard(length)
        self.last_step = None

    def _cut_points(self, seq: int, at: int, asked: int) -> None:
        """Forget points behind the end; where states are kept, that is where a point was."""
        points = self.points.pop(seq, set())
        if self.recurrence is not None and asked < self.lengths.get(seq, 0):
            there = max((point for point in points if point <= asked), default=0)
            assert at == there or (at < there and self.case.lets_go), (at, asked, points)
        self.points[seq] = {point for point in points if point <= at}

    def clear(self) -> None:
        """Forget everything, in the cache and in the oracle."""
        self.points = {}
        self.cache.clear()
        self.histories, self.lengths, self.trees, self.last_step = {}, {}, {}, None

    def propose(self, parents: Sequence[int], seq: int = 0) -> int:
        """Append a frontier; returns how many tokens the sequence now brings."""
        positions = self.cache.propose(parents, seq)
        tree = self.trees.setdefault(seq, Tree())
        base = self.length_of(seq)
        tree.frontier = len(tree.parents)
        tree.parents.extend(parents)
        for node in range(tree.frontier, len(tree.parents)):
            tree.tokens.append(Token(base + len(tree.ancestors(node)) - 1))
        assert list(positions) == [t.pos for t in tree.tokens[tree.frontier :]]
        tree.is_pending = True
        self.last_step = None
        return len(parents)

    def compact(self) -> int:
        """Copy every history together; how many cells that took. No history knows of it."""
        self.last_step = None
        seqs = self.cache.seq_ids()
        done = self.cache.compact([self.cache.seq_table(seq) for seq in seqs], 1000)
        self.cache.check()
        return int(done.n_cells)

    def commit(self, accepted: Sequence[int], seq: int = 0) -> None:
        """Accept a chain of nodes and drop the others, in the cache and in the oracle."""
        assert list(self.cache.commit(accepted, seq)) == list(accepted)
        tree = self.trees.pop(seq)
        if accepted:
            mine = self.histories.setdefault(seq, [*self.begin_with])
            mine.extend(tree.tokens[node] for node in accepted)
            self.lengths[seq] = self.length_of(seq) + len(accepted)
        self.last_step = None

    # What should hold --------------------------------------------------------------------------

    def agrees(self) -> None:
        """Assert that the cache holds the oracle's sequences at the oracle's lengths."""
        if self.kind == "decode":
            assert self.cache.length == self.length_of(0)
        else:
            assert {s: self.cache.seq_len(s) for s in self.cache.seq_ids()} == self.lengths
        if self.recurrence is not None:
            for seq, history in self.histories.items():
                self._states_agree(seq, history)

    def _states_agree(self, seq: int, history: list[Token]) -> None:
        """Assert that a sequence's slots hold the oracle's states, and where it has slots."""
        slots = self.cache.slots.table(seq, len(history))
        there = np.flatnonzero(slots >= 0) + 1
        wanted = {len(history), *self.points.get(seq, ())} - {0}
        assert set(there.tolist()) == wanted, (seq, there, wanted)
        for at in there:
            for got, want in zip(
                read_slot(self.cache, slots[at - 1]), history[at - 1].states, strict=True
            ):
                for one, other in zip(got, want, strict=True):
                    np.testing.assert_array_equal(one, other, err_msg=f"sequence {seq} at {at}")

    def state(self) -> tuple[Any, ...]:
        """Return all that a caller can see of the cache."""
        usage = self.cache.usage()
        if self.kind == "decode":
            return usage, self.cache.length, self.cache.resumable_from()
        lengths = {s: self.cache.seq_len(s) for s in self.cache.seq_ids()}
        return usage, lengths, {s: self.cache.seq_usage(s) for s in lengths}

    @contextmanager
    def refuses(self, *errors: type[Exception], in_step: bool = False) -> Iterator[None]:
        """Assert that the block raises one of these and changes nothing that a caller can see.

        ``in_step`` says that a step is open and should stay open; otherwise the last one is
        accepted first, which may let go of what windows have passed.
        """
        if not in_step:
            self.cache.end_step()
            self.last_step = None
        before = self.state()
        with pytest.raises(errors):
            yield
        assert self.state() == before

    # The oracle --------------------------------------------------------------------------------

    def new_tokens(self, ids: Sequence[int]) -> list[Token]:
        """Return the tokens that a forward brings: a tree's frontier, or what follows a history."""
        tokens = []
        n_before: Counter[int] = Counter()
        for seq in ids:
            tree = self.trees.get(seq)
            if tree is not None:
                node = tree.frontier + n_before[seq]
                tokens.append(Token(tree.tokens[node].pos))
            else:
                tokens.append(Token(self.length_of(seq) + n_before[seq]))
            n_before[seq] += 1
        return tokens

    def store(self, tokens: Sequence[Token], inputs: Inputs) -> None:
        """Give every token its K and V, as the pool rounds them."""
        for layer in range(self.n_layers):
            source = self.sources.get(layer, layer)
            k = stored(inputs.k[source], self.case.kv_dtype, "k")
            v = stored(inputs.v[source], self.case.kv_dtype, "v")
            for i, token in enumerate(tokens):
                token.k.append(k[:, i])
                token.v.append(v[:, i])

    def visibility(
        self, ids: Sequence[int], tokens: Sequence[Token]
    ) -> dict[int, tuple[list[int], list[Token], Array]]:
        """Per sequence: its rows of the batch, all its tokens, and who may see whom by ancestry.

        The last is ``[rows, tokens]``; a window or chunk comes on top of it.
        """
        out = {}
        for seq in dict.fromkeys(ids):
            rows = [i for i, s in enumerate(ids) if s == seq]
            history = self.histories.get(seq, self.begin_with)
            tree = self.trees.get(seq)
            new = [tokens[i] for i in rows]
            if tree is None:
                keys = [*history, *new]
                mask = np.ones((len(rows), len(keys)), dtype=bool)
            else:
                keys = [*history, *tree.tokens[: tree.frontier], *new]
                mask = np.zeros((len(rows), len(keys)), dtype=bool)
                mask[:, : len(history)] = True
                for i in range(len(rows)):
                    for node in tree.ancestors(tree.frontier + i):
                        mask[i, len(history) + node] = True
            out[seq] = rows, keys, mask
        return out

    def dense(
        self,
        layer: int,
        ids: Sequence[int],
        tokens: Sequence[Token],
        q: Array,
        seen: dict[int, tuple[list[int], list[Token], Array]],
    ) -> Array:
        """Attend in one layer as the oracle does; ``seen`` is what ``visibility`` returned.

        Returns:
            ``[n_q_heads, n_tok, v_head_dim]``.
        """
        group = self.case.group(layer)
        out = np.empty((self.case.n_q_heads, len(ids), group.v_head_dim))
        for rows, keys, by_ancestry in seen.values():
            where = np.array([t.pos for t in keys])
            queries = np.array([tokens[i].pos for i in rows])[:, None]
            mask = by_ancestry & (where <= queries)
            if group.window is not None:
                mask &= where > queries - group.window
            if group.chunk is not None:
                mask &= where // group.chunk == queries // group.chunk
            out[:, rows] = attend_dense(
                q[:, rows], keys, mask, layer, self.scale(layer), group.softcap, self.sinks[layer]
            )
        return out

    def complete(self, ids: Sequence[int], tokens: Sequence[Token]) -> None:
        """Count the tokens of a forward that went through all layers, in the oracle."""
        drafting = {s for s in ids if s in self.trees}
        histories = {s: list(h) for s, h in self.histories.items()}
        self.last_step = histories, dict(self.lengths), drafting
        n_before: Counter[int] = Counter()
        for seq, token in zip(ids, tokens, strict=True):
            if seq in drafting:
                tree = self.trees[seq]
                tree.tokens[tree.frontier + n_before[seq]] = token
                tree.is_pending = False
                n_before[seq] += 1
            else:
                self.histories.setdefault(seq, [*self.begin_with]).append(token)
                self.lengths[seq] = token.pos + 1

    def _range(self, seq: int, p0: int, p1: int | None) -> list[Token]:
        return [
            t for t in self.histories.get(seq, []) if t.pos >= p0 and (p1 is None or t.pos < p1)
        ]

    def _random(self, *shape: int) -> Array:
        return rounded(self.rng.standard_normal(shape), self.case.in_dtype)
