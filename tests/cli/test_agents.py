"""``kvcellar agents`` as a user meets it: each command is a process of its own to the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcellar.agents import leasing
from kvcellar.cli import app
from kvcellar.cli.agents import agent_turns
from kvcellar.hosting import host
from kvcellar.store import Store

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    return tmp_path


def run(*args: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["agents", *args], input=stdin)
    return result.exit_code, result.stdout, result.stderr


def run_json(*args: str, stdin: str | None = None) -> Any:
    code, out, err = run(*args, "--json", stdin=stdin)
    assert (code, err) == (0, ""), err
    return json.loads(out)


def say(agent_id: str, text: str, *more: str) -> Any:
    return run_json("generate", agent_id, text, "--max-tokens", "6", *more)


@pytest.mark.card
def test_a_chat_goes_on_as_a_branch_where_another_process_has_the_agent(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "PATIENCE_S", 0.0)
    run_json("create", "poet")
    with Store(home / "home" / "store") as store:
        (name,) = store.reference_names()
        store.leases.take(name)
        args = ("chat", "poet", "--max-tokens", "4", "--json")
        code, out, err = run(*args, stdin="One.\nTwo.\n")
        assert code == 0, err
        first, second = map(json.loads, out.splitlines())
        assert first["id"] == second["id"] == "poet.2"
        assert "in use by process" in first["usage"]["notes"][0]
        assert second["usage"]["notes"] == [] and second["usage"]["cached_tokens"]
    assert len(run_json("show", "poet.2")["messages"]) == 4


def test_an_agent_lives_through_all_commands(home: Path) -> None:
    assert run_json("create", "poet", "--system", "Be brief.")["state"] == "idle"
    first = say("poet", "A line about rain, and one about the sea behind it.")
    assert first["finish_reason"] == "length" and first["usage"]["cached_tokens"] == 0
    second = say("poet", "Another.")
    n = second["usage"]["cached_tokens"]
    assert n == second["usage"]["restored_tokens"] > 20
    assert second["usage"]["miss"] is None
    code, out, err = run("why", "poet")
    assert (code, err) == (0, "") and "nothing was lost" in out
    assert run_json("why", "poet") is None
    assert run_json("rewind", "poet", "--turn", "0")["n_turns"] == 0
    code, out, _ = run("why", "poet")
    assert code == 0 and "it has no turn left" in out and "reused" not in out
    assert run_json("undo", "poet")[0]["n_turns"] == 2

    assert run_json("rename", "poet", "Verses, all of them")["title"] == "Verses, all of them"
    assert "“Verses, all of them”" in run("list")[1]
    assert (
        run_json("rename", "poet", "")["title"]
        == "A line about rain, and one about the sea behind…"
    )

    child = run_json("fork", "poet", "twin", "--turn", "1")
    assert (child["parent"], child["n_turns"]) == ("poet", 1)
    run_json("fork", "poet", "other", "--turn", "1")
    assert say("twin", "Something else.")["usage"]["restored_tokens"] > 10
    assert run_json("keep", "twin")["deleted"] == ["other"]
    assert [info["id"] for info in run_json("list")] == ["poet", "twin"]
    code, out, err = run("list")
    assert "forked from poet" in out

    assert run_json("rewind", "poet")["n_turns"] == 1
    again = say("poet", "Another.")
    assert again["token_ids"] == second["token_ids"]
    assert run_json("pause", "poet")["state"] == "paused"
    back = run_json("resume", "poet")
    assert back["restored_tokens"] == back["n_tokens"] - 1

    file = home / "poet.kv"
    assert run_json("export", "poet", str(file))["size_bytes"] == file.stat().st_size
    assert run_json("import", str(file), "copy")["id"] == "copy"
    shown = run_json("show", "copy")
    assert [m["role"] for m in shown["messages"]] == ["system", *("user", "assistant") * 2]
    for name in ("poet", "copy", "twin"):
        assert run_json("delete", name) == {"deleted": [name]}
    assert run_json("list") == []


def test_a_turn_prints_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(agent_turns, "print_note", said.append)
    counts = dict.fromkeys(
        ("restored_tokens", "drafted_tokens", "accepted_tokens", "cached_tokens", "prompt_tokens"),
        0,
    )
    notes = ["the KV that was restored had been stored in 8 bits"]
    usage = {**counts, "miss": None, "time_to_first_token_s": None, "notes": notes}
    agent_turns._show_end({"usage": usage})
    assert said[1:] == notes


@pytest.mark.card
def test_an_agent_keeps_its_type_of_k_and_v() -> None:
    assert run_json("create", "small", "--kv-dtype", "int8")["kv_dtype"] == "int8"
    say("small", "Something to remember for a while, please.")
    assert say("small", "And?")["usage"]["restored_tokens"] > 16
    other = say("small", "And?", "--kv-dtype", "float32")
    assert other["usage"]["miss"]["cause"] == "other model"
    assert {info["kv_dtype"] for info in run_json("list")} == {"int8", "float32"}


@pytest.mark.card
def test_an_agent_goes_on_in_blocks_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    engine_of = host.EngineService

    def start(engine: Any) -> Any:
        opened.append((engine.cache.block_size, engine.cache.config.layout))
        return engine_of(engine)

    monkeypatch.setattr(host, "EngineService", start)
    greedy = ("--temperature", "0", "--max-tokens", "4")
    assert run("generate", "poet", "x = ", "--create", *greedy)[0] == 0
    blocks = ("--cache", "paged", "--block-size", "8", "--layout", "block_first")
    code, out, err = run(
        "generate", "poet", "1", "--temperature", "0", "--max-tokens", "4", *blocks
    )
    assert code == 0 and out, err
    assert opened == [(1, "layer_first"), (8, "block_first")]


@pytest.mark.card
def test_chat_makes_its_agent_and_each_line_is_a_turn() -> None:
    code, _, err = run(
        "chat",
        "friend",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        stdin="Hello!\nThanks!\n/undo\n",
    )
    assert (code, err) == (0, ""), err
    assert run_json("show", "friend")["n_turns"] == 1


def test_what_cannot_be_done_is_one_line() -> None:
    for args in (
        ("generate", "nobody", "hello"),
        ("rewind", "nobody"),
        ("import", "missing.kv"),
        ("why", "nobody"),
    ):
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1, err
    run_json("create", "a")
    code, out, err = run("create", "a")
    assert code == 2 and "already" in err
    code, out, err = run("rewind", "a", "--turn", "5")
    assert code == 2 and "0 turns" in err


@pytest.mark.card
def test_what_was_dropped_is_listed_brought_back_and_deleted_for_good() -> None:
    run_json("create", "poet", "--system", "Be brief.")
    say("poet", "One.")
    say("poet", "Two.")
    before = run_json("show", "poet")["messages"]
    assert run("rewind", "poet")[0] == run("delete", "poet")[0] == 0
    assert [one["verb"] for one in run_json("dropped")] == ["rewind", "delete"]
    code, out, err = run("dropped")
    assert "poet  " in out and "2 turns, dropped by rewind at " in out
    (back,) = run_json("undo", "poet")
    assert (back["id"], back["n_turns"]) == ("poet", 1)
    code, out, err = run("undo", "poet")
    assert (code, err) == (0, "") and out.startswith("poet: ") and "2 turns" in out
    assert run_json("show", "poet")["messages"] == before
    code, out, err = run("undo", "poet")
    assert code == 2 and "nothing of agent 'poet' can be brought back" in err
    run("rewind", "poet")
    assert run_json("dropped", "--empty") == {"deleted": 1}
    code, _, err = run("delete", "poet", "--forever")
    assert (code, err) == (0, "") and run_json("dropped") == []
    code, _, err = run("undo", "poet")
    assert code == 2 and "no agent 'poet'" in err and "`kvcellar agents create` makes one" in err


def test_where_there_is_nothing_to_list_it_is_said_beside_the_result(home):
    code, out, err = run("list")
    assert (code, out) == (0, "") and f"no agents in {home}/home/store" in err
    assert "kvcellar agents create" in err
    assert run("list", "--json") == (0, "[]\n", "")
    code, out, err = run("dropped")
    assert (code, out) == (0, "") and "nothing was dropped" in err
    assert run("dropped", "--json") == (0, "[]\n", "")
