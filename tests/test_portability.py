"""Nothing that only Unix has is needed on the way to an answer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import started

pytest.importorskip("torch")


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
    generated, made, said, served = objects_in(out)
    assert generated["text"] and made["id"] == "poet" and said["text"]
    assert served["kvcellar"]["agent_id"] == "poet"
    assert served["usage"]["prompt_tokens"] > said["usage"]["prompt_tokens"]
    assert not list((tmp_path / "store" / "leases").iterdir())
