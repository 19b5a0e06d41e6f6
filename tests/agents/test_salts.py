"""Agents of different salts share nothing, in the cache, in the store or by what they said."""

from __future__ import annotations

from typing import Any

import pytest

from kvcellar.agents import salt_of, salted_id, without_salt
from kvcellar.errors import AgentError, AgentNameError, StoreError, UnknownAgentError
from tests.agents.fakes import continued, engine_of, manager, oracle, run, tokens_of, turn

ONE, TWO = "1" * 32, "2" * 32
SALTS = ("", ONE, TWO)
LONG = "a question of many words " * 10


def test_a_salted_id_says_its_salt_and_is_shown_without():
    assert salted_id("poet", "") == "poet" and salt_of("poet") == ""
    mine = salted_id("poet", ONE)
    assert (
        salt_of(mine) == ONE and without_salt(f"no agent {mine!r} here") == "no agent 'poet' here"
    )
    assert salt_of(f"{mine}x") == salt_of(f"{mine}0") == ""


def test_the_same_words_of_strangers_are_computed_by_each_and_within_a_salt_once(tmp_path):
    async def main(agents: Any) -> None:
        for salt in SALTS:
            for i, name in enumerate(("a", "b")):
                agent_id = salted_id(name, salt)
                await agents.lifecycle.create(agent_id, system="Be brief.")
                end = await turn(agents, agent_id, LONG)
                n_prompt, n_cached = end.usage.prompt_tokens, end.usage.cached_tokens
                assert n_cached == (n_prompt - 1 if i else 0), (salt, name)
                history = tokens_of(agents, agent_id)
                n = len(end.finish.token_ids)
                assert list(history[-n:]) == oracle(history[:-n], n)
                engine_of(agents)
        for salt in SALTS:  # each goes on where it was
            end = await turn(agents, salted_id("a", salt), "And?")
            assert end.usage.miss is None and end.usage.cached_tokens >= 250

    with manager(tmp_path) as agents:
        run(main(agents))


def test_what_is_stored_is_found_again_within_its_salt_alone(tmp_path):
    async def talk(agents: Any, salt: str) -> Any:
        agent_id = salted_id("a", salt)
        if not await agents.directory.has(agent_id):
            await agents.lifecycle.create(agent_id)
        return await turn(agents, agent_id, LONG)

    with manager(tmp_path) as agents:
        run(talk(agents, ONE))
    with manager(tmp_path) as agents:
        assert run(talk(agents, TWO)).usage.restored_tokens == 0
        assert run(talk(agents, "")).usage.restored_tokens == 0
        again = run(talk(agents, ONE)).usage
        assert again.restored_tokens >= 240 and again.miss is None
        ids = {info.agent_id for info in agents.directory.infos()}
        assert ids == {salted_id("a", salt) for salt in SALTS}


def test_a_conversation_is_found_among_those_of_its_salt(tmp_path):
    async def main(agents: Any) -> None:
        for salt in (ONE, ""):
            await agents.lifecycle.create(salted_id("a", salt))
            await turn(agents, salted_id("a", salt), "Hello")
        said = [*agents.directory.conversation("a"), {"role": "user", "content": "And?"}]
        assert continued(agents, said) == "a"
        for salt, found in ((ONE, salted_id("a", ONE)), (TWO, None)):
            place = agents.lookup.place_of(said, model="hash", salt=salt)
            assert (place.agent_id if place else None) == found
        await agents.lifecycle.create(salted_id("b", TWO))
        await agents.lookup.expect(salted_id("b", TWO), said, model="hash")
        assert agents.directory.agent(salted_id("b", TWO)).live.beside is None

    with manager(tmp_path) as agents:
        run(main(agents))


def test_nobody_hears_of_strangers_or_makes_a_fork_of_them(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create(salted_id("secret", ONE))
        await agents.lifecycle.create("plain")
        for missing, known in (("secret", "plain"), (salted_id("plain", ONE), "secret")):
            with pytest.raises(UnknownAgentError) as error:
                await turn(agents, missing, "Hello")
            assert without_salt(str(error.value)).endswith(f"there are: {known}")
        with pytest.raises(AgentError, match="one salt"):
            await agents.lifecycle.fork(salted_id("secret", ONE), "mine")
        fork = await agents.lifecycle.fork(salted_id("secret", ONE))
        assert salt_of(fork.agent_id) == ONE
        with pytest.raises(AgentNameError):
            await agents.lifecycle.create("a~b")

    with manager(tmp_path) as agents:
        run(main(agents))


def test_a_file_of_an_agent_keeps_its_salt(tmp_path):
    async def main(agents: Any) -> None:
        await agents.lifecycle.create(salted_id("a", ONE))
        await turn(agents, salted_id("a", ONE), LONG)
        file = tmp_path / "file"
        await agents.sleep.export(salted_id("a", ONE), file)
        with pytest.raises(StoreError, match="another salt"):
            await agents.sleep.import_file(file, "mine")
        back = await agents.sleep.import_file(file, salted_id("c", ONE))
        assert salt_of(back.agent_id) == ONE
        await agents.sleep.pause(salted_id("a", ONE))
        await agents.lifecycle.delete(salted_id("a", ONE))
        (again,) = await agents.dropped.undo(salted_id("a", ONE))
        assert again.agent_id == salted_id("a", ONE)

    with manager(tmp_path / "store") as agents:
        run(main(agents))
