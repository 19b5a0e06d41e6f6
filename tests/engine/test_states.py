"""The engine over a model whose states cannot be cut back: the plain loop's tokens, whatever comes.

What is reported as reused was not computed, snapshots are where later requests want them, and
slots come back.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcellar.engine.engine import Engine
from kvcellar.engine.requests.request import FinishEvent, Request
from kvcellar.engine.sampler.sampling import SamplingParams
from kvcellar.engine.speculate import Draft
from kvcellar.space import SHARED
from tests.engine.fakes import (
    MIXED_PARAMS,
    STATE_PARAMS,
    ByteTokenizer,
    GuessTrees,
    PagedCells,
    make_cache,
)
from tests.engine.test_engine import (
    GuessAgain,
    Heard,
    make_engine,
    nothing_is_left,
    plain_loop,
    ran_tokens,
)

VOCAB = ByteTokenizer.vocab_size
ONE = SamplingParams(max_tokens=1)
GREEDY8 = SamplingParams(max_tokens=8, ignore_eos=True)


def state_engine(
    capacity: int = 4000, kind: str = "seq", params: Any = STATE_PARAMS, **config: Any
) -> Engine:
    settings = {name: config.pop(name) for name in ("n_slots",) if name in config}
    return make_engine(cache=make_cache(kind, capacity, params, **settings), **config)


# Any mixture ------------------------------------------------------------------------------------


class Mixture:
    """Requests at random: new ones, ones that go on from another's tokens, cancelled ones."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.params = rng.choice([STATE_PARAMS, MIXED_PARAMS])
        self.kind = rng.choice(["none", "chain", "tree", "tree in chains"])
        block_size = rng.choice([1, 1, 3, 4])
        capacity = rng.randint(48, 110) // block_size * block_size
        cache: Any = make_cache(
            "tree" if self.kind in ("tree", "chain") else "seq",
            capacity,
            self.params,
            n_slots=rng.choice([2, 3, 4, 6, 9, 20, 64]),
        )
        if block_size > 1:
            cache = PagedCells(replace(cache.config, block_size=block_size))
        drafter: Any = None
        if self.kind != "none":
            trees = GuessTrees(self.params, VOCAB)
            drafter = GuessAgain() if self.kind == "chain" else trees
        index = rng.choice(["radix", "radix", "hashed", "naive"])
        config: dict[str, Any] = {"index": index}
        if block_size == 1 and index != "naive":
            config["block_size"] = rng.choice([1, 4])
        self.engine = make_engine(
            cache=cache,
            drafter=drafter,
            policy=rng.choice(["mixed", "mixed", "prefill-first"]),
            max_num_batched_tokens=rng.randint(1, 24),
            max_num_seqs=rng.randint(1, 5),
            verify_all_drafts=rng.random() < 0.5,
            **config,
        )
        self.heard = Heard()
        self.asked: dict[int, Request] = {}
        self.cancelled: set[int] = set()
        self.n_steps = 0

    def new_request(self) -> Request:
        rng = self.rng
        trunk: tuple[int, ...] = rng.choice([(), tuple(range(1, 12)), (1, 2, 3, 4, 50, 60)])
        if self.asked and rng.random() < 0.5:
            other = rng.choice(list(self.asked))
            so_far = (*self.asked[other].prompt_ids, *self.heard.tokens.get(other, []))
            trunk = tuple(so_far[: rng.choice([len(so_far), rng.randint(0, len(so_far))])])
            if rng.random() < 0.3:
                assert self.engine.publish(other) in (None, so_far)
        prompt = (*trunk, *(rng.randint(0, 3) for _ in range(rng.randint(1, 25))))
        prompt = prompt[: self.engine.cache.capacity]
        return Request(
            prompt,
            SamplingParams(
                max_tokens=rng.randint(0, 12),
                temperature=rng.choice([0.0, 0.0, 0.8]),
                seed=rng.randint(0, 3),
                ignore_eos=rng.random() < 0.5,
            ),
            priority=rng.randint(0, 1),
            prompt_logprobs=rng.choice([None] * 7 + [0]),
            snapshots_at=tuple(
                sorted({rng.randint(1, len(prompt)) for _ in range(rng.randint(0, 3))})
            ),
        )

    def step(self) -> None:
        self.n_steps += 1
        assert self.n_steps < 4000, "the engine stands still"
        self.heard.take(self.engine.step())
        if self.rng.random() < 0.1:
            self.engine.tidy()
        if self.rng.random() < 0.2:
            self.engine.index.check()
            index = [cells.tolist() for cells in self.engine.index.held_cells()]
            self.engine.cache.check(index)

    def run(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(3, 12)):
            request = self.new_request()
            self.asked[self.engine.submit(request)] = request
            for _ in range(rng.choice([0, 1, 3, 30])):
                self.step()
            if rng.random() < 0.15:
                victim = rng.choice(list(self.asked))
                if self.engine.cancel(victim):
                    self.cancelled.add(victim)
        while not self.engine.is_idle:
            self.step()

    def check(self) -> None:
        assert set(self.heard.ends) == set(self.asked)
        for request_id, request in self.asked.items():
            want = plain_loop(request.prompt_ids, request.params, self.params)
            end = self.heard.ends[request_id]
            assert end.error is None
            assert want.token_ids[: len(end.token_ids)] == end.token_ids
            is_full = end.finish is not None and end.finish.cause == "cache_full"
            if is_full:
                n = len(request.prompt_ids) + len(end.token_ids)
                assert n >= self.engine.cache.capacity
            elif request_id not in self.cancelled:
                assert end.token_ids == want.token_ids
                assert end.usage is not None
                assert end.usage.cached_tokens < len(request.prompt_ids)
        nothing_is_left(self.engine)


@pytest.mark.parametrize("seed", range(60))
def test_any_mixture_gives_the_tokens_of_the_plain_loop(seed):
    mixture = Mixture(seed)
    mixture.run()
    mixture.check()


# Where snapshots are ----------------------------------------------------------------------------


def lengths_of(engine: Engine, tokens: Any) -> list[int]:
    """The lengths of a history at which the index has states."""
    return (np.flatnonzero(engine.index.peek_prefix(tokens)[-1] >= 0) + 1).tolist()


def test_the_end_of_a_prompt_and_of_a_turn_and_what_was_asked_for_can_be_resumed():
    engine = state_engine()
    request = Request(tuple(range(40)), GREEDY8, snapshots_at=(7, 33))
    end = engine.generate(request)
    said = (*range(40), *end.token_ids)
    assert lengths_of(engine, said) == [7, 33, 40, 47]
    for prompt, n_reused in (((*said, 5), 47), ((*range(36), 99), 33), ((*range(20), 99), 7)):
        before = ran_tokens(engine)
        again = engine.generate(Request(prompt, ONE))
        assert again.usage.cached_tokens == n_reused
        assert ran_tokens(engine) - before == len(prompt) - n_reused, "reused is not computed"
        assert again.token_ids == plain_loop(prompt, ONE, STATE_PARAMS).token_ids
    nothing_is_left(engine)


def test_where_an_earlier_request_left_a_history_the_next_one_resumes():
    engine = state_engine()
    engine.generate(Request(tuple(range(60)), ONE))
    second = engine.generate(Request((*range(40), 1, 2), ONE))
    assert second.usage.cached_tokens == 0  # nobody knew
    third = engine.generate(Request((*range(40), 3, 4), ONE))
    assert third.usage.cached_tokens == 40


@pytest.mark.parametrize(("index", "block_size"), [("radix", 1), ("radix", 8), ("hashed", 8)])
def test_a_prompt_that_is_asked_again_is_not_read_again(index, block_size):
    config = make_cache("seq", 4000, STATE_PARAMS).config
    cache = PagedCells(replace(config, block_size=block_size)) if block_size > 1 else None
    cache = cache or make_cache("seq", 4000, STATE_PARAMS)
    engine = make_engine(cache=cache, index=index, max_num_batched_tokens=500)
    prompt = tuple(i % 250 for i in range(400))
    first, again = (engine.generate(Request(prompt, ONE)) for _ in range(2))
    assert again.usage.cached_tokens == 400 - block_size
    assert ran_tokens(engine) == 400 + block_size
    assert again.token_ids == first.token_ids
    nothing_is_left(engine)


def test_snapshots_within_a_long_prompt_are_apart_as_far_as_they_cost():
    engine = state_engine(capacity=640, n_slots=18)  # 640 tokens to 16 slots: one for each 40
    engine.generate(Request(tuple(range(200)), ONE))
    assert lengths_of(engine, tuple(range(200))) == [48, 96, 144, 199, 200]  # chunks of 16
    other = engine.generate(Request((*range(130), 7), ONE))
    assert other.usage.cached_tokens == 96
    nothing_is_left(engine)


def test_eight_on_one_trunk_compute_it_once():
    engine = state_engine(max_num_batched_tokens=24, max_num_seqs=8)
    trunk = range(60)
    ids = [engine.submit(Request((*trunk, 70 + i, i), ONE)) for i in range(8)]
    ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    assert ran_tokens(engine) == 60 + 8 * 2
    for i, request_id in enumerate(ids):
        want = plain_loop((*trunk, 70 + i, i), ONE, STATE_PARAMS)
        assert ends[request_id].token_ids == want.token_ids
    nothing_is_left(engine)


def test_nobody_waits_for_a_prefix_that_the_other_has_passed():
    engine = state_engine()
    engine.submit(Request(tuple(range(100)), ONE))
    for _ in range(4):
        engine.step()
    engine.submit(Request((*range(40), 1), ONE))
    engine.step()
    assert engine.stats().waiting == 0
    list(engine.run())
    nothing_is_left(engine)


@pytest.mark.parametrize("index", ["radix", "hashed"])
def test_over_blocks_whole_ones_are_resumed_at_the_end_of_the_prompt_and_of_the_turn(index):
    cache = PagedCells(replace(make_cache("seq", 4000, STATE_PARAMS).config, block_size=8))
    engine = make_engine(cache=cache, index=index)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    end = engine.generate(Request(tuple(range(45)), params, snapshots_at=(21,)))
    said = (*range(45), *end.token_ids)
    assert lengths_of(engine, said) == [16, 40, 72]  # of 21, 45 and 74
    again = engine.generate(Request((*said, 5), ONE))
    assert again.usage.cached_tokens == 72
    assert again.token_ids == plain_loop((*said, 5), ONE, STATE_PARAMS).token_ids
    nothing_is_left(engine)


# Slots ------------------------------------------------------------------------------------------


def test_only_as_many_run_as_there_are_slots_for_and_all_end():
    engine = state_engine(n_slots=5, max_num_seqs=8)
    ids = [engine.submit(Request((i, *range(10)), GREEDY8)) for i in range(5)]
    heard = Heard()
    most = 0
    while not engine.is_idle:
        heard.take(engine.step())
        most = max(most, engine.stats().running)
    assert most == 2
    for i, request_id in enumerate(ids):
        want = plain_loop((i, *range(10)), GREEDY8, STATE_PARAMS)
        assert heard.ends[request_id].token_ids == want.token_ids
    nothing_is_left(engine)


def test_snapshots_give_way_before_rows_and_the_cheapest_first():
    engine = state_engine(n_slots=5)
    engine.generate(Request(tuple(range(30)), ONE, snapshots_at=(10, 12, 25)))
    assert lengths_of(engine, tuple(range(30))) == [10, 12, 25, 30]
    engine.generate(Request(tuple(range(100, 110)), ONE))
    engine.generate(Request(tuple(range(200, 210)), ONE))
    stats = engine.stats()
    assert stats.evicted_snapshots >= 1 and stats.evicted_tokens == 0
    assert lengths_of(engine, tuple(range(30))) == [10, 25, 30]
    nothing_is_left(engine)


def test_who_gives_way_goes_on_from_its_own_states():
    engine = state_engine(capacity=64)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [(i, *range(10)) for i in range(3)]
    ids = [engine.submit(Request(prompt, params)) for prompt in prompts]
    ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert ends[request_id].token_ids == plain_loop(prompt, params, STATE_PARAMS).token_ids
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.reused_tokens > 0, "what it had computed was found again"
    nothing_is_left(engine)


def test_a_held_history_says_which_of_its_snapshots_went():
    engine = state_engine(n_slots=4)
    engine.generate(Request(tuple(range(30)), ONE, snapshots_at=(20,)))
    held = engine.hold(tuple(range(30)))
    assert (np.flatnonzero(held.tables[-1] >= 0) + 1).tolist() == [20, 30]
    engine.generate(Request(tuple(range(100, 140)), ONE, snapshots_at=(10, 20, 30)))
    there = (np.flatnonzero(held.tables[-1] >= 0) + 1).tolist()
    assert there == lengths_of(engine, tuple(range(30))) and 20 not in there
    held.release()
    nothing_is_left(engine)


def test_a_dropped_history_goes_with_rows_that_nobody_could_resume():
    engine = state_engine(n_slots=3)
    engine.generate(Request(tuple(range(30)), ONE))
    engine.generate(Request(tuple(range(100, 130)), ONE))
    while engine.index.evict_states(1).cells[-1].size:  # all that the index has
        pass
    assert engine.match(np.arange(30)) == 0
    assert engine.drop(np.arange(30)) == 30


def test_slots_are_drawn_beside_cells():
    engine = state_engine(n_slots=8)
    engine.generate(Request(tuple(range(30)), ONE, snapshots_at=(20,)))
    running = engine.submit(Request((*range(30), 7), GREEDY8))
    engine.step()
    drawn = engine.cell_map(
        [(np.arange(30), None, SHARED), (np.array([*range(30), 7]), running, SHARED)]
    )
    assert drawn.slots.shape == (8,)
    assert drawn.snapshots[0][:, 0].tolist() == [20, 30]
    assert drawn.snapshots[1][:, 0].tolist() == [20, 30, 31]
    states = drawn.slots[drawn.snapshots[1][:, 1]].tolist()
    assert states == [1, 1, 3], "two that can go, and the one that the request lives on"
    list(engine.run())
    nothing_is_left(engine)


def test_slots_that_cannot_be_had_cost_no_snapshot():
    engine = state_engine(n_slots=6)
    engine.generate(Request(tuple(range(30)), ONE, snapshots_at=(10, 20)))
    before = engine.stats().snapshots
    assert before == 3
    residency = engine.scheduler.residency
    assert not residency.make_room_for([(0, 1)], 7)
    assert engine.stats().snapshots == before
    assert residency.make_room_for([(0, 1)], 6)
    assert engine.stats().snapshots == 0


# Guesses ----------------------------------------------------------------------------------------


class HalfRight:
    """A drafter whose first ``n_right`` guesses are right; one more is wrong."""

    is_free = True

    def __init__(self, want: Any, n_prompt: int, n_right: int) -> None:
        self.want, self.n_prompt, self.n_right = want, n_prompt, n_right

    def propose(self, asks: Any) -> list[Draft]:
        (ask,) = asks
        done = len(ask.tokens) - self.n_prompt
        right = self.want[done : done + self.n_right]
        return [Draft((*right, (int(self.want[done]) + 1) % 256)[: ask.limit], "half")]

    def ended(self, request_id: int) -> None:
        pass


def test_what_was_verified_with_a_wrong_guess_comes_again_with_the_next_forward():
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    prompt = (1, 2, 1, 2, 1)
    want = plain_loop(prompt, params, STATE_PARAMS)
    engine = state_engine(drafter=HalfRight(want.token_ids, 5, 2), verify_all_drafts=True)
    end = engine.generate(Request(prompt, params))
    assert end.token_ids == want.token_ids
    stats = engine.stats()
    # a step brings two right guesses and one more token; the next runs what it knows again, and
    # brings one: guesses behind that would only put it off
    assert [len(part) for part in engine.runner.forwards] == [5, 4, 4, 4, 4, 4, 4]
    assert stats.computed_tokens == 29 and end.usage.accepted_tokens == 6
    assert (end.usage.cached_tokens, stats.reused_tokens) == (0, 0), "run again is no reuse"
    nothing_is_left(engine)


def test_where_all_guesses_are_right_nothing_comes_again():
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    want = plain_loop((1, 2, 1), params, STATE_PARAMS)

    class Right(HalfRight):
        def propose(self, asks: Any) -> list[Draft]:
            done = len(asks[0].tokens) - self.n_prompt
            return [Draft(self.want[done : done + 3][: asks[0].limit], "right")]

    engine = state_engine(drafter=Right(want.token_ids, 3, 3), verify_all_drafts=True)
    end = engine.generate(Request((1, 2, 1), params))
    assert end.token_ids == want.token_ids
    assert ran_tokens(engine) == 3 + 12
    nothing_is_left(engine)


def test_trees_keep_the_states_of_the_guesses_that_were_right():
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine = state_engine(
        kind="tree", drafter=GuessTrees(STATE_PARAMS, VOCAB), verify_all_drafts=True
    )
    end = engine.generate(Request((1, 2, 3), params))
    assert end.token_ids == plain_loop((1, 2, 3), params, STATE_PARAMS).token_ids
    assert end.usage.accepted_tokens > 5
    n_wrong = end.usage.drafted_tokens - end.usage.accepted_tokens
    assert ran_tokens(engine) == 3 + 19 + n_wrong, "none is run again"
    nothing_is_left(engine)


def test_guesses_leave_half_of_the_slots_to_snapshots():
    engine = state_engine(
        kind="tree", drafter=GuessTrees(STATE_PARAMS, VOCAB), verify_all_drafts=True, n_slots=24
    )
    points = tuple(range(10, 230, 10))
    prompt = tuple(i % 250 for i in range(240))
    engine.generate(Request(prompt, ONE, snapshots_at=points))
    assert engine.stats().snapshots == 23
    end = engine.generate(Request((5, 5, 5), SamplingParams(max_tokens=20, ignore_eos=True)))
    assert end.usage.accepted_tokens > 5
    assert engine.stats().snapshots >= 12
    nothing_is_left(engine)


def test_a_chain_in_a_cache_with_trees_keeps_the_states_behind_each_guess():
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    want = plain_loop((1, 2, 1), params, STATE_PARAMS)
    drafter = HalfRight(want.token_ids, 3, 2)
    engine = state_engine(kind="tree", drafter=drafter, verify_all_drafts=True)
    end = engine.generate(Request((1, 2, 1), params))
    assert end.token_ids == want.token_ids
    assert [len(part) for part in engine.runner.forwards] == [3, 4, 4, 4, 3]
    nothing_is_left(engine)


def test_chunks_end_where_a_snapshot_pays_once_it_is_known_what_forwards_take():
    engine = state_engine(n_slots=3000, max_num_batched_tokens=1000)
    spacing = engine.scheduler.residency.snapshots.spacing
    spacing.ran(1, 0, 0.02)
    spacing.ran(100, 100, 1.0)
    spacing.ran = lambda *_: None  # time that stands still would say otherwise
    prompt = tuple(i % 250 for i in range(900))  # sqrt(2 * 900 * 2) = 60
    engine.generate(Request(prompt, ONE))
    assert lengths_of(engine, prompt) == [*range(60, 781, 60), 899, 900]
    nothing_is_left(engine)
