"""A turn that was acknowledged is there after whatever happens, as tokens and messages."""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.agents.records.agent import _turn_as_json, _turn_of
from kvcellar.agents.records.checking import _check_turn
from kvcellar.agents.records.durable import entry_of, stored_state
from kvcellar.agents.records.views import Took, TurnRecord
from kvcellar.errors import StoreError, UnknownReferenceError
from kvcellar.store import Store, StoreConfig
from kvcellar.store.disk import leases
from kvcellar.store.disk.folder import RESERVE_BYTES, Folder
from kvcellar.store.disk.journal import Journal
from kvcellar.store.values.facts import BadFactError
from tests.agents.crashing import CONFIG, NAMES, new_tokens
from tests.agents.fakes import BLOCK_TOKENS, make_host, manager, run, tokens_of, turn
from tests.agents.test_crash import states_of
from tests.processes import started
from tests.store.fakes import QUICK

N_KILLS = int(os.environ.get("KVCELLAR_KILLS", "16"))


@pytest.mark.slow
def test_every_acknowledged_turn_is_there_after_a_kill() -> None:
    """At random moments, with a disk that is too slow for the saves."""
    rng = np.random.default_rng(5)
    n_behind = 0
    with (
        started("tests.agents.crashing", "windows") as process,
        tempfile.TemporaryDirectory(dir=QUICK) as name,
    ):
        folder = Path(name)
        done = dict.fromkeys(NAMES, 0)
        begun = dict.fromkeys(NAMES, 0)
        for kill in range(N_KILLS):
            process.stdin.write(f"{folder} {kill} acknowledged\n")
            process.stdin.flush()
            pid = int(process.stdout.readline().split()[1])
            assert process.stdout.readline() == "open\n"
            n_turns = int(rng.integers(1, 6))
            is_killed = False
            for line in iter(process.stdout.readline, "end\n"):
                word, agent_id, n = line.split()
                assert word in ("begin", "done"), line
                (begun if word == "begin" else done)[agent_id] = int(n)
                n_turns -= word == "done"
                if n_turns <= 0 and not is_killed:
                    time.sleep(float(rng.exponential(0.004)))
                    os.kill(pid, signal.SIGKILL)
                    is_killed = True
            with Store(folder, CONFIG) as store:
                published = {
                    n.partition("@")[0]: len(store.get(n).tokens) for n in store.revisions()
                }
            with manager(folder, config=CONFIG) as agents:
                for agent_id in NAMES:
                    n = run(agents.directory.describe(agent_id)).n_turns
                    assert done[agent_id] <= n <= begun[agent_id]
                    assert tokens_of(agents, agent_id) == states_of(agent_id, n)[n]
                    n_behind += published[agent_id] < len(tokens_of(agents, agent_id))
                    done[agent_id] = begun[agent_id] = n
        assert sum(done.values()) > N_KILLS
        assert n_behind > N_KILLS / 4, "the saves were fast enough, so nothing was shown"
        with manager(folder, config=CONFIG) as agents:
            for agent_id in NAMES:
                n = run(agents.directory.describe(agent_id)).n_turns
                run(turn(agents, agent_id, tokens=new_tokens(agent_id, n)))
                assert tokens_of(agents, agent_id) == states_of(agent_id, n + 1)[n + 1]


class Held:
    """Keeps the store's writer from writing until it is let go."""

    def __init__(self, store: Store) -> None:
        self.go = threading.Event()
        is_here = threading.Event()

        def wait() -> None:
            is_here.set()
            self.go.wait(60)

        assert store._writer.offer(wait, 0)
        assert is_here.wait(60)


def conversation_of(agents: Any, agent_id: str) -> list[Any]:
    return list(agents.directory.conversation(agent_id))


def test_a_turn_is_durable_before_its_end_is_told_whatever_waits_to_be_written(
    tmp_path: Path,
) -> None:
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a", system="Be kind."))
        run(turn(agents, "a", "first"))
        run(turn(agents, "a", "second"))
        run(agents.lifecycle.rewind("a", turn=1))
        agents.store.flush()
        held = Held(agents.store)
        for text in ("third", "fourth"):
            run(turn(agents, "a", text))
        want = tokens_of(agents, "a"), conversation_of(agents, "a")
        with manager(tmp_path) as others:  # as after a kill: nothing of it is published
            assert len(others.store.get(others.store.reference_names()[0]).tokens) < len(want[0])
            assert (tokens_of(others, "a"), conversation_of(others, "a")) == want
            info = run(others.directory.describe("a"))
            assert info.n_turns == 3 and info.n_stored < info.n_tokens
            assert [turn.stop for turn in others.directory.turns("a")][-1] == info.n_tokens
            end = run(turn(others, "a", "fifth"))
            assert end.usage.prompt_tokens > len(want[0])
            assert tokens_of(others, "a")[: len(want[0]) - 1] == want[0][:-1]
        held.go.set()


def test_an_agent_that_was_never_published_is_there_from_the_journal_alone(tmp_path: Path) -> None:
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", "one"))
        run(turn(agents, "a", "two"))
        want = tokens_of(agents, "a"), conversation_of(agents, "a")
        agent = agents.directory.agent("a")
        name, (payload, _) = agent.name, entry_of(agent, None)
    with Store(tmp_path) as store:
        store.delete(name)
        assert not store.recorded(name) and not store.recorded_serials()
        store.record(name, agent.serial, payload)
    with manager(tmp_path) as agents:
        assert (tokens_of(agents, "a"), conversation_of(agents, "a")) == want
        assert run(agents.directory.listed())[0].n_stored == 0
        run(turn(agents, "a", "three"))
        run(agents.sleep.pause("a"))
    with Store(tmp_path) as store:
        assert store.get(name).n_stored


def test_what_is_published_is_let_go_of(tmp_path: Path) -> None:
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        for i in range(20):
            run(turn(agents, "a", f"turn {i}"))
        run(agents.sleep.pause("a"))
        (name,) = agents.store.reference_names()
    with Store(tmp_path) as store:
        assert not store.recorded(name)
        ref = store.get(name)
        assert ref.serial and len(stored_state(store, name).tokens) == len(ref.tokens)


@pytest.mark.parametrize("reader", ["stored_state", "turn", "listed"])
def test_a_state_that_is_published_while_it_is_read_is_not_missed(
    tmp_path: Path, monkeypatch: Any, reader: str
) -> None:
    """Its entry goes from the journal as its reference comes: one of the two has to be seen."""
    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(ours.lifecycle.create("a"))
        run(turn(ours, "a", "one"))
        run(theirs.directory.refresh())
        ours.store.flush()
        held = Held(ours.store)
        run(turn(ours, "a", "two"))
        asked: list[str] = []

        def publishing(verb: str) -> Any:
            ask = getattr(theirs.store, verb)

            def answer(*args: Any) -> Any:
                asked.append(verb)
                if len(asked) == 2:
                    held.go.set()
                    ours.store.flush()
                    ours.store.record("another@x", 1, b"")  # drops what is superseded
                return ask(*args)

            return answer

        for verb in ("get", "recorded", "revision", "revisions", "recorded_serials"):
            monkeypatch.setattr(theirs.store, verb, publishing(verb))
        name = ours.directory.agent("a").name
        if reader == "stored_state":
            assert len(stored_state(theirs.store, name).metadata["turns"]) == 2
            return
        if reader == "turn":
            run(turn(theirs, "a", "three"))
        else:
            run(theirs.directory.refresh())
        assert [m["content"] for m in conversation_of(theirs, "a")][:3:2] == ["one", "two"]


def test_a_deleted_agent_does_not_come_back(tmp_path: Path) -> None:
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", "one"))
        held = Held(agents.store)
        run(turn(agents, "a", "two"))
        held.go.set()
        run(agents.lifecycle.delete("a"))
    with manager(tmp_path) as agents:
        assert run(agents.directory.listed()) == []
        run(agents.lifecycle.create("a"))
        assert run(agents.directory.describe("a")).n_turns == 0


@pytest.mark.parametrize("damage", ["entry", "file", "garbage"])
def test_a_damaged_journal_costs_what_it_alone_said_and_says_so(
    damage: str, tmp_path: Path
) -> None:
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        run(agents.lifecycle.create("b"))
        run(turn(agents, "a", "one"))
        agents.store.flush()
        published = tokens_of(agents, "a")
        agent = agents.directory.agent("a")
        serial = agent.serial
    with Store(tmp_path) as store:
        store.record(agent.name, serial + 1, b"x" * 500)
    journal = tmp_path / "journal.sqlite"
    if damage == "file":
        journal.write_bytes(b"no database" * 1000)
    elif damage == "garbage":
        data = bytearray(journal.read_bytes())
        data[100:] = bytes(len(data) - 100)
        journal.write_bytes(data)
    with manager(tmp_path) as agents:
        assert {info.agent_id for info in run(agents.directory.listed())} == {"a", "b"}
        assert tokens_of(agents, "a") == published
        assert "journal_damaged" in [event.kind for event in agents.store.take_events()]
        run(turn(agents, "a", "two"))
        want = tokens_of(agents, "a")
        agents.store.verify()
    with manager(tmp_path) as agents:
        assert tokens_of(agents, "a") == want


def full(*_: Any, **__: Any) -> Any:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


def test_a_turn_that_cannot_be_recorded_says_so(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        held = Held(agents.store)
        monkeypatch.setattr(Journal, "_drop_superseded", full)
        with pytest.raises(StoreError, match="cannot be written"):
            agents.store.record("x", 1, b"")
        end = run(turn(agents, "a", "one"))
        assert any("is not on disk" in note for note in end.usage.notes), end.usage.notes
        (line,) = [one for one in caplog.records if one.name == "kvcellar.agents"]
        assert line.levelname == "ERROR" and "'a' is not on disk" in line.getMessage()
        monkeypatch.undo()
        held.go.set()
        end = run(turn(agents, "a", "two"))
        assert not any("is not on disk" in note for note in end.usage.notes), end.usage.notes
        want = tokens_of(agents, "a")
    with manager(tmp_path) as agents:
        assert tokens_of(agents, "a") == want
        assert not any("is not on disk" in note for note in agents.directory.agent("a").notes)


def test_a_turn_that_is_nowhere_on_disk_stays_whatever_was_published_before_it(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """A state whose file got its name, and whose folder could not be synchronised, is ours."""

    def failing(folders: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        monkeypatch.setattr(Folder, "settle", staticmethod(failing))
        run(turn(agents, "a", "one"))
        agents.store.flush()
        monkeypatch.setattr(Journal, "_changing", full)
        monkeypatch.setattr(Folder, "write", full)
        end = run(turn(agents, "a", "two"))
        assert any("is not on disk" in note for note in end.usage.notes), end.usage.notes
        agents.store.flush()
        want = tokens_of(agents, "a")
        run(agents.directory.describe("a"))
        assert tokens_of(agents, "a") == want
        monkeypatch.undo()
        run(turn(agents, "a", "three"))
        want = tokens_of(agents, "a")
    with manager(tmp_path) as agents:
        assert tokens_of(agents, "a") == want


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_a_turn_behind_the_largest_file_that_may_be_written_says_so(tmp_path: Path) -> None:
    """The system's own refusal of every write, the lease's line among them."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", "one"))
        agents.store.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            end = run(turn(agents, "a", "two"))
            agents.store.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert any("is not on disk" in note for note in end.usage.notes), end.usage.notes
        run(turn(agents, "a", "three"))
        want = tokens_of(agents, "a")
    with manager(tmp_path) as agents:
        assert tokens_of(agents, "a") == want


@pytest.mark.parametrize("is_final", [False, True])
def test_an_agent_is_deleted_on_a_full_disk(
    tmp_path: Path, monkeypatch: Any, is_final: bool
) -> None:
    """In the room that was kept for that: nothing else can be written, a lease's owner neither."""
    reserve, changing = tmp_path / "journal.reserve", Journal._changing

    def changing_where_there_is_room(journal: Journal) -> Any:
        return full() if reserve.exists() else changing(journal)

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with manager(tmp_path) as agents:
        for name in "ab":
            run(agents.lifecycle.create(name))
        held = Held(agents.store)  # so that turns are in the journal, and not in what was saved
        for name in "ab":
            run(turn(agents, name, "one"))
        held.go.set()
        agents.store.flush()
        assert reserve.stat().st_size == RESERVE_BYTES
        monkeypatch.setattr(Journal, "_changing", changing_where_there_is_room)
        monkeypatch.setattr(leases, "write_owner", no_room)
        run(agents.lifecycle.delete("a", is_final=is_final))
        assert not reserve.exists()
        monkeypatch.undo()
        run(turn(agents, "b", "two"))
        agents.store.flush()  # the turn is durable by the journal, or by what was saved before
        assert reserve.exists(), "the next one that is deleted needs it again"
    with manager(tmp_path) as agents:
        assert [info.agent_id for info in run(agents.directory.listed())] == ["b"]


def test_entries_that_come_at_one_time_are_written_together(tmp_path: Path) -> None:
    with Store(tmp_path, StoreConfig(warm_bytes=0)) as store:
        threads = [
            threading.Thread(target=store.record, args=(f"a{i}@x", i + 1, bytes(i)))
            for i in range(24)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.recorded_serials() == {f"a{i}@x": i + 1 for i in range(24)}
        with pytest.raises(UnknownReferenceError):
            stored_state(store, "nobody@x")


def test_of_who_was_not_named_nothing_is_written_before_the_first_turn_and_then_all(
    tmp_path: Path,
) -> None:
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("chat-1", is_passing=True))
        assert not agents.store.recorded_serials() and not agents.store.reference_names()
        held = Held(agents.store)
        run(turn(agents, "chat-1", "one"))
        run(agents.lifecycle.fork("chat-1", "chat-2", is_passing=True))
        assert len(agents.store.recorded_serials()) == 1
        run(turn(agents, "chat-2", "two"))
        want = {name: conversation_of(agents, name) for name in ("chat-1", "chat-2")}
        with manager(tmp_path) as others:  # as after a kill: nothing of it is published
            assert not others.store.reference_names()
            assert {name: conversation_of(others, name) for name in want} == want
        held.go.set()


def test_kv_of_an_unnamed_first_turn_that_others_evict_comes_back_from_the_store(
    tmp_path: Path,
) -> None:
    with manager(tmp_path, lambda name: make_host(name, capacity=512)) as agents:
        run(agents.lifecycle.create("chat-1", is_passing=True))
        run(turn(agents, "chat-1", tokens=[(7 * i) % 250 for i in range(300)]))
        known = len(tokens_of(agents, "chat-1"))
        for i in range(4):
            run(agents.lifecycle.create(f"other-{i}", is_passing=True))
            run(turn(agents, f"other-{i}", tokens=[(31 * i + j) % 250 for j in range(200)]))
        n_left = run(agents.directory.describe("chat-1")).n_cached
        assert n_left is not None and n_left < known // 2, "nothing was evicted, nothing is shown"
        usage = run(turn(agents, "chat-1", tokens=[1, 2, 3])).usage
        assert usage.cached_tokens >= known - 1 - BLOCK_TOKENS  # less waits until the engine rests
        assert usage.restored_tokens > known // 2


def test_turns_of_stores_that_did_not_note_what_they_took_are_read():
    old = [0, 3, 5, 1, "stop"]
    assert _turn_of(old) == TurnRecord(0, 3, 5, 1, "stop") and _turn_as_json(_turn_of(old)) == old
    took = Took(2, 1, 0.5, 1.5, 3, "edited")
    new = TurnRecord(0, 3, 5, 1, "stop", took)
    assert _turn_of(json.loads(json.dumps(_turn_as_json(new)))) == new
    _check_turn(_turn_as_json(new), "turns[0]", 5)
    for wrong in ([*old, None], [*old, [2, 1]], [*old, [2, 1, 0.5, 1.5, 3, "unheard of"]]):
        with pytest.raises(BadFactError):
            _check_turn(wrong, "turns[0]", 5)
