"""Two processes that talk with one agent at once: no turn is lost, and none is put elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.agents import AgentManager, Turn, leasing
from kvcellar.engine import GeneratedToken
from kvcellar.errors import AgentHeldError, LeaseLostError, PromptError
from kvcellar.store import Lease
from tests.agents.fakes import GREEDY, manager, run, turn
from tests.processes import started


def said_to(agents: AgentManager, agent_id: str) -> list[str]:
    """What was said to an agent, oldest first; each is followed by an answer."""
    messages = agents.directory.conversation(agent_id)
    assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
    return [str(m["content"]) for m in messages if m["role"] == "user"]


@contextlib.asynccontextmanager
async def talking(agents: AgentManager, one: Turn) -> Any:
    """A turn that has been answered, and has not ended yet."""
    async with agents.models.use("hash") as host, agents.turns.running(one, host) as running:
        async for event in running.events:
            running.take(event)
            if isinstance(event, GeneratedToken):
                break
        yield running
        async for event in running.events:
            running.take(event)


def test_who_comes_second_waits_and_goes_on_from_the_newest(tmp_path: Path) -> None:
    async def both(ours: AgentManager, theirs: AgentManager) -> None:
        told: list[str] = []

        def progress(_: object, what: str) -> None:
            told.append(what)

        await ours.lifecycle.create("poet")
        assert (await theirs.directory.describe("poet")).n_turns == 0  # what comes now is news
        async with talking(ours, Turn("poet", "one", params=GREEDY)):
            second = asyncio.create_task(turn(theirs, "poet", "two", progress=progress))
            while not any(what.startswith("waiting for process") for what in told):
                assert not second.done()
                await asyncio.sleep(0.01)
        end = await second
        assert end.agent_id == "poet"
        assert any("another process has talked with agent 'poet'" in n for n in end.usage.notes)
        end = await turn(theirs, "poet", "three")
        assert not any("another process" in note for note in end.usage.notes)
        assert said_to(theirs, "poet") == ["one", "two", "three"]

    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(both(ours, theirs))
        run(ours.directory.refresh())
        assert said_to(ours, "poet") == ["one", "two", "three"]


def test_who_does_not_wait_as_long_answers_in_a_branch_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "PATIENCE_S", 0.05)
    told: list[str] = []

    async def both(ours: AgentManager, theirs: AgentManager) -> None:
        await ours.lifecycle.create("poet", system="In verse.")
        await turn(ours, "poet", "one")
        async with talking(ours, Turn("poet", "two", params=GREEDY)):
            asked = Turn("poet", "other", params=GREEDY, progress=lambda _, what: told.append(what))
            async with talking(theirs, asked) as running:
                pass
            assert running.end.agent_id == running.planned.turn.agent_id == "poet.2"
            assert running.end.usage.notes[0] == running.end.notice
            assert "is in use by process" in str(running.end.notice)
            assert str(running.end.notice).endswith("so the answer is in its branch poet.2")
            for verb in (
                theirs.lifecycle.rewind("poet", turn=-1),
                theirs.lifecycle.delete("poet"),
                theirs.sleep.pause("poet"),
                theirs.lifecycle.finish("poet"),
            ):
                with pytest.raises(AgentHeldError, match="agent 'poet' is in use by process"):
                    await verb
        assert theirs.directory.agent("poet.2").branch_of == "poet"
        await turn(theirs, "poet", "three")

    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(both(ours, theirs))
        run(ours.directory.refresh())
        texts = {i: [m["content"] for m in ours.directory.conversation(i)] for i in ours_of(ours)}
        assert texts["poet"][::2][1:] + texts["poet"][1::2] != []
        assert [t for t in texts["poet"] if t in ("one", "two", "three")] == ["one", "two", "three"]
        assert [t for t in texts["poet.2"] if t in ("one", "other")] == ["one", "other"]
    assert any(what.startswith("waiting for process") for what in told)


def ours_of(agents: AgentManager) -> list[str]:
    return [info.agent_id for info in agents.directory.infos()]


def test_a_branch_whose_turn_is_refused_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "PATIENCE_S", 0.0)

    async def both(ours: AgentManager, theirs: AgentManager) -> None:
        await ours.lifecycle.create("poet")
        async with talking(ours, Turn("poet", "one", params=GREEDY)):
            with pytest.raises(PromptError):
                await turn(theirs, "poet", tokens=[])
            assert [info.agent_id for info in await theirs.directory.listed()] == ["poet"]

    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(both(ours, theirs))


@pytest.mark.parametrize("is_named", [True, False])
def test_messages_that_continue_what_has_gone_on_meanwhile_are_answered_in_a_branch(
    tmp_path: Path, is_named: bool
) -> None:
    """The client of a server, whose agent somebody else talks with on the command line."""

    async def both(ours: AgentManager, theirs: AgentManager) -> None:
        await ours.lifecycle.create("poet")
        await turn(ours, "poet", "one")
        known = list(ours.directory.conversation("poet"))
        await turn(theirs, "poet", "two")
        asked = Turn(
            "poet",
            messages=[*known, {"role": "user", "content": "other"}],
            params=GREEDY,
            is_continuing=is_named,  # else they may replace a history, but not an unseen one
        )
        async with talking(ours, asked) as running:
            pass
        assert running.end.agent_id == "poet.2"
        assert said_to(ours, "poet") == ["one", "two"]
        assert said_to(ours, "poet.2") == ["one", "other"]

    with manager(tmp_path) as ours, manager(tmp_path) as theirs:
        run(both(ours, theirs))


class Expiring:
    """Leases that end by themselves; others cannot be asked once they have."""

    def __init__(self, lasts_s: float) -> None:
        self.lasts_s = lasts_s
        self.is_reachable = True
        self.n_renewed = 0

    def take(self, name: str) -> Lease:
        return Lease(name, "me", expires_s=time.monotonic() + self.lasts_s)

    def renew(self, lease: Lease) -> Lease:
        if not self.is_reachable:
            raise LeaseLostError(lease.name)
        self.n_renewed += 1
        return Lease(lease.name, lease.owner, lease.token, time.monotonic() + self.lasts_s)

    def release(self, lease: Lease) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


def outlives(leases: Expiring) -> None:
    """Wait until a lease was renewed so often that it had ended otherwise."""
    deadline = time.monotonic() + 180
    while leases.n_renewed < 16:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_turn_that_outlives_its_lease_is_in_a_branch(
    tmp_path: Path, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "_RENEWALS", 15)

    async def both(ours: AgentManager) -> None:
        await ours.lifecycle.create("poet")
        await turn(ours, "poet", "one")
        ours.store.leases = leases = Expiring(1.5 if is_kept else 0.1)
        leases.is_reachable = is_kept
        host = ours.models.host("hash")
        assert host is not None
        host.service.run(lambda _: outlives(leases) if is_kept else time.sleep(0.3))
        async with ours.turns.running(Turn("poet", "two", params=GREEDY), host) as running:
            async for event in running.events:
                running.take(event)
        if is_kept:
            assert running.end.agent_id == "poet" and leases.n_renewed > 1
            return
        assert said_to(ours, "poet") == ["one"]
        assert running.end.agent_id.startswith("poet-")
        assert said_to(ours, running.end.agent_id) == ["one", "two"]
        assert "lease of agent 'poet' ended" in running.end.usage.notes[0]

    with manager(tmp_path) as ours:
        run(both(ours))
        with manager(tmp_path) as after:
            assert ours_of(after) == ours_of(ours)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ours", "theirs"]), st.sampled_from(["begin", "end", "say", "rewind"])
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def pair() -> Iterator[dict[str, AgentManager]]:
    """Two that share a store as two processes do; each example has an agent of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        manager(Path(folder)) as ours,
        manager(Path(folder)) as theirs,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(leasing, "PATIENCE_S", 0.0)
        yield {"ours": ours, "theirs": theirs}


_numbers = itertools.count()


@settings(max_examples=25)
@given(steps=STEPS)
def test_every_turn_is_in_exactly_the_history_that_it_was_said_to(
    pair: dict[str, AgentManager], steps: list[tuple[str, str]]
) -> None:
    """The oracle: a list of texts per agent, which is changed where a turn ends."""
    name = f"poet{next(_numbers)}"

    async def play() -> dict[str, list[str]]:
        want: dict[str, list[str]] = {name: []}
        running: dict[str, tuple[Any, Turn, list[list[str]]]] = {}
        await pair["ours"].lifecycle.create(name)

        async def begin(who: str, text: str) -> None:
            block = talking(pair[who], Turn(name, text, params=GREEDY))
            one = (await block.__aenter__()).planned.turn
            held = [other for _, other, _ in running.values() if other.agent_id == name]
            assert (one.agent_id == name) is not bool(held)
            # A turn whose answer is whole may be published before whoever reads it has read it.
            before = [want[name], *([*want[name], str(other.text)] for other in held)]
            running[who] = block, one, [[*texts, text] for texts in before]

        async def end(who: str) -> None:
            block, one, allowed = running.pop(who)
            await block.__aexit__(None, None, None)
            want[one.agent_id] = said_to(pair[who], one.agent_id)
            assert want[one.agent_id] in allowed

        for number, (who, verb) in enumerate(steps):
            is_held = any(one.agent_id == name for _, one, _ in running.values())
            if verb == "end" and who in running:
                await end(who)
            elif verb == "begin" and who not in running:
                await begin(who, f"{who} {number}")
            elif verb == "say" and who not in running:
                await begin(who, f"{who} {number}")
                await end(who)
            elif verb == "rewind" and who not in running:
                if is_held:
                    with pytest.raises(AgentHeldError):
                        await pair[who].lifecycle.rewind(name, turn=-1)
                elif want[name]:
                    await pair[who].lifecycle.rewind(name, turn=-1)
                    del want[name][-1]
        for who in list(running):
            await end(who)
        return want

    want = run(play())
    for agents in pair.values():
        run(agents.directory.refresh())
        assert {i: said_to(agents, i) for i in want} == want


@pytest.mark.parametrize("is_killed", [False, True])
def test_two_processes_lose_nothing_that_was_said(tmp_path: Path, is_killed: bool) -> None:
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("poet"))
    n = 12
    lines: list[str] = []
    with (
        started("tests.agents.talking", tmp_path, "poet", "ada", n) as ada,
        started("tests.agents.talking", tmp_path, "poet", "bob", n) as bob,
    ):
        for one in (ada, bob):
            assert one.stdout is not None and one.stdout.readline() == "open\n"
        for one in (ada, bob):
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        assert ada.stdout is not None and bob.stdout is not None
        if is_killed:
            lines += [ada.stdout.readline() for _ in range(3)]
            ada.kill()
        lines += [*ada.stdout, *bob.stdout]
        assert (ada.wait(), bob.wait()) == (-9 if is_killed else 0, 0)
    where = dict(line.rstrip("\n").split("|") for line in lines)
    assert len(where) == 2 * n or is_killed
    with manager(tmp_path) as agents:
        said = {agent_id: said_to(agents, agent_id) for agent_id in ours_of(agents)}
    for text, agent_id in where.items():
        assert said[agent_id].count(text) == 1
    more = {text for texts in said.values() for text in texts} - set(where)
    assert len(more) <= is_killed  # a turn that was durable, and of which nobody was told any more
