"""What may name an agent, and that a name belongs to nobody whose state could not be saved."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.names import derived_id
from kvcellar.errors import AgentError, AgentNameError, StoreError, UnknownAgentError
from tests.agents.fakes import manager, run, tokens_of, turn

BAD = (
    *("", ".", "..", ".hidden", "-rf", "../etc", "/etc", "a/b", "a\\b", "a b", "a@b", "a:b", "a+b"),
    *("a\x00b", "a\nb", "ü", "a" * 129, "\N{KELVIN SIGN}"),
)
GOOD = ("a", "A9", "_a", "poet.2", "resp_0f", "chat-1a", "a..b", "a" * 128)


@pytest.mark.parametrize("bad", BAD)
def test_a_name_is_letters_digits_dots_underscores_and_dashes(bad, tmp_path):
    with manager(tmp_path / "store") as agents:
        run(agents.lifecycle.create("good"))
        with pytest.raises(AgentNameError, match="cannot name an agent; choose 1 to 128 letters"):
            run(agents.lifecycle.create(bad))
        with pytest.raises(AgentNameError):
            run(agents.lifecycle.fork("good", bad))
        run(agents.sleep.export("good", tmp_path / "file"))
        with pytest.raises(AgentNameError):
            run(agents.sleep.import_file(tmp_path / "file", bad))
        assert [info.agent_id for info in run(agents.directory.listed())] == ["good"]
        assert len(agents.store.reference_names()) == 1


@pytest.mark.parametrize("good", GOOD)
def test_good_names_are_taken(good, tmp_path):
    with manager(tmp_path) as agents:
        assert run(agents.lifecycle.create(good)).agent_id == good
        fork = run(agents.lifecycle.fork(good)).agent_id
        assert fork.startswith(good[:100]) and len(fork) <= 128


def store_odd(agents: Any, agent_id: str) -> None:
    """Store a name as an earlier version did, which let every printable text be one."""
    run(agents.lifecycle.create("even"))
    run(turn(agents, "even", "Hello"))
    agents.store.flush()
    even = agents.directory.agent("even")
    odd = AgentRecord(agent_id, even.model, even.key)
    odd.take(agents.store.get(even.name))
    agents.store.save(odd.name, odd.key, odd.tokens, metadata=odd.metadata()).wait()


@pytest.mark.parametrize("odd", ["../etc", "a b", "ü", "a@b"])
def test_an_odd_name_that_is_stored_is_still_listed_forked_and_deleted(odd, tmp_path):
    with manager(tmp_path) as agents:
        store_odd(agents, odd)
    with manager(tmp_path) as agents:
        assert {info.agent_id for info in run(agents.directory.listed())} == {"even", odd}
        assert tokens_of(agents, odd) == tokens_of(agents, "even")
        fork = run(agents.lifecycle.fork(odd)).agent_id
        assert fork.startswith(derived_id(odd, "-")) and tokens_of(agents, fork)
        run(agents.lifecycle.delete(odd))
        assert {info.agent_id for info in run(agents.directory.listed())} == {"even", fork}


def test_a_file_does_not_bring_an_odd_name(tmp_path):
    with manager(tmp_path / "old") as agents:
        store_odd(agents, "../etc")
        run(agents.sleep.export("../etc", tmp_path / "file"))
    with manager(tmp_path / "new") as agents:
        with pytest.raises(AgentNameError, match="cannot name an agent"):
            run(agents.sleep.import_file(tmp_path / "file"))
        assert agents.store.reference_names() == [] and run(agents.directory.listed()) == []
        assert run(agents.sleep.import_file(tmp_path / "file", "etc")).agent_id == "etc"


def broken(*_: Any, **__: Any) -> Any:
    raise StoreError("the disk is gone")


def test_an_agent_that_cannot_be_saved_is_not_made(tmp_path, monkeypatch):
    with manager(tmp_path) as agents:
        with monkeypatch.context() as patch:
            patch.setattr(agents.store, "save", broken)
            with pytest.raises(StoreError, match="the disk is gone"):
                run(agents.lifecycle.create("poet", system="You write verse."))
            assert run(agents.directory.listed()) == []
            with pytest.raises(UnknownAgentError):
                run(agents.directory.describe("poet"))
        assert run(agents.lifecycle.create("poet")).n_messages == 0


@pytest.mark.parametrize("is_in_cache", [True, False])
def test_a_fork_that_cannot_be_saved_is_not_made(is_in_cache, tmp_path, monkeypatch):
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("poet"))
        run(turn(agents, "poet", "Hello"))
    with manager(tmp_path) as agents:
        if is_in_cache:
            run(agents.sleep.resume("poet"))
        with monkeypatch.context() as patch:
            patch.setattr(agents.store, "save", broken)
            with pytest.raises(StoreError):
                run(agents.lifecycle.fork("poet", "other"))
            assert [info.agent_id for info in run(agents.directory.listed())] == ["poet"]
        assert tokens_of(agents, run(agents.lifecycle.fork("poet", "other")).agent_id)


def test_an_agent_whose_write_fails_later_is_not_made_either(tmp_path, monkeypatch):
    """The save is queued and fails in the writer's thread, as on a full disk."""
    with manager(tmp_path) as agents:
        with monkeypatch.context() as patch:
            patch.setattr(agents.store._cold, "put_reference", broken)
            with pytest.raises(StoreError, match=r"could not be saved: .*the disk is gone"):
                run(agents.lifecycle.create("poet"))
            assert run(agents.directory.listed()) == []
        run(agents.lifecycle.create("poet"))


def test_a_save_that_other_processes_disturb_twice_is_done_again(tmp_path, monkeypatch):
    with manager(tmp_path) as agents:
        put, errors = agents.store._cold.put_reference, iter(["removed"] * 2)

        def disturbed(*args):
            for error in errors:
                raise StoreError(f"a block was {error} while the save waited; save again")
            return put(*args)

        monkeypatch.setattr(agents.store._cold, "put_reference", disturbed)
        run(agents.lifecycle.create("poet"))
        assert next(errors, None) is None
        assert [info.agent_id for info in run(agents.directory.listed())] == ["poet"]


def test_an_agent_whose_end_cannot_be_written_is_not_said_to_have_ended(tmp_path, monkeypatch):
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("poet"))
        run(turn(agents, "poet", tokens=range(5)))
        with monkeypatch.context() as patch:
            patch.setattr(agents.store._cold, "put_reference", broken)
            with pytest.raises(StoreError, match=r"'poet' could not be saved: .*the disk is gone"):
                run(agents.lifecycle.finish("poet"))
            assert run(agents.directory.describe("poet")).state == "idle"
        assert run(agents.lifecycle.finish("poet")).state == "finished"
    with manager(tmp_path) as agents:
        assert run(agents.directory.describe("poet")).state == "finished"


@pytest.mark.parametrize("is_final", [False, True])
def test_an_agent_whose_file_cannot_be_removed_is_still_there_and_the_error_says_so(
    tmp_path, monkeypatch, is_final
):
    def read_only(*_: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("poet"))
        run(turn(agents, "poet", tokens=range(5)))
        before = tokens_of(agents, "poet")
        with monkeypatch.context() as patch:
            patch.setattr(agents.store._cold, "remove_reference", read_only)
            with pytest.raises(StoreError, match="could not be deleted"):
                run(agents.lifecycle.delete("poet", is_final=is_final))
        assert [info.agent_id for info in run(agents.directory.listed())] == ["poet"]
        assert tokens_of(agents, "poet") == before
        run(agents.lifecycle.delete("poet"))
        assert run(agents.directory.listed()) == []


def test_an_import_that_cannot_be_published_is_not_known(tmp_path, monkeypatch):
    with manager(tmp_path / "a") as agents:
        run(agents.lifecycle.create("poet"))
        run(agents.sleep.export("poet", tmp_path / "file"))
    with manager(tmp_path / "b") as agents:
        with monkeypatch.context() as patch:
            patch.setattr(agents.store._cold, "put_reference", broken)
            with pytest.raises(StoreError):
                run(agents.sleep.import_file(tmp_path / "file"))
        assert run(agents.directory.listed()) == [] and agents.store.reference_names() == []
        assert run(agents.sleep.import_file(tmp_path / "file")).agent_id == "poet"


def test_of_two_that_make_one_name_at_once_one_is_refused(tmp_path):
    async def both(agents: Any) -> list[Any]:
        makers = [agents.lifecycle.create("twin", system=system) for system in ("One.", "Two.")]
        return await asyncio.gather(*makers, return_exceptions=True)

    with manager(tmp_path) as agents:
        ends = run(both(agents))
        assert sorted(isinstance(end, AgentError) for end in ends) == [False, True]
        (winner,) = (i for i, end in enumerate(ends) if not isinstance(end, AgentError))
        assert agents.directory.conversation("twin")[0]["content"] == ("One.", "Two.")[winner]
