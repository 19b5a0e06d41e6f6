"""Plays of a check: texts that are run in every way in which a cache is used.

Tokens come in one piece, in chunks and one by one, are taken back, from a fork, beside others in
flat batches, and behind bytes that left the cache and came back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvcellar.models.runner import FloatArray, Runner, turning
from kvcellar.registry import CacheSession
from kvcellar.types import IntArray

LENGTH, PREFILL, _DECODES, _FORK, _CUT = 104, 64, 32, 40, 70
"""Tokens of a text; of its first forward; those that come one by one behind 8 more; and where a
fork and another end begin."""

MAIN, _LEFT, _RIGHT, _OTHER, _FIRST, _SECOND, _THIRD, CHANGED = range(8)
"""Texts: one, two that leave it at the fork, one that leaves it at the cut, three strangers, and
the first with another first token."""


def make_texts(vocab_size: int, n_columns: int) -> IntArray:
    """Return the texts ``[8, n_columns]``: random tokens, alike as far as the plays want them.

    Only low ids: high ones may stand for images.
    """
    texts = np.random.default_rng(7).integers(0, min(vocab_size, 250), (8, n_columns))
    texts[[_LEFT, _RIGHT], :_FORK] = texts[MAIN, :_FORK]
    texts[_OTHER, :_CUT] = texts[MAIN, :_CUT]
    texts[CHANGED, 1:] = texts[MAIN, 1:]
    return texts


Piece = tuple[str, int, int, FloatArray]
"""Part, text, position of the first token, and logits ``[T, vocab_size]``."""


class Player:
    """A session and a model bound to it, fed with the texts."""

    def __init__(
        self, session: CacheSession[Any], runner: Runner, texts: IntArray, is_one: bool
    ) -> None:
        """Start with an empty cache."""
        self.cache: Any = session.cache
        self._runner, self._texts = runner, texts
        self.is_one = is_one
        self._at: dict[int, int] = {}

    def feed(self, text: int, n_tokens: int, seq_id: int = 0) -> FloatArray:
        """Run the next tokens of a text in one forward; return their logits."""
        return self.batch([(seq_id, text, n_tokens)])[0]

    def batch(
        self, pieces: Sequence[tuple[int, int, int]], long: Sequence[bool] = ()
    ) -> list[FloatArray]:
        """Run pieces of several texts as one flat batch; return the logits of each piece.

        Args:
            pieces: sequence, text and number of tokens of each.
            long: of each piece, true if RoPE is to turn it as a part of a long text; nothing: all.
        """
        ids: list[int] = []
        for seq_id, text, n_tokens in pieces:
            at = self._at.get(seq_id, 0)
            ids += self._texts[text, at : at + n_tokens].tolist()
            self._at[seq_id] = at + n_tokens
        positions = (
            range(self.cache.length, self.cache.length + len(ids))
            if self.is_one
            else self.cache.begin_step([(seq_id, n_tokens) for seq_id, _, n_tokens in pieces])
        )
        sizes = [n for _, _, n in pieces]
        with turning(self._runner, [*zip(long, sizes, strict=True)] if long else True):
            logits = self._runner.forward(ids, list(positions), range(len(ids)))
        ends = np.cumsum([n_tokens for _, _, n_tokens in pieces])[:-1]
        return np.split(logits, ends)

    def length_of(self, seq_id: int) -> int:
        """Return how many tokens a sequence was fed."""
        return self._at.get(seq_id, 0)

    def cut(self, length: int, seq_id: int = 0) -> int:
        """Go back to the first tokens of a sequence; return how many, fewer where states say so."""
        at: int = self.cache.rewind(length) if self.is_one else self.cache.seq_rm(seq_id, length)
        self._at[seq_id] = at
        return at

    def keep(self, seq_id: int = 0) -> None:
        """Keep the states of where a sequence is, which no rows stand for."""
        if self.cache.config.params.state is not None:
            at = self._at[seq_id]
            self.cache.keep_point(*((at,) if self.is_one else (seq_id, at)))

    def fork(self, seq_id: int, to: int) -> None:
        """Have another sequence go on from where one is."""
        self.cache.seq_cp(seq_id, to)
        self._at[to] = self._at[seq_id]

    def restore(self, seq_id: int, to: int) -> None:
        """Read what a sequence keeps, drop it, and put its bytes back as another sequence."""
        tables = self.cache.seq_table(seq_id)
        n_groups = len(self.cache.config.params.groups)

        def of(tables: Sequence[IntArray]) -> tuple[list[IntArray], list[IntArray]]:
            there = [table[table >= 0] for table in tables]
            return there[:n_groups], there[n_groups:]

        cells, slots = of(tables)
        rows = self.cache.read_rows(cells)
        states = [self.cache.read_states(some) for some in slots]
        self.cache.seq_rm(seq_id, 0)
        cells, slots = of(self.cache.seq_claim(to, tables))
        self.cache.write_rows(cells, rows)
        for some, of_some in zip(slots, states, strict=True):
            self.cache.write_states(some, of_some)
        self._at[to] = self._at.pop(seq_id)


def _play_one(player: Player) -> Iterator[Piece]:
    """Play a text in two forwards and then token by token, take it back twice, and go on."""
    yield "prefill", MAIN, 0, player.feed(MAIN, PREFILL)
    player.keep()
    at = LENGTH - _DECODES
    yield "chunks", MAIN, PREFILL, player.feed(MAIN, at - PREFILL)
    for i in range(at, LENGTH):
        yield "decode", MAIN, i, player.feed(MAIN, 1)
        if i == LENGTH - 7:
            player.keep()
    at = player.cut(LENGTH - 5)
    yield "rollback", MAIN, at, player.feed(MAIN, 3)
    at = player.cut(_CUT)
    yield "rollback", _OTHER, at, player.feed(_OTHER, LENGTH - at)


def _play_chunks(player: Player) -> Iterator[Piece]:
    """Play a text token by token, then seven at a time, and the rest at once."""
    at = 0
    for size in [1] * 12 + [7] * 4 + [LENGTH - 40]:
        yield "chunks", _FIRST, at, player.feed(_FIRST, size)
        at += size


def _play_many(player: Player) -> Iterator[Piece]:
    """Fork a text and go on with both, beside three others, in flat batches."""
    player.feed(MAIN, _FORK)
    player.fork(0, 1)
    at = _FORK
    for size in (5, 1, 12, 1):
        left, right = player.batch([(0, _LEFT, size), (1, _RIGHT, size)])
        yield "fork", _LEFT, at, left
        yield "fork", _RIGHT, at, right
        at += size
    starts = [0, 0, 0]
    for sizes in ((21, 5, 12), (1, 1, 1), (1, 7, 1), (1, 1, 19), (1, 1, 1)):
        pieces = [(2 + i, _FIRST + i, size) for i, size in enumerate(sizes)]
        order = pieces[1:] + pieces[:1]
        for (seq_id, text, size), got in zip(order, player.batch(order), strict=True):
            yield "batch", text, starts[seq_id - 2], got
            starts[seq_id - 2] += size


def _play_restore(player: Player) -> Iterator[Piece]:
    """Take what a text has left behind out of the cache, put it back elsewhere, and go on."""
    player.feed(_SECOND, _FORK)
    player.restore(0, 3)
    yield "restore", _SECOND, _FORK, player.feed(_SECOND, 1, 3)
    yield "restore", _SECOND, _FORK + 1, player.feed(_SECOND, 9, 3)


def play_border(player: Player, n_tokens: int) -> Iterator[tuple[bool, Piece]]:
    """Play a short text alone and beside a long one, over the border of RoPE's factors, and back.

    K that was turned by other factors is computed again, as an engine does.

    Args:
        player: with an empty cache.
        n_tokens: of the short text.

    Yields:
        Whether a piece is of a long text, and the piece.
    """

    def alone(n_tokens: int, *, is_long: bool) -> tuple[bool, Piece]:
        player.cut(0)
        return is_long, ("border", MAIN, 0, player.batch([(0, MAIN, n_tokens)], [is_long])[0])

    first = n_tokens // 2
    yield False, ("border", MAIN, 0, player.batch([(0, MAIN, first)], [False])[0])
    for i in range(0 if player.is_one else n_tokens - first):
        size = 9 if i % 2 else 1
        at = player.length_of(1)
        long, short = player.batch([(1, _SECOND, size), (0, MAIN, 1)], [True, False])
        yield True, ("border", _SECOND, at, long)
        yield False, ("border", MAIN, first + i, short)
    yield alone(n_tokens + 20, is_long=True)
    yield alone(n_tokens - 2, is_long=False)


PLAYS = (_play_one, _play_chunks, _play_many, _play_restore)
