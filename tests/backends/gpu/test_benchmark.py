"""The benchmark of cards runs where there is none, and a figure of it can be trusted."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: it comes with torch for CUDA"
)

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
FEW = ("engine",)
UNSEEN = {f"float32_apart_{family}" for family in ("llama", "gemma2", "gpt_oss", "lfm2")}
"""Figures of families that only a card is tried with: tests walk them elsewhere."""

HAS_ALL = "KVCELLAR_ALL_CASES" in os.environ
"""True for all parts, which take minutes: each interprets a model's steps, and some a server's."""

BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import gpu_parts
from kvcellar.backends.torch.run.runner import SamplingTorchRunner
from kvcellar.engine import Engine

forward = SamplingTorchRunner.forward_kept

def without_logits(self, ids, positions, rows=None, **more):
    if rows is not None and not len(rows):
        raise ZeroDivisionError("the head was given no rows")
    return forward(self, ids, positions, rows, **more)

SamplingTorchRunner.forward_kept = without_logits
Engine.prepare = lambda self, report: None
gpu_parts.main()
"""
"""A worker in which all chunks of a prompt but the last end with an error, as on a card once."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu")


def told(script: Any, words: tuple[str, ...], monkeypatch: Any, capfd: Any) -> tuple[int, Any]:
    """Run the script in this process, which imports nothing for it; return its status and line."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", *words])
    with pytest.raises(SystemExit) as end:
        script.main()
    return int(end.value.code), json.loads(capfd.readouterr().out.splitlines()[-1])


@needs_triton
@pytest.mark.slow
def test_parts_run_on_a_cpu_and_tell_their_figures_and_goals(gpu: Any) -> None:
    chosen = () if HAS_ALL else tuple(word for part in FEW for word in ("--part", part))
    command = [sys.executable, str(FOLDER / "gpu.py"), "--dry", "--json", *chosen]
    command += ["--seconds", "7000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == {} and found["left_out"] == [] and not found["measured"]
    goals = found["goals"]
    assert {name for name, one in goals.items() if one["figure"] is None} <= UNSEEN
    assert all(one["figure"] == found[name] for name, one in goals.items() if name in found)
    assert found["engine_is_recorded"] and found["engine_8_at_5000_step_ms"] > 0
    if HAS_ALL:
        assert found["restore_is_exact"]
        assert len(goals) == len(gpu.GOALS)
        recorded = [name for name in found if name.endswith("_is_recorded")]
        assert len(recorded) == 5 and all(found[name] for name in recorded)
        assert found["shortage_is_survived"] and found["second_card_is_equal"]
        assert found["is_correct"] and found["serve_4000_clients_8_tokens_per_s"] > 0


@needs_triton
@pytest.mark.slow
def test_a_request_that_fails_makes_its_part_fail_and_the_others_run(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(BROKEN.format(folder=str(FOLDER)))
    monkeypatch.setattr(gpu, "WORKER", [sys.executable, str(worker)])
    words = ("--dry", "--part", "engine", "--part", "transfers")
    status, found = told(gpu, words, monkeypatch, capfd)
    assert status == 1
    assert found["failed"].keys() == {"engine"}
    assert "ZeroDivisionError: the head was given no rows" in found["failed"]["engine"]
    assert not any(name.startswith("engine") for name in found)
    assert found["goals"]["engine_1_at_2048_step_ms"] == {
        "figure": None, "goal": "<= 1.15", "met": False
    }  # fmt: skip
    assert found["restore_is_exact"] and found["goals"]["restore_is_exact"]["met"]


def test_a_part_that_takes_its_process_along_fails_and_the_others_run_in_another(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "for part in json.loads(sys.argv[1])['parts']:\n"
        "    if part == 'serve': os.abort()\n"
        "    print(json.dumps({'part': part, 'seconds': 1.0, 'found': {part: 3}}), flush=True)\n"
    )
    monkeypatch.setattr(gpu, "WORKER", [sys.executable, str(worker)])
    words = ("--part", "decode", "--part", "serve", "--part", "kv", "--part", "branches")
    status, found = told(gpu, words, monkeypatch, capfd)
    assert status == 1
    assert found["failed"] == {"serve": "the process ended with status -6"}
    assert found["decode"] == found["kv"] == found["branches"] == 3 and found["left_out"] == []


def test_a_part_that_does_not_end_fails(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(gpu, "WORKER", [sys.executable, str(worker)])
    words = ("--seconds", "0.2", "--part", "decode", "--part", "kv")
    status, found = told(gpu, words, monkeypatch, capfd)
    assert status == 1
    assert found["failed"] == {"decode": "it was not done within its time"}
    assert found["left_out"] == ["kv"]


def test_goals_are_met_or_not_as_their_signs_say(gpu: Any) -> None:
    figures = {
        "eight_over_one": 1.35,
        "branches8_over_one": 1.26,
        "decode_2048_fraction_of_bandwidth": 0.6,
        "decode_32768_fraction_of_bandwidth": 0.69,
        "decode_is_recorded": False,
    }
    found = gpu.verdicts(figures, ["decode", "branches"])
    assert found == {
        "decode_2048_fraction_of_bandwidth": {"figure": 0.6, "goal": ">= 0.6", "met": True},
        "decode_32768_fraction_of_bandwidth": {"figure": 0.69, "goal": ">= 0.7", "met": False},
        "decode_is_recorded": {"figure": False, "goal": "== true", "met": False},
        "eight_over_one": {"figure": 1.35, "goal": "<= 1.35", "met": True},
        "branches8_over_one": {"figure": 1.26, "goal": "<= 1.25", "met": False},
    }
    assert {goal.part for goal in gpu.GOALS} <= gpu.PARTS.keys()
    assert len({goal.figure for goal in gpu.GOALS}) == len(gpu.GOALS)
