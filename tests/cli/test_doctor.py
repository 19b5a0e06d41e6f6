"""What an installation can do on a machine, and what would help."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.cli.models import doctor
from kvcellar.installed import pip_command
from kvcellar.store import Store


def run(*args):
    return CliRunner().invoke(app, ["doctor", *args])


def found(*args):
    result = run("--json", *args)
    return result.exit_code, {one["name"]: one for one in json.loads(result.stdout)}


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch):
    """Do not start torch in each test; one below does."""
    monkeypatch.setattr(doctor, "_ASK_TORCH", "print('cuda:0 (a card)')")


def test_each_thing_is_said_in_a_line_and_the_way_out_below(tmp_path):
    with Store(tmp_path / "store"):
        pass
    result = run("--store", str(tmp_path / "store"))
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert any(line.startswith("ok     kvcellar    0.") for line in lines)
    assert any("cpu, cuda:0 (a card)" in line for line in lines)
    assert any(f"{tmp_path}/store, 0 blocks" in line for line in lines)


def test_an_extra_that_is_not_there_says_what_it_would_add_and_a_part_that_is_not_is_less(
    monkeypatch,
):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in ("mlx_lm", "uvicorn") else real(name),
    )
    code, things = found()
    assert code == 0
    assert things["mlx"]["state"] == "more" and "Apple silicon" in things["mlx"]["said"]
    assert things["mlx"]["helps"] == pip_command("mlx")
    assert things["server"]["state"] == "less" and "uvicorn" in things["server"]["said"]
    assert things["server"]["helps"] == pip_command()


def test_nothing_that_one_may_do_without_is_less_or_has_no_command(monkeypatch, tmp_path):
    """A bare installation without a config, a store or a model is well."""
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_version", lambda module: None)
    _, things = found()
    extras = {name: one for name, one in things.items() if one["state"] == "more"}
    assert extras.keys() == {"torch", "mlx", "executorch", "tp", "shared", "ray", "smollm2"}
    assert all(one["helps"] for one in extras.values())
    assert {name for name, one in things.items() if one["state"] == "less"} <= {
        "models",
        "server",
        "CPU kernel",
        "folder",
    }


def test_a_broken_store_a_broken_torch_and_a_folder_that_is_none_end_with_1(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(doctor, "_ASK_TORCH", "raise SystemExit('no such driver')")
    code, things = found("--store", str(tmp_path / "file"))
    assert code == 1
    assert things["store"]["state"] == things["devices"]["state"] == "broken"
    assert "no such driver" in things["devices"]["said"]
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "file" / "below"))
    _, things = found()
    assert things["folder"]["state"] == "broken" and "KVCELLAR_HOME" in things["folder"]["helps"]


@pytest.mark.slow
def test_torch_says_which_devices_there_are(monkeypatch):
    monkeypatch.undo()
    assert "print" in doctor._ASK_TORCH
    subprocess.run([sys.executable, "-c", doctor._ASK_TORCH], check=True)
    assert found()[1]["devices"]["said"].startswith("cpu")


def test_a_folder_that_is_called_like_a_module_is_not_one(tmp_path, monkeypatch):
    (tmp_path / "called_like_one").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("called_like_one") is not None
    said = doctor._packages("server", ("called_like_one",))
    assert (said.state, said.said) == ("less", "not installed: called_like_one")


def test_a_shared_place_is_tried(tmp_path):
    code, things = found("--shared", f"file://{tmp_path}/place")
    assert (code, things["shared place"]["state"]) == (0, "ok")
    code, things = found("--shared", "valkey://:hidden@127.0.0.1:1/0")
    assert (code, things["shared place"]["state"]) == (1, "broken")
    assert "hidden" not in str(things)
