"""Restore or recompute: the faster one, and never much slower than having no store."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from kvcellar.agents import residence
from kvcellar.agents.costs import Costs
from kvcellar.engine import Restore
from kvcellar.store import Store, StoreConfig
from tests.agents.fakes import (
    FULL_PARAMS,
    GREEDY,
    make_host,
    manager,
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
        run(agents.create("a"))
        run(turn(agents, "a", tokens=[1] * 300))
        host = agents.models.host("hash")
        for prefill, is_restored in ((1e-9, False), (1.0, True)):
            run(agents.pause("a"))
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


def test_a_restore_that_turns_out_slow_is_given_up_after_a_twentieth(tmp_path, monkeypatch):
    whole = Store.load

    def slow(self: Store, *args: Any) -> Any:
        for loaded in whole(self, *args):
            time.sleep(0.05)
            yield loaded

    with manager(tmp_path, load) as agents:
        run(agents.create("a"))
        run(turn(agents, "a", tokens=[1] * 600))
        run(agents.pause("a"))
        monkeypatch.setattr(Store, "load", slow)
        host = agents.models.host("hash")
        host.costs.prefill_s_per_token = 0.001  # 0.6 s for what takes 2 s to load
        before = tokens_of(agents, "a")
        end = run(turn(agents, "a", tokens=[2]))
        assert 0 < end.usage.restored_tokens < 100
        assert end.usage.miss.cause == "recomputed"
        assert list(tokens_of(agents, "a")[-6:]) == oracle([*before, 2], 6, FULL_PARAMS)


def test_rates_are_learnt_and_a_refusal_is_forgiven():
    costs = Costs()
    start = dict(costs.s_per_byte)
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


@pytest.mark.parametrize("verb", ["match", "load", "load_window"])
def test_a_store_that_fails_costs_time_and_no_turn(tmp_path, monkeypatch, verb):
    def broken(*args: Any) -> Any:
        raise OSError("the disk is gone")

    with manager(tmp_path) as agents:
        run(agents.create("a"))
        run(turn(agents, "a", tokens=[1] * 100))
        run(agents.pause("a"))
        before = tokens_of(agents, "a")
        monkeypatch.setattr(Store, verb, broken)
        end = run(turn(agents, "a", tokens=[2]))
        assert any("the disk is gone" in note for note in end.usage.notes)
        assert end.usage.cached_tokens == 0
        assert list(tokens_of(agents, "a")[-6:]) == oracle([*before, 2], 6)
        residency = agents.models.host("hash").engine.scheduler.residency
        assert residency.index.size_info().protected == 0


def test_rows_that_went_through_8_bits_are_said_to_have(tmp_path):
    config = StoreConfig(warm_bytes=0, cold_precision="int8")
    with manager(tmp_path, config=config) as agents:
        run(agents.create("a"))
        run(turn(agents, "a", tokens=[1] * 100))
        run(agents.pause("a"))
        assert run(agents.resume("a")).is_exact is False


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
        await agents.create("a")
        await turn(agents, "a", tokens=[1] * 100)
        await agents.pause("a")
        await agents.create("b")
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
        events = agents.generate("b", tokens=[2] * 110, params=GREEDY)
        await anext(events)  # it runs
        before = tokens_of(agents, "a")
        task = asyncio.ensure_future(turn(agents, "a", tokens=[3]))
        assert await asyncio.to_thread(asked.wait, 60)
        if not is_freed:  # its patience has an end: then it stands in the queue
            while not task.done() and not host.engine.scheduler.waiting:
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
