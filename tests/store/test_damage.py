"""A file says what cannot be, with a valid checksum: it is refused, or listed, and nothing else is
touched."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.errors import AgentError, KVCellarError, StoreError
from kvcellar.store import Store, StoreConfig
from kvcellar.store.disk.folder import Folder
from tests.agents.fakes import manager, run, turn
from tests.server.live import serving
from tests.store.forging import about, facts, forge, forge_export, random_change

COLD = StoreConfig(warm_bytes=0)

IMPOSSIBLE = {
    "a revision that no integer holds": facts(revision=2**70),
    "a revision that is a text": facts(revision="1"),
    "a time that is not finite": facts(saved_at=float("inf")),
    "more stored than there is": facts(n_stored=10**6),
    "a name with a line break": facts(name="a\nb@c"),
    "a parent that is a number": facts(parent=5),
    "messages that are numbers": about(messages=[5], stops=[None]),
    "a message without a role": about(messages=[{"content": "x"}], stops=[None]),
    "a role that is a number": about(messages=[{"role": 5}], stops=[None]),
    "half an emoji": about(messages=[{"role": "user", "content": "\ud83d"}], stops=[None]),
    "stops of other messages": about(stops=[]),
    "turns behind the end": about(turns=[[0, 1, 10**6, 0, "stop"]]),
    "turns of four parts": about(turns=[[0, 1, 2, 0]]),
    "tools that are no objects": about(tools=["x"]),
    "a miss of no known cause": about(
        miss={"cause": "x", "tokens_lost": 1, "position": 1, "was": "", "became": ""}
    ),
    "a rate that is a text": about(rates={"prefill_s_per_token": "fast"}),
    "a time that is a list": about(used_s=[]),
    "an agent named ../etc": about(id="../etc"),
    "an agent named 5": about(id=5),
    "a model that is a list": about(model=[]),
}


def reference_of(folder: Path, agent_id: str) -> Path:
    with Store(folder, COLD) as store:
        (name,) = [n for n in store.reference_names() if n.startswith(f"{agent_id}@")]
    return Folder(folder).of_reference(name)


def forget_previous(folder: Path) -> None:
    """Leave each history its latest state alone."""
    for path in (folder / "references").glob("*.previous"):
        path.unlink()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with agents a and b, and an export of a."""
    folder = tmp_path_factory.mktemp("damage")
    with manager(folder / "store") as agents:
        for name in "ab":
            run(agents.lifecycle.create(name, system="Be kind."))
            run(turn(agents, name, f"hello {name}"))
            run(agents.lifecycle.rewind(name, turn=1))
            run(turn(agents, name, "and again"))
            run(agents.sleep.pause(name))
        run(agents.sleep.export("a", folder / "a.kv"))
    forget_previous(folder / "store")
    return folder


@pytest.fixture
def folder(stored: Path, quick_path: Path) -> Path:
    shutil.copytree(stored, quick_path / "x")
    return quick_path / "x"


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_export_that_says_what_cannot_be_is_refused_and_nothing_is_published(
    what: str, folder: Path
) -> None:
    forge_export(folder / "a.kv", IMPOSSIBLE[what])
    with manager(folder / "store") as agents:
        run(agents.lifecycle.delete("a"))
        agents.store.flush()
        before = sorted(path.name for path in (folder / "store" / "references").iterdir())
        with pytest.raises((StoreError, AgentError)):
            run(agents.sleep.import_file(folder / "a.kv"))
        assert before == sorted(p.name for p in (folder / "store" / "references").iterdir())
        assert {info.agent_id for info in run(agents.directory.listed())} == {"b"}


@pytest.mark.parametrize("what", [w for w in IMPOSSIBLE if "named ../etc" not in w])
def test_a_damaged_reference_is_listed_as_damaged_and_the_rest_goes_on(
    what: str, folder: Path
) -> None:
    path = reference_of(folder / "store", "a")
    forge(path, IMPOSSIBLE[what])
    with manager(folder / "store") as agents:
        states = {info.agent_id: info.state for info in run(agents.directory.listed())}
        assert states.pop("b") == "paused"
        assert list(states.values()) == ["damaged"], states
        (info,) = [info for info in run(agents.directory.listed()) if info.state == "damaged"]
        assert info.damage
        assert run(turn(agents, "b", "on")).finish.token_ids
        run(agents.lifecycle.create("c"))
        assert run(turn(agents, "c", "new")).finish.token_ids
        agents.store.gc()
        if "name" not in what:
            with pytest.raises(KVCellarError, match="cannot be read"):
                run(turn(agents, "a", "on"))
            with pytest.raises(AgentError, match="already"):
                run(agents.lifecycle.create("a"))


@pytest.mark.parametrize("what", [w for w in IMPOSSIBLE if "named ../etc" not in w])
def test_verify_puts_a_damaged_reference_away(what: str, folder: Path) -> None:
    path = reference_of(folder / "store", "a")
    good = path.read_bytes()
    forge(path, IMPOSSIBLE[what])
    command = ["store", "verify", "--store", str(folder / "store"), "--json"]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 1, said.output
    assert json.loads(said.stdout)["damaged_references"] == [path.name]
    assert not path.exists()
    assert any(path.name in p.name for p in (folder / "store" / "quarantine").iterdir())
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["n_references"] == 1
    with manager(folder / "store") as agents:
        assert [info.agent_id for info in run(agents.directory.listed())] == ["b"]
    path.write_bytes(good)
    with manager(folder / "store") as agents:
        assert {info.agent_id for info in run(agents.directory.listed())} == {"a", "b"}


def test_verify_gives_an_agent_the_state_before_that_can_be_read(folder: Path) -> None:
    with manager(folder / "store") as agents:
        n = run(agents.directory.describe("a")).n_turns
        run(turn(agents, "a", "one more"))
        run(agents.sleep.pause("a"))
    path = reference_of(folder / "store", "a")
    forge(path, about(messages=[5]))
    said = CliRunner().invoke(app, ["store", "verify", "--store", str(folder / "store")])
    assert said.exit_code == 1
    with manager(folder / "store") as agents:
        info = run(agents.directory.describe("a"))
        assert info.state != "damaged" and info.n_turns >= n


def test_turns_that_speak_of_more_messages_than_there_are_harm_nobody(folder: Path) -> None:
    turns = [[0, 1, 2, 10**6, "stop"], [2, 3, 4, 10**6, "stop"]]
    forge(reference_of(folder / "store", "a"), about(turns=turns))
    with manager(folder / "store") as agents:
        assert {info.agent_id for info in run(agents.directory.listed())} == {"a", "b"}
        assert agents.lookup.place_of([{"role": "user", "content": "x"}], model="hash") is None
        run(turn(agents, "a", "on"))
        run(agents.lifecycle.rewind("a", turn=1))


def test_the_list_of_agents_says_which_is_damaged_and_why(folder: Path) -> None:
    forge(reference_of(folder / "store", "a"), about(messages=[5], stops=[None]))
    said = CliRunner().invoke(app, ["agents", "list", "--store", str(folder / "store")])
    assert said.exit_code == 0, said.output
    damaged, good = said.stdout.splitlines()
    assert damaged.startswith("a  damaged") and "messages[0]" in damaged
    assert good.startswith("b  paused")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_whatever_a_reference_says_the_others_are_untouched(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    path = reference_of(folder / "store", "a")
    good = path.read_bytes()
    export = (folder / "a.kv").read_bytes()
    check = CliRunner()
    for i in range(25):
        path.write_bytes(good)
        forge(path, random_change(rng))
        with manager(folder / "store") as agents:
            infos = {info.agent_id: info for info in run(agents.directory.listed())}
            assert infos["b"].state == "paused"
            for name in [name for name in infos if name != "b"]:
                try:
                    run(agents.directory.describe(name))
                    run(turn(agents, name, "on"))
                    run(agents.lifecycle.rewind(name, turn=0))
                except KVCellarError:
                    pass
            assert agents.lookup.place_of([{"role": "user", "content": "x"}], model="hash") is None
            agents.store.gc()
            (folder / "a.kv").write_bytes(export)
            forge_export(folder / "a.kv", random_change(rng))
            with contextlib.suppress(KVCellarError):
                run(agents.sleep.import_file(folder / "a.kv", f"new-{seed}-{i}"))
            assert {info.agent_id for info in run(agents.directory.listed())} >= {"b"}
        if i % 5 == 0:
            said = check.invoke(app, ["store", "verify", "--store", str(folder / "store")])
            assert said.exit_code in (0, 1) and said.exception.__class__ is not KeyError, said
            assert said.exception is None or isinstance(said.exception, SystemExit)
    with manager(folder / "store") as agents:
        assert run(turn(agents, "b", "still")).usage.prompt_tokens > 0


@pytest.mark.slow
def test_a_server_with_a_damaged_agent_serves_everybody_else(tmp_path: Path) -> None:
    with serving(tmp_path / "one") as live:
        live.post("/v1/agents", {"id": "a"})
        live.post("/v1/agents", {"id": "b"})
        for name in "ab":
            live.post(f"/v1/agents/{name}/generate", {"text": "Hello", "max_tokens": 4})
        export = live.http.get("/v1/agents/a/export").content
    forget_previous(tmp_path / "one")
    forge(reference_of(tmp_path / "one", "a"), about(messages=[5], stops=[None]))
    file = tmp_path / "a.kv"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with serving(tmp_path / "one") as live:
        listed = {agent["id"]: agent for agent in live.get("/v1/agents")["data"]}
        assert listed["a"]["state"] == "damaged" and "messages[0]" in listed["a"]["damage"]
        assert listed["b"]["state"] != "damaged" and listed["b"]["damage"] is None
        assert live.http.get("/v1/agents/a").status_code == 409
        assert live.http.post("/v1/chat/completions", json=chat).status_code == 200
        for change in (facts(revision=2**70), about(messages=[5], stops=[None])):
            file.write_bytes(export)
            forge_export(file, change)
            refused: httpx.Response = live.http.post(
                "/v1/agents/import?id=c", content=file.read_bytes()
            )
            assert refused.status_code == 400, refused.text
            assert str(tmp_path) not in refused.text
        assert {a["id"] for a in live.get("/v1/agents")["data"]} >= {"a", "b"}
        assert live.http.get("/v1/agents/c").status_code == 404
        live.post("/v1/agents/b/generate", {"text": "And?", "max_tokens": 2})
        assert live.http.post("/v1/chat/completions", json=chat).status_code == 200
