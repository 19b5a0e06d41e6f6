"""What rewind, keep, delete and a replaced history drop comes back, until its room is needed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from kvcellar.agents import dropped as dropped_module
from kvcellar.agents.records.checking import key_of
from kvcellar.errors import AgentError, StoreError, UnknownAgentError
from kvcellar.store import DROPPED
from tests.agents.fakes import SMALL, manager, nothing_is_held, run, tokens_of, turn


def talk(agents: Any, agent_id: str, *texts: str) -> None:
    for text in texts:
        run(turn(agents, agent_id, text))


def state_of(agents: Any, agent_id: str) -> Any:
    return (
        tokens_of(agents, agent_id),
        agents.directory.conversation(agent_id),
        agents.directory.turns(agent_id),
    )


def ids(agents: Any) -> list[str]:
    return sorted(info.agent_id for info in agents.directory.infos())


@pytest.fixture
def poet(tmp_path):
    with manager(tmp_path / "store") as agents:
        run(agents.lifecycle.create("poet", system="You write verse."))
        talk(agents, "poet", "One. " * 9, "Two. " * 9)
        yield agents


def test_a_deleted_agent_comes_back_as_it_was(poet):
    before, info = state_of(poet, "poet"), run(poet.directory.describe("poet"))
    run(poet.lifecycle.fork("poet", "child", turn=1))
    run(poet.lifecycle.delete("poet"))
    assert ids(poet) == ["child"]
    (back,) = run(poet.dropped.undo("poet"))
    assert back.agent_id == "poet" and state_of(poet, "poet") == before
    assert (back.created_s, back.n_turns) == (info.created_s, 2)
    assert not run(poet.directory.describe("child")).is_parent_gone, "its children know it again"
    with pytest.raises(AgentError, match="nothing of agent 'poet' can be brought back"):
        run(poet.dropped.undo("poet"))
    run(turn(poet, "poet", "Three."))
    nothing_is_held(poet)


def test_its_kv_comes_back_too(poet):
    run(poet.sleep.pause("poet"))
    n = len(tokens_of(poet, "poet"))
    run(poet.lifecycle.delete("poet"))
    poet.store.gc()
    run(poet.dropped.undo("poet"))
    assert run(poet.sleep.resume("poet")).n_restored == n - 1


def test_each_rewind_is_undone_in_turn(poet):
    talk(poet, "poet", "Three.")
    states = []
    for _ in range(3):
        states.append(state_of(poet, "poet"))
        run(poet.lifecycle.rewind("poet", turn=-1))
    for state in reversed(states):
        (back,) = run(poet.dropped.undo("poet"))
        assert back.agent_id == "poet" and state_of(poet, "poet") == state
    run(turn(poet, "poet", "Four."))


def test_what_was_dropped_last_comes_back_first_though_the_clock_was_set_back(poet, monkeypatch):
    before = [tokens_of(poet, "poet")]
    run(poet.lifecycle.rewind("poet", turn=-1))
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - 10**15)
    before.append(tokens_of(poet, "poet"))
    run(poet.lifecycle.rewind("poet", turn=-1))
    while before:
        run(poet.dropped.undo("poet"))
        assert tokens_of(poet, "poet") == before.pop()


def test_a_rewind_into_an_answer_is_undone(poet):
    before = state_of(poet, "poet")
    run(poet.lifecycle.rewind("poet", position=len(before[0]) - 2))
    run(poet.dropped.undo("poet"))
    assert state_of(poet, "poet") == before


def test_a_rewind_to_where_it_is_drops_nothing(poet):
    run(poet.lifecycle.rewind("poet", position=len(tokens_of(poet, "poet"))))
    assert poet.dropped.listed() == []


def test_what_was_dropped_before_it_went_on_comes_back_beside_it(poet):
    before = state_of(poet, "poet")
    run(poet.lifecycle.rewind("poet", turn=1))
    talk(poet, "poet", "Else. " * 9)
    now = state_of(poet, "poet")
    (back,) = run(poet.dropped.undo("poet"))
    assert back.agent_id == "poet.2" and state_of(poet, "poet.2") == before
    assert state_of(poet, "poet") == now


def test_a_deleted_agent_whose_name_is_taken_comes_back_under_another(poet):
    before = state_of(poet, "poet")
    run(poet.lifecycle.delete("poet"))
    run(poet.lifecycle.create("poet", system="Another."))
    (back,) = run(poet.dropped.undo("poet"))
    assert back.agent_id == "poet.2" and state_of(poet, "poet.2") == before
    assert poet.directory.conversation("poet")[0]["content"] == "Another."


def test_all_that_a_keep_deleted_comes_back_with_one_undo(poet):
    for name in ("a", "b", "c"):
        run(poet.lifecycle.fork("poet", name))
    talk(poet, "b", "Of b.")
    run(poet.lifecycle.fork("b", "b-child"))
    before = {name: state_of(poet, name) for name in ("b", "b-child", "c")}
    assert sorted(run(poet.lifecycle.keep("a"))) == sorted(before)
    assert ids(poet) == ["a", "poet"]
    assert sorted(info.agent_id for info in run(poet.dropped.undo("a"))) == sorted(before)
    assert {name: state_of(poet, name) for name in before} == before
    assert run(poet.directory.describe("b-child")).parent == "b"
    run(poet.lifecycle.keep("a"))
    assert [info.agent_id for info in run(poet.dropped.undo("c"))] == ["c"], (
        "one of them, by its own name"
    )


def test_a_history_that_a_whole_conversation_replaced_comes_back(poet):
    """The library does what it is told; the routes never ask it to."""
    before = state_of(poet, "poet")
    run(turn(poet, "poet", messages=[{"role": "user", "content": "Else."}]))
    assert len(poet.directory.conversation("poet")) == 2
    (back,) = run(poet.dropped.undo("poet"))
    assert back.agent_id == "poet.2" and state_of(poet, "poet.2") == before


def test_tokens_that_a_message_would_drop_come_back(poet):
    run(turn(poet, "poet", tokens=[1, 2, 3]))
    before = state_of(poet, "poet")
    talk(poet, "poet", "Three.")
    (back,) = run(poet.dropped.undo("poet"))
    assert state_of(poet, back.agent_id) == before


def test_a_turn_that_drops_nothing_leaves_nothing_to_undo(poet):
    messages = [*poet.directory.conversation("poet"), {"role": "user", "content": "On."}]
    run(turn(poet, "poet", messages=messages))
    run(turn(poet, "poet", tokens=[1]))
    assert poet.dropped.listed() == []


def test_a_turn_that_never_was_leaves_nothing_to_undo(poet):
    def refuse(*_: Any) -> None:
        raise AgentError("not today")

    with pytest.raises(AgentError, match="not today"):
        other = [{"role": "user", "content": "Else."}]
        run(turn(poet, "poet", messages=other, on_start=refuse))
    assert poet.dropped.listed() == []


def test_it_survives_a_restart(tmp_path):
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("poet"))
        talk(agents, "poet", "One.")
        before = state_of(agents, "poet")
        run(agents.lifecycle.delete("poet"))
    with manager(tmp_path) as agents:
        assert agents.directory.infos() == [] and [one.verb for one in agents.dropped.listed()] == [
            "delete"
        ]
        run(agents.dropped.undo("poet"))
        assert state_of(agents, "poet") == before
        assert agents.dropped.listed() == []


def test_nobody_and_nothing_are_told_apart(poet):
    with pytest.raises(UnknownAgentError):
        run(poet.dropped.undo("nobody"))
    with pytest.raises(AgentError, match="nothing was dropped"):
        run(poet.dropped.undo("poet"))


def test_what_is_deleted_for_ever_does_not_come_back(poet):
    run(poet.lifecycle.rewind("poet", turn=1))
    assert poet.dropped.forget_all() == 1
    run(poet.lifecycle.delete("poet", is_final=True))
    assert poet.store.reference_names() == []
    with pytest.raises(UnknownAgentError):
        run(poet.dropped.undo("poet"))


def test_an_agent_without_a_word_is_not_kept(poet):
    run(poet.lifecycle.create("empty"))
    run(poet.lifecycle.delete("empty"))
    assert poet.dropped.listed() == []


def test_an_agent_that_went_back_to_nothing_and_was_deleted_comes_back_step_by_step(poet):
    run(poet.lifecycle.create("short"))
    talk(poet, "short", "One. " * 9)
    before = state_of(poet, "short")
    run(poet.lifecycle.rewind("short", turn=0))
    run(poet.lifecycle.delete("short"))
    (back,) = run(poet.dropped.undo("short"))
    assert (back.agent_id, back.n_tokens, back.n_turns) == ("short", 0, 0)
    (back,) = run(poet.dropped.undo("short"))
    assert (back.agent_id, back.n_turns) == ("short", 1) and state_of(poet, "short") == before


def test_an_older_agent_of_the_name_comes_back_first_where_a_new_one_said_nothing(poet):
    run(poet.lifecycle.delete("poet"))
    run(poet.lifecycle.create("poet"))
    run(poet.lifecycle.delete("poet"))
    (back,) = run(poet.dropped.undo("poet"))
    assert (back.agent_id, back.n_turns) == ("poet", 2)


def test_their_number_and_age_are_bounded(poet, monkeypatch):
    monkeypatch.setattr(dropped_module, "MOST", 3)
    for i in range(5):
        run(poet.lifecycle.create(f"a{i}", system="x"))
        run(poet.lifecycle.delete(f"a{i}"))
    assert [one.agent_id for one in poet.dropped.listed()] == ["a2", "a3", "a4"]
    monkeypatch.setattr(dropped_module, "MAX_AGE_S", 0.0)
    run(poet.lifecycle.create("last", system="x"))
    run(poet.lifecycle.delete("last"))
    assert poet.dropped.listed() == []


def test_they_are_the_first_to_go_where_the_store_needs_room(tmp_path):
    config = replace(SMALL, cold_bytes=1 << 20)
    with manager(tmp_path, config=config) as agents:
        run(agents.lifecycle.create("living"))
        run(turn(agents, "living", tokens=range(200)))
        run(agents.lifecycle.create("doomed"))
        run(turn(agents, "doomed", tokens=range(50, 250)))
        run(agents.sleep.pause("living"))
        run(agents.sleep.pause("doomed"))
        run(agents.lifecycle.delete("doomed"))
        assert [one.agent_id for one in agents.dropped.listed()] == ["doomed"]
        stored = run(agents.directory.describe("living")).n_stored
        free = agents.store.stats().cold
        agents.store._cold.limit_bytes = free.size_bytes  # full to the brim
        run(agents.lifecycle.create("newcomer"))
        run(turn(agents, "newcomer", tokens=range(50, 120)))
        run(agents.sleep.pause("newcomer"))
        assert agents.dropped.listed() == []
        with pytest.raises(UnknownAgentError):
            run(agents.dropped.undo("doomed"))
        assert run(agents.directory.describe("living")).n_stored == stored
        agents.store.flush()
        ref = agents.store.get(agents.directory.agent("living").name)
        assert not ref.is_evicted and ref.n_stored == stored
        assert any("cannot be brought back" in e.detail for e in agents.store.take_events())


def test_a_full_store_deletes_without_keeping_and_does_not_rewind_without(poet, monkeypatch):
    def broken(*_: Any, **__: Any) -> Any:
        raise StoreError("no room")

    before = state_of(poet, "poet")
    with monkeypatch.context() as patch:
        patch.setattr(poet.store, "save", broken)
        with pytest.raises(StoreError):
            run(poet.lifecycle.rewind("poet", turn=1))
        assert state_of(poet, "poet") == before
        run(poet.lifecycle.delete("poet"))
    assert ids(poet) == [] and poet.dropped.listed() == []


def test_a_rewind_that_a_full_disk_refuses_says_whose_state_found_no_room(poet, monkeypatch):
    def full(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is full")

    monkeypatch.setattr(poet.store._cold, "put_reference", full)
    with pytest.raises(StoreError, match="what rewind drops of agent 'poet' could not be saved"):
        run(poet.lifecycle.rewind("poet", turn=1))


def test_dropped_states_are_no_agents(poet, tmp_path):
    run(poet.lifecycle.delete("poet"))
    assert poet.directory.infos() == [] and run(poet.directory.listed()) == []
    (name,) = poet.store.reference_names()
    assert name.startswith(DROPPED)
    with pytest.raises(UnknownAgentError):
        run(poet.directory.describe(name))


def test_one_that_is_damaged_hides_no_other(poet):
    for name in ("a", "b"):
        run(poet.lifecycle.create(name, system="x"))
        run(poet.lifecycle.delete(name))
    poet.store.flush()
    first = poet.dropped.listed()[0].name
    ref = poet.store.get(first)
    damaged = {"kvcellar_agent": 1, "dropped": 5}
    poet.store.save(first, key_of(ref), ref.tokens, metadata=damaged).wait()
    assert [one.agent_id for one in poet.dropped.listed()] == ["b"]
    assert [info.agent_id for info in run(poet.dropped.undo("b"))] == ["b"]
