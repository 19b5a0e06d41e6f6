"""``make serve`` and ``make demo`` run a real model where it can be had, else the bundled one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """#!/bin/sh
if [ "$1" = models ]; then echo "$@" >&2; exit {rc}; fi
echo "$@"
"""


def make(folder: Path, *args: str, rc: int = 0) -> subprocess.CompletedProcess[str]:
    """Run make where all is set up, with a program that only says what it was asked for."""
    (folder / "bin").mkdir()
    for name in ("python", "kvcellar"):
        (folder / "bin" / name).write_text(PROGRAM.format(rc=rc))
        (folder / "bin" / name).chmod(0o755)
    (folder / ".runtime").touch()
    command = ["make", "--no-print-directory", "-C", str(ROOT), f"VENV={folder}", *args]
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        (["serve"], ["serve", "smollm2"]),
        (["serve", "ARGS=--port 1"], ["serve", "smollm2", "--port", "1"]),
        (["demo"], ["demo", "smollm2"]),
    ],
)
def test_the_real_model_is_fetched_and_run(said, asked, tmp_path):
    done = make(tmp_path, *said)
    assert done.stdout.split() == asked
    assert done.stderr.split() == ["models", "pull", "smollm2"]


@pytest.mark.parametrize("target", ["serve", "demo"])
def test_the_bundled_model_is_run_where_it_cannot_be_fetched_and_that_is_said(target, tmp_path):
    done = make(tmp_path, target, rc=2)
    assert done.stdout.split() == [target, "demo"]
    assert "going on with demo, the bundled model" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["demo", "some/model"])
def test_another_model_is_run_as_it_was_named(name, tmp_path):
    done = make(tmp_path, "serve", f"MODEL={name}")
    assert done.stdout.split() == ["serve", name] and done.stderr == ""
