"""Requests that go on from others' tokens, also of some that still run: all give their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.engine.engine import Engine
from kvcellar.engine.requests.request import FinishEvent, Request
from kvcellar.engine.sampler.sampling import SamplingParams
from kvcellar.errors import PromptError
from tests.engine.fakes import (
    FULL_PARAMS,
    PARAMS,
    STATE_PARAMS,
    ByteTokenizer,
    GuessTrees,
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

ONE = SamplingParams(max_tokens=1)
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=90, ignore_eos=True)


def ends_of(engine: Engine) -> dict[int, FinishEvent]:
    """Run until nothing is left to do, and fail where that never comes."""
    heard = Heard()
    for _ in range(2000):
        if engine.is_idle:
            return heard.ends
        heard.take(engine.step())
    raise AssertionError("the engine stands still")


def test_forks_of_a_request_that_has_ended_compute_only_what_is_new():
    engine = make_engine(capacity=200, params=FULL_PARAMS)
    trunk = engine.generate(Request(tuple(range(30)), FOUR))
    before = ran_tokens(engine)
    prompts = [(*range(30), *trunk.token_ids, 5, i) for i in range(3)]
    ids = [engine.submit(Request(prompt, ONE)) for prompt in prompts]
    ends = ends_of(engine)
    assert ran_tokens(engine) - before == 3 * 3  # the last token that was sampled, and two new ones
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert ends[request_id].token_ids == plain_loop(prompt, ONE, FULL_PARAMS).token_ids
    nothing_is_left(engine)


@pytest.mark.parametrize(
    "params", [FULL_PARAMS, PARAMS, STATE_PARAMS], ids=["full", "window", "state"]
)
def test_a_fork_of_a_request_that_still_generates_computes_only_what_is_new(params):
    engine = make_engine(capacity=200, params=params)
    parent = engine.submit(Request(tuple(range(30)), LONG))
    for _ in range(4):
        engine.step()
    so_far = engine.publish(parent)
    child = engine.submit(Request((*so_far, 7), FOUR))
    ends = ends_of(engine)
    assert ends[child].usage.cached_tokens == len(so_far) - 1
    assert ends[child].token_ids == plain_loop([*so_far, 7], FOUR, params).token_ids
    nothing_is_left(engine)


@pytest.mark.parametrize("index", ["naive", "radix", "hashed"])
@pytest.mark.parametrize("params", [FULL_PARAMS, PARAMS], ids=["full", "window"])
def test_a_fork_that_has_to_wait_does_not_take_what_its_parent_wrote_since(params, index):
    config = {"max_num_seqs": 2, "index": index, "block_size": None if index == "naive" else 1}
    engine = make_engine(capacity=300, params=params, **config)
    parent = engine.submit(Request(tuple(range(10)), LONG))
    engine.submit(Request((3, 3), LONG))
    for _ in range(4):
        engine.step()
    so_far = engine.publish(parent)
    child = engine.submit(Request((*so_far, 7, 8, 9), FOUR))
    ends = ends_of(engine)
    assert ends[child].token_ids == plain_loop([*so_far, 7, 8, 9], FOUR, params).token_ids
    if params is FULL_PARAMS and index != "naive":
        assert ends[child].usage.cached_tokens >= len(so_far) - 1
    nothing_is_left(engine)


def test_a_request_that_had_to_give_way_is_forked_like_one_that_runs():
    engine = make_engine(capacity=64, index="naive")
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    ids = [engine.submit(Request((i, *range(18)), long)) for i in range(2)]
    while not engine.scheduler.waiting or engine.scheduler.waiting[0].n_preemptions == 0:
        engine.step()
    so_far = engine.publish(engine.scheduler.waiting[0].request_id)
    child = engine.submit(Request((*so_far, 7), ONE))
    ends = ends_of(engine)
    assert ends[child].token_ids == plain_loop([*so_far, 7], ONE).token_ids
    assert set(ends) == {*ids, child}
    nothing_is_left(engine)


@dataclass
class Families:
    """Requests, and the tokens that each has to give."""

    engine: Engine
    params: Any
    heard: Heard = field(default_factory=Heard)
    asked: dict[int, Request] = field(default_factory=dict)
    n_steps: int = 0

    def tokens_of(self, request_id: int) -> tuple[int, ...]:
        return (*self.asked[request_id].prompt_ids, *self.heard.tokens.get(request_id, []))

    def submit(self, request: Request) -> None:
        try:
            self.asked[self.engine.submit(request)] = request
        except PromptError:
            assert len(request.prompt_ids) > self.engine.cache.capacity

    def step(self) -> None:
        self.n_steps += 1
        assert self.n_steps < 5000, "the engine stands still"
        self.heard.take(self.engine.step())


ACTIONS = st.one_of(
    st.tuples(st.just("new"), st.integers(1, 60)),
    st.tuples(st.just("new"), st.integers(1, 60)),
    st.tuples(st.just("fork"), st.integers(0, 3)),
    st.tuples(st.just("fork"), st.integers(0, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 3)),
)
STEPS = st.sampled_from([0, 2, 40, 40])


@pytest.mark.parametrize(
    "params", [FULL_PARAMS, PARAMS, STATE_PARAMS], ids=["full", "window", "state"]
)
@settings(max_examples=100)
@given(
    actions=st.lists(st.tuples(ACTIONS, st.integers(1, 8), STEPS), min_size=3, max_size=20),
    config=st.fixed_dictionaries(
        {
            "index": st.sampled_from(["radix", "hashed", "naive"]),
            "max_num_seqs": st.integers(1, 4),
        }
    ),
    kind=st.sampled_from(["none", "chain", "tree"]),
)
@pytest.mark.slow
def test_any_family_of_requests_gives_the_tokens_of_the_plain_loop(params, actions, config, kind):
    cache = make_cache("seq" if kind == "none" else "tree", 72, params)
    drafters = {
        "chain": GuessAgain(),
        "tree": GuessTrees(params, ByteTokenizer.vocab_size),
        "none": None,
    }
    engine = make_engine(cache=cache, drafter=drafters[kind], verify_all_drafts=True, **config)
    families = Families(engine, params)
    for (verb, what), max_tokens, n_steps in actions:
        settings_of_one = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if verb == "new":
            prompt = tuple((what * i) % 5 for i in range(what))
            families.submit(Request(prompt, settings_of_one))
        elif what in families.asked and verb == "fork":
            so_far = families.tokens_of(what)
            published = engine.publish(what)
            assert published in (None, so_far)
            families.submit(Request((*so_far, what, 7), settings_of_one))
        elif what in families.asked:
            engine.cancel(what)
        for _ in range(n_steps):
            families.step()
    while not engine.is_idle:
        families.step()
    assert set(families.heard.ends) == set(families.asked)
    for request_id, request in families.asked.items():
        end = families.heard.ends[request_id]
        assert end.error is None
        want = plain_loop(request.prompt_ids, request.params, params).token_ids
        assert want[: len(end.token_ids)] == end.token_ids
        is_full = end.finish is not None and end.finish.cause == "cache_full"
        assert end.token_ids == want or end.reason == "cancelled" or is_full
    nothing_is_left(engine)
