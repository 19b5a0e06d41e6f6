"""Agents of several machines that share one place: each goes on where another stopped."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcellar.agents import AgentManager
from kvcellar.errors import NameTakenError
from kvcellar.store.shared import guarded_calls, pusher
from kvcellar.store.shared.folders import FolderPlace
from kvcellar.store.shared.places import PlaceError
from kvcellar.store.shared.tier import SharedTier
from tests.agents.fakes import manager, run, turn
from tests.agents.test_two_processes import said_to
from tests.processes import started
from tests.store.fakes import QUICK
from tests.store.shared.servers import wait_long

LONG = "one " * 20
Machine = Callable[[str], AgentManager]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places may be slow."""
    wait_long(monkeypatch)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Opens the agents of a machine, by its name."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(
            manager(tmp_path / name, shared=str(tmp_path / "share"))
        )


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """While it holds a machine's place, that does not answer."""
    gone = cutting(monkeypatch)
    yield gone
    gone.clear()


def cutting(patch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of places that do not answer as long as they are in it."""
    gone: list[Any] = []
    ask = FolderPlace._ask

    def broken(self: FolderPlace, request: Callable[[], Any]) -> Any:
        if self in gone:
            raise PlaceError("no answer")
        return ask(self, request)

    patch.setattr(FolderPlace, "_ask", broken)
    patch.setattr(guarded_calls, "FIRST_PAUSE_S", 0.02)
    patch.setattr(guarded_calls, "LONGEST_PAUSE_S", 0.02)
    patch.setattr(pusher, "_TRY_AGAIN_S", 0.02)
    return gone


def tier_of(agents: AgentManager) -> SharedTier:
    assert agents.store.shared is not None
    return agents.store.shared


def flushed(agents: AgentManager) -> None:
    assert tier_of(agents).flush(180)


def answering(agents: AgentManager) -> None:
    """Wait until a place that answers again was asked again."""
    while tier_of(agents).stats().trouble:
        tier_of(agents).pull("nobody@1")
        time.sleep(0.005)


def test_an_agent_goes_on_on_another_machine(machine: Machine) -> None:
    async def talk() -> None:
        await ours.lifecycle.create("poet")
        first = await turn(ours, "poet", LONG)
        await ours.sleep.pause("poet")
        second = await turn(theirs, "poet", "two")
        assert second.usage.restored_from == {"shared": second.usage.restored_tokens}
        assert second.usage.restored_tokens >= first.usage.prompt_tokens
        await turn(ours, "poet", "three")

    ours, theirs = machine("a"), machine("b")
    run(talk())
    assert said_to(ours, "poet") == [LONG, "two", "three"]


def test_an_acknowledged_turn_is_there_before_anything_is_closed(machine: Machine) -> None:
    async def talk() -> None:
        await ours.lifecycle.create("poet")
        await turn(ours, "poet", "one")
        await turn(ours, "poet", "two")
        assert await theirs.directory.has("poet")
        assert said_to(theirs, "poet") == ["one", "two"]

    ours, theirs = machine("a"), machine("b")
    run(talk())


def test_a_machine_that_dies_takes_no_acknowledged_turn_with_it(
    tmp_path: Path, machine: Machine
) -> None:
    ours = machine("a")
    run(ours.lifecycle.create("poet"))
    flushed(ours)
    share = tmp_path / "share"
    with started("tests.agents.talking", tmp_path / "b", "poet", "ada", 1000, share) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "open\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        told = [other.stdout.readline().split("|")[0] for _ in range(3)]
        other.kill()
        told += [line.split("|")[0] for line in other.stdout.read().splitlines() if "|" in line]
    run(ours.directory.refresh("poet"))
    assert said_to(ours, "poet")[: len(told)] == told


def test_a_name_that_another_machine_has_is_taken(machine: Machine) -> None:
    async def both() -> None:
        await ours.lifecycle.create("poet")
        flushed(ours)
        with pytest.raises(NameTakenError):
            await theirs.lifecycle.create("poet")

    ours, theirs = machine("a"), machine("b")
    run(both())


def test_what_is_deleted_here_is_gone_there(machine: Machine) -> None:
    async def both() -> None:
        await ours.lifecycle.create("poet")
        await turn(ours, "poet", "one")
        await turn(theirs, "poet", "two")
        flushed(theirs)
        await ours.lifecycle.delete("poet")
        flushed(ours)
        tier_of(theirs).pull_all("poet")
        await theirs.directory.refresh()
        assert theirs.directory.known("poet") is None

    ours, theirs = machine("a"), machine("b")
    run(both())


def test_who_went_on_alone_finds_both_talks_again(machine: Machine, away: list[Any]) -> None:
    async def both() -> Any:
        await ours.lifecycle.create("poet")
        await turn(ours, "poet", "one")
        await theirs.directory.has("poet")
        flushed(ours)
        away.append(tier_of(ours).place)
        await turn(ours, "poet", "ours alone")
        await turn(theirs, "poet", "theirs")
        flushed(theirs)
        away.clear()
        answering(ours)
        return await turn(ours, "poet", "more")

    ours, theirs = machine("a"), machine("b")
    end = run(both())
    assert end.agent_id == "poet.2"
    assert "branch poet.2" in end.usage.notes[0]
    assert said_to(ours, "poet.2") == ["one", "ours alone", "more"]
    assert said_to(ours, "poet") == ["one", "theirs"]
    flushed(ours)
    third = machine("c")
    run(third.directory.refresh())
    assert said_to(third, "poet") == ["one", "theirs"]
    assert said_to(third, "poet.2") == ["one", "ours alone", "more"]


PHASES = st.lists(
    st.tuples(st.sampled_from(["", "a", "b", "ab"]), st.text("ab", max_size=4)), max_size=3
)


@settings(max_examples=10, deadline=None)
@given(phases=PHASES)
@example(phases=[("a", "ab"), ("b", "ba")])
def test_whoever_is_cut_off_when_no_turn_is_lost(phases: list[tuple[str, str]]) -> None:
    """Each phase is who is cut off, and who speaks in which order."""
    with (
        tempfile.TemporaryDirectory(dir=QUICK) as folder,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
    ):
        gone = cutting(patch)
        share = f"{folder}/share"
        machines = {
            name: stack.enter_context(manager(Path(folder) / name, shared=share)) for name in "ab"
        }
        run(machines["a"].lifecycle.create("poet"))
        flushed(machines["a"])
        run(machines["b"].directory.has("poet"))
        told = []
        for cut, speakers in [*phases, ("", "ab")]:
            gone[:] = [tier_of(machines[name]).place for name in cut]
            for name in set(machines) - set(cut):
                answering(machines[name])
            for name in speakers:
                told.append(f"{name} {len(told)}")
                run(turn(machines[name], "poet", told[-1]))
        for one in machines.values():
            flushed(one)
        third = stack.enter_context(manager(Path(folder) / "c", shared=share))
        run(third.directory.refresh())
        infos = third.directory.infos()
        found = [text for info in infos for text in said_to(third, info.agent_id)]
        assert set(told) <= set(found)
