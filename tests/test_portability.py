"""Nothing that only Unix has is needed on the way to an answer."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, started

UNIX_ALONE = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "uvloop"}
"""Modules that are imported where they are used, behind a question for the platform."""


def test_no_module_of_ours_imports_what_only_unix_has_when_it_is_imported() -> None:
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            else:
                names = {node.module} if isinstance(node, ast.ImportFrom) else set()
            found += [(path.name, name) for name in names & UNIX_ALONE]
    assert not found


def objects_in(text: str) -> Iterator[Any]:
    """The JSON objects that a process has printed, whatever else it has."""
    while (start := text.find("{")) >= 0:
        value, end = json.JSONDecoder().raw_decode(text[start:])
        yield value
        text = text[start + end :]


@pytest.mark.slow
def test_a_process_without_what_only_unix_has_generates_chats_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "KVCELLAR_HOME", str(tmp_path / "home"))
    with started("tests.unixless", tmp_path / "store") as process:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0
    generated, made, said, talked, served = objects_in(out)
    assert generated["text"] and made["id"] == "poet" and said["text"]
    assert talked["text"]
    assert served["kvcellar"]["agent_id"] == "poet"
    assert served["usage"]["prompt_tokens"] > said["usage"]["prompt_tokens"]
    assert not list((tmp_path / "store" / "leases").iterdir())
