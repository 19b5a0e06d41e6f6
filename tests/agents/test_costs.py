"""Restore or recompute: the faster one, and never much slower than having no store."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from kvcellar.agents import Turn
from kvcellar.agents.kv import residence
from kvcellar.engine import Restore
from kvcellar.hosting.costs import Costs, Estimate
from kvcellar.store import Store, StoreConfig
from tests.agents.fakes import (
    FULL_PARAMS,
    GREEDY,
    PARAMS,
    engine_of,
    make_host,
    manager,
    nothing_is_held,
    oracle,
    run,
    tokens_of,
    turn,
)


def load(name: str) -> Any:
    host = make_host(name, params=FULL_PARAMS)
    host.costs = Costs()
    return host


def test_what_is_slower_to_load_than_to_compute_is_computed(tmp_path):
    with manager(tmp_path, load) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=[1] * 300))
        host = agents.models.host("hash")
        for prefill, is_restored in ((1e-9, False), (1.0, True)):
            run(agents.sleep.pause("a"))
            before = tokens_of(agents, "a")
            host.costs.prefill_s_per_token = prefill
            end = run(turn(agents, "a", tokens=[2]))
            assert bool(end.usage.restored_tokens) == is_restored
            assert (end.usage.miss is not None) == (not is_restored)
            if not is_restored:
                assert end.usage.miss.cause == "recomputed"
            assert list(tokens_of(agents, "a")) == [
                *before,
                2,
                *oracle([*before, 2], 6, FULL_PARAMS),
            ]


@pytest.mark.parametrize("n_fast", [0, 5])
def test_a_restore_that_turns_out_slow_is_given_up_while_it_waits(tmp_path, monkeypatch, n_fast):
    whole, may_go = Store.load, threading.Event()

    def stuck(self: Store, *args: Any) -> Any:
        for i, loaded in enumerate(whole(self, *args)):
            if i >= n_fast:
                may_go.wait(60)
            yield loaded

    with manager(tmp_path, load) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=[1] * 600))
        run(agents.sleep.pause("a"))
        monkeypatch.setattr(Store, "load", stuck)
        host = agents.models.host("hash")
        host.costs.prefill_s_per_token = 0.01  # 6 s for what never comes
        before = tokens_of(agents, "a")
        end = run(turn(agents, "a", tokens=[2]))
        assert end.usage.restored_tokens <= 16 * n_fast  # fewer where the machine is busy
        assert end.usage.miss.cause == "recomputed"
        assert list(tokens_of(agents, "a")[-6:]) == oracle([*before, 2], 6, FULL_PARAMS)
        may_go.set()
        for thread in threading.enumerate():
            if thread.name == "kvcellar-restore":
                thread.join(60)
        nothing_is_held(agents)


def test_patience_is_a_small_part_of_what_computing_takes_until_a_restore_is_ahead_of_it():
    costs = Costs(prefill_s_per_token=0.001)
    assert costs.patience_s(10_000, 0) == pytest.approx(0.3)
    assert costs.patience_s(10_000, 2000) == pytest.approx(2.0)
    assert costs.patience_s(100, 0) == 0.05
    assert Costs().patience_s(100, 0) is None


def test_rates_are_learnt_and_a_refusal_is_forgiven():
    costs = Costs()
    start = dict(costs.s_per_byte)
    costs.learn_load("cold", 100 << 20, 10.0)
    assert costs.s_per_byte["cold"] * (100 << 20) > 8.5, "one bad surprise is enough"
    for _ in range(30):
        costs.learn_load("cold", 100 << 20, 10.0)
    assert 0.9 < costs.s_per_byte["cold"] * (100 << 20) / 10 < 1.1
    for _ in range(100):
        costs.declined()
    assert costs.s_per_byte == start
    costs.learn_load("warm", 100, 1.0)
    assert costs.s_per_byte["warm"] < 1.01e-9 + 1e-6, "a few bytes say little of a rate"
    costs.learn_prefill(4, 100.0)
    assert costs.prefill_s_per_token is None
    costs.learn_prefill(100, 1.0)
    assert costs.prefill_s_per_token == 0.01


@pytest.mark.parametrize("verb", ["match", "load", "load_boundary"])
def test_a_store_that_fails_costs_time_and_no_turn(tmp_path, monkeypatch, verb):
    def broken(*args: Any) -> Any:
        raise OSError("the disk is gone")

    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=[1] * 100))
        run(agents.sleep.pause("a"))
        before = tokens_of(agents, "a")
        monkeypatch.setattr(Store, verb, broken)
        end = run(turn(agents, "a", tokens=[2]))
        assert any("the disk is gone" in note for note in end.usage.notes)
        assert end.usage.cached_tokens == 0
        assert list(tokens_of(agents, "a")[-6:]) == oracle([*before, 2], 6)
        nothing_is_held(agents)


def test_rows_that_went_through_8_bits_are_said_to_have(tmp_path):
    config = StoreConfig(warm_bytes=0, cold_precision="int8")
    with manager(tmp_path, config=config) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=[1] * 100))
        run(agents.sleep.pause("a"))
        assert run(agents.sleep.resume("a")).is_exact is False


@pytest.mark.parametrize("is_freed", [True, False])
def test_a_restore_waits_for_cells_as_long_as_it_pays(tmp_path, monkeypatch, is_freed):
    """Another turn holds the cells; it ends once the restore has asked for them and was refused."""
    begin, asked, may_go = Restore.begin, threading.Event(), threading.Event()

    def watched(*args: Any) -> Any:
        restore = begin(*args)
        if restore is None:
            asked.set()
        return restore

    def load_small(name: str) -> Any:
        return make_host(name, capacity=200, params=FULL_PARAMS)

    async def main(agents: Any) -> None:
        await agents.lifecycle.create("a")
        await turn(agents, "a", tokens=[1] * 100)
        await agents.sleep.pause("a")
        await agents.lifecycle.create("b")
        host = agents.models.host("hash")
        step = host.engine.step

        def held_step() -> Any:
            """Prefill goes on, decoding waits."""
            running = host.engine.scheduler.running
            if may_go.is_set() or not running or any(s.n_computed < s.n_prompt for s in running):
                return step()
            time.sleep(0.001)
            return []

        host.engine.step = held_step
        events = agents.turns.generate(Turn("b", tokens=[2] * 110, params=GREEDY))
        await anext(events)  # it runs
        before = tokens_of(agents, "a")
        task = asyncio.ensure_future(turn(agents, "a", tokens=[3]))
        assert await asyncio.to_thread(asked.wait, 60)
        if not is_freed:  # its patience has an end: then it stands in the queue
            while not task.done() and not host.engine.stats().waiting:
                await asyncio.sleep(0.01)
        may_go.set()
        async for _ in events:
            pass
        end = await task
        assert end.usage.restored_tokens == (len(before) - 1 if is_freed else 0)
        assert list(tokens_of(agents, "a")[-6:]) == oracle([*before, 3], 6, FULL_PARAMS)

    monkeypatch.setattr(residence, "PATIENCE_S", 60.0 if is_freed else 0.05)
    monkeypatch.setattr(Restore, "begin", watched)
    with manager(tmp_path, load_small) as agents:
        run(main(agents))


class Balanced(Costs):
    """Loading takes as long as computing."""

    def estimate(self, match: Any, n_cached: int, n_rows: int, stop: int) -> Estimate:
        return Estimate(float(stop - n_cached), float(stop - n_cached))


def load_balanced(params: Any) -> Any:
    def load_one(name: str) -> Any:
        host = make_host(name, params=params)
        host.costs = Balanced(prefill_s_per_token=1.0)
        return host

    return load_one


@pytest.mark.parametrize("params", [PARAMS, FULL_PARAMS], ids=["windows", "full"])
@pytest.mark.parametrize("verify", ["checksum", "canary"])
def test_the_beginning_is_computed_while_the_end_is_loaded(tmp_path, params, verify):
    with manager(tmp_path, load_balanced(params), verify=verify) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=[(7 * i) % 250 for i in range(600)]))
        run(agents.sleep.pause("a"))
        before = tokens_of(agents, "a")
        end = run(turn(agents, "a", tokens=[2]))
        n, n_computed = len(before) - 1, 304
        assert n == 605
        assert end.usage.restored_tokens == end.usage.cached_tokens == n - n_computed
        assert end.usage.miss.cause == "recomputed"
        assert end.usage.miss.tokens_lost == n_computed
        assert list(tokens_of(agents, "a")[-6:]) == oracle([*before, 2], 6, params)
        nothing_is_held(agents)
        run(agents.lifecycle.delete("a"))
        cache = engine_of(agents).cache
        assert cache.n_free == cache.capacity


@pytest.mark.parametrize("params", [PARAMS, FULL_PARAMS], ids=["windows", "full"])
def test_a_beginning_that_cannot_be_computed_costs_the_restore_and_no_turn(
    tmp_path, monkeypatch, params
):
    with manager(tmp_path, load_balanced(params)) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=[(7 * i) % 250 for i in range(600)]))
        run(agents.sleep.pause("a"))
        before = tokens_of(agents, "a")
        host = agents.models.host("hash")
        forward, n_calls = host.engine.runner.forward, 0

        def broken(*args: Any) -> Any:
            nonlocal n_calls
            n_calls += 1
            if n_calls == 2:
                raise RuntimeError("out of luck")
            return forward(*args)

        host.engine.runner.forward = broken
        end = run(turn(agents, "a", tokens=[2]))
        assert end.usage.restored_tokens == 0
        assert list(tokens_of(agents, "a")[-6:]) == oracle([*before, 2], 6, params)
        nothing_is_held(agents)


def test_a_caller_that_leaves_during_a_restore_leaves_nothing_behind(tmp_path, monkeypatch):
    whole, reached, may_go = Store.load, threading.Event(), threading.Event()

    def stuck(self: Store, *args: Any) -> Any:
        for loaded in whole(self, *args):
            reached.set()
            may_go.wait(60)
            yield loaded

    async def main(agents: Any) -> None:
        await agents.lifecycle.create("a")
        await turn(agents, "a", tokens=[1] * 600)
        await agents.sleep.pause("a")
        before = tokens_of(agents, "a")
        with monkeypatch.context() as patch:
            patch.setattr(Store, "load", stuck)
            task = asyncio.ensure_future(turn(agents, "a", tokens=[2]))
            assert await asyncio.to_thread(reached.wait, 60)
            task.cancel()
            may_go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert tokens_of(agents, "a") == before
        await turn(agents, "a", tokens=[3])
        nothing_is_held(agents)
        assert list(tokens_of(agents, "a")[-6:]) == oracle([*before, 3], 6, FULL_PARAMS)

    with manager(tmp_path, load_balanced(FULL_PARAMS)) as agents:
        run(main(agents))


def test_how_much_to_compute_meanwhile():
    assert Estimate(1.0, 1.0).n_to_compute(1000, 10) == 500
    assert Estimate(3.0, 1.0).n_to_compute(1000, 10) == 750
    assert Estimate(2.0, 1.0).n_to_compute(1024, 256) == 768, "whole blocks alone are loaded"
    assert Estimate(0.009, 1.0).n_to_compute(1000, 10) == 0, "loading is almost free"
    assert Estimate(1.0, 0.001).n_to_compute(1000, 10) == 0, "loading is no help"
    assert Estimate(1.0, None).n_to_compute(1000, 10) == 0
