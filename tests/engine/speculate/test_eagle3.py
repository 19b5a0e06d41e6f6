"""The Eagle3 drafter on a head that hashes what it is shown: right guesses need right pairs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvcellar.cache_config import make_config
from kvcellar.engine import Request, SamplingParams
from kvcellar.engine.config import EngineConfig
from kvcellar.engine.engine import Engine
from kvcellar.engine.requests.draft import LATER
from kvcellar.engine.speculate import Eagle3Drafter
from kvcellar.errors import ConfigError
from kvcellar.types import ModelCacheParams
from tests.engine.fakes import (
    FULL_PARAMS,
    ByteTokenizer,
    HashRunner,
    TellingRunner,
    TreeCells,
    _seen_by_queries,
    logits_of,
    make_cache,
    wanted,
)
from tests.engine.test_engine import EOS, VOCAB, nothing_is_left, plain_loop

OWN = VOCAB
"""In place of the features of a token that the target has not computed."""


@dataclass
class Said:
    tokens: np.ndarray
    beliefs: np.ndarray
    hidden: list[list[int]]


class HashHead:
    """Says what the target says next, as far as the pairs that its cache shows spell its history.

    The right token is one of the ``k`` likeliest; which one changes.
    """

    feature_layers = (0,)

    def __init__(
        self, cache: Any, rank: int | None = None, target: ModelCacheParams = FULL_PARAMS
    ) -> None:
        self.cache, self.rank, self.target = cache, rank, target
        self.n_forwards = 0

    def join(self, features: Sequence[np.ndarray], before: Any = None) -> np.ndarray:
        rows = np.concatenate(features)
        return rows if before is None else np.concatenate((before, rows))

    def read(
        self, tokens: Any, joined: Sequence[np.ndarray], positions: Any, rows: Any, k: int
    ) -> Said:
        features = np.concatenate(list(joined))
        assert len(features) == len(tokens) == len(positions)
        return self._forward([int(f) for f, _ in features], tokens, positions, rows, k)

    def go_on(self, tokens: Any, above: Said, rows: Any, positions: Any, k: int) -> Said:
        said = self._forward([OWN] * len(tokens), tokens, positions, range(len(tokens)), k)
        for i, row in enumerate(rows):
            assert said.hidden[i] == [*above.hidden[row], tokens[i]], "another path's hidden state"
        return said

    def _forward(self, features: list[int], tokens: Any, positions: Any, rows: Any, k: int) -> Said:
        self.n_forwards += 1
        plan = self.cache.steps.plan(0, len(tokens), positions)
        cells = self.cache.stored[0]
        cells[plan.write_cells] = np.asarray(features) * 1000 + np.asarray(tokens)
        self.cache.steps.wrote(0)
        histories = []
        for read in plan.reads:
            for seen in _seen_by_queries(cells, read):
                pairs = [divmod(pair, 1000) for pair in seen]
                for (_, token), (feature, _) in itertools.pairwise(pairs):
                    assert feature in (token, OWN), "features of another token"
                histories.append([pairs[0][0], *(token for _, token in pairs)])
        kept = [histories[row] for row in rows]
        found = np.zeros((len(kept), k), dtype=np.int64)
        for i, history in enumerate(kept):
            order = np.argsort(-logits_of(history, VOCAB, self.target))[:k]
            found[i] = np.roll(order, len(history) % k if self.rank is None else self.rank)
        beliefs = np.tile(0.9 * 0.5 ** np.arange(k), (len(kept), 1)).astype(np.float32)
        return Said(found, beliefs, kept)


def head_of(capacity: int = 4000, **options: Any) -> Eagle3Drafter:
    cache = TreeCells(make_config(ModelCacheParams(1, 1, 4), capacity, min_chunk=16))
    head: Any = HashHead(cache, options.pop("rank", None), options.pop("target", FULL_PARAMS))
    return Eagle3Drafter(head, cache, **{"min_reach": 0.0, "max_depth": 9, **options})


def engine_of(drafter: Any, kind: Any = TreeCells, capacity: int = 1500, **config: Any) -> Engine:
    cache = kind(make_config(FULL_PARAMS, capacity, min_chunk=16))
    return Engine(
        TellingRunner(cache, VOCAB),
        cache,
        ByteTokenizer(),
        eos_token_ids=EOS,
        config=EngineConfig(
            **{"max_num_batched_tokens": 64, "max_num_seqs": 4, "verify_all_drafts": True, **config}
        ),
        drafter=drafter,
    )


def run(engine: Engine, prompts: Sequence[tuple[int, ...]], n: int) -> dict[int, Any]:
    """Every answer is what the plain loop says."""
    sampling = SamplingParams(max_tokens=n, ignore_eos=True)
    ids = [engine.submit(Request(prompt, sampling)) for prompt in prompts]
    ends = {e.request_id: e for e in engine.run() if hasattr(e, "reason")}
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert ends[request_id].token_ids == plain_loop(prompt, sampling, FULL_PARAMS).token_ids
    nothing_is_left(engine)
    return ends


PROMPTS = [tuple(range(i, 20 + 2 * i)) for i in range(8)]


def test_a_chain_of_its_first_guesses_is_all_right():
    drafter = head_of(width=1, rank=0)
    engine = engine_of(drafter, max_drafted=5)
    run(engine, PROMPTS, 24)
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    assert drafter._cache.n_free == drafter._cache.capacity


def test_one_of_each_level_of_a_tree_is_right():
    drafter = head_of(width=3)
    engine = engine_of(drafter, max_drafted=15)
    run(engine, PROMPTS, 24)
    stats = engine.stats()
    assert stats.accepted_tokens > 24 * 8 // 2, "most tokens were guesses"
    assert stats.accepted_tokens < stats.drafted_tokens
    assert drafter._cache.n_free == drafter._cache.capacity


def test_one_forward_per_level_whatever_the_number_of_sequences():
    drafter = head_of(width=2, rank=0)
    for request_id in (3, 5):
        features = [[t, i] for i, t in enumerate(range(6 + request_id))]
        drafter.saw(request_id, 0, np.array(features, dtype=np.float32))
    asks = [wanted(i, [*range(6 + i), 77], 3, 8) for i in (3, 5)]
    drafts = drafter.propose(asks)
    assert drafter._runner.n_forwards == 3
    for ask, draft in zip(asks, drafts, strict=True):
        assert draft.depth == 3 and len(draft) <= 8
        said = list(ask.tokens)
        for _ in range(3):
            said.append(int(logits_of(said, VOCAB, FULL_PARAMS).argmax()))
        assert len(draft.follow(said[len(ask.tokens) :])) == 3


def test_without_room_for_a_tree_it_is_a_chain():
    drafter = head_of(width=4)
    drafter.saw(1, 0, np.array([[5, 0], [6, 1]], dtype=np.float32))
    (draft,) = drafter.propose([wanted(1, [5, 6, 7], 4)])
    assert draft.is_chain and len(draft) == 4


def test_levels_that_are_hardly_reached_are_not_guessed():
    drafter = head_of(width=1, min_reach=0.5)
    drafter.saw(1, 0, np.array([[5, 0], [6, 1]], dtype=np.float32))
    (draft,) = drafter.propose([wanted(1, [5, 6, 7], 9)])
    assert len(draft) == 7, "0.9 to the power of 7 is the first below a half"


@pytest.mark.parametrize("capacity", [30, 90, 200])
def test_who_does_not_fit_gets_fewer_guesses_and_the_same_tokens(capacity):
    drafter = head_of(capacity, width=2)
    engine = engine_of(drafter, max_drafted=8)
    run(engine, PROMPTS, 24)
    assert drafter._cache.n_free == capacity


def test_a_sequence_on_reused_cells_begins_where_its_features_do():
    drafter = head_of(width=2)
    engine = engine_of(drafter, max_drafted=6)
    shared = tuple(range(100, 160))
    run_once = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.generate(Request(shared, run_once))
    prompts = [(*shared, i) for i in range(3)]
    ids = [
        engine.submit(Request(p, SamplingParams(max_tokens=12, ignore_eos=True))) for p in prompts
    ]
    ends = {e.request_id: e for e in engine.run() if hasattr(e, "reason")}
    for prompt, request_id in zip(prompts, ids, strict=True):
        want = plain_loop(prompt, SamplingParams(max_tokens=12, ignore_eos=True), FULL_PARAMS)
        assert ends[request_id].token_ids == want.token_ids
        assert ends[request_id].usage.cached_tokens > 0
    assert engine.stats().drafted_tokens > 0
    assert drafter._cache.n_free == drafter._cache.capacity


def test_preempted_sequences_go_on_with_what_the_head_knows_of_them():
    drafter = head_of(width=2)
    engine = engine_of(drafter, capacity=90, max_drafted=6)
    run(engine, PROMPTS[:4], 24)
    assert engine.stats().preemptions > 0
    assert drafter._cache.n_free == drafter._cache.capacity


def test_many_pairs_are_taken_in_several_steps_and_hold_nobody_up():
    drafter = head_of(width=1)
    tokens = np.random.default_rng(0).integers(0, 256, 1300).tolist()
    features = np.array([[t, i] for i, t in enumerate(tokens)], dtype=np.float32)
    for start in range(0, 1300, 50):
        drafter.saw(4, start, features[start : start + 50])
    long, short = wanted(4, [*tokens, 9], 2), wanted(5, [5, 6, 7], 2)
    drafter.saw(5, 0, np.array([[5, 0], [6, 1]], dtype=np.float32))
    first, second = drafter.propose([long, short])
    assert first is LATER and len(second) == 2, "beside it the first 510"
    assert drafter._runner.n_forwards == 1 + 2
    assert drafter.propose([long]) == [LATER], "510 more"
    (draft,) = drafter.propose([long])
    assert len(draft) == 2
    assert drafter._runner.n_forwards == 3 + 1 + 2


def test_a_head_that_fails_leaves_nothing_behind():
    drafter = head_of(width=2)
    drafter.saw(1, 0, np.array([[5, 0], [6, 1]], dtype=np.float32))
    drafter.propose([wanted(1, [5, 6, 7], 3, 6)])
    used = drafter._cache.n_free
    go_on, drafter._runner.go_on = drafter._runner.go_on, None
    drafter.saw(1, 2, np.array([[7, 2]], dtype=np.float32))
    with pytest.raises(TypeError):
        drafter.propose([wanted(1, [5, 6, 7, 8], 3, 6)])
    drafter._cache.cancel_step()
    assert drafter._cache.n_free == used - 1, "one more pair and no guesses"
    drafter._runner.go_on = go_on
    drafter.saw(1, 3, np.array([[8, 3]], dtype=np.float32))
    (draft,) = drafter.propose([wanted(1, [5, 6, 7, 8, 9], 3, 6)])
    assert draft.depth == 3


def test_where_nothing_was_chosen_it_is_asked_the_same_again():
    """A sequence may have had to give way before its guesses were verified."""
    drafter = head_of(width=2)
    drafter.saw(1, 0, np.array([[5, 0], [6, 1]], dtype=np.float32))
    ask = wanted(1, [5, 6, 7], 3, 6)
    first = drafter.propose([ask])
    n_free = drafter._cache.n_free
    assert drafter.propose([ask]) == first and first[0].depth == 3
    assert drafter._cache.n_free == n_free
    drafter.saw(1, 2, np.array([[7, 2]], dtype=np.float32))
    (draft,) = drafter.propose([wanted(1, [5, 6, 7, 8], 3, 6)])
    want = logits_of([5, 6, 7, 8], VOCAB, FULL_PARAMS).argmax()
    assert want in draft.tokens[:2]


def test_a_runner_that_tells_no_features_is_refused():
    cache = make_cache("tree")
    with pytest.raises(ConfigError, match="tells nothing"):
        Engine(HashRunner(cache, VOCAB), cache, drafter=head_of())


def test_features_that_come_once_more_are_those_that_are_known():
    drafter = head_of(width=1, rank=0)
    rows = np.array([[t, i] for i, t in enumerate((5, 6, 7, 8))], dtype=np.float32)
    drafter.saw(1, 0, rows[:3])
    drafter.propose([wanted(1, [5, 6, 7, 8], 2)])
    drafter.saw(1, 0, rows[:2])
    drafter.saw(1, 2, rows[2:])
    (draft,) = drafter.propose([wanted(1, [5, 6, 7, 8, 9], 2)])
    assert draft.tokens[0] == logits_of([5, 6, 7, 8, 9], VOCAB, FULL_PARAMS).argmax()
    drafter.saw(1, 7, rows[:1])  # what lies between is not known: it begins anew
    assert not drafter.propose([wanted(1, [5, 6, 7, 8, 9], 2)])[0]
