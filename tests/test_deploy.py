"""What deploys a server fits the package: options exist, and checkers accept the files."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer

from kvcellar.cli import app

ROOT = Path(__file__).parents[1]
IMAGE = (ROOT / "Dockerfile").read_text()
UNIT = ROOT / "deploy" / "kvcellar.service"


def commands():
    """Return what the container and the service run, and what the Dockerfile's head recommends."""
    said = re.search(r"^CMD (\[.*\])$", IMAGE, re.MULTILINE)[1]
    yield [*re.findall(r'"([^"]+)"', said)]
    yield shlex.split(re.search(r"^#.* kvcellar (serve .*)$", IMAGE, re.MULTILINE)[1])
    yield shlex.split(re.search(r"^ExecStart=\S+ (.*)$", UNIT.read_text(), re.MULTILINE)[1])


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_what_is_run_is_a_command_with_options_that_it_has(command):
    group = typer.main.get_command(app)
    verb = group.get_command(None, command[0])
    made = verb.make_context(command[0], command[1:])
    assert made.params["host"] == ("0.0.0.0" if "--host" in command else "127.0.0.1")


def test_the_image_can_have_the_torch_of_the_extra():
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pinned["optional-dependencies"]["torch"][0]
    assert pinned.startswith("torch==")
    assert re.findall(r"torch==[\d.]+", IMAGE) == [pinned]


def test_all_that_the_image_is_built_of_is_let_through_to_docker():
    let = (ROOT / ".dockerignore").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = ["pyproject.toml", "setup.py", "src", project["readme"], *project["license-files"]]
    assert {f"!{name}" for name in needed} <= set(let)


def test_systemd_accepts_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/kvcellar/bin/kvcellar", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
