"""The benchmark of starts counts what has answered, and fails where a process has not."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module("start")
    for name in ("start", "harness"):
        sys.modules.pop(name, None)


def test_a_start_that_fails_or_says_nothing_fails_the_benchmark(start: Any) -> None:
    said = "print('first', flush=True); held = b'x' * 50_000_000"
    took, held = start.started([sys.executable, "-c", said], os.environ)
    assert took > 0 and held > 50_000_000
    with pytest.raises(RuntimeError, match="failed: "):
        start.started([sys.executable, "-c", "print(1); raise SystemExit(3)"], os.environ)
    with pytest.raises(RuntimeError, match="boom"):
        start.started([sys.executable, "-c", "raise ValueError('boom')"], os.environ)
    with pytest.raises(RuntimeError, match="failed"):
        start.started([sys.executable, "-c", "print()"], os.environ)


def test_an_installation_is_what_is_required_without_extras(start: Any) -> None:
    sizes = start.installed_bytes()
    assert {"kvcellar", "numpy", "typer"} <= sizes.keys() and all(sizes.values())
    assert not {"pytest", "ray", "mypy"} & sizes.keys()


def test_agents_are_listed_by_their_records_alone(tmp_path: Path) -> None:
    """Neither an engine, nor a host, nor what reads models is imported for a list."""
    asked = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(len(ours()), *sorted(ours() & heavy), file=sys.stderr))\n"
        "ours = lambda: {one for one in sys.modules if one.startswith('kvcellar.')}\n"
        "heavy = {'kvcellar.engine.engine', 'kvcellar.hosting.host',\n"
        "    'kvcellar.models.sizes.sizing', 'kvcellar.agents.manager',\n"
        "    'kvcellar.server.commands.verbs'}\n"
        "sys.argv = ['kvcellar', 'agents', 'list', '--json']\n"
        "from kvcellar.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, "KVCELLAR_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "[]\n"
    n_modules, *heavy = done.stderr.split()
    assert not heavy and int(n_modules) <= 164
