"""``kvcellar store`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.cli.store.store import parse_size, size_text
from kvcellar.errors import ConfigError
from kvcellar.store import Store
from tests.store.fakes import History, fork, make_key, save, tokens_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    with Store(tmp_path / "store") as store:
        save(store, "a", History(make_key(), tokens_of(0, 40)))
        save(store, "b", History(make_key(), tokens_of(1, 40)))
        fork(store, make_key(), "a", "c", 24)
    return tmp_path / "store"


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["store", *args])
    return result.exit_code, result.stdout, result.stderr


def test_stats_are_a_page_and_an_object(folder: Path) -> None:
    code, out, err = run("stats")
    assert (code, err) == (0, "")
    for words in (str(folder), "in 10 blocks", "unshared"):
        assert words in out
    code, out, err = run("stats", "--json", "--store", str(folder))
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert value["cold"]["n_blocks"] == 10
    assert value["unshared_bytes"] > value["referenced_bytes"] > 0
    assert {row["name"]: row["parent"] for row in value["references"]} == {
        "a": None,
        "b": None,
        "c": "a",
    }


def test_verify_finds_damage_and_says_so_by_its_exit_code(folder: Path) -> None:
    code, out, err = run("verify")
    assert (code, err) == (0, "")
    assert "10 blocks" in out
    assert "3 histories are good" in out
    path = sorted((folder / "blocks").iterdir())[0]
    path.write_bytes(path.read_bytes()[:-1])
    code, out, err = run("verify")
    assert code == 1
    assert "9 blocks" in out
    assert f"warning: {path.stem}: " in err
    assert "computed again" in err
    code, out, _ = run("verify", "--json")
    value = json.loads(out)
    assert code == 1
    assert value["damaged"] == []  # it is in quarantine
    assert value["incomplete"]
    assert value["is_good"] is False


def test_gc_frees_what_no_history_needs(folder: Path) -> None:
    with Store(folder) as store:
        store.delete("b")
    code, out, err = run("gc", "--grace", "3600")
    assert (code, err) == (0, "")
    assert out.startswith("0 blocks removed")
    code, out, _ = run("gc")
    assert out.startswith("5 blocks removed, ")
    code, out, _ = run("gc", "--limit", "2K")
    assert "gave up the KV of a; its tokens remain" in out
    code, out, _ = run("gc", "--json", "--quarantine")
    assert json.loads(out)["n_blocks"] == 0


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    for command in ("stats", "verify", "gc"):
        code, out, err = run(command, "--store", str(tmp_path / "none"))
        assert (code, out) == (2, "")
        assert err.startswith(f"error: there is no store in {tmp_path}/none")
    assert not (tmp_path / "none").exists()
    code, _, err = run("gc", "--store", str(tmp_path), "--limit", "many")
    assert code == 2
    assert "'many' is no size" in err


@pytest.mark.parametrize("command", [(), ("stats",), ("verify",), ("gc",)])
def test_every_command_has_help_with_examples(command: tuple[str, ...]) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "Examples:" in out
    assert "kvcellar store " + " ".join(command) in out


def test_sizes_are_read_and_written() -> None:
    assert parse_size("20G") == 20 << 30
    assert parse_size("1.5 mb") == 3 << 19
    assert parse_size("512KiB") == 512 << 10
    assert parse_size("4096") == 4096
    for text in ("", "G", "-1", "1X", "nan", "inf"):
        with pytest.raises(ConfigError):
            parse_size(text)
    assert [size_text(n) for n in (0, 1023, 1536, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
    ]


def test_the_commands_import_the_store_only_when_they_run() -> None:
    code = "import sys, kvcellar.cli; sys.exit('kvcellar.store.store' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_shared_place_is_counted_and_freed(folder: Path, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/place"
    with Store(folder, shared=place) as store:
        save(store, "poet@1", History(make_key(), tokens_of(2, 40)), metadata={"serial": 1})
    code, out, err = run("stats", "--shared", place)
    assert (code, err) == (0, "")
    assert place in out
    assert "in 5 blocks, 1 histories" in out
    code, out, err = run("gc-shared", "--shared", place, "--limit", "0", "--grace", "0", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["n_blocks"], report["n_agents"], report["size_bytes"]) == (5, 1, 0)
    code, out, err = run("stats", "--shared", place, "--json")
    assert json.loads(out)["place"] == {"n_agents": 1, "n_blocks": 0, "size_bytes": 0}


def test_a_place_that_is_none_is_refused() -> None:
    for args in (("gc-shared",), ("gc-shared", "--shared", "ftp://host/x")):
        code, _, err = run(*args)
        assert code == 2
        assert "place" in err
