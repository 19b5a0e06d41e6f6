"""What is published when: histories at once, the KV of short turns when the engine rests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvcellar.agents import Turn, publishing
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.checking import key_of
from kvcellar.engine import SamplingParams
from kvcellar.engine import service as service_module
from kvcellar.store import ModelKey, RowLayout
from tests.agents.fakes import BLOCK_TOKENS, PARAMS, make_host, manager, run, tokens_of, turn

SHORT = [1, 2, 3]
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
WRITER = "kvcellar-store"


@pytest.fixture
def never_rests(monkeypatch):
    monkeypatch.setattr(service_module, "REST_S", 3600.0)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def rest(agents: Any, monkeypatch: Any) -> None:
    """Let the engine do what it put off."""
    service = agents.models.host("hash").service
    monkeypatch.setattr(service_module, "REST_S", 0.001)
    until(lambda: service.run(lambda _: not service._for_rest).result())
    agents.store.flush()


def stored(agents: Any, agent_id: str = "a") -> tuple[tuple[int, ...], int]:
    """The tokens of an agent's reference, and how many of them have KV in the store."""
    agents.store.flush()
    ref = agents.store.get(agents.directory.agent(agent_id).name)
    return tuple(ref.tokens), ref.n_stored


def test_a_short_turn_is_published_at_once_and_its_kv_when_the_engine_rests(
    tmp_path, monkeypatch, never_rests
):
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        end = run(turn(agents, "a", tokens=SHORT))
        assert end.save.wait() == "published"
        history = tokens_of(agents, "a")
        assert stored(agents) == (history, 0)
        rest(agents, monkeypatch)
        assert stored(agents) == (history, len(history) - 1)
        assert run(agents.directory.describe("a")).n_stored == len(history) - 1


def test_kv_that_fills_a_block_is_taken_with_its_turn(tmp_path, never_rests):
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=list(range(BLOCK_TOKENS))))
        n = stored(agents)[1]
        assert n == len(tokens_of(agents, "a")) - 1
        run(turn(agents, "a", tokens=SHORT))  # what was stored stays of use
        assert stored(agents) == (tokens_of(agents, "a"), n)


def test_kv_does_not_wait_for_rest_for_ever(tmp_path, monkeypatch, never_rests):
    monkeypatch.setattr(publishing, "REST_EVERY_S", 0.0)
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=SHORT))
        history = tokens_of(agents, "a")
        assert stored(agents) == (history, len(history) - 1)


def test_kv_that_waited_is_taken_when_the_model_goes(tmp_path, never_rests):
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=SHORT))
        history = tokens_of(agents, "a")
    with manager(tmp_path) as agents:
        assert stored(agents) == (history, len(history) - 1)


@pytest.mark.parametrize("verb", ["delete", "forget"])
def test_an_agent_that_is_gone_is_not_saved_when_the_engine_rests(
    verb, tmp_path, monkeypatch, never_rests
):
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=SHORT))
        name = agents.directory.agent("a").name
        run(getattr(agents.lifecycle, verb)("a"))
        rest(agents, monkeypatch)
        assert not agents.store.has_reference(name)


def test_an_agent_that_went_back_stays_there_when_the_engine_rests(
    tmp_path, monkeypatch, never_rests
):
    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=SHORT))
        history = tokens_of(agents, "a")
        run(turn(agents, "a", tokens=SHORT))
        run(agents.lifecycle.rewind("a", turn=1))
        rest(agents, monkeypatch)
        assert stored(agents)[0] == history == tokens_of(agents, "a")


def test_all_of_a_turn_that_was_interrupted_is_taken_at_once(tmp_path, never_rests):
    async def leave(agents: Any) -> None:
        await agents.lifecycle.create("a")
        async with contextlib.aclosing(
            agents.turns.generate(Turn("a", tokens=SHORT, params=LONG))
        ) as events:
            async for _ in events:
                break

    with manager(tmp_path) as agents:
        run(leave(agents))
        history = tokens_of(agents, "a")
        assert len(history) > len(SHORT)
        assert stored(agents)[0] == history
        assert stored(agents)[1] >= len(history) - 1


def test_what_waits_is_exported_too(tmp_path, never_rests):
    with manager(tmp_path / "one") as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=SHORT))
        history = tokens_of(agents, "a")
        run(agents.sleep.export("a", tmp_path / "a.kv"))
    with manager(tmp_path / "two") as agents:
        run(agents.sleep.import_file(tmp_path / "a.kv"))
        assert stored(agents) == (history, len(history) - 1)


def test_a_stored_agent_of_a_model_with_soft_capping_is_still_the_models(tmp_path):
    groups = tuple(replace(group, softcap=50.0) for group in PARAMS.groups)

    def load(name: str) -> Any:
        host = make_host(name)
        return replace(host, key=ModelKey("capped", RowLayout(groups, "float32", BLOCK_TOKENS)))

    with manager(tmp_path, load) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=SHORT))
    with manager(tmp_path, load) as agents:
        run(turn(agents, "a", tokens=SHORT))
        key = agents.models.host("hash").key
        assert key_of(agents.store.get(agents.directory.agent("a").name)) == key
        assert key != ModelKey("another", key.layout)
        assert run(agents.directory.describe("a")).n_cached  # it is looked for in the model's cache


def test_what_is_written_of_a_turn_is_put_together_by_the_writer_as_it_was_then(
    tmp_path, monkeypatch, never_rests
):
    """However long the conversation, the engine's next step does not wait for its JSON."""
    made: list[tuple[str, int]] = []
    has_gone_on = threading.Event()
    metadata = AgentRecord.metadata

    def watched(agent: AgentRecord) -> dict[str, Any]:
        thread = threading.current_thread().name
        if thread == WRITER:
            assert has_gone_on.wait(60)
        made.append((thread, len(agent.turns)))
        return metadata(agent)

    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a"))
        agents.store.flush()
        monkeypatch.setattr(AgentRecord, "metadata", watched)
        for _ in range(2):
            run(turn(agents, "a", tokens=list(range(BLOCK_TOKENS))))
        has_gone_on.set()
        agents.store.flush()
        assert [n for thread, n in made if thread == WRITER] == [1, 2]
        assert "kvcellar-engine" not in {thread for thread, _ in made}
