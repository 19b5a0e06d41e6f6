"""A drafter that raises costs nobody more than its guesses."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from kvcellar.cache_config import make_config
from kvcellar.engine import Engine, EngineConfig, Request, SamplingParams
from kvcellar.engine.speculate import Draft, DraftModel, DraftRequest
from tests.engine.fakes import (
    FULL_PARAMS,
    ByteTokenizer,
    GuessTrees,
    HashRunner,
    TellingRunner,
    TreeCells,
)
from tests.engine.speculate.test_eagle3 import head_of
from tests.engine.test_engine import EOS, VOCAB, nothing_is_left, plain_loop

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
CALLS = ("propose", "saw", "ended")


class Failing:
    """Another drafter, of which some calls of one kind raise: before they are made, or after."""

    is_free = True
    feature_layers = (0,)

    def __init__(self, call: str, which: range | None = None, *, is_late: bool = False) -> None:
        self.guesses: Any = GuessTrees(FULL_PARAMS, VOCAB)
        self.call, self.which, self.is_late = call, which, is_late
        self.n = 0
        self.asked: list[list[int]] = []
        self.gone: list[int] = []

    def propose(self, asks: list[DraftRequest]) -> list[Draft]:
        self.asked.append([ask.request_id for ask in asks])
        drafts: list[Draft] = self._perhaps("propose", self.guesses.propose, asks)
        return drafts

    def saw(self, request_id: int, start: int, features: np.ndarray) -> None:
        self._perhaps("saw", lambda *_: None, request_id, start, features)

    def ended(self, request_id: int) -> None:
        self.gone.append(request_id)
        self._perhaps("ended", self.guesses.ended, request_id)

    def _perhaps(self, name: str, call: Any, *args: Any) -> Any:
        if name != self.call:
            return call(*args)
        self.n += 1
        fails = self.which is None or self.n in self.which
        if fails and not self.is_late:
            raise ZeroDivisionError(f"{name} {self.n}")
        said = call(*args)
        if fails:
            raise ZeroDivisionError(f"{name} {self.n}")
        return said


def engine_of(drafter: Any, capacity: int = 400) -> Engine:
    cache = TreeCells(make_config(FULL_PARAMS, capacity, min_chunk=16))
    return Engine(
        TellingRunner(cache, VOCAB),
        cache,
        ByteTokenizer(),
        eos_token_ids=EOS,
        config=EngineConfig(max_num_batched_tokens=32, max_num_seqs=3, verify_all_drafts=True),
        drafter=drafter,
    )


def run(engine: Engine, n: int) -> list[Any]:
    """Ends of ``n`` requests; every one says what it would say alone."""
    prompts = [tuple(range(i, 9 + 2 * i)) for i in range(n)]
    ids = [engine.submit(Request(prompt, PARAMS)) for prompt in prompts]
    ends = {e.request_id: e for e in engine.run() if hasattr(e, "reason")}
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert ends[request_id].error is None
        assert ends[request_id].token_ids == plain_loop(prompt, PARAMS, FULL_PARAMS).token_ids
    nothing_is_left(engine)
    return [ends[request_id] for request_id in ids]


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("capacity", [400, 70], ids=["roomy", "tight"])
def test_whatever_always_raises_no_request_notices(call, is_late, capacity, caplog):
    drafter = Failing(call, is_late=is_late)
    engine = engine_of(drafter, capacity)
    ends = run(engine, 6)
    stats = engine.stats()
    assert 2 <= stats.drafter_failures <= 6, "once for each, or for all that were asked for at once"
    assert (stats.preemptions > 0) == (capacity == 70)
    (record,) = [r for r in caplog.records if r.name == "kvcellar.engine"]
    assert record.levelno == logging.ERROR and record.exc_info[0] is ZeroDivisionError
    assert "Failing cannot guess" in record.getMessage()
    if call == "ended":
        assert sum(end.usage.accepted_tokens for end in ends) > 20, "it guessed until then"
    else:
        assert sum(end.usage.drafted_tokens for end in ends) == 0


def test_one_failure_costs_those_that_were_asked_for_their_guesses_and_no_other():
    drafter = Failing("propose", range(4, 5))
    engine = engine_of(drafter)
    ends = run(engine, 6)
    assert engine.stats().drafter_failures == 1
    without = drafter.asked[3]
    assert 0 < len(without) < 6
    assert all(not set(asked) & set(without) for asked in drafter.asked[4:])
    for request_id in without:
        assert drafter.gone.count(request_id) == 1, "it is told at once, and not again"
    others = [end for end in ends if end.request_id not in without]
    assert all(end.usage.accepted_tokens > 0 for end in others)


@pytest.mark.parametrize("at", range(2, 12))
def test_a_draft_models_forward_that_raises_leaves_its_cache_whole(at):
    cache = TreeCells(make_config(FULL_PARAMS, 2000, min_chunk=16))
    runner: Any = HashRunner(cache, VOCAB)
    engine = engine_of(DraftModel(runner, cache, VOCAB))
    runner.fail_after = at
    run(engine, 4)
    assert engine.stats().drafter_failures >= 1
    cache.check()
    assert cache.n_free == cache.capacity
    runner.fail_after = None
    assert sum(end.usage.accepted_tokens for end in run(engine, 3)) > 0, "new ones are guessed for"


@pytest.mark.parametrize("name", ["read", "go_on", "join"])
def test_a_heads_forward_that_raises_leaves_its_cache_whole(name):
    drafter = head_of(width=2)
    head: Any = drafter._runner
    works = getattr(head, name)

    def breaks(*args: Any) -> Any:
        works(*args)
        raise ZeroDivisionError(name)

    setattr(head, name, breaks)
    engine = engine_of(drafter)
    run(engine, 4)
    assert engine.stats().drafter_failures >= 1
    assert drafter._cache.n_free == drafter._cache.capacity
    setattr(head, name, works)
    assert sum(end.usage.accepted_tokens for end in run(engine, 3)) > 0


def test_an_answer_that_is_too_short_is_a_failure():
    class Short(GuessTrees):
        def propose(self, asks: list[DraftRequest]) -> list[Draft]:
            return super().propose(asks)[1:]

    engine = engine_of(Short(FULL_PARAMS, VOCAB))
    run(engine, 4)
    assert engine.stats().drafter_failures >= 1
