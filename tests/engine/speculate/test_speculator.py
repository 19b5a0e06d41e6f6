"""Guesses change how fast tokens come and nothing else; and only where that pays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.engine import Request, SamplingParams
from kvcellar.engine.requests.draft import LATER, NO_DRAFT
from kvcellar.engine.speculate import Draft, DraftRequest, NgramDrafter, Speculator, StepCosts
from kvcellar.engine.speculate.ngram import _key, _keys
from kvcellar.errors import ConfigError
from kvcellar.history import History
from tests.engine.fakes import wanted
from tests.engine.test_engine import make_engine, nothing_is_left, plain_loop

# The n-gram drafter -------------------------------------------------------------------------------


def slow_guess(histories: list[list[int]], own: int, sizes: tuple[int, ...], limit: int) -> Any:
    """All places where the last tokens stood before, by looking everywhere."""
    tokens = histories[own]
    for size in sizes:
        suffix = tokens[-size:]
        found = [
            tuple(other[i : i + limit])
            for other in histories
            for i in range(size, len(other))
            if other[i - size : i] == suffix
        ]
        if len(tokens) >= size and found:
            return f"{size}-gram", found
    return "", []


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=12)),
        min_size=1,
        max_size=14,
    )
)
def test_a_guess_is_what_followed_the_longest_known_run(steps):
    sizes = (4, 2)
    drafter = NgramDrafter(sizes)
    histories = [History() for _ in range(4)]
    known: list[list[int]] = [[], [], [], []]
    for own, new in steps:
        histories[own].extend(new)
        known[own] = list(histories[own])
        (draft,) = drafter.propose([DraftRequest(own, histories[own], 5)])
        kind, found = slow_guess(known, own, sizes, 5)
        assert draft.kind == kind
        if found:
            assert any(draft.tokens[: len(f)] == f for f in found)
        else:
            assert draft.tokens == ()


def test_a_sequence_finds_what_its_siblings_and_those_before_it_said():
    drafter = NgramDrafter((3,))
    drafter.propose([wanted(0, [1, 2, 3, 4, 5, 6], 4)])
    drafter.ended(0)
    tokens = [9, 9, 2, 3, 4]
    assert drafter.propose([wanted(1, tokens, 2)]) == [Draft((5, 6), "3-gram")]
    assert drafter.propose([wanted(1, tokens, 1)]) == [Draft((5,), "3-gram")]


def test_what_repeats_goes_on_repeating():
    drafter = NgramDrafter((2,))
    assert drafter.propose([wanted(0, [7, 8, 7, 8, 7, 8], 5)])[0].tokens == (7, 8, 7, 8, 7)


def test_the_oldest_of_what_has_ended_is_forgotten():
    drafter = NgramDrafter((2,), max_tokens=3000)
    for i in range(20):
        drafter.propose([wanted(i, [1000 * i + j for j in range(1000)], 4)])
        drafter.ended(i)
    assert drafter.propose([wanted(90, [5, 0, 1], 4)])[0].tokens == ()
    assert drafter.propose([wanted(91, [5, 19_000, 19_001], 2)])[0].tokens == (19_002, 19_003)
    assert len(drafter._histories) <= 5
    assert len(drafter._by_size[0][1]) < 10_000


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_keys_that_roll_on_are_those_of_their_runs(pieces):
    """However many tokens come at a time: the keys of the last runs, and what is remembered."""
    sizes = (5, 3, 1)
    tokens = np.random.default_rng(0).integers(0, 1 << 31, sum(pieces)).tolist()
    rolling, at_once = NgramDrafter(sizes), NgramDrafter(sizes)
    said = History()
    for n in pieces:
        said.extend(tokens[len(said) : len(said) + n])
        rolling.propose([DraftRequest(0, said, 4)])
    at_once.propose([wanted(0, tokens, 4)])
    assert rolling._by_size == at_once._by_size
    keys = rolling._of_request[0].keys
    assert [key for key, size in zip(keys, sizes, strict=True) if size <= len(tokens)] == [
        _key(tokens[-size:]) for size in sizes if size <= len(tokens)
    ]


def test_one_run_and_many_have_one_key():
    tokens = np.random.default_rng(0).integers(0, 1 << 31, 50)
    for size in (1, 2, 8):
        keys = _keys(tokens, size).tolist()
        assert keys == [_key(tokens[i : i + size].tolist()) for i in range(51 - size)]
        assert len(set(keys)) == len(keys)


def test_sizes_that_cannot_be():
    for sizes in ((), (0,), (2, 4), (3, 3)):
        with pytest.raises(ConfigError, match="longest first"):
            NgramDrafter(sizes)


# How many pay -------------------------------------------------------------------------------------


def test_a_size_that_was_never_tried_is_believed_to_cost_little_more():
    costs = StepCosts()
    assert costs.seconds(3) is None
    costs.learn(1, 1.0)
    assert costs.seconds(9) == 1.0
    costs.learn(9, 3.0)
    assert costs.seconds(5) == 1.5, "half way, and half of that"
    assert costs.seconds(9) == costs.seconds(500) == 3.0
    for _ in range(40):
        costs.learn(9, 1.0)
    assert costs.seconds(9) == pytest.approx(1.0, abs=0.01)
    costs.learn(1, 1000.0)
    assert costs.seconds(1) < 1.3, "one step that was held up says little"


def test_no_size_costs_more_than_a_larger_one():
    costs = StepCosts()
    for n, seconds in ((1, 1.0), (8, 1.4), (4, 50.0), (2, 1.1)):
        costs.learn(n, seconds)
    assert [costs.seconds(n) for n in (1, 2, 4, 8)] == [1.0, 1.1, 1.4, 1.4]
    costs.learn(8, 1.6)
    assert costs.seconds(4) == costs.seconds(8) > 1.4
    costs.learn(4, 1.2)
    assert costs.seconds(4) == costs.seconds(8), "twice what it took is what is left of the first"
    for _ in range(9):
        costs.learn(4, 1.2)
    assert 1.2 < costs.seconds(4) < 1.21


class Always:
    """Guesses the same tokens every time."""

    is_free = True

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self.n_asked = 0

    def propose(self, asks: Any) -> list[Draft]:
        self.n_asked += 1
        return [Draft(self.tokens[: ask.limit], "always") for ask in asks]

    def ended(self, request_id: int) -> None:
        pass

    def spent(self) -> float:
        return 0.0


class Costly(Always):
    """And takes time for every level, by a clock of its own."""

    is_free = False

    def __init__(self, tokens: tuple[int, ...], level_s: float = 0.06) -> None:
        super().__init__(tokens)
        self.level_s = level_s
        self.now = self._told = 0.0

    def clock(self) -> float:
        return self.now

    def spent(self) -> float:
        """Seconds since the last call."""
        spent, self._told = self.now - self._told, self.now
        return spent

    def propose(self, asks: Any) -> list[Draft]:
        drafts = super().propose(asks)
        self.now += self.level_s * max(draft.depth for draft in drafts)
        return drafts


class Sequenced:
    """What a speculator looks at of a sequence."""

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self.tokens = [1]
        self.sampled: list[int] = []
        self.draft = NO_DRAFT
        self.request = Request((1,), SamplingParams(max_tokens=None))


def rounds(
    speculator: Any, truth: tuple[int, ...], n: int, cost: Any, n_sequences: int = 1
) -> list[int]:
    """How many guesses were verified in each of n steps that take ``cost(n_tokens)`` seconds."""
    sequences: list[Any] = [Sequenced(i) for i in range(n_sequences)]
    verified = []
    for _ in range(n):
        speculator.propose(sequences, 0)
        verified.append(sum(len(s.draft) for s in sequences))
        n_tokens = n_sequences + verified[-1]
        speculator.ran(n_tokens, cost(n_tokens) + speculator.drafter.spent())
        for sequence in sequences:
            n_right = len(sequence.draft.follow(truth))
            speculator.learn(sequence.request_id, list(truth[: n_right + 1]))
    return verified


def flat(n_tokens: int) -> float:
    return 1.0 + 0.01 * n_tokens


def steep(n_tokens: int) -> float:
    return float(n_tokens)


def test_right_guesses_are_verified_where_they_are_cheap_and_not_where_they_are_dear():
    right = tuple(range(8))
    assert rounds(Speculator(Always(right)), (*right, 9), 50, flat)[-10:] == [8] * 10
    dear = rounds(Speculator(Always(right)), (*right, 9), 200, lambda n: n**1.2)
    assert sum(dear[-100:]) == 0


def test_guesses_stop_where_running_tokens_again_makes_them_too_dear():
    """Three of five are right, and a step of two tokens takes half as much again as one of one."""
    verified = []
    for runs_again in (False, True):
        rng = np.random.default_rng(0)
        speculator = Speculator(Always((5,)), 1, runs_again=runs_again)
        sequence: Any = Sequenced(0)
        n_verified = 0
        for step in range(600):
            speculator.propose([sequence], 0)
            n_verified += len(sequence.draft) * (step >= 300)
            speculator.learn(0, [5 if rng.random() < 0.6 else 6, 5])
            speculator.ran(1 + len(sequence.draft), [1.0, 1.5][len(sequence.draft)])
            speculator.ran(3, 2.0)  # others have such a step now and then
        verified.append(n_verified)
    assert verified[0] > 250 and verified[1] < 30


def test_wrong_guesses_stop_and_are_tried_again_when_they_would_have_been_right():
    drafter = Always((5,) * 8)
    speculator = Speculator(drafter)
    assert sum(rounds(speculator, (6,), 100, flat)[-50:]) == 0
    assert drafter.n_asked == 100
    assert rounds(speculator, (5,) * 9, 100, flat)[-1] == 8


def test_a_new_engine_loses_little_before_it_knows_that_guesses_are_wrong():
    """Dear guesses, one in fifty right: 120 tokens, from the first step on, by the fake clock."""
    rng = np.random.default_rng(0)
    sequence: Any = Sequenced(0)
    for seed in range(4):
        speculator = Speculator(Always((5,) * 16), 16)
        n_tokens, took = 0, 0.0
        while n_tokens < 120:
            speculator.propose([sequence], 0)
            seconds = (1 + 0.1 * len(sequence.draft)) * (1 + 0.05 * rng.standard_normal())
            truth = [5 if rng.random() < 0.02 else 6 for _ in range(17)]
            chosen = truth[: len(sequence.draft.follow(truth)) + 1]
            speculator.learn(0, chosen)
            speculator.ran(1 + len(sequence.draft), seconds)
            n_tokens, took = n_tokens + len(chosen), took + seconds
        assert n_tokens / took > 0.96, seed


def test_what_a_drafter_reads_before_its_first_guess_says_nothing_of_levels():
    class Reading(Costly):
        """Takes three calls of 5 s each before it guesses."""

        def propose(self, asks: Any) -> list[Draft]:
            if self.n_asked < 3:
                self.n_asked += 1
                self.now += 5.0
                return [LATER for _ in asks]
            return super().propose(asks)

    drafter = Reading((5,) * 8)
    speculator = Speculator(drafter, clock=drafter.clock)
    rounds(speculator, (5,) * 9, 30, flat)
    assert speculator.level_s == pytest.approx(0.06, rel=0.01)
    assert rounds(speculator, (5,) * 9, 10, flat) == [8] * 10


def test_where_two_sequences_guess_the_better_guesses_go_first():
    speculator = Speculator(Always(tuple(range(8))))
    rounds(speculator, (*range(8), 9), 30, flat, n_sequences=2)
    sequences: list[Any] = [Sequenced(0), Sequenced(1)]
    for _ in range(60):
        speculator.propose(sequences, 0)
        speculator.learn(0, list(range(9))[: len(sequences[0].draft) + 1])
        speculator.learn(1, [77])
        speculator.ran(4, 1.05)
    assert len(sequences[0].draft) > len(sequences[1].draft)


def test_guesses_that_take_time_are_asked_for_seldom_where_they_do_not_pay():
    drafter = Costly((5,) * 8)
    speculator = Speculator(drafter, clock=drafter.clock)
    rounds(speculator, (6,), 2000, flat)
    n_first = drafter.n_asked
    assert n_first < 150
    rounds(speculator, (6,), 2000, flat)
    assert 70 < drafter.n_asked - n_first < 90, "a hundredth of the time: 20 s of 0.24 s each"
    rounds(speculator, (5,) * 9, 400, flat)
    assert rounds(speculator, (5,) * 9, 10, flat) == [8] * 10, "they pay, and are back"


@pytest.mark.parametrize("kind", [Always, Costly])
def test_a_machine_that_was_held_up_for_a_while_is_found_to_be_free_again(kind):
    """Whatever is tried at first takes fifty times as long: nothing pays, or so it seems."""
    drafter = kind((5,) * 8)
    speculator = Speculator(drafter, clock=getattr(drafter, "clock", lambda: 0.0))
    drafter.level_s = 3.0
    rounds(speculator, (5,) * 9, 12, lambda n: 50.0 if n > 1 else flat(n))
    drafter.level_s = 0.06
    found = rounds(speculator, (5,) * 9, 8000, flat)
    assert 0 in found[:5], "it has to be off before it can come back"
    assert found[-10:] == [8] * 10


class Doubting(Costly):
    """It holds each of its guesses to be right as often as not, and stops when told to."""

    def propose(self, asks: Any) -> list[Draft]:
        worth = [
            next(n for n in range(1, 99) if 0.5**n < ask.min_reach or n == ask.limit)
            for ask in asks
        ]
        return super().propose([replace(ask, limit=n) for ask, n in zip(asks, worth, strict=True)])


@pytest.mark.parametrize("level_s, depth", [(0.3, 1), (0.05, 3)])
def test_guesses_that_take_time_go_as_deep_as_pays(level_s, depth):
    """A level is right half of the time: of a third of a step one pays, of a twentieth three."""
    drafter = Doubting((5,) * 8, level_s=level_s)
    speculator = Speculator(drafter, clock=drafter.clock)
    sequence: Any = Sequenced(0)
    rng = np.random.default_rng(0)
    depths = []
    for _ in range(600):
        speculator.propose([sequence], 0)
        depths.append(sequence.draft.depth)
        truth = [5 if rng.random() < 0.5 else 6 for _ in range(9)]
        speculator.learn(0, truth[: len(sequence.draft.follow(truth)) + 1])
        speculator.ran(1, 1.0 + drafter.spent())
    assert Counter(depths[-300:]).most_common(1)[0][0] == depth


# Trees --------------------------------------------------------------------------------------------

BUSHY = Draft(
    (1, 2, 3, 4, 5, 6),
    "bushy",
    (-1, -1, 0, 0, 1, 2),
    (0.5, 0.4, 0.9, 0.05, 0.1, 0.02),
)


class Bushes(Always):
    def propose(self, asks: Any) -> list[Draft]:
        return [BUSHY for _ in asks]


def test_of_a_tree_the_likeliest_paths_are_verified():
    """0.5 and 0.45 of the first path, 0.4 beside it; the others are a hundredth of a token each."""
    speculator: Any = Speculator(Bushes(()), has_trees=True)
    sequence: Any = Sequenced(0)
    for n in range(1, 8):
        speculator.costs.learn(n, 1.0 + 0.1 * n)
    speculator.propose([sequence], 0)
    assert sequence.draft == Draft((1, 2, 3), "bushy", (-1, -1, 0), (0.5, 0.4, 0.9))
    speculator.has_trees = False
    speculator.propose([sequence], 0)
    assert sequence.draft == Draft((1, 3), "bushy", (-1, 0), (0.5, 0.9)), "the likeliest chain"


def test_a_belief_is_taken_for_what_it_was_worth():
    speculator: Any = Speculator(Bushes(()), has_trees=True)
    sequence: Any = Sequenced(0)
    for n in range(1, 8):
        speculator.costs.learn(n, 1.0 + 0.1 * n)
    for _ in range(60):
        speculator.propose([sequence], 0)
        speculator.learn(0, [2, 5])
    assert sequence.draft.tokens == (2, 5), "what it held to be unlikely is right here"


def test_no_more_is_verified_than_is_allowed():
    speculator: Any = Speculator(Bushes(()), 2, has_trees=True)
    sequence: Any = Sequenced(0)
    for n in range(1, 8):
        speculator.costs.learn(n, 1.0)
    speculator.propose([sequence], 0)
    assert sequence.draft.tokens == (1, 3), "the two likeliest of six, for nothing"


# In the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verify_all", [True, False])
def test_the_n_gram_drafter_changes_no_token(temperature, verify_all):
    engine = make_engine(
        capacity=4000, drafter=NgramDrafter((4, 2)), verify_all_drafts=verify_all, max_num_seqs=6
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=1)
    prompts = [tuple((i * j) % 7 for j in range(30 + i)) for i in range(12)]
    ids = [engine.submit(Request(prompt, params)) for prompt in prompts]
    ends = {e.request_id: e for e in engine.run() if hasattr(e, "reason")}
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert ends[request_id].token_ids == plain_loop(prompt, params).token_ids
    if verify_all:
        assert engine.stats().drafted_tokens > 0
    nothing_is_left(engine)
