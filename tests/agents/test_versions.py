"""A store of every version that there was: all that was said is there, and it goes on."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcellar.store import EventKind
from kvcellar.store.disk import catalogue, journal
from tests.agents.fakes import make_host, manager, oracle, run, tokens_of, turn
from tests.agents.versions.make import HERE, VERSIONS
from tests.engine import fakes as models

WITH_DROPPED = list(VERSIONS)[3:]
"""Versions that keep what a rewind drops."""


def opened(name: str, folder: Path) -> dict[str, Any]:
    """Unpack a store as its process has left it; returns what its agents had said."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    said = folder / "expected.json"
    expected: dict[str, Any] = json.loads(said.read_text())
    said.unlink()
    return expected


def version_of(path: Path) -> int:
    with sqlite3.connect(path) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_every_archive_is_of_a_version_that_is_listed() -> None:
    assert {path.name.removesuffix(".tar.xz") for path in HERE.glob("*.xz")} == set(VERSIONS)


@pytest.mark.parametrize("name", VERSIONS)
def test_a_store_of_each_version_opens_and_goes_on(name: str, tmp_path: Path) -> None:
    expected = opened(name, tmp_path)
    params = getattr(models, VERSIONS[name][1])
    load = partial(make_host, params=params)
    with manager(tmp_path, load) as agents:
        infos = {info.agent_id: info for info in run(agents.directory.listed())}
        assert set(infos) == set(expected) and not any(info.damage for info in infos.values())
        for agent_id, said in expected.items():
            assert list(tokens_of(agents, agent_id)) == said["tokens"]
            assert list(agents.directory.conversation(agent_id)) == said["messages"]
        assert agents.store.verify().is_good
        for agent_id in expected:
            before = len(expected[agent_id]["tokens"])
            end = run(turn(agents, agent_id, "And now?"))
            assert end.usage.restored_tokens + end.usage.cached_tokens > before // 2
            history = tokens_of(agents, agent_id)
            n = end.usage.prompt_tokens
            assert list(history[n:]) == oracle(history[:n], len(history) - n, params)
        counts = agents.store.stats().events
        assert set(counts) <= {EventKind.CATALOGUE_REBUILT, EventKind.EVICTED}
        agents.store.put_document("response", b"{}")
        said = {agent_id: tokens_of(agents, agent_id) for agent_id in expected}
        dropped = agents.dropped.listed()
        assert bool(dropped) == (name in WITH_DROPPED)
    with manager(tmp_path, load) as agents:
        assert {agent_id: tokens_of(agents, agent_id) for agent_id in expected} == said
        if dropped:
            assert run(agents.dropped.undo("twin"))
    assert version_of(tmp_path / "catalogue.sqlite") == catalogue.SCHEMA_VERSION
    assert version_of(tmp_path / "journal.sqlite") == journal.SCHEMA_VERSION
