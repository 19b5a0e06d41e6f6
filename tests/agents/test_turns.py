"""Turns, forks, going back, sleeping, coming back: always the tokens of an agent that never did."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvcellar.agents import Turn
from kvcellar.errors import AgentError, PromptError, UnknownAgentError
from tests.agents.fakes import (
    CHUNK_PARAMS,
    FULL_PARAMS,
    PARAMS,
    continued,
    make_host,
    manager,
    oracle,
    run,
    tokens_of,
    turn,
)


def check(agents: Any, end: Any, params: Any = PARAMS) -> None:
    """The sampled tokens are those that follow the history, by the tokens alone."""
    n = len(end.finish.token_ids)
    history = tokens_of(agents, end.agent_id)
    assert list(history[-n:]) == oracle(history[:-n], n, params)


def test_a_history_grows_turn_by_turn_and_each_turn_computes_only_what_is_new(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create("a", system="Be brief.")
        before = 0
        for i in range(4):
            end = await turn(agents, "a", f"question {i}")
            check(agents, end)
            if i:
                assert end.usage.cached_tokens >= before - 1
                assert end.usage.miss is None
            before = len(tokens_of(agents, "a"))
        assert agents.directory.infos()[0].n_turns == 4

    with manager(tmp_path) as agents:
        run(main(agents))


@pytest.mark.parametrize("params", [PARAMS, FULL_PARAMS, CHUNK_PARAMS])
def test_an_agent_outlives_the_process(tmp_path, params):
    def load(name: str) -> Any:
        return make_host(name, params=params)

    async def talk(agents: Any, text: str) -> Any:
        end = await turn(agents, "a", text)
        check(agents, end, params)
        return end

    with manager(tmp_path, load) as agents:
        run(agents.lifecycle.create("a"))
        run(talk(agents, "x" * 100))
        before = tokens_of(agents, "a")
    for i in range(3):
        with manager(tmp_path, load) as agents:
            assert tokens_of(agents, "a") == before
            end = run(talk(agents, f"again {i}"))
            assert end.usage.cached_tokens == len(before) - 1 == end.usage.restored_tokens
            assert end.usage.restored_from and end.usage.miss is None
            before = tokens_of(agents, "a")


def test_pause_frees_the_cells_and_resume_brings_them_back(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create("a")
        await turn(agents, "a", "y" * 90)
        info = await agents.directory.describe("a")
        assert info.n_cached == info.n_tokens - 1
        info = await agents.sleep.pause("a")
        assert (info.state, info.n_cached) == ("paused", 0)
        assert (await agents.directory.describe("a")).n_cached == 0
        cache = agents.models.host("hash").engine.cache
        assert cache.usage().groups[0].live == 0
        back = await agents.sleep.resume("a")
        assert (
            back.n_restored == info.n_tokens - 1 == (await agents.directory.describe("a")).n_cached
        )
        end = await turn(agents, "a", "more")
        assert end.usage.cached_tokens == info.n_tokens - 1
        check(agents, end)

    with manager(tmp_path) as agents:
        run(main(agents))


def test_forks_share_cells_and_differ_afterwards(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create("trunk")
        await turn(agents, "trunk", "t" * 200)
        cache = agents.models.host("hash").engine.cache
        live = cache.usage().groups[0].live
        for i in range(8):
            await agents.lifecycle.fork("trunk", f"f{i}")
        assert cache.usage().groups[0].live == live
        ends = await asyncio.gather(*(turn(agents, f"f{i}", f"way {i}") for i in range(8)))
        n = len(tokens_of(agents, "trunk"))
        for i, end in enumerate(ends):
            assert end.agent_id == f"f{i}"
            assert end.usage.cached_tokens >= n - 1
            check(agents, end)
            info = await agents.directory.describe(f"f{i}")
            assert (info.parent, info.parent_position) == ("trunk", n)
        check(agents, await turn(agents, "trunk", "on"))

    with manager(tmp_path) as agents:
        run(main(agents))
    with manager(tmp_path) as agents:  # the lineage, too, is found again
        assert {info.parent for info in agents.directory.infos()} == {None, "trunk"}
        gone = run(agents.lifecycle.keep("f3"))
        assert sorted(gone) == sorted(f"f{i}" for i in range(8) if i != 3)
        assert sorted(info.agent_id for info in agents.directory.infos()) == ["f3", "trunk"]


def test_a_fork_while_the_parent_generates_shares_what_there_is_by_now(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create("p")
        from kvcellar.engine import GeneratedToken, SamplingParams

        long = SamplingParams(max_tokens=40, ignore_eos=True)
        n = 0
        async for event in agents.turns.generate(Turn("p", "z" * 60, params=long)):
            if isinstance(event, GeneratedToken):
                n += 1
                if n == 10:
                    info = await agents.lifecycle.fork("p", "c")
                    assert info.n_tokens > 60 + 9
                    child = asyncio.ensure_future(turn(agents, "c", tokens=[5]))
                    await asyncio.sleep(0)
        end = await child
        at = agents.directory.agent("c").parent_position
        assert tokens_of(agents, "c")[:at] == tokens_of(agents, "p")[:at]
        assert end.usage.cached_tokens >= at - 1
        check(agents, end)

    with manager(tmp_path) as agents:
        run(main(agents))


@pytest.mark.parametrize("restart", [False, True])
def test_rewind_goes_back_to_a_turn_or_a_token(tmp_path, restart):
    async def build(agents: Any) -> list[tuple[int, ...]]:
        await agents.lifecycle.create("a")
        states = []
        for i in range(3):
            await turn(agents, "a", f"turn {i} " * 5)
            states.append(tokens_of(agents, "a"))
        return states

    async def main(agents: Any, states: Any) -> None:
        info = await agents.lifecycle.rewind("a", turn=-1)
        assert tokens_of(agents, "a") == states[1] and info.n_messages == 4
        end = await turn(agents, "a", "another way")
        check(agents, end)
        assert end.usage.cached_tokens >= len(states[1]) - 1
        await agents.lifecycle.rewind("a", position=len(states[0]) - 2)  # inside of an answer
        end = await turn(agents, "a", "and another")
        check(agents, end)
        assert tokens_of(agents, "a")[: len(states[0]) - 2] == states[0][:-2]
        assert [m["role"] for m in agents.directory.conversation("a")] == ["user", "assistant"] * 2
        with pytest.raises(AgentError, match="no position"):
            await agents.lifecycle.rewind("a", position=10**6)

    with manager(tmp_path) as agents:
        states = run(build(agents))
        if not restart:
            run(main(agents, states))
    if restart:
        with manager(tmp_path) as agents:
            run(main(agents, states))


def test_turns_of_one_agent_wait_for_each_other(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create("a")
        ends = await asyncio.gather(*(turn(agents, "a", f"n{i}") for i in range(5)))
        assert len({end.finish.token_ids for end in ends}) > 1
        said = [m["content"] for m in agents.directory.conversation("a") if m["role"] == "user"]
        assert said == [f"n{i}" for i in range(5)]
        assert agents.directory.infos()[0].n_turns == 5

    with manager(tmp_path) as agents:
        run(main(agents))


def test_leaving_a_turn_keeps_what_was_sampled_by_then(tmp_path):
    async def main(agents: Any) -> None:
        from kvcellar.engine import SamplingParams

        await agents.lifecycle.create("a")
        long = SamplingParams(max_tokens=3000, ignore_eos=True)
        events = agents.turns.generate(Turn("a", "q", params=long))
        for _ in range(3):
            await anext(events)
        await events.aclose()
        n = len(tokens_of(agents, "a"))
        assert 5 < n < 3000
        end = await turn(agents, "a", "go on")
        check(agents, end)
        assert end.usage.cached_tokens >= n - 2

    with manager(tmp_path) as agents:
        run(main(agents))


def test_delete_frees_its_own_cells_and_leaves_what_others_share(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create("a")
        await turn(agents, "a", "s" * 80)
        await agents.lifecycle.fork("a", "b")
        await turn(agents, "b", "b" * 50)
        cache = agents.models.host("hash").engine.cache
        n = len(tokens_of(agents, "a"))
        await agents.lifecycle.delete("b")
        assert n - 1 <= cache.usage().groups[0].live <= n
        end = await turn(agents, "a", "on")
        assert end.usage.cached_tokens >= n - 1
        check(agents, end)
        await agents.lifecycle.delete("a")
        assert cache.usage().groups[0].live == 0
        assert agents.directory.infos() == []
        with pytest.raises(UnknownAgentError, match="no agent 'a'"):
            await turn(agents, "a", "on")

    with manager(tmp_path) as agents:
        run(main(agents))
        assert agents.dropped.forget_all() == 2
        assert agents.store.references() == []


def test_export_and_import_bring_an_agent_to_another_store(tmp_path):
    with manager(tmp_path / "one") as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", "e" * 70))
        before = tokens_of(agents, "a")
        assert run(agents.sleep.export("a", tmp_path / "file.kv")) > 1000
    with manager(tmp_path / "two") as agents:
        run(agents.sleep.import_file(tmp_path / "file.kv"))
        with pytest.raises(AgentError, match="already"):
            run(agents.sleep.import_file(tmp_path / "file.kv"))
        info = run(agents.sleep.import_file(tmp_path / "file.kv", "b"))
        assert info.agent_id == "b" and tokens_of(agents, "b") == before
        for name in "ab":
            end = run(turn(agents, name, f"hello {name}"))
            assert end.usage.cached_tokens >= len(before) - 1
            check(agents, end)


def test_a_turn_that_cannot_be_changes_nothing(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create("a")
        await turn(agents, "a", "hello")
        before = tokens_of(agents, "a")
        for wrong in ({"tokens": []}, {"tokens": [10**6]}, {"text": "x" * 5000}, {}):
            with pytest.raises(PromptError):
                await turn(agents, "a", **wrong)
            assert tokens_of(agents, "a") == before
        with pytest.raises(AgentError, match="already"):
            await agents.lifecycle.create("a")
        check(agents, await turn(agents, "a", "still here"))

    with manager(tmp_path) as agents:
        run(main(agents))


def test_two_sub_agents_with_the_same_system_prompt_never_collide(tmp_path):
    system = {"role": "system", "content": "s" * 300}

    async def main(agents: Any) -> None:
        for name in ("one", "two"):
            await agents.lifecycle.create(name)
            await turn(agents, name, messages=[system, {"role": "user", "content": name}])
        for name in ("one", "two"):
            own = list(agents.directory.conversation(name))
            assert continued(agents, [*own, {"role": "user", "content": "x"}]) == name
        fresh = [system, {"role": "user", "content": "three"}]
        assert continued(agents, fresh) is None

    with manager(tmp_path) as agents:
        run(main(agents))


def test_whatever_agents_do_their_tokens_are_those_of_the_plain_loop(tmp_path):
    """Random verbs over a cache that is far too small, and restarts in between."""
    rng = np.random.default_rng(3)

    def load(name: str) -> Any:
        return make_host(name, capacity=420)

    names: list[str] = []

    async def act(agents: Any) -> None:
        kind = rng.integers(9)
        if kind == 0 or not names:
            names.append(f"n{len(names)}")
            await agents.lifecycle.create(names[-1])
        name = names[int(rng.integers(len(names)))]
        n = len(tokens_of(agents, name))
        if kind == 1 and n:
            names.append(f"n{len(names)}")
            await agents.lifecycle.fork(name, names[-1], position=int(rng.integers(1, n + 1)))
        elif kind == 2 and n:
            await agents.lifecycle.rewind(name, position=int(rng.integers(1, n + 1)))
        elif kind == 3:
            await agents.sleep.pause(name)
        elif kind == 4:
            await agents.sleep.resume(name)
        elif kind == 5:
            await agents.sleep.wait(name)
        elif n < 300:
            some = rng.integers(0, 250, int(rng.integers(1, 60))).tolist()
            check(agents, await turn(agents, name, tokens=some))
        cache = agents.models.host("hash")
        if cache is not None:

            def verify(engine: Any) -> None:
                engine.index.check()
                engine.cache.check([c.tolist() for c in engine.index.held_cells()])

            await asyncio.wrap_future(cache.service.run(verify))

    for _ in range(6):
        with manager(tmp_path, load) as agents:
            for _ in range(25):
                run(act(agents))


def test_where_a_block_is_gone_a_window_model_goes_back_to_the_nearest_turn_and_not_to_zero(
    tmp_path,
):
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        lengths = []
        for i in range(4):
            run(turn(agents, "a", tokens=[i + 1] * 50))
            lengths.append(len(tokens_of(agents, "a")) - 1)
        run(agents.sleep.pause("a"))
        blocks = agents.store.get("a@" + agents.directory.agent("a").name.rpartition("@")[2]).blocks
    gone = blocks[-3].hex()  # of 16 tokens each: between the last two turns' ends
    (found,) = [p for p in (tmp_path / "blocks").rglob("*") if gone in p.name]
    found.unlink()
    with manager(tmp_path) as agents:
        end = run(turn(agents, "a", tokens=[9]))
        check(agents, end)
        n = end.usage.cached_tokens
        assert lengths[-2] <= n < lengths[-1]
        assert end.usage.miss is not None and end.usage.miss.tokens_lost == lengths[-1] - n


def test_what_another_process_said_is_taken_over_before_the_next_turn(tmp_path):
    with manager(tmp_path) as one, manager(tmp_path) as two:
        run(one.lifecycle.create("a"))
        for i in range(3):
            for agents in (one, two):
                end = run(turn(agents, "a", tokens=[i + 1] * 30))
                check(agents, end)
                agents.store.flush()
        assert len(tokens_of(two, "a")) == 6 * 36 and two.directory.infos()[0].n_turns == 6
        assert end.usage.cached_tokens == 5 * 36 - 1
        run(one.lifecycle.delete("a"))
        assert one.directory.infos() == []


def test_a_deleted_parent_is_told_from_a_later_agent_of_its_name(tmp_path):
    async def begin(agents: Any) -> None:
        await agents.lifecycle.create("p")
        await turn(agents, "p", tokens=list(range(40)))
        await agents.lifecycle.fork("p", "old-1")
        await agents.lifecycle.fork("p", "old-2")
        await agents.lifecycle.fork("old-2", "grandchild")
        assert not any(info.is_parent_gone for info in agents.directory.infos())
        await agents.lifecycle.delete("p")
        await agents.lifecycle.create("p")
        await turn(agents, "p", tokens=[9] * 40)
        await agents.lifecycle.fork("p", "new-1")

    with manager(tmp_path) as agents:
        run(begin(agents))
        agents.store.flush()
    with manager(tmp_path) as agents:
        gone = {info.agent_id for info in agents.directory.infos() if info.is_parent_gone}
        assert gone == {"old-1", "old-2"}
        assert run(agents.directory.describe("old-1")).parent == "p"
        assert set(run(agents.lifecycle.keep("old-1"))) == {"old-2", "grandchild"}
        assert {info.agent_id for info in agents.directory.infos()} == {"old-1", "p", "new-1"}
