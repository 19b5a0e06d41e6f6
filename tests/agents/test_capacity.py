"""How many cells a model is given where nobody says: its context, where memory allows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcellar.agents import MemoryPlan, choose_capacity, open_host, planned_context
from kvcellar.cli.talk.session import bound_model
from kvcellar.errors import ConfigError
from kvcellar.hosting import memory as agent_memory
from kvcellar.models import LoadOptions
from kvcellar.models.files.hub import DEMO_FOLDER

MB = 1_000_000
LONG = 32_768


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with positions for 32k tokens."""
    return made(tmp_path_factory.mktemp("long") / "model")


def made(folder: Path, **fields: Any) -> str:
    folder.mkdir()
    for file in DEMO_FOLDER.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    fields = {"max_position_embeddings": LONG} | fields
    (folder / "config.json").write_text(json.dumps(config | fields))
    return str(folder)


def test_the_default_is_the_models_context_and_says_so(long_model):
    host = open_host(long_model, dtype="float32")
    try:
        assert host.engine.cache.capacity == host.context == LONG
        assert str(host.capacity) == "capacity 32768 cells: the model's context"
        stats = host.service.run(lambda engine: engine.stats()).result()
        assert stats.cache.size_bytes == 0, "pools grow with use"
    finally:
        host.close()
    with bound_model(LoadOptions(long_model, dtype="float32")) as bound:
        assert bound.cache.capacity == LONG


@pytest.mark.parametrize("megabytes", [300, 800, 1200])
def test_less_memory_gives_as_much_as_fits_of_it(long_model, megabytes):
    limit = megabytes * MB
    asked = LoadOptions(long_model, dtype="float32", memory_bytes=limit)
    chosen = choose_capacity(asked)
    host = open_host(asked)
    try:
        assert host.engine.cache.capacity == host.context
        assert 0.97 * chosen.cells <= host.context <= chosen.cells <= LONG
        if chosen.cells < LONG:
            assert f"what {megabytes}.0 MB allow" in str(host.capacity).replace(
                "1.20 GB", "1200.0 MB"
            )
    finally:
        host.close()
    if chosen.cells < LONG:
        more = choose_capacity(replace(asked, memory_bytes=limit + 50 * MB))
        assert more.cells > chosen.cells + 1000
    else:
        assert "the model's context" in chosen.why


def test_without_a_limit_it_is_what_the_machine_allows(long_model, monkeypatch):
    monkeypatch.setattr(agent_memory, "machine_bytes", lambda: 450 * MB)
    asked = LoadOptions(long_model, dtype="float32")
    chosen = choose_capacity(asked)
    assert 1024 < chosen.cells < LONG
    assert chosen.why == f"what 450.0 MB allow of the model's context of {LONG}"
    assert planned_context(asked) == (chosen.cells, LONG)
    monkeypatch.setattr(agent_memory, "machine_bytes", lambda: 10 * MB)
    assert choose_capacity(asked).cells == 512, "it is tried all the same"


def test_what_is_asked_for_is_what_there_is(long_model):
    host = open_host(long_model, capacity=2 * LONG, dtype="float32")
    try:  # several conversations, none longer than the model's context
        assert (host.engine.cache.capacity, host.context) == (2 * LONG, LONG)
        assert str(host.capacity) == f"capacity {2 * LONG} cells: as asked"
    finally:
        host.close()
    assert planned_context(LoadOptions(long_model, capacity=1000)) == (1000, LONG)
    with pytest.raises(ConfigError, match="capacity"):
        open_host(long_model, capacity=0)


def test_models_that_are_offered_together_share_the_memory_rather_than_take_turns(
    long_model, tmp_path
):
    short = made(tmp_path / "short", max_position_embeddings=4096)
    names, asked = [long_model, short], LoadOptions(dtype="float32")
    rich = MemoryPlan.divide(100_000 * MB, 100 * MB)
    assert rich.shared_capacities(names, asked) == {long_model: None, short: None}
    poor = MemoryPlan.divide(900 * MB, 100 * MB)
    shared = poor.shared_capacities(names, asked)
    assert shared[short] == 4096 and 8192 <= shared[long_model] < LONG
    sizes = [poor.size_of(replace(asked, model=n, capacity=shared[n])) for n in names]
    assert sum(sizes) <= poor.models_bytes
    alone = poor.shared_capacities([long_model], LoadOptions())
    assert alone == {long_model: None}, "alone it takes what fits"
    tiny = MemoryPlan.divide(300 * MB, 100 * MB)
    assert tiny.shared_capacities(names, asked)[long_model] == 8192
