"""A short soak, and that it finds what is wrong; ``make soak`` is the long one."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvcellar.engine import Engine
from tests.processes import ROOT
from tests.server.live import serving
from tests.soak import __main__ as program
from tests.soak.fleet import Fleet, Report, Worker
from tests.soak.oracle import Oracle
from tests.soak.served import BrokenError

WRITER = ROOT / "tools" / "write_reliability.py"

M = 1_000_000

WORLDS = [
    "plain",
    "int8",
    "window",
    "hybrid",
    "adapters",
    "swaps",
    "faults",
    "harmed",
    "bounded",
    "crowded",
]


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
@pytest.mark.skipif("KVCELLAR_ALL_CASES" not in os.environ, reason="a minute or two: make night")
@pytest.mark.parametrize("world", WORLDS)
def test_a_short_soak_finds_nothing(world, capsys):
    status, told, errors = result(["--minutes", "0.1", "--seed", "3", "--world", world], capsys)
    assert (status, told["broken"]) == (0, None), errors
    assert told["seed"] == 3 and told["requests"] > 0 == told["wrong_tokens"]


def test_runs_are_published_as_they_were_and_summed(tmp_path):
    runs = [run_of(seed=1, requests=1500), run_of(seed=2, requests=700, warm=None, end={})]
    files = [tmp_path / f"{told['seed']}.json" for told in runs]
    for file, told in zip(files, runs, strict=True):
        file.write_text(f"a line before\n{json.dumps(told)}\n")
    command = [sys.executable, str(WRITER), *map(str, files), "--to", str(tmp_path / "page.md")]
    subprocess.run(command, check=True)
    page = (tmp_path / "page.md").read_text()
    assert "| requests | 2,200 |" in page and "| wrong tokens | 0 |" in page
    assert "| faults | 14 |" in page and "| faults: kill | 14 |" in page
    assert "| 1 | 2.0 | 3 | 1,500 | 7 | 5.0 | 1.0 | 6.0 | 2.0 | 8.0 of 9.0 |" in page
    assert "| 2 | 2.0 | 3 | 700 | 7 |  |  |  |  | 8.0 of 9.0 |" in page


def run_of(**more: Any) -> dict[str, Any]:
    """What a run prints."""
    warm, end = ({"resident_bytes": n, "accounted_bytes": n - 4_000_000} for n in (5 * M, 6 * M))
    counts = dict.fromkeys(("turns", "refused", "failed", "wrong_tokens", "bytes_lost"), 0)
    said = {"version": "1", "python": "3", "machine": "one", "minutes": 2.0, "broken": None}
    return {
        **counts,
        **said,
        "rounds": {"plain": 3},
        "faults": {"kill": 7},
        "operations": {"turn": 9},
        "warm": warm,
        "end": end,
        "bounded": {"crowded": {"limit_bytes": 9 * M, "most_bytes": 8 * M}},
        **more,
    }


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
        worker = Worker(f"{kind}-{type(oracle).__name__}", served, {"demo": oracle}, True, report)
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
    fleet = Fleet(
        [Worker(f"fleet{i}", served, {"demo": oracles[0]}, True, report) for i in range(2)]
    )
    fleet.run("3", time.monotonic() + 1)
    for worker in fleet.workers:
        worker.check_all()
    assert report.operations and report.wrong_tokens == report.bytes_lost == 0


def test_what_a_worker_finds_ends_its_fleet(oracles, live):
    served: Any = SimpleNamespace(http=live.http)
    report = Report()
    fleet = Fleet(
        [Worker(f"lied{i}", served, {"demo": oracles[1]}, True, report) for i in range(2)]
    )
    with pytest.raises(BrokenError, match="the oracle says"):
        fleet.run("3", time.monotonic() + 60)
    assert report.wrong_tokens and report.last


def test_a_history_that_was_changed_behind_a_worker_is_found(oracles, live):
    served: Any = SimpleNamespace(http=live.http)
    worker = Worker("changed", served, {"demo": oracles[0]}, True, Report())
    worker.turn()
    (agent,) = worker.agents.values()
    live.post(f"/v1/agents/{agent.name}/rewind")
    with pytest.raises(BrokenError, match="has 0 tokens"):
        worker.check_all()
    assert worker.report.bytes_lost > 0


def test_a_worker_whose_requests_fail_knows_what_its_agents_have(oracles, live, monkeypatch):
    served: Any = SimpleNamespace(http=live.http)
    report = Report()
    compute, n = Engine._forward, itertools.count(1)

    def failing(self: Engine, *step: Any) -> Any:
        if next(n) % 7 == 0:
            raise RuntimeError("injected")
        return compute(self, *step)

    monkeypatch.setattr(Engine, "_forward", failing)
    fleet = Fleet([Worker("failing", served, {"demo": oracles[0]}, True, report, may_fail=True)])
    fleet.run("3", time.monotonic() + 1)
    monkeypatch.undo()
    fleet.workers[0].check_all()
    assert report.failed and report.wrong_tokens == report.bytes_lost == 0


def test_after_a_kill_only_what_was_said_not_to_be_on_disk_may_be_gone(oracles, live):
    served: Any = SimpleNamespace(http=live.http)
    worker = Worker("killed", served, {"demo": oracles[0]}, True, Report())
    worker.take_turn(worker.create())
    worker.take_turn(*worker.agents.values())
    (agent,) = worker.agents.values()
    live.post(f"/v1/agents/{agent.name}/rewind")
    with pytest.raises(BrokenError, match="tokens"):
        worker.recover()
    agent.states[-1] = replace(agent.states[-1], is_kept=False)
    worker.recover()
    assert len(agent.states) == 2
    worker.check_all()


@pytest.fixture(scope="module")
def oracles():
    return Oracle(), LyingOracle()


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("soak")) as live:
        yield live
