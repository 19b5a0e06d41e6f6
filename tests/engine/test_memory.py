"""An engine inside a memory budget: who does not fit waits, gives way, or is told why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.budget import MemoryBudget
from kvcellar.cache_config import make_config
from kvcellar.engine import Engine, EngineConfig, Request, SamplingParams
from kvcellar.engine.schedule.scheduler import Scheduler
from kvcellar.errors import CacheFullError, PromptError
from kvcellar.types import ModelCacheParams
from tests.engine.fakes import FULL_PARAMS, KINDS, PARAMS, STATE_PARAMS, ByteTokenizer, HashRunner
from tests.engine.test_engine import (
    GuessAgain,
    Heard,
    make_engine,
    plain_loop,
    requests,
)


def budgeted(
    kind: str, budget: MemoryBudget, params: ModelCacheParams = PARAMS, **more: Any
) -> Any:
    settings = {"capacity": 256, "min_chunk": 8, "window_slack": 4} | more
    config = make_config(params, **settings, budget=budget)
    return KINDS[kind](config)


@settings(max_examples=60)
@given(
    arrivals=st.lists(st.tuples(requests(), st.integers(0, 4)), max_size=9),
    kind=st.sampled_from(["seq", "paged"]),
    params=st.sampled_from([FULL_PARAMS, PARAMS, STATE_PARAMS]),
    n_bytes=st.integers(16_000, 40_000),
    config=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["mixed", "prefill-first"]),
            "index": st.sampled_from(["radix", "hashed", "naive"]),
            "max_num_batched_tokens": st.integers(1, 24),
            "max_num_seqs": st.integers(1, 5),
        }
    ),
    drafter=st.sampled_from([None, GuessAgain()]),
)
@pytest.mark.slow
def test_with_too_little_memory_for_all_each_gets_the_tokens_of_the_plain_loop(
    arrivals, kind, params, n_bytes, config, drafter
):
    budget = MemoryBudget(n_bytes)
    cache = budgeted(kind, budget, params, block_size=4)
    engine = make_engine(cache=cache, drafter=drafter, **config)
    heard = Heard()
    asked: dict[int, Request] = {}
    n_steps = 0

    def step() -> None:
        nonlocal n_steps
        n_steps += 1
        heard.take(engine.step())
        cache.steps.growth.check()
        assert budget.held_bytes == cache.steps.growth._held.n_bytes <= n_bytes
        assert n_steps < 5000, "the engine stands still"

    for request, pause in arrivals:
        try:
            asked[engine.submit(request)] = request
        except PromptError:
            assert len(request.prompt_ids) > cache.capacity
        for _ in range(pause):
            step()
    while not engine.is_idle:
        step()
    assert set(heard.ends) == set(asked)
    for request_id, request in asked.items():
        want, end = plain_loop(request.prompt_ids, request.params, params), heard.ends[request_id]
        if end.finish is not None and end.finish.cause == "cache_full":
            assert want.token_ids[: len(end.token_ids)] == end.token_ids
            assert len(request.prompt_ids) + len(end.token_ids) >= cache.capacity
            assert "give more memory" in end.finish.detail
        else:
            assert end.token_ids == want.token_ids
            assert end.reason == want.finish_reason
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.protected_tokens, stats.live_cells) == (0, 0, 0, 0)
    assert not cache.seq_ids()
    sizes = engine.index.size_info()
    if sizes.evictable:
        cache.release_cells(engine.index.evict(sizes.evictable).cells)
    cache.check()
    assert all(group.live == 0 for group in cache.usage().groups)
    assert budget.held_bytes == cache.steps.growth._held.n_bytes


def engine_of(cache: Any, **settings: Any) -> Engine:
    runner = HashRunner(cache, 64)
    return Engine(runner, cache, ByteTokenizer(), config=EngineConfig(**settings))


def test_a_prompt_that_no_memory_is_ever_there_for_is_refused_with_the_numbers():
    cache = budgeted("seq", MemoryBudget(20_000))
    engine = engine_of(cache)
    n = cache.capacity + 1
    with pytest.raises(PromptError) as caught:
        engine.submit(Request(tuple([1] * n)))
    assert f"the prompt has {n} tokens and the cache {n - 1} cells" in str(caught.value)
    assert "give more memory (KV may take 20.00 KB of 20.00 KB" in str(caught.value)
    assert engine.is_idle


def test_a_request_that_is_alone_and_finds_no_memory_ends_with_what_is_left():
    budget = MemoryBudget(60_000)
    engine = engine_of(budgeted("seq", budget, FULL_PARAMS))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    short = engine.submit(Request(tuple(range(1, 21)), params))
    long = engine.submit(Request((9,) * 150, params))
    assert budget.ask(budget.available_bytes - 8_000)  # another session's
    heard = Heard()
    while not engine.is_idle:
        heard.take(engine.step())
    assert len(heard.ends[short].token_ids) == 4
    finish = heard.ends[long].finish
    assert finish is not None and finish.cause == "cache_full"
    assert "KV may take 60.00 KB" in finish.detail


def test_memory_that_another_cache_takes_between_choice_and_step_ends_nobody(monkeypatch):
    budget = MemoryBudget(60_000)
    cache = budgeted("seq", budget, FULL_PARAMS)
    engine = engine_of(cache)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    request_id = engine.submit(Request(tuple(range(1, 41)), params))
    schedule, taken = Scheduler.schedule, []

    def late(self: Scheduler, now: float) -> Any:
        batch = schedule(self, now)
        if not taken:
            taken.append(budget.available_bytes)
            assert budget.ask(taken[0])
        return batch

    monkeypatch.setattr(Scheduler, "schedule", late)
    assert engine.step() == []
    assert cache.seq_ids() == []
    budget.give_back(taken[0])
    heard = Heard()
    while not engine.is_idle:
        heard.take(engine.step())
    assert len(heard.ends[request_id].token_ids) == 3


def test_a_step_that_is_refused_for_ever_ends_its_requests_with_the_error():
    cache = budgeted("seq", MemoryBudget(60_000), FULL_PARAMS)
    engine = engine_of(cache)
    request_id = engine.submit(Request((1, 2, 3)))

    def refuse(*_: Any) -> Any:
        raise CacheFullError("no")

    cache.begin_step = refuse
    heard = Heard()
    for _ in range(20):
        heard.take(engine.step())
    assert isinstance(heard.ends[request_id].error, CacheFullError)
