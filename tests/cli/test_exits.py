"""Exit codes of commands, each as the manual has it."""

from __future__ import annotations

import errno
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcellar import errors
from kvcellar.cli import app
from kvcellar.cli.common.exits import ExitCode, code_of
from kvcellar.cli.models import doctor
from kvcellar.store import Store

RUNNER = CliRunner()
MODULE = importlib.import_module("kvcellar.cli.program")
PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def run(*args):
    return RUNNER.invoke(app, [*args], prog_name="kvcellar")


def test_the_manual_has_every_code_and_no_other():
    table = PAGE.read_text().split("| exit code | means |")[1].split("##")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| ")]
    assert {int(code): says.strip() for code, says in rows[1:]} == {
        code.value: code.says for code in ExitCode
    }


def test_what_is_done_what_is_found_and_what_cannot_be_asked_for_differ(tmp_path, monkeypatch):
    store = ("--store", str(tmp_path / "store"))
    assert run("agents", "list", *store).exit_code == ExitCode.DONE
    assert run("agents", "show", "nobody", *store).exit_code == ExitCode.WRONG_INPUT
    assert run("agents", "show", "nobody", "--nothing").exit_code == ExitCode.WRONG_INPUT
    broken = doctor.Finding("something", doctor.BROKEN, "is broken")
    monkeypatch.setattr(doctor, "findings", lambda store: iter([broken]))
    assert run("doctor").exit_code == ExitCode.FOUND


def test_a_store_that_fails_is_no_wrong_input(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise errors.StoreError("no room is left on the disk")

    monkeypatch.setattr(Store, "__init__", refuse)
    result = run("store", "stats", "--store", str(tmp_path))
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr == "error: no room is left on the disk\n"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ConfigError, ExitCode.WRONG_INPUT),
        (errors.ModelError, ExitCode.WRONG_INPUT),
        (errors.UnknownAgentError, ExitCode.WRONG_INPUT),
        (errors.StoreError, ExitCode.FAILED),
        (errors.DeviceMemoryError, ExitCode.FAILED),
        (errors.EngineFailedError, ExitCode.FAILED),
        (errors.DeadlineError, ExitCode.FAILED),
    ],
)
def test_an_error_against_what_was_asked_differs_from_one_that_may_pass(kind, code):
    assert code_of(kind("said")) is code


def test_ctrl_c_has_its_own_code(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(MODULE, "show_start", interrupt)
    assert run().exit_code == ExitCode.INTERRUPTED


def test_a_reader_that_left_has_its_own_code(monkeypatch):
    def leave():
        raise BrokenPipeError(errno.EPIPE, "broken pipe")

    monkeypatch.setattr(MODULE, "show_start", leave)
    monkeypatch.setattr(MODULE, "_abandon_stdout", lambda: None)
    assert run().exit_code == ExitCode.CLOSED_PIPE


def test_an_error_of_our_own_ends_with_a_traceback_and_a_code_that_nothing_else_has():
    program = (
        "import importlib, sys\n"
        "module = importlib.import_module('kvcellar.cli.program')\n"
        "module.show_start = lambda: 1 / 0\n"
        "sys.argv = ['kvcellar']\n"
        "module.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == ExitCode.BUG
    assert "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr
