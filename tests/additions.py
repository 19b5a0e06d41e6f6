"""Applies the changes that a guide shows to a copy of the package."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import kvcellar

ROOT = Path(kvcellar.__file__).parents[2]


def added(guide: str, folder: Path) -> set[str]:
    """Copy the package into a folder and make a guide's changes there; return the files changed.

    A guide shows changes as blocks of ``diff``: a line with ``---`` and the file, then for each
    change ``@@`` and lines that begin with a space, a minus or a plus.

    Raises:
        AssertionError: what a change takes the place of is not in the file, or more than once.
    """
    package = folder / "src/kvcellar"
    left_out = shutil.ignore_patterns("__pycache__", "*.cpp", "*.h")
    shutil.copytree(ROOT / "src/kvcellar", package, ignore=left_out)
    changed = set()
    for block in re.findall(r"```diff\n(.*?)```", (ROOT / guide).read_text("utf-8"), re.DOTALL):
        name, *changes = re.split(r"^@@\n", textwrap.dedent(block), flags=re.MULTILINE)
        path = folder / name.removeprefix("--- ").strip()
        text = path.read_text("utf-8") if path.exists() else ""
        for change in changes:
            lines = change.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] in " -")
            new = "".join(line[1:] for line in lines if line[0] in " +")
            assert text.count(old) == 1 or not text, f"{name}: {text.count(old)} times\n{old}"
            text = text.replace(old, new) if text else new
        path.write_text(text, "utf-8")
        changed.add(path.name)
    return changed
