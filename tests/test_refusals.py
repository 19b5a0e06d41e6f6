"""What cannot be done is refused with the errors that are documented, and changes nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvcellar as kv
from kvcellar.agents import (
    AgentManager,
    Hosting,
    MemoryPlan,
    ModelRegistry,
    check_host,
    checked_id,
    choose_capacity,
    open_host,
    planned_context,
)
from kvcellar.cellar import Cellar
from kvcellar.engine import EngineConfig, Request, SamplingParams, branch, encode_chat, generate
from kvcellar.errors import (
    AgentError,
    AgentNameError,
    BackendError,
    ConfigError,
    EngineClosedError,
    KVCellarError,
    ModelError,
    PictureError,
    PromptError,
    SessionClosedError,
    ShapeError,
    StoreError,
    UnknownReferenceError,
)
from kvcellar.hosting import loader
from kvcellar.models import LoadOptions, check_model, load_model
from kvcellar.space import Space
from kvcellar.store import Store, writer
from kvcellar.store.disk.folder import Folder
from kvcellar.store.disk.journal import Journal
from tests.agents.fakes import make_host
from tests.agents.test_durable import full
from tests.engine.fakes import PARAMS, ByteTokenizer, HashRunner, make_cache
from tests.pictures.fakes import VOCAB
from tests.pictures.test_engine import host_of
from tests.pictures.test_engine import tokens_of as picture_tokens
from tests.store.fakes import FULL, STATE, History, make_key, save, tokens_of

MISSING = "no/such/model"
KEY = make_key(groups=(FULL,), state=STATE)


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo", dtype="float32")


@pytest.fixture(scope="module")
def cellar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cellar]:
    folder = tmp_path_factory.mktemp("cellar")
    with kv.open("demo", store=folder, capacity=512) as opened:
        opened.agent("poet", system="Be brief.").say("Hello.", max_tokens=2)
        yield opened


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        save(opened, "a", History(KEY, tokens_of(1, 20)))
        yield opened


def no_room(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


LOADING: list[tuple[type[KVCellarError], dict[str, Any]]] = [
    (ModelError, {"model": MISSING}),
    (BackendError, {"model": "demo", "backend": "abacus"}),
    (ConfigError, {"model": "demo", "dtype": "float3"}),
]


@pytest.mark.parametrize(("error", "asked"), LOADING)
def test_what_cannot_be_loaded_is_refused_alike_wherever_it_is_asked_for(error, asked):
    options = LoadOptions(**asked)
    hosting = Hosting(options)
    for call in (load_model, check_model, open_host, check_host):
        with pytest.raises(error):
            call(options)
    for named in (hosting.open, hosting.check):
        with pytest.raises(error):
            named(options.model)


@pytest.mark.parametrize("error", [ModelError, BackendError, ConfigError])
def test_a_registry_says_what_keeps_a_model_from_being_loaded(error):
    def load(name: str) -> Any:
        raise error(f"{name} cannot be loaded")

    async def use() -> None:
        async with ModelRegistry(load).use("some"):
            pass

    with pytest.raises(error, match="some cannot be loaded"):
        asyncio.run(use())


def test_sizes_of_a_model_that_is_not_there_are_not_guessed():
    missing, plan = LoadOptions(MISSING), MemoryPlan.divide(10**9, 0)
    calls: list[Callable[[], Any]] = [
        lambda: plan.size_of(missing),
        lambda: plan.shared_capacities([MISSING], missing),
        lambda: choose_capacity(missing, 10**9),
        lambda: planned_context(missing),
    ]
    for call in calls:
        with pytest.raises(ModelError):
            call()


def test_memory_that_is_not_there_is_not_divided(monkeypatch):
    card = type("Card", (), {"total_bytes": 10, "held_bytes": 1})()
    with pytest.raises(ConfigError, match="more than the card's"):
        MemoryPlan.of_card(11, card)
    with pytest.raises(BackendError):
        Hosting.within(10**9, LoadOptions("demo", backend="abacus"))
    monkeypatch.setattr(loader, "accelerator_memory", lambda _: card)
    with pytest.raises(ConfigError, match="more than the card's"):
        Hosting.within(11, LoadOptions("demo"))


def test_settings_that_nobody_knows_are_refused(demo, tmp_path):
    with pytest.raises(ConfigError):
        EngineConfig(policy="random").make_policy()
    with pytest.raises(ConfigError):
        LoadOptions("demo", kv_dtype="int3").config_for(demo.params, 64)
    with pytest.raises(ConfigError, match="has no adapter 'sql'"):
        demo.adapter("sql")
    for wrong in ({"rules": ["none such"]}, {"verify": "none such"}):
        with Store(tmp_path) as store, pytest.raises(AgentError, match="none such"):
            AgentManager(store, ModelRegistry(make_host), **wrong)
    with pytest.raises(AgentNameError):
        checked_id("../up")


def test_names_and_places_that_are_not_there_are_refused(demo, tmp_path, monkeypatch):
    with pytest.raises(ConfigError):
        EngineConfig(block_size=3).make_index([], 2)
    with closing(make_host()) as host, pytest.raises(ConfigError):
        host.engine.submit(Request((1, 2), space=Space(adapter="sql")))
    with pytest.raises(ConfigError):
        Store(tmp_path, shared="nowhere://there")
    with kv.make_seq_session(demo.backend, kv.make_config(demo.params, 64)) as session:
        pass
    with pytest.raises(SessionClosedError):
        demo.bind(session)
    monkeypatch.setattr(type(demo), "has_session_ropes", True)
    with pytest.raises(ConfigError, match="rope_length"):
        demo.fingerprint()


def test_what_reads_text_alone_refuses_pictures():
    with host_of() as host:
        prompt = [1, *picture_tokens(host, 1)]
    cache = make_cache("seq", 400, PARAMS)
    runner = HashRunner(cache, VOCAB)
    with pytest.raises(PictureError):
        next(generate(runner, cache, ByteTokenizer(), prompt))
    with pytest.raises(PictureError):
        branch(runner, cache, ByteTokenizer(), prompt, SamplingParams(max_tokens=2), 2)
    gone = {"role": "user", "content": "See.", "pictures": [{"name": "0" * 64, "at": 0}]}
    with host_of() as host, pytest.raises(PictureError):
        encode_chat(host.tokenizer, [gone], looks=host.looks)


def test_an_engine_that_was_closed_does_nothing_more():
    host = make_host()
    host.service.close()
    with pytest.raises(EngineClosedError):
        asyncio.run(host.between_steps(lambda engine: engine.stats()))
    with pytest.raises(EngineClosedError):
        host.prepare(lambda *_: None)
    with pytest.raises(EngineClosedError):
        host.service.submit_quietly(Request((1, 2)), lambda _: None)


def test_a_model_whose_files_cannot_be_read_has_no_fingerprint(demo, tmp_path, monkeypatch):
    gone = replace(demo, path=tmp_path / "gone")
    with pytest.raises(StoreError):
        gone.fingerprint()
    monkeypatch.setattr("kvcellar.models.fingerprint._Known.digest", no_room)
    for call in (open_host, lambda options: Hosting(options).open("demo")):
        with pytest.raises(StoreError):
            call(LoadOptions("demo"))


def test_an_agent_that_cannot_do_it_is_as_it_was(cellar):
    poet = cellar.agent("poet")
    before = poet.messages
    calls: list[tuple[type[KVCellarError], Callable[[], Any]]] = [
        (AgentError, lambda: poet.fork("other", turn=99)),
        (AgentError, lambda: poet.rewind(turn=99)),
        (AgentError, poet.undo),
        (AgentNameError, lambda: poet.rename("x" * 10_000)),
        (AgentNameError, lambda: cellar.agent("../up")),
        (PromptError, lambda: cellar.complete("")),
    ]
    for error, call in calls:
        with pytest.raises(error):
            call()
    assert poet.messages == before and [one.name for one in cellar.agents()] == ["poet"]


def test_a_branch_that_talks_is_not_let_go_of(cellar):
    trunk = cellar.agent("trunk")
    trunk.say("Hello.", max_tokens=2)
    one, other = branches = trunk.branch(2)
    with other.stream("Write a lot.", max_tokens=200) as stream:
        next(iter(stream))
        with pytest.raises(AgentError):
            one.keep()
        with pytest.raises(AgentError):
            branches.keep(0)
    one.delete(forever=True)
    other.delete(forever=True)
    trunk.delete(forever=True)


def test_files_that_are_no_agents_are_not_taken_in(cellar, tmp_path):
    (tmp_path / "damaged").write_bytes(b"no such file")
    with pytest.raises(StoreError):
        cellar.import_agent(tmp_path / "damaged")
    cellar.agent("poet").export(tmp_path / "poet")
    with pytest.raises(AgentError):
        cellar.import_agent(tmp_path / "poet", "poet")


def test_an_agent_for_which_there_is_no_room_is_not_made(cellar, monkeypatch):
    monkeypatch.setattr(Folder, "write", no_room)
    with pytest.raises(StoreError):
        cellar.agent("new")
    monkeypatch.undo()
    assert "new" not in [one.name for one in cellar.agents()]


def test_a_cellar_that_is_not_open_has_nothing_in_it():
    closed = kv.open_async("demo")
    for name in ("host", "manager"):
        with pytest.raises(ConfigError, match="not open"):
            getattr(closed, name)


def test_what_a_store_cannot_keep_is_refused(store, tmp_path, monkeypatch):
    ref = store.get("a")
    with pytest.raises(StoreError):
        replace(ref, metadata={"a": object()}).pack()
    rows = History(KEY, tokens_of(1, 8)).read_rows(0, 8)
    with pytest.raises(ShapeError):
        KEY.layout.check_rows(0, rows[0], 9)
    with pytest.raises(ShapeError):
        KEY.layout.check_states(())
    with pytest.raises(UnknownReferenceError):
        store.export_reference("b", tmp_path / "b")
    with pytest.raises(StoreError):
        store.export_reference("a", tmp_path / "no" / "folder" / "a")
    monkeypatch.setattr(Folder, "write", no_room)
    monkeypatch.setattr(Journal, "_changing", full)
    with pytest.raises(StoreError):
        store.put_document("resp_1", b"said")
    with pytest.raises(StoreError):
        store.record("a", 9, b"said")
    with pytest.raises(StoreError):
        store.put_picture("0" * 64, b"drawn")


def test_a_history_that_cannot_be_read_says_so(store):
    for path in (store.path / "references").iterdir():
        path.write_bytes(b"damaged")
    with pytest.raises(StoreError):
        store.get("a")


def test_who_waits_for_a_disk_that_does_not_answer_is_told(store, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(writer, "STUCK_S", 0.05)
    store._writer.offer(gate.wait, 0)
    history = History(KEY, tokens_of(2, 20))
    ticket = store.save("b", KEY, history.tokens, history)
    for wait in (ticket.wait, store.flush):
        with pytest.raises(StoreError, match="see whether its disk answers"):
            wait()
    gate.set()
    monkeypatch.undo()
    assert ticket.wait() == "published"


def test_a_slow_disk_that_writes_block_after_block_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(writer, "STUCK_S", 2.0)
    written = Folder.write

    def slowly(folder, data):
        time.sleep(0.4)
        return written(folder, data)

    monkeypatch.setattr(Folder, "write", slowly)
    history = History(KEY, tokens_of(3, 40))
    began = time.monotonic()
    assert store.save("c", KEY, history.tokens, history).wait() == "published"
    assert time.monotonic() - began > 2.0  # longer than one file may take
