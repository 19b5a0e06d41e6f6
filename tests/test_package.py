"""What the package's metadata promises: extras that are named exist, and versions agree."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import kvcellar
from kvcellar.cli.models import doctor
from kvcellar.version import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements):
    return {re.match(r"[\w-]+", one)[0] for one in requirements}


def test_every_extra_that_is_named_exists():
    tracked = subprocess.run(
        ["git", "grep", "-hoE", r"(kvcellar|-e '?\.)\[[a-z0-9,]+\]"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    named = {
        extra for one in re.findall(r"\[([^]]+)\]", tracked.stdout) for extra in one.split(",")
    }
    assert {"mlx", "testing"} <= named
    assert named - PROJECT["optional-dependencies"].keys() == set()


def test_what_doctor_says_the_base_brings_is_what_it_depends_on():
    parts = doctor._NEEDS.keys() - doctor._ADDS.keys()
    base = {one.replace("_", "-") for name in parts for one in doctor._NEEDS[name]}
    assert base <= names(PROJECT["dependencies"])
    assert doctor._ADDS.keys() <= PROJECT["optional-dependencies"].keys()


def test_the_changelog_begins_with_the_version_that_is_being_made():
    head = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", head[1])
    assert kvcellar.__version__ == __version__
