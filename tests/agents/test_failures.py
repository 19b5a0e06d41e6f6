"""What an engine, a disk or a model that fails leaves of agents: what they have said is kept."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvcellar.agents import ModelRegistry, Turn
from kvcellar.agents.kv.overlap_restore import Front, ReadAhead
from kvcellar.agents.kv.residence import _Job
from kvcellar.engine import SamplingParams
from kvcellar.engine.kv.residency import Residency
from kvcellar.errors import EngineFailedError
from kvcellar.store import Store
from tests.agents.fakes import (
    Eager,
    make_host,
    manager,
    nothing_is_held,
    oracle,
    run,
    tokens_of,
    turn,
)

PATIENCE_S = 180
ENDLESS = SamplingParams(max_tokens=500, ignore_eos=True)


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a book is torn")


def test_an_engine_that_stops_in_a_turn_keeps_every_agents_history(tmp_path, monkeypatch):
    async def main(agents: Any) -> dict[str, tuple[int, ...]]:
        for name in ("a", "b"):
            await agents.lifecycle.create(name)
            await turn(agents, name, tokens=[1, 2, ord(name)])
        stream = agents.turns.generate(Turn("a", tokens=[7, 8], params=ENDLESS))
        first = await anext(stream)
        monkeypatch.setattr(Residency, "make_room_for", raises)
        end = None
        async for event in stream:
            end = event
        assert isinstance(end.finish.error, EngineFailedError)
        with pytest.raises(EngineFailedError, match="a book is torn"):
            await turn(agents, "b", tokens=[3])
        said = {name: tokens_of(agents, name) for name in ("a", "b")}
        assert said["a"][-len(end.finish.token_ids) - 2 :][:3] == (7, 8, first.token_id)
        return said

    with manager(tmp_path) as agents:
        said = run(asyncio.wait_for(main(agents), PATIENCE_S))
    monkeypatch.undo()

    async def again(agents: Any) -> None:
        for name, tokens in said.items():
            await agents.sleep.resume(name)
            assert tokens_of(agents, name) == tokens
            end = await turn(agents, name, tokens=[4])
            assert list(end.finish.token_ids) == oracle([*tokens, 4], 6)

    with manager(tmp_path) as agents:
        run(asyncio.wait_for(again(agents), PATIENCE_S))


def test_one_agent_that_cannot_be_saved_keeps_no_other_from_being_saved(tmp_path):
    async def main(agents: Any) -> None:
        for name in ("a", "b", "c"):
            await agents.lifecycle.create(name)
            await turn(agents, name, tokens=[1, 2, ord(name)])

    with manager(tmp_path) as agents:
        run(main(agents))
        complete = agents.sleep.publisher.complete
        seen = []

        def sometimes(agent: Any, host: Any) -> None:
            seen.append(agent.agent_id)
            if agent.agent_id == "a":
                raises()
            complete(agent, host)

        agents.sleep.publisher.complete = sometimes
    assert sorted(seen) == ["a", "b", "c"]


@pytest.mark.parametrize("what", ["the engine", "the look for what was computed"])
def test_a_beginning_that_fails_while_the_rest_is_loaded_is_told_to_who_waits(what, monkeypatch):
    host = make_host()
    tokens = np.arange(50)
    if what == "the engine":
        monkeypatch.setattr(Residency, "make_room_for", raises)
    else:
        monkeypatch.setattr(host.engine, "hold", raises)
    try:
        front = Front(host, tokens)
        with pytest.raises((EngineFailedError, RuntimeError), match="a book is torn"):
            front.wait(lambda: False)
        front.stop()
    finally:
        host.close()


def test_blocks_that_cannot_be_read_ahead_are_told_to_who_waits(tmp_path):
    with Store(tmp_path) as store:
        store.load = raises  # type: ignore[method-assign]
        ahead = ReadAhead(store, None, 0, 10, Eager())  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="a book is torn"):
            ahead.next(PATIENCE_S)
        assert ahead.is_over


def test_a_model_that_cannot_be_let_go_of_does_not_end_the_look_for_idle_ones():
    clock = [0.0]
    hosts: list[Any] = []

    def load(name: str) -> Any:
        hosts.append(make_host(name))
        return hosts[-1]

    models = ModelRegistry(load, idle_ttl_s=0.04, clock=lambda: clock[0])

    async def use(name: str) -> None:
        async with models.use(name):
            pass

    async def wait_until_gone(name: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while name in models.names and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert name not in models.names

    asyncio.run(use("a"))
    close = hosts[0].service.close
    hosts[0].service.close = raises
    clock[0] = 100.0
    asyncio.run(wait_until_gone("a"))
    asyncio.run(use("b"))
    clock[0] = 200.0
    asyncio.run(wait_until_gone("b"))
    assert any(t.name == "kvcellar-models" and t.is_alive() for t in threading.enumerate())
    models.close()
    close()


def test_who_leaves_twice_while_his_history_comes_back_leaves_no_cell_held(tmp_path, monkeypatch):
    """The second time is while he waits for what is under way, as when a server is stopped."""
    is_here, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        is_here.set()
        assert go_on.wait(PATIENCE_S)

    async def main(agents: Any) -> None:
        await agents.lifecycle.create("a")
        await turn(agents, "a", tokens=list(range(100)))
        monkeypatch.setattr(_Job, "_fill", slow)
        leaving = asyncio.ensure_future(turn(agents, "a", tokens=list(range(100))))
        await asyncio.to_thread(is_here.wait, PATIENCE_S)
        for _ in range(2):
            leaving.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await leaving
        go_on.set()

    with manager(tmp_path) as agents:
        run(main(agents))  # and behind it all threads of the loop have ended
        nothing_is_held(agents)
