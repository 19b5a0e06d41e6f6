"""Trees of guesses in the engine: what is walked, kept, dropped, told, and how it is spread."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvcellar.bookkeeping import TreeSequences
from kvcellar.cache_config import make_config
from kvcellar.engine import Engine, EngineConfig, FinishEvent, Request, SamplingParams
from kvcellar.engine.requests.draft import NO_DRAFT, Draft
from kvcellar.engine.sampler.sampling import SamplingState
from kvcellar.engine.speculate import DraftRequest, verify
from kvcellar.errors import CacheFullError, ConfigError
from kvcellar.types import ModelCacheParams
from tests.engine.fakes import (
    FULL_PARAMS,
    PARAMS,
    GuessTrees,
    HashRunner,
    TellingRunner,
    TreeCells,
    make_cache,
)
from tests.engine.test_engine import (
    VOCAB,
    GuessAgain,
    make_engine,
    nothing_is_left,
    plain_loop,
)

TREE = Draft((3, 4, 5, 6, 5, 9), "tree", (-1, -1, 0, 1, 1, 4))
"""3 -> 5, and 4 -> 6 or 5, and behind that 5 a 9."""


def engine_of(drafter: Any, params: ModelCacheParams = PARAMS, **config: Any) -> Engine:
    cache = make_cache("tree", config.pop("capacity", 400), params)
    settings = {"verify_all_drafts": True, "max_num_batched_tokens": 64, **config}
    return make_engine(cache=cache, params=params, drafter=drafter, **settings)


# The value ----------------------------------------------------------------------------------------


def test_a_draft_is_a_chain_unless_it_says_otherwise():
    chain = Draft((7, 8, 9), "chain")
    assert chain.parents == (-1, 0, 1) and chain.is_chain and chain.depth == 3
    assert not TREE.is_chain and TREE.depth == 3
    assert not NO_DRAFT and NO_DRAFT.is_chain and NO_DRAFT.depth == 0


def test_a_path_is_followed_as_far_as_it_goes():
    assert TREE.follow([4, 5, 9, 1]) == [1, 4, 5]
    assert TREE.follow([4, 7]) == [1]
    assert TREE.follow([9]) == TREE.follow([]) == []


def test_a_part_of_a_tree_is_a_tree():
    part = TREE.keep([1, 4, 5])
    assert part == Draft((4, 5, 9), "tree", (-1, 0, 1)) and part.is_chain
    assert TREE.first(3) == Draft((3, 4, 5), "tree", (-1, -1, 0))
    assert TREE.first(0) is TREE.keep([]) is NO_DRAFT


# The walk -----------------------------------------------------------------------------------------


def rows_saying(*tokens: int) -> np.ndarray:
    logits = np.zeros((len(tokens), 12), dtype=np.float32)
    logits[range(len(tokens)), tokens] = 5
    return logits


def test_the_walk_goes_where_sampling_goes_and_one_further():
    state = SamplingState(SamplingParams(), 12)
    verdict = verify(rows_saying(4, 0, 5, 0, 0, 9, 2), TREE, state)
    assert [c.token_id for c in verdict.choices] == [4, 5, 9, 2]
    assert verdict.accepted == (1, 4, 5)
    assert state.n_sampled == 0, "a trial"
    none = verify(rows_saying(8, 1, 1, 1, 1, 1, 1), TREE, state)
    assert [c.token_id for c in none.choices] == [8] and none.accepted == ()


class UpTo:
    """A guide that lets ``n`` tokens be said, all of them even."""

    end_id = None

    def __init__(self, n: int) -> None:
        self.n = n

    @property
    def is_complete(self) -> bool:
        return self.n == 0

    def allowed(self) -> np.ndarray:
        assert self.n, "nobody asks behind the end"
        return np.arange(VOCAB) % 2 == 0

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == 0 and self.n
        self.n -= 1

    def fork(self) -> UpTo:
        return UpTo(self.n)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_grammar_holds_within_a_tree_and_ends_it(temperature):
    params = SamplingParams(max_tokens=30, guide=lambda: UpTo(9), temperature=temperature, seed=2)
    want = plain_loop((1, 2, 3), params)
    right = Known({(1, 2, 3): want.token_ids})
    engine = engine_of(right)
    end = engine.generate(Request((1, 2, 3), params))
    assert end.token_ids == want.token_ids and len(end.token_ids) == 9
    assert engine.stats().accepted_tokens > 0
    nothing_is_left(engine)


class Known:
    """Knows what is said behind some prompts, and guesses it beside something wrong."""

    is_free = True

    def __init__(self, said: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self.said = said

    def propose(self, asks: Any) -> list[Draft]:
        return [self._tree(ask) for ask in asks]

    def ended(self, request_id: int) -> None:
        pass

    def _tree(self, ask: DraftRequest) -> Draft:
        (whole,) = (p + s for p, s in self.said.items() if tuple(ask.tokens[: len(p)]) == p)
        coming = whole[len(ask.tokens) :][: ask.limit]
        tokens: list[int] = []
        parents: list[int] = []
        for token in coming:
            above = len(tokens) - 1
            if len(tokens) + 2 <= ask.n_nodes:
                tokens += [(token + 1) % VOCAB, token]
                parents += [above, above]
        return Draft(tuple(tokens), "known", tuple(parents))


def test_logprobs_penalties_and_stops_are_those_of_one_token_at_a_time():
    params = SamplingParams(
        max_tokens=40, logprobs=2, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True
    )
    want = plain_loop((5, 6), params)
    stop = want.token_ids[11]
    n = want.token_ids.index(stop) + 1
    engine = engine_of(Known({(5, 6): want.token_ids}))
    request = Request((5, 6), SamplingParams(**vars_of(params) | {"stop_token_ids": (stop,)}))
    request_id = engine.submit(request)
    events = [e for e in engine.run() if e.request_id == request_id]
    end = events[-1]
    assert isinstance(end, FinishEvent) and end.reason == "stop"
    assert end.token_ids == want.token_ids[:n]
    alone = make_engine(capacity=200)
    alone.submit(request)
    plain = [e for e in alone.run() if not isinstance(e, FinishEvent)]
    assert events[:-1] == plain
    nothing_is_left(engine)


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_who_ends_among_right_guesses_is_gone_on_from_at_its_end():
    """A stop in the midst of accepted guesses: those behind it are no part of the sequence."""
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    want = plain_loop((1, 2), free).token_ids
    stop = want[3]
    n = want.index(stop) + 1
    for drafter in (Known({(1, 2): want}), Chains(want)):
        engine = engine_of(drafter)
        stopping = SamplingParams(ignore_eos=True, stop_token_ids=(stop,))
        end = engine.generate(Request((1, 2), stopping))
        assert end.token_ids == want[:n]
        assert engine.index.match_prefix((1, 2, *want)).n_matched <= 2 + n
        drafter.said = {}
        drafter.propose = lambda asks: [NO_DRAFT for _ in asks]
        more = engine.generate(Request((1, 2, *want[:n], 7, 8), free))
        assert more.token_ids == plain_loop((1, 2, *want[:n], 7, 8), free).token_ids
        nothing_is_left(engine)


class Chains(Known):
    """Trees with nothing wrong in them."""

    def __init__(self, said: tuple[int, ...]) -> None:
        super().__init__({(1, 2): said})

    def _tree(self, ask: DraftRequest) -> Draft:
        whole = (1, 2, *self.said[1, 2])
        return Draft(tuple(whole[len(ask.tokens) :][: ask.limit]), "known")


# What goes wrong ----------------------------------------------------------------------------------


def test_a_forward_that_fails_leaves_no_guess_behind():
    engine = engine_of(GuessTrees(FULL_PARAMS, VOCAB), FULL_PARAMS)
    runner: Any = engine.runner
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    ids = [engine.submit(Request((i, 2, 3), params)) for i in range(3)]
    for _ in range(3):
        engine.step()
    runner.fail_after = len(runner.forwards)
    ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    assert [ends[i].reason for i in ids] == ["error"] * 3
    nothing_is_left(engine)


def test_room_that_was_taken_between_choice_and_step_costs_nobody_anything(monkeypatch):
    engine = engine_of(GuessTrees(FULL_PARAMS, VOCAB), FULL_PARAMS)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    request_id = engine.submit(Request((1, 2, 3), params))
    for _ in range(2):
        engine.step()
    begin, refused = engine.cache.begin_step, []

    def late(stretches: Any) -> Any:
        if sum(n for _, n in stretches) > 1 and len(refused) < 3:
            refused.append(stretches)
            raise CacheFullError("another cache took it")
        return begin(stretches)

    monkeypatch.setattr(engine.cache, "begin_step", late)
    (end,) = [e for e in engine.run() if isinstance(e, FinishEvent)]
    assert len(refused) == 3 and end.request_id == request_id
    assert end.token_ids == plain_loop((1, 2, 3), params, FULL_PARAMS).token_ids
    nothing_is_left(engine)


def test_no_more_is_guessed_than_a_window_lets_be_taken_back():
    class Wide(GuessAgain):
        def __init__(self) -> None:
            self.limits: list[int] = []

        def propose(self, asks: Any) -> list[Draft]:
            self.limits += [ask.limit for ask in asks]
            return [Draft(tuple(range(ask.limit)), "wide") for ask in asks]

    for slack, most in ((0, 0), (3, 3), (64, 16)):
        cache = TreeCells(make_config(PARAMS, 200, min_chunk=16, window_slack=slack))
        drafter = Wide()
        engine = make_engine(cache=cache, drafter=drafter, verify_all_drafts=True)
        params = SamplingParams(max_tokens=90, ignore_eos=True)
        end = engine.generate(Request((1, 2, 3), params))
        assert end.token_ids == plain_loop((1, 2, 3), params).token_ids
        assert max(drafter.limits, default=0) == most
        nothing_is_left(engine)


# Features -----------------------------------------------------------------------------------------


class Listening(GuessTrees):
    """Keeps what it is told, and finds at every ask that it knows all but the last token."""

    feature_layers = (0,)

    def __init__(self) -> None:
        super().__init__(FULL_PARAMS, VOCAB)
        self.told: dict[int, dict[int, int]] = {}
        self.n_checked = 0

    def saw(self, request_id: int, start: int, features: np.ndarray) -> None:
        told = self.told.setdefault(request_id, {})
        for i, (token, position) in enumerate(features.astype(int).tolist()):
            assert position == start + i
            told[position] = token

    def propose(self, asks: Any) -> list[Draft]:
        for ask in asks:
            told = self.told[ask.request_id]
            assert max(told) == len(ask.tokens) - 2
            assert sorted(told) == list(range(min(told), len(ask.tokens) - 1))
            assert all(ask.tokens[position] == token for position, token in told.items())
            self.n_checked += 1
        return super().propose(asks)


def test_features_are_told_of_every_token_that_counts_and_no_other():
    cache = TreeCells(make_config(FULL_PARAMS, 120, min_chunk=16))
    listening = Listening()
    engine = Engine(
        TellingRunner(cache, VOCAB),
        cache,
        drafter=listening,
        config=EngineConfig(verify_all_drafts=True, max_num_batched_tokens=24, max_num_seqs=4),
    )
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    for i in range(6):
        engine.submit(Request(tuple(range(i % 2, 30 + i)), params))
        engine.step()
    for _ in engine.run():
        pass
    stats = engine.stats()
    assert listening.n_checked > 30 and stats.preemptions and stats.accepted_tokens
    assert stats.reused_tokens, "some begin behind a shared prefix"


def test_a_runner_that_tells_nothing_is_refused():
    cache = make_cache("tree")
    with pytest.raises(ConfigError, match="HashRunner tells nothing"):
        Engine(HashRunner(cache, VOCAB), cache, drafter=Listening())


# The distribution ---------------------------------------------------------------------------------

N_WORDS = 5


class Markov:
    """Logits by the last token alone: what the text has to be distributed like is known."""

    params = ModelCacheParams(n_layers=1, n_kv_heads=1, head_dim=4)
    vocab_size = N_WORDS
    max_tokens_per_step = None
    table = np.random.default_rng(7).normal(0, 1.2, (N_WORDS, N_WORDS)).astype(np.float32)

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def forward(self, token_ids: Any, positions: Any, rows: Any = None) -> np.ndarray:
        self.cache.steps.plan(0, len(token_ids), positions)
        self.cache.steps.wrote(0)
        wanted = [len(token_ids) - 1] if rows is None else list(rows)
        return self.table[np.asarray(token_ids)[wanted]]


class Fixed:
    """One tree every time: two or three guesses a level."""

    is_free = True
    tree = Draft((0, 3, 1, 2, 4, 0, 2), "fixed", (-1, -1, 0, 0, 0, 1, 1))

    def propose(self, asks: Any) -> list[Draft]:
        return [self.tree if ask.limit > 2 else NO_DRAFT for ask in asks]

    def ended(self, request_id: int) -> None:
        pass


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.slow
def test_what_is_sampled_is_distributed_as_the_model_says(temperature):
    """Chi-square of 20,000 tokens, by the token before; fixed seeds, 99.9 per cent."""
    cache = TreeSequences(make_config(Markov.params, 10 * 2100))
    config = EngineConfig(verify_all_drafts=True, index="naive")
    engine = Engine(Markov(cache), cache, drafter=Fixed(), config=config)
    for seed in range(10):
        params = SamplingParams(
            temperature=temperature, max_tokens=2000, ignore_eos=True, seed=seed
        )
        engine.submit(Request((seed % N_WORDS,), params))
    pairs: Counter[tuple[int, int]] = Counter()
    for event in engine.run():
        if isinstance(event, FinishEvent):
            pairs.update(zip(event.token_ids, event.token_ids[1:], strict=False))
    stats = engine.stats()
    assert stats.sampled_tokens == 20_000
    assert stats.accepted_tokens > 5000, "of which many were guesses"
    chi2 = 0.0
    for before in range(N_WORDS):
        row = Markov.table[before].astype(float) / temperature
        wanted = np.exp(row - row.max())
        seen = np.array([pairs[before, after] for after in range(N_WORDS)], float)
        wanted *= seen.sum() / wanted.sum()
        assert wanted.min() > 5
        chi2 += float(((seen - wanted) ** 2 / wanted).sum())
    assert chi2 < 45.3, "the 0.999 quantile for 5 rows of 4 degrees of freedom"
