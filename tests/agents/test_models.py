"""Models come and go, agents stay: swaps, idle models, budgets, the same name on two models."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest

from kvcellar.agents import ModelRegistry
from kvcellar.errors import ConfigError, NameTakenError
from tests.agents.fakes import FULL_PARAMS, make_host, manager, oracle, run, tokens_of, turn
from tests.agents.test_turns import check


def load(name: str) -> Any:
    return make_host(name, params=FULL_PARAMS, size_bytes=100)


def test_agents_of_a_model_that_was_swapped_out_come_back_with_it(tmp_path):
    with manager(tmp_path, load) as agents:
        agents.models._budget_bytes = 150
        agents.models._size_of = lambda name: 100

        async def main() -> None:
            for i in range(3):
                for model in ("one", "two"):
                    if not i:
                        await agents.lifecycle.create(f"of-{model}", model=model)
                    before = len(tokens_of(agents, f"of-{model}"))
                    end = await turn(agents, f"of-{model}", "some words to say " * 3)
                    check(agents, end, FULL_PARAMS)
                    assert agents.models.names == [model]
                    if i:
                        assert end.usage.restored_tokens == before - 1

        run(main())


def test_a_name_of_an_agent_with_another_model_is_not_taken_by_an_empty_one_unasked(tmp_path):
    with manager(tmp_path, load) as agents:

        async def main() -> None:
            await agents.lifecycle.create("poet", model="one")
            await turn(agents, "poet", "some words to say")
            said = len(tokens_of(agents, "poet"))
            assert agents.lifecycle.default_model != "one"
            with pytest.raises(NameTakenError, match="'poet' with model 'one' already"):
                await agents.lifecycle.create("poet")
            assert len(tokens_of(agents, "poet")) == said
            await agents.lifecycle.create("poet", model="two")  # asked for, so it is another one
            assert [info.model for info in agents.directory.infos()] == ["one", "two"]

        run(main())


def test_two_models_are_in_memory_together_where_the_budget_allows(tmp_path):
    registry = ModelRegistry(load, budget_bytes=200, size_of=lambda name: 100)

    async def main() -> None:
        async with registry.use("one") as one, registry.use("two"):
            assert sorted(registry.names) == ["one", "two"]
        async with registry.use("three"):
            assert sorted(registry.names) == ["one", "three"], "the least recently used went"
            assert registry.host("one") is one

    run(main())
    registry.close()
    assert registry.names == []
    small = ModelRegistry(load, budget_bytes=50, size_of=lambda name: 100)
    with pytest.raises(ConfigError, match="may hold"):
        run(small._enter("one"))


def test_a_model_that_is_needed_waits_for_one_that_is_in_use():
    registry = ModelRegistry(load, budget_bytes=150, size_of=lambda name: 100)

    async def main() -> None:
        inside = asyncio.Event()

        async def second() -> None:
            async with registry.use("two"):
                inside.set()

        async with registry.use("one"):
            task = asyncio.ensure_future(second())
            await asyncio.sleep(0.1)
            assert not inside.is_set() and registry.names == ["one"]
        await task
        assert registry.names == ["two"]

    run(main())
    registry.close()


def test_an_idle_model_goes_after_its_time_and_a_used_one_stays():
    before = set(threading.enumerate())
    registry = ModelRegistry(load, idle_ttl_s=0.1)

    async def main() -> None:
        async with registry.use("one"):
            await asyncio.sleep(0.4)
            assert registry.names == ["one"]
        deadline = time.monotonic() + 180
        while registry.names and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert registry.names == []

    run(main())
    registry.close()
    begun = set(threading.enumerate()) - before
    assert not any(thread.name == "kvcellar-models" for thread in begun)


def test_another_model_reads_the_conversation_anew_says_so_and_keeps_the_old(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create("a", model="one")
        await turn(agents, "a", "hello on one")
        old = tokens_of(agents, "a")
        end = await turn(agents, "a", "hello on two", model="two")
        assert end.usage.miss.cause == "other model"
        assert end.usage.miss.tokens_lost == len(old)
        assert any("is read anew by 'two'" in note for note in end.usage.notes)
        said = [
            m["content"] for m in agents.directory.conversation("a", "two") if m["role"] == "user"
        ]
        assert said == ["hello on one", "hello on two"], "nothing that was said is lost"
        assert agents.directory.conversation("a", "two")[:2] == agents.directory.conversation(
            "a", "one"
        )
        assert [(i.agent_id, i.model) for i in agents.directory.infos()] == [
            ("a", "one"),
            ("a", "two"),
        ]
        end = await turn(agents, "a", "and again", model="two")
        assert end.usage.miss is None
        end = await turn(agents, "a", "back", model="one")
        assert tokens_of(agents, "a")[: len(old)] == old
        assert end.usage.cached_tokens == len(old) - 1

    with manager(tmp_path, load) as agents:
        run(main(agents))
    with manager(tmp_path, load) as agents:
        assert len(agents.directory.infos()) == 2


def test_the_same_model_in_another_form_goes_on_from_all_that_was_said(tmp_path):
    def in_form(block_tokens: int) -> Any:
        return lambda name: make_host(name, block_tokens=block_tokens)

    async def create(agents: Any) -> None:
        await agents.lifecycle.create("a", system="Be brief.")

    async def say(agents: Any, text: str) -> list[str]:
        end = await turn(agents, "a", text)
        check(agents, end)
        said = agents.directory.conversation("a")
        return [message["content"] for message in said if message["role"] == "user"]

    with manager(tmp_path, in_form(16)) as agents:
        run(create(agents))
    texts = ["first", "second", "third", "fourth"]
    for n, block_tokens in enumerate([32, 16, 32, 16]):
        with manager(tmp_path, in_form(block_tokens)) as agents:
            assert run(say(agents, texts[n])) == texts[: n + 1], "nothing that was said is lost"


def test_a_waiting_agent_is_the_first_to_go_and_comes_back(tmp_path):
    def small(name: str) -> Any:
        return make_host(name, params=FULL_PARAMS, capacity=700)

    async def main(agents: Any) -> None:
        for name in ("waits", "idles"):
            await agents.lifecycle.create(name)
            await turn(agents, name, tokens=[ord(name[0])] * 200)
        await agents.sleep.wait("idles")  # was used last, and waits
        assert (await agents.directory.describe("idles")).state == "waiting"
        await agents.lifecycle.create("big")
        await turn(agents, "big", tokens=[9] * 350)
        assert (await agents.directory.describe("waits")).n_cached == 205
        assert (await agents.directory.describe("idles")).n_cached < 205
        end = await turn(agents, "idles", tokens=[1])
        assert end.usage.cached_tokens == 205 and end.usage.restored_tokens > 0
        assert end.usage.miss is None
        check(agents, end, FULL_PARAMS)

    with manager(tmp_path, small) as agents:
        run(main(agents))


def test_an_agent_that_generates_is_never_the_victim(tmp_path):
    from kvcellar.engine import SamplingParams

    def small(name: str) -> Any:
        return make_host(name, params=FULL_PARAMS, capacity=500)

    async def main(agents: Any) -> None:
        for name in ("busy", "idle", "new"):
            await agents.lifecycle.create(name)
        await turn(agents, "idle", tokens=[3] * 150)
        long = SamplingParams(max_tokens=100, ignore_eos=True)
        busy = asyncio.ensure_future(turn(agents, "busy", tokens=[4] * 150, params=long))
        await asyncio.sleep(0.02)
        await turn(agents, "new", tokens=[5] * 200)
        end = await busy
        assert list(end.finish.token_ids) == oracle([4] * 150, 100, FULL_PARAMS)
        engine = agents.models.host("hash").engine
        assert engine.stats().preemptions == 0
        assert (await agents.directory.describe("idle")).n_cached < 155

    with manager(tmp_path, small) as agents:
        run(main(agents))


def test_a_finished_sub_agent_leaves_its_private_cells_at_once(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create("a")
        await turn(agents, "a", tokens=[3] * 100)
        await agents.lifecycle.fork("a", "sub")
        await turn(agents, "sub", tokens=[4] * 100)
        cache = agents.models.host("hash").engine.cache
        info = await agents.lifecycle.finish("sub")
        assert info.state == "finished"
        assert cache.usage().groups[0].live <= 106
        assert (await agents.directory.describe("a")).n_cached >= 105
        end = await turn(agents, "sub", tokens=[5])
        assert end.usage.cached_tokens == info.n_tokens - 1
        check(agents, end, FULL_PARAMS)

    with manager(tmp_path, load) as agents:
        run(main(agents))


def test_who_is_told_that_a_model_went_finds_nothing_of_it():
    registry = ModelRegistry(load)
    left: list[Any] = []

    async def main() -> None:
        async with registry.use("one") as host:
            left.append(weakref.ref(host.service))

    registry.after_unload(lambda: left.append((gc.collect() >= 0, left[0](), registry.names)))
    run(main())
    registry.close()
    assert left[1:] == [(True, None, [])]
