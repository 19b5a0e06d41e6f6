"""A short soak, and that it finds what is wrong; ``make soak`` is the long one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import ROOT
from tests.server.live import serving
from tests.soak import __main__ as program
from tests.soak.fleet import Fleet, Report, Worker
from tests.soak.oracle import Oracle
from tests.soak.served import BrokenError

WRITER = ROOT / "tools" / "write_reliability.py"


class LyingOracle(Oracle):
    """An oracle that is told a wrong first token."""

    def answer(self, prompt: Any, max_tokens: int) -> list[int]:
        first, *others = super().answer(prompt, max_tokens)
        return [first ^ 1, *others]


def result(arguments: list[str], capsys: Any) -> tuple[int, dict[str, Any], str]:
    status = program.main(arguments)
    said = capsys.readouterr()
    return status, json.loads(said.out), said.err


@pytest.mark.slow
@pytest.mark.skipif("KVCELLAR_ALL_CASES" not in os.environ, reason="half a minute: make night")
def test_a_short_soak_finds_nothing_and_is_published_as_it_was(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "N_WORKERS", 1)
    status, told, errors = result(["--minutes", "0.01", "--seed", "3"], capsys)
    assert (status, told["broken"]) == (0, None), errors
    assert told["seed"] == 3 and told["requests"] > 0 == told["wrong_tokens"]
    assert told["faults"]["place_away"] == 1 and told["end"]["resident_bytes"] > 0
    (tmp_path / "run.json").write_text(json.dumps(told))
    command = [sys.executable, str(WRITER), str(tmp_path / "run.json"), "--to"]
    subprocess.run([*command, str(tmp_path / "page.md")], check=True)
    page = (tmp_path / "page.md").read_text()
    assert f"| requests | {told['requests']:,} |" in page and "| wrong tokens | 0 |" in page


def test_a_broken_invariant_ends_a_soak_with_its_seed_and_the_last_operations(capsys, monkeypatch):
    def broken(self: Any, ends_s: float) -> None:
        self.report.last.append("exact0 turn")
        raise BrokenError("a wrong token")

    monkeypatch.setattr(program.Soak, "run", broken)
    status, told, errors = result(["--minutes", "0.01", "--seed", "7"], capsys)
    assert status == 1 and told["broken"] == "a wrong token"
    assert "--seed 7" in errors and "exact0 turn" in errors


@pytest.mark.parametrize("kind", ["turn", "chat", "named_chat", "disconnect", "stop"])
def test_each_kind_of_turn_is_held_to_the_oracle(kind, oracles, live):
    for oracle in oracles:
        report = Report()
        served: Any = SimpleNamespace(http=live.http)
        worker = Worker(f"{kind}-{type(oracle).__name__}", served, oracle, True, report)
        worker.rng = random.Random(7)  # with which it hears three tokens before it leaves
        if type(oracle) is Oracle:
            getattr(worker, kind)()
            worker.check_all()
        else:
            with pytest.raises(BrokenError, match="the oracle says"):
                getattr(worker, kind)()


def test_a_fleet_works_for_a_second_and_each_worker_knows_what_it_has(oracles, live):
    served: Any = SimpleNamespace(http=live.http)
    report = Report()
    fleet = Fleet([Worker(f"fleet{i}", served, oracles[0], True, report) for i in range(2)])
    fleet.run("3", time.monotonic() + 1)
    for worker in fleet.workers:
        worker.check_all()
    assert report.operations and report.wrong_tokens == report.bytes_lost == 0


def test_what_a_worker_finds_ends_its_fleet(oracles, live):
    served: Any = SimpleNamespace(http=live.http)
    report = Report()
    fleet = Fleet([Worker(f"lied{i}", served, oracles[1], True, report) for i in range(2)])
    with pytest.raises(BrokenError, match="the oracle says"):
        fleet.run("3", time.monotonic() + 60)
    assert report.wrong_tokens and report.last


def test_a_history_that_was_changed_behind_a_worker_is_found(oracles, live):
    served: Any = SimpleNamespace(http=live.http)
    worker = Worker("changed", served, oracles[0], True, Report())
    worker.turn()
    (agent,) = worker.agents.values()
    live.post(f"/v1/agents/{agent.name}/rewind")
    with pytest.raises(BrokenError, match="has 0 tokens"):
        worker.check_all()
    assert worker.report.bytes_lost > 0


@pytest.fixture(scope="module")
def oracles():
    return Oracle(), LyingOracle()


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("soak")) as live:
        yield live
