"""``kvcellar models check``: its table, its JSON and its exit code."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvcellar.backends.torch import checking, tiny
from kvcellar.cli import app
from kvcellar.models.check import CACHES, PARTS, Verdict, verdict_path
from kvcellar.models.checkpoint import read_config


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", "check", *args])
    return result.exit_code, result.stdout


def test_all_tiny_has_a_line_for_every_family_and_says_why_some_are_refused(monkeypatch):
    monkeypatch.setattr(tiny, "zoo", lambda: ["bert", "qwen3"])
    code, said = invoke("--all-tiny")
    lines = said.splitlines()
    assert code == 0, "what is refused by name is no fault"
    assert lines[0].split() == ["FAMILY", "LAYERS", *(part.upper() for part in PARTS), "VERDICT"]
    assert lines[1].split()[0] == "bert"
    assert lines[1].endswith("refused")
    assert lines[2].startswith("qwen3 ")
    assert lines[2].endswith("exact")
    assert "lets a token of layer 0 see others" in said
    assert lines[-1] == "1 of 2 exact within 2e-04"


def test_a_family_that_differs_fails_the_command(monkeypatch):
    gaps = {kind: dict.fromkeys(PARTS, 0.25) for kind in CACHES}
    wrong = Verdict("qwen3", ("2 full",), "a twin", gaps, None, None, checking.versions(), 0.1)
    monkeypatch.setattr(tiny, "zoo", lambda: ["qwen3"])
    monkeypatch.setattr(checking, "check_family", lambda family: wrong)
    code, said = invoke("--all-tiny", "--json")
    found = json.loads(said)
    assert code == 1
    assert (found["n_exact"], found["n_inexact"], found["n_refused"]) == (0, 1, 0)
    assert found["models"][0]["worst"] == 0.25
    assert not found["models"][0]["is_exact"]


def test_a_checkpoint_is_checked_and_its_verdict_kept(tmp_path):
    folder = tiny.write_tiny("qwen3", tmp_path / "tiny")
    code, said = invoke(str(folder), "--json")
    (model,) = json.loads(said)["models"]
    assert code == 0
    assert model["is_exact"]
    assert model["family"] == "qwen3"
    kept = verdict_path(read_config(folder), checking.versions())
    assert Verdict.from_json(json.loads(kept.read_text())) == Verdict.from_json(model)


def test_a_checkpoint_that_cannot_be_served_fails_the_command(tmp_path):
    folder = tiny.write_tiny("bert", tmp_path / "tiny")
    code, said = invoke(str(folder))
    assert code == 1
    assert "refused" in said


def test_a_model_and_all_families_are_not_asked_for_together():
    result = CliRunner().invoke(app, ["models", "check", "demo", "--all-tiny"])
    assert result.exit_code == 2
    assert "leave one out" in result.output
