"""Two processes with one store: each sees what the other has done, once it looks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvcellar.engine import service as service_module
from kvcellar.errors import UnknownAgentError
from tests.agents.fakes import manager, run, tokens_of, turn


def test_a_turn_of_another_process_is_seen_before_the_next_one_here(tmp_path):
    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(ours.lifecycle.create("a"))
        run(turn(ours, "a", "Hello"))
        ours.store.flush()
        run(turn(theirs, "a", "And?"))
        theirs.store.flush()
        info = run(ours.directory.describe("a"))
        assert (info.n_turns, info.n_messages) == (2, 4)
        assert ours.directory.conversation("a") == theirs.directory.conversation("a")
        assert tokens_of(ours, "a") == tokens_of(theirs, "a")
        run(turn(ours, "a", "So?"))
        ours.store.flush()
        assert [i.n_turns for i in run(theirs.directory.listed())] == [3]


def test_what_another_process_made_and_deleted_is_seen(tmp_path):
    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(theirs.lifecycle.create("a"))
        run(theirs.lifecycle.create("b"))
        assert [i.agent_id for i in run(ours.directory.listed())] == ["a", "b"]
        run(theirs.lifecycle.delete("a"))
        assert [i.agent_id for i in run(ours.directory.listed())] == ["b"]
        with pytest.raises(UnknownAgentError):
            run(ours.directory.describe("a"))
        run(theirs.lifecycle.create("a", system="Another."))
        run(ours.directory.refresh())
        assert ours.directory.conversation("a") == theirs.directory.conversation("a")


def test_one_that_was_made_again_elsewhere_is_the_new_one(tmp_path):
    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(ours.lifecycle.create("a"))
        for _ in range(3):
            run(turn(ours, "a", "Hello"))
        ours.store.flush()
        run(theirs.lifecycle.delete("a"))
        run(theirs.lifecycle.create("a", system="Another."))
        assert [i.n_messages for i in run(ours.directory.listed())] == [1]
        assert ours.directory.conversation("a")[0]["content"] == "Another."


def test_what_was_not_saved_yet_here_is_not_taken_for_deleted(tmp_path):
    with manager(tmp_path) as ours:
        run(ours.lifecycle.create("passing", is_passing=True))
        assert [i.n_turns for i in run(ours.directory.listed())] == [0]
        run(turn(ours, "passing", "Hello"))
        assert [i.n_turns for i in run(ours.directory.listed())] == [1]


def test_looking_does_not_keep_the_event_loop(tmp_path, monkeypatch):
    """The store's queries and reads are answered while the loop goes on."""
    go_on = threading.Event()

    async def both(agents: Any, verb: Any) -> None:
        waiting = asyncio.create_task(verb())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        go_on.set()
        await waiting

    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(ours.lifecycle.create("a"))
        run(turn(ours, "a", "Hello"))
        ours.store.flush()
        ask = ours.store._cold.ask

        def slowly(question: Any) -> Any:
            assert go_on.wait(60)
            return ask(question)

        for verb in (
            ours.directory.listed,
            lambda: ours.directory.describe("a"),
            lambda: turn(ours, "a", "So?"),
            lambda: ours.lifecycle.rewind("a", turn=1),
        ):
            run(turn(theirs, "a", "And?"))
            theirs.store.flush()
            go_on.clear()
            with monkeypatch.context() as patch:
                patch.setattr(ours.store._cold, "ask", slowly)
                run(both(ours, verb))
            ours.store.flush()


def test_kv_that_is_saved_late_does_not_bring_back_an_older_history(tmp_path, monkeypatch):
    """Our engine rests after another process has published its turn."""
    monkeypatch.setattr(service_module, "REST_S", 3600.0)
    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(ours.lifecycle.create("a"))
        run(turn(ours, "a", "Hello"))
        ours.store.flush()
        run(turn(theirs, "a", "And?"))
        run(theirs.sleep.pause("a"))
        host = ours.models.host("hash")
        agent = ours.directory.agent("a")
        host.service.run(lambda _: ours.sleep.publisher.between_steps(host, agent, True)).result()
        ours.store.flush()
        published = ours.store.get(agent.name)
        assert len(published.metadata["turns"]) == 2
        assert published.n_stored == len(published.tokens) - 1
        assert [info.n_turns for info in run(ours.directory.listed())] == [2]


def test_a_turn_of_another_process_is_seen_while_a_save_of_ours_waits(tmp_path, monkeypatch):
    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(ours.lifecycle.create("a"))
        run(turn(ours, "a", "Hello"))
        ours.store.flush()
        run(turn(theirs, "a", "And?"))
        theirs.store.flush()
        monkeypatch.setattr(ours.sleep.publisher, "revision_of", lambda agent: None)
        assert [info.n_turns for info in run(ours.directory.listed())] == [2]


def test_a_save_of_ours_that_ends_while_we_look_hides_no_turn_of_another(tmp_path, monkeypatch):
    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(ours.lifecycle.create("a"))
        run(turn(ours, "a", "Hello"))
        ours.store.flush()
        run(turn(theirs, "a", "And?"))
        revisions = iter([None])  # queued when the look begins, and published when it ends
        known = ours.sleep.publisher.revision_of
        monkeypatch.setattr(
            ours.sleep.publisher, "revision_of", lambda agent: next(revisions, known(agent))
        )
        assert [info.n_turns for info in run(ours.directory.listed())] == [2]
