"""Requests that go on from others, which are kept, given up or cancelled: all give their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.engine.engine import Engine
from kvcellar.engine.request import FinishEvent, Request
from kvcellar.engine.sampling import SamplingParams
from kvcellar.errors import PromptError, UnknownRequestError
from tests.engine.fakes import FULL_PARAMS, PARAMS, ByteTokenizer, GuessTrees, make_cache
from tests.engine.test_engine import (
    GuessAgain,
    Heard,
    MovingCells,
    MovingTrees,
    make_engine,
    nothing_is_left,
    plain_loop,
)

ONE = SamplingParams(max_tokens=1)
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


def ends_of(engine: Engine) -> dict[int, FinishEvent]:
    """Run until nothing is left to do, and fail where that never comes."""
    heard = Heard()
    for _ in range(2000):
        if engine.is_idle:
            return heard.ends
        heard.take(engine.step())
    raise AssertionError("the engine stands still")


def test_a_continuation_of_a_kept_request_whose_cells_were_given_up_computes_them_again():
    engine = make_engine(capacity=64)
    kept = engine.generate(Request(tuple(range(30)), ONE, keep=True))
    engine.generate(Request(tuple(range(100, 150)), ONE))
    child = engine.submit(Request((5, 6), FOUR, parent=kept.request_id, is_fork=False))
    want = plain_loop([*range(30), *kept.token_ids, 5, 6], FOUR)
    assert ends_of(engine)[child].token_ids == want.token_ids
    nothing_is_left(engine)


@pytest.mark.parametrize("is_fork", [True, False], ids=["fork", "continuation"])
@pytest.mark.parametrize("how", ["given up", "released", "taken over"])
def test_a_parent_that_goes_between_submission_and_scheduling_leaves_its_child_its_tokens(
    how, is_fork
):
    engine = make_engine(capacity=64, max_num_seqs=1)
    kept = engine.generate(Request(tuple(range(30)), ONE, keep=True))
    if how == "taken over":
        first = engine.submit(Request((9,), ONE, parent=kept.request_id, is_fork=False))
    elif how == "given up":
        first = engine.submit(Request(tuple(range(100, 160)), ONE))
    else:
        first = engine.submit(Request((1, 2, 3), ONE))
    child = engine.submit(Request((5, 6), FOUR, parent=kept.request_id, is_fork=is_fork))
    if how == "released":
        engine.release(kept.request_id)
    ends = ends_of(engine)
    assert ends[first].error is None
    want = plain_loop([*range(30), *kept.token_ids, 5, 6], FOUR)
    assert ends[child].token_ids == want.token_ids
    engine.release(kept.request_id)
    nothing_is_left(engine)


def test_several_go_on_from_one_kept_request_whose_cells_were_given_up():
    engine = make_engine(capacity=96)
    kept = engine.generate(Request(tuple(range(30)), ONE, keep=True))
    engine.generate(Request(tuple(range(100, 180)), ONE))
    children = [
        engine.submit(Request((5, i), FOUR, parent=kept.request_id, is_fork=i != 1))
        for i in range(4)
    ]
    ends = ends_of(engine)
    for i, child in enumerate(children):
        want = plain_loop([*range(30), *kept.token_ids, 5, i], FOUR)
        assert ends[child].token_ids == want.token_ids
    nothing_is_left(engine)


def test_a_request_that_had_to_give_way_is_a_parent_like_one_that_runs():
    engine = make_engine(capacity=64, index="naive")
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    ids = [engine.submit(Request((i, *range(18)), long)) for i in range(2)]
    while not engine.scheduler.waiting or engine.scheduler.waiting[0].n_preemptions == 0:
        engine.step()
    (gave_way,) = engine.scheduler.waiting
    so_far = list(gave_way.tokens)
    child = engine.submit(Request((7,), ONE, parent=gave_way.request_id))
    ends = ends_of(engine)
    assert ends[child].token_ids == plain_loop([*so_far, 7], ONE).token_ids
    assert set(ends) == {*ids, child}
    nothing_is_left(engine)


def test_the_last_request_that_runs_ends_full_though_a_kept_one_is_still_known():
    engine = make_engine(capacity=64)
    kept = engine.generate(Request(tuple(range(30)), ONE, keep=True))
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    full = engine.submit(Request(tuple(range(100, 140)), long))
    end = ends_of(engine)[full]
    assert end.finish is not None and end.finish.cause == "cache_full"
    assert len(end.token_ids) == 64 - 40 + 1
    assert engine.release(kept.request_id)
    nothing_is_left(engine)


@dataclass
class Families:
    """Requests, their parents, and the tokens that each has to give."""

    engine: Engine
    params: Any
    heard: Heard = field(default_factory=Heard)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    asked: dict[int, Request] = field(default_factory=dict)
    n_steps: int = 0

    def tokens_of(self, request_id: int) -> list[int]:
        return self.prompts[request_id] + self.heard.tokens.get(request_id, [])

    def submit(self, request: Request) -> None:
        before = [] if request.parent is None else self.tokens_of(request.parent)
        try:
            request_id = self.engine.submit(request)
        except (UnknownRequestError, PromptError):
            return
        self.asked[request_id] = request
        self.prompts[request_id] = [*before, *request.prompt_ids]

    def step(self) -> None:
        self.n_steps += 1
        assert self.n_steps < 5000, "the engine stands still"
        self.heard.take(self.engine.step())


ACTIONS = st.one_of(
    st.tuples(st.just("new"), st.integers(1, 60)),
    st.tuples(st.just("new"), st.integers(1, 60)),
    st.tuples(st.sampled_from(["fork", "continue"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["fork", "continue"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["cancel", "release"]), st.integers(0, 3)),
)
STEPS = st.sampled_from([0, 2, 40, 40])


@pytest.mark.parametrize("params", [FULL_PARAMS, PARAMS], ids=["full", "window"])
@settings(max_examples=100)
@given(
    actions=st.lists(
        st.tuples(ACTIONS, st.sampled_from([True, True, False]), st.integers(1, 8), STEPS),
        min_size=3,
        max_size=20,
    ),
    config=st.fixed_dictionaries(
        {
            "index": st.sampled_from(["radix", "hashed", "naive"]),
            "max_num_seqs": st.integers(1, 4),
            "max_moved_bytes": st.sampled_from([0, 10**9]),
        }
    ),
    kind=st.sampled_from(["none", "chain", "tree"]),
)
def test_any_family_of_requests_gives_the_tokens_of_the_plain_loop(params, actions, config, kind):
    make = MovingCells if kind == "none" else MovingTrees
    cache = make(make_cache("seq", 72, params).config)
    drafters = {
        "chain": GuessAgain(),
        "tree": GuessTrees(params, ByteTokenizer.vocab_size),
        "none": None,
    }
    engine = make_engine(cache=cache, drafter=drafters[kind], verify_all_drafts=True, **config)
    families = Families(engine, params)
    for (verb, what), keep, max_tokens, n_steps in actions:
        settings_of_one = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        match verb:
            case "new":
                prompt = tuple((what * i) % 5 for i in range(what))
                families.submit(Request(prompt, settings_of_one, keep=keep))
            case "fork" | "continue" if what in families.prompts:
                families.submit(
                    Request(
                        (what, 7),
                        settings_of_one,
                        parent=what,
                        is_fork=verb == "fork",
                        keep=keep,
                    )
                )
            case "cancel":
                engine.cancel(what)
            case "release":
                engine.release(what)
        for _ in range(n_steps):
            families.step()
    while not engine.is_idle:
        families.step()
    assert set(families.heard.ends) == set(families.asked)
    for request_id, request in families.asked.items():
        end = families.heard.ends[request_id]
        assert end.error is None
        want = plain_loop(families.prompts[request_id], request.params, params).token_ids
        assert want[: len(end.token_ids)] == end.token_ids
        is_full = end.finish is not None and end.finish.cause == "cache_full"
        assert end.token_ids == want or end.reason == "cancelled" or is_full
    for request_id in list(engine.scheduler.kept):
        engine.release(request_id)
    nothing_is_left(engine)
