"""A smaller model's guesses: its cache follows the target's, whatever is accepted or forked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from kvcellar.cache_config import make_config
from kvcellar.engine import Request, SamplingParams, generate, last
from kvcellar.engine.requests.draft import LATER
from kvcellar.engine.speculate import DraftModel, DraftRequest
from kvcellar.errors import ConfigError
from tests.engine.fakes import (
    FULL_PARAMS,
    PARAMS,
    STATE_PARAMS,
    ByteTokenizer,
    HashRunner,
    TreeCells,
    logits_of,
    make_cache,
    wanted,
)
from tests.engine.test_engine import VOCAB, make_engine, nothing_is_left, plain_loop


def draft_of(params: Any, capacity: int = 2000, vocab: int = VOCAB) -> DraftModel:
    cache = TreeCells(make_config(params, capacity, min_chunk=16))
    return DraftModel(HashRunner(cache, vocab), cache, VOCAB)


@pytest.mark.parametrize(
    "params", [FULL_PARAMS, PARAMS, STATE_PARAMS], ids=["full", "window", "state"]
)
def test_its_guesses_are_what_it_would_say_itself(params):
    drafter = draft_of(params)
    tokens = [5, 6, 7]
    for truth in (3, 250, 4, 4, 9):
        (draft,) = drafter.propose([wanted(7, tokens, 4)])
        said = list(tokens)
        for _ in range(4):
            said.append(int(logits_of(said, VOCAB, params).argmax()))
        assert list(draft.tokens) == said[len(tokens) :]
        tokens = [*tokens, *draft.tokens[:2], truth]  # two were right
    drafter.ended(7)
    assert drafter._cache.n_free == drafter._cache.capacity


@pytest.mark.parametrize(
    "params", [FULL_PARAMS, PARAMS, STATE_PARAMS], ids=["full", "window", "state"]
)
@pytest.mark.parametrize("capacity", [2000, 120])
def test_the_same_tokens_in_fewer_steps(params, capacity):
    drafter = draft_of(params, capacity)
    engine = make_engine(
        params=params, capacity=1500, drafter=drafter, verify_all_drafts=True, max_num_seqs=4
    )
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [tuple(range(i, 20 + 2 * i)) for i in range(8)]
    ids = [engine.submit(Request(prompt, sampling)) for prompt in prompts]
    ends = {e.request_id: e for e in engine.run() if hasattr(e, "reason")}
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert ends[request_id].token_ids == plain_loop(prompt, sampling, params).token_ids
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0, "it is the target itself"
    if capacity == 2000:
        assert stats.n_steps < 30, "not 24 for each of two batches"
    nothing_is_left(engine)
    assert drafter._cache.n_free == drafter._cache.capacity


def slow_tree(
    tokens: Iterable[int], ask: DraftRequest, width: int, params: Any
) -> dict[Any, float]:
    """Paths of guesses and what is believed of their last one, each computed from the tokens."""
    found: dict[tuple[int, ...], tuple[float, float]] = {}  # path: belief, of the whole path
    level: list[tuple[int, ...]] = [()]
    for _ in range(ask.limit):
        below = {}
        for path in level:
            row = logits_of([*tokens, *path], VOCAB, params).astype(float)
            share = np.exp(row - row.max())
            share /= share.sum()
            for token in np.argsort(-share)[:width]:
                before = found[path][1] if path else 1.0
                below[*path, int(token)] = (share[token], before * share[token])
        found |= below
        level = sorted(below, key=lambda path: -below[path][1])[:width]
        level = [path for i, path in enumerate(level) if not i or below[path][1] >= 0.01]
    best = sorted(found, key=lambda path: -found[path][1])[: ask.n_nodes]
    return {path: found[path][0] for path in best}


@pytest.mark.parametrize(
    "params", [FULL_PARAMS, PARAMS, STATE_PARAMS], ids=["full", "window", "state"]
)
def test_its_trees_hold_the_likeliest_paths_whatever_was_right_before(params):
    """It shows nowhere if guesses that were right are kept in its cache or computed again."""
    drafter = draft_of(params)
    rng = np.random.default_rng(0)
    sequences = [[5, 6, 7], [9, 8, 7, 6]]
    n_right = 0
    asks = [wanted(i, tokens, 4, 12) for i, tokens in enumerate(sequences)]
    for _ in range(6):
        for ask, draft in zip(asks, drafter.propose(asks), strict=True):
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(draft.tokens, draft.parents, strict=True):
                paths.append(((*paths[parent],) if parent >= 0 else ()) + (token,))
            want = slow_tree(ask.tokens, ask, 4, params)
            assert dict(zip(paths, draft.beliefs, strict=True)) == pytest.approx(want, rel=1e-4)
            right = paths[int(rng.integers(len(paths)))]
            n_right += len(right)
            ask.tokens.extend([*right, int(rng.integers(VOCAB))])
    assert drafter._runner.n_tokens < sum(len(ask.tokens) for ask in asks) + 2 * 6 * 3 * 4
    for request_id in (0, 1):
        drafter.ended(request_id)
    assert n_right > 12 and drafter._cache.n_free == drafter._cache.capacity
    drafter._cache.check()


def test_a_sequence_that_begins_as_another_does_shares_its_cells():
    drafter = draft_of(FULL_PARAMS)
    trunk = list(range(100))
    drafter.propose([wanted(0, [*trunk, 1], 2, 8)])
    before = drafter._runner.n_tokens
    (draft,) = drafter.propose([wanted(1, [*trunk, 2, 3], 2, 8)])
    assert drafter._runner.n_tokens - before <= 2 + 4, "two tokens and a level"
    (alone,) = draft_of(FULL_PARAMS).propose([wanted(1, [*trunk, 2, 3], 2, 8)])
    assert draft == alone
    drafter.ended(0)
    assert drafter.propose([wanted(1, [*trunk, 2, 3, 4], 2)])[0]


def test_forwards_are_no_longer_than_the_runner_takes():
    drafter = draft_of(FULL_PARAMS)
    runner = drafter._runner
    runner.max_tokens_per_step = 16
    drafter = DraftModel(runner, drafter._cache, VOCAB)
    asks = [wanted(i, list(range(i, 30 + 9 * i)), 3, 9) for i in range(7)]
    whole = draft_of(FULL_PARAMS).propose(asks)
    assert drafter.propose(asks) == whole
    assert max(map(len, runner.forwards)) <= 16


def test_a_long_prompt_is_read_in_several_steps_and_holds_nobody_up():
    drafter = draft_of(FULL_PARAMS)
    tokens = np.random.default_rng(0).integers(0, 256, 1200).tolist()
    long, short = wanted(0, tokens, 3, 9), wanted(1, [1, 2, 3], 3, 9)
    first, second = drafter.propose([long, short])
    assert first is LATER and second
    assert max(map(len, drafter._runner.forwards)) == 512
    drafter.ended(1)
    n_before = drafter._runner.n_tokens
    assert drafter.propose([long]) == [LATER]
    assert drafter._runner.n_tokens - n_before == 512
    (draft,) = drafter.propose([long])
    want = slow_tree(tokens, long, 4, FULL_PARAMS)
    assert sorted(draft.beliefs) == pytest.approx(sorted(want.values()), rel=1e-4)


def test_an_engine_decodes_on_while_a_draft_model_reads():
    cache = make_cache("tree", 4000, FULL_PARAMS)
    drafter = draft_of(FULL_PARAMS, capacity=4000)
    engine = make_engine(
        params=FULL_PARAMS,
        cache=cache,
        drafter=drafter,
        verify_all_drafts=True,
        max_num_batched_tokens=2048,
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = tuple(np.random.default_rng(1).integers(0, 256, 1300).tolist())
    n_read = [0]
    engine.submit(Request(prompt, params))
    (end,) = [e for e in stepped(engine, n_read, drafter) if hasattr(e, "reason")]
    assert end.token_ids == plain_loop_of(prompt, params)
    assert max(np.diff(n_read)) <= 512 + 16 * 4
    assert end.usage.accepted_tokens > 0
    nothing_is_left(engine)


def stepped(engine: Any, n_read: list[int], drafter: Any) -> Any:
    """Events of all steps, and what the draft model had read after each."""
    while not engine.is_idle:
        yield from engine.step()
        n_read.append(drafter._runner.n_tokens)


def plain_loop_of(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    cache = make_cache("seq", 2000, FULL_PARAMS)
    runner = HashRunner(cache, VOCAB)
    return last(generate(runner, cache, ByteTokenizer(), prompt, params)).token_ids


def test_where_nothing_was_chosen_it_is_asked_the_same_again():
    """A sequence may have had to give way before its guesses were verified."""
    drafter = draft_of(FULL_PARAMS)
    ask = wanted(0, [1, 2, 3], 3, 8)
    assert drafter.propose([ask]) == drafter.propose([ask])


def test_what_does_not_fit_gets_no_guesses_and_the_rest_does():
    drafter = draft_of(FULL_PARAMS, capacity=60)
    asks = [wanted(i, list(range(i, 25 + i)), 3, 8) for i in range(3)]
    drafts = drafter.propose(asks)
    assert [bool(draft) for draft in drafts] == [True, False, False]
    drafts = drafter.propose(asks[1:])
    assert [bool(draft) for draft in drafts] == [True, False], "the first gave way"


def test_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="the target's own vocabulary"):
        draft_of(FULL_PARAMS, vocab=VOCAB + 1)
