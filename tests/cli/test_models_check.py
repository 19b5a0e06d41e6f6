"""``kvcellar models check``: its table, its JSON and its exit code."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvcellar.backends.torch import loading
from kvcellar.backends.torch.learn import checking
from kvcellar.backends.torch.learn.shrink import checkpoints
from kvcellar.cli import app
from kvcellar.models.check import CACHES, PARTS, CheckVerdict, torch_versions, verdict_path
from kvcellar.models.files.checkpoint import read_config


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", "check", *args])
    return result.exit_code, result.stdout


def test_all_tiny_has_a_line_for_every_family_and_says_why_some_are_refused(monkeypatch):
    monkeypatch.setattr(checkpoints, "zoo", lambda: ["bert", "qwen3"])
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
    wrong = CheckVerdict("qwen3", ("2 full",), "a twin", gaps, None, None, torch_versions(), 0.1)
    monkeypatch.setattr(checkpoints, "zoo", lambda: ["qwen3"])
    monkeypatch.setattr(checking, "check_family", lambda family: wrong)
    code, said = invoke("--all-tiny", "--json")
    found = json.loads(said)
    assert code == 1
    assert (found["n_exact"], found["n_inexact"], found["n_refused"]) == (0, 1, 0)
    assert found["models"][0]["worst"] == 0.25
    assert not found["models"][0]["is_exact"]


def test_a_checkpoint_is_checked_and_its_verdict_kept(tmp_path):
    folder = checkpoints.write_tiny("qwen3", tmp_path / "tiny")
    code, said = invoke(str(folder), "--json")
    (model,) = json.loads(said)["models"]
    assert code == 0
    assert model["is_exact"]
    assert model["family"] == "qwen3"
    kept = verdict_path(read_config(folder), torch_versions())
    assert CheckVerdict.from_json(json.loads(kept.read_text())) == CheckVerdict.from_json(model)


def test_a_checkpoint_that_cannot_be_served_fails_the_command(tmp_path):
    folder = checkpoints.write_tiny("bert", tmp_path / "tiny")
    code, said = invoke(str(folder))
    assert code == 1
    assert "refused" in said


def test_a_model_and_all_families_are_not_asked_for_together():
    result = CliRunner().invoke(app, ["models", "check", "demo", "--all-tiny"])
    assert result.exit_code == 2
    assert "leave one out" in result.output


def test_which_of_the_exact_families_export_is_a_column_and_the_reason_is_said(monkeypatch):
    proving = pytest.importorskip("kvcellar.backends.executorch.proving")
    whys = {"qwen3": None, "llama": "its graph branches"}
    monkeypatch.setattr(checkpoints, "zoo", lambda: ["bert", *whys])
    monkeypatch.setattr(proving, "why_not_exported", lambda raw: whys[raw["model_type"]])
    gaps = {kind: dict.fromkeys(PARTS, 0.0) for kind in CACHES}

    def check(family: str) -> CheckVerdict:
        found = {} if family == "bert" else gaps
        reason = "it sees what comes" if family == "bert" else None
        return CheckVerdict(
            family, ("2 full",), "a twin", found, None, reason, torch_versions(), 0.1
        )

    monkeypatch.setattr(checking, "check_family", check)
    code, said = invoke("--all-tiny", "--export")
    assert code == 0, "what does not export is no fault"
    lines = [line.split()[-1] for line in said.splitlines()[:4]]
    assert lines == ["EXPORTS", "-", "yes", "no"]
    assert "llama does not export: its graph branches" in said
    assert said.endswith("2 of 3 exact within 2e-04\n1 of 2 export\n")
    _, said = invoke("--all-tiny", "--export", "--json")
    found = json.loads(said)
    assert found["n_exported"] == 1
    assert [model["exports"] for model in found["models"]] == [None, True, False]
    assert found["models"][2]["why_not_exported"] == "its graph branches"


def test_what_was_learnt_wrong_before_is_said_to_be_replaced(tmp_path, monkeypatch):
    folder = checkpoints.write_tiny("qwen3", tmp_path / "tiny")
    prove = loading.prove_model
    monkeypatch.setattr(loading, "prove_model", lambda *args: (prove(*args)[0], True))
    assert "wrong, and is replaced" in invoke(str(folder))[1]
    assert json.loads(invoke(str(folder), "--json")[1])["models"][0]["facts_replaced"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--backend", "executorch"], "with torch or mlx"),
        (["--backend", "mlx", "--all-tiny"], "with torch alone"),
        (["--backend", "mlx", "--export"], "with torch alone"),
    ],
)
def test_what_cannot_be_checked_is_refused(args, said):
    result = CliRunner().invoke(app, ["models", "check", *args])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
