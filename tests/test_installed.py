"""What one is told to type brings what is missing, however this copy was installed."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvcellar import installed

ROOT = Path(__file__).parents[1]


class Distribution:
    """An installed kvcellar of which pip has written down where it was from."""

    def __init__(self, said: object) -> None:
        self.said = said

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.said is None else json.dumps(self.said)


@pytest.fixture(autouse=True)
def pip(tmp_path, monkeypatch):
    """Have an environment whose pip is the one on the PATH."""
    for name in ("python", "pip"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_checkout_is_installed_again_from_its_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(installed, "_ROOT", ROOT)
    assert installed.pip_command("mlx") == f"pip install -e '{ROOT}[mlx]'"
    assert installed.pip_command() == f"pip install -e {ROOT}"
    assert installed.rebuild_command() == f"pip install --no-deps -e {ROOT}"
    (tmp_path / "my folder").mkdir()
    for name in ("setup.py", "pyproject.toml"):
        (tmp_path / "my folder" / name).touch()
    monkeypatch.setattr(installed, "_ROOT", tmp_path / "my folder")
    assert installed.pip_command() == f"pip install -e '{tmp_path}/my folder'"


@pytest.mark.parametrize(
    ("said", "source"),
    [
        (None, "--no-binary kvcellar kvcellar"),
        (
            {"url": "file:///w/k.whl", "archive_info": {}},
            "--no-binary kvcellar kvcellar",
        ),
        ({"url": "file:///src/kvcellar", "dir_info": {}}, "file:///src/kvcellar"),
        (
            {"url": "https://host/kvcellar", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "git+https://host/kvcellar@abc",
        ),
    ],
)
def test_any_other_copy_is_known_by_its_name_and_built_again_from_where_it_came(
    said, source, monkeypatch, tmp_path
):
    monkeypatch.setattr(installed, "_ROOT", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda _: Distribution(said))
    assert installed.pip_command("mlx") == "pip install 'kvcellar[mlx]'"
    assert installed.pip_command() == "pip install kvcellar"
    again = "pip install --no-deps --force-reinstall --no-cache-dir"
    assert installed.rebuild_command() == f"{again} {source}"


def test_another_pip_on_the_path_is_not_the_one_that_is_named(monkeypatch, tmp_path):
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "pip").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "another"))
    assert installed.pip_command("mlx").startswith(f"{tmp_path}/python -m pip install ")


def test_no_message_and_no_page_names_a_package_that_no_index_has():
    """Two sentences do: one says so, one is of a time when an index has it."""
    own = re.compile(r"pip install (?:--\S+ )*'?kvcellar\b")
    files = [
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/clients/*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Dockerfile")),
        ROOT / "deploy" / "kvcellar.service",
    ]
    found = [
        line.strip()
        for file in files
        for line in file.read_text().splitlines()
        if own.search(line) and file.name != "installed.py"
    ]
    assert [line for line in found if "finds nothing" not in line] == [
        "tools. Nobody has done that yet. `pip install kvcellar` there builds from the source "
        "distribution meanwhile.",
        "6. After the first upload, `pip install kvcellar` may stand where pages have "
        "`pip install .`, or the folder's path.",
    ]
