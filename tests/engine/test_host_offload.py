"""KV of sequences that give way: copied to main memory where that is cheaper, and brought back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import kvcellar as kv
from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.engine import Engine, FinishEvent, Request, SamplingParams
from kvcellar.engine.kv import host_offload
from kvcellar.errors import DeviceMemoryError
from kvcellar.models import load_model
from tests.engine.test_engine import nothing_is_left

torch = pytest.importorskip("torch")
FEW = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo")


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are held to be on a card, and few tokens to be many."""
    monkeypatch.setattr(TorchCache, "rows_are_apart", property(lambda self: True))
    monkeypatch.setattr(host_offload, "LEAST_TOKENS", 8)


@contextmanager
def engine_of(demo: Any, capacity: int, s_per_token: float | None = 1e6) -> Iterator[Engine]:
    """An engine that believes so much of prompts; None: it has no memory for what moves."""
    with kv.make_seq_session("torch", kv.make_config(demo.params, capacity)) as session:
        engine = Engine(demo.bind(session), session.cache)
        found = engine.scheduler.residency.offload
        assert found is not None
        if s_per_token is None:
            engine.scheduler.residency.offload = None
        else:
            found._s_per_token = s_per_token
            found.ran = lambda *_: None
        yield engine


def prompts(n: int) -> list[list[int]]:
    return [[3 + (17 * i + 5 * j) % 90 for j in range(20)] for i in range(n)]


def answers(engine: Engine, n: int = 4) -> dict[int, tuple[int, ...]]:
    for prompt in prompts(n):
        engine.submit(Request(prompt, FEW))
    return {e.request_id: e.token_ids for e in engine.run() if isinstance(e, FinishEvent)}


def test_what_gave_way_comes_back_without_being_computed_again(demo) -> None:
    with engine_of(demo, 1000, None) as roomy:
        wanted = answers(roomy)
    with engine_of(demo, 70, None) as plain:
        answers(plain)
        computed = plain.stats().computed_tokens
    with engine_of(demo, 70) as engine:
        assert answers(engine) == wanted
        kept, stats = engine.scheduler.residency.offload, engine.stats()
        assert stats.preemptions and kept.n_back > 0 and kept.size_bytes == 0
        assert stats.computed_tokens < computed
        nothing_is_left(engine)


def test_what_is_cheap_to_compute_or_has_no_memory_is_not_copied(demo, monkeypatch) -> None:
    with engine_of(demo, 70, 1e-12) as engine:
        answers(engine)
        assert engine.stats().preemptions and engine.scheduler.residency.offload.n_out == 0
    monkeypatch.setattr(host_offload, "MOST_BYTES", 1000)
    with engine_of(demo, 70) as engine:
        answers(engine)
        assert engine.stats().preemptions and engine.scheduler.residency.offload.n_out == 0


def test_what_is_cancelled_while_it_waits_leaves_no_rows(demo) -> None:
    with engine_of(demo, 70) as engine:
        ids = [engine.submit(Request(prompt, FEW)) for prompt in prompts(4)]
        kept = engine.scheduler.residency.offload
        while not kept.size_bytes:
            engine.step()
        for request_id in ids:
            engine.cancel(request_id)
        assert kept.size_bytes == 0
        list(engine.run())
        nothing_is_left(engine)


def test_caches_in_main_memory_keep_no_copies(demo, monkeypatch) -> None:
    monkeypatch.undo()
    with kv.make_seq_session("torch", kv.make_config(demo.params, 64)) as session:
        engine = Engine(demo.bind(session), session.cache)
        assert engine.scheduler.residency.offload is None


def test_a_card_without_memory_for_a_copy_computes_again(demo, monkeypatch) -> None:
    def short(*_: Any) -> None:
        raise DeviceMemoryError("a copy of rows found no memory")

    with engine_of(demo, 1000, None) as roomy:
        wanted = answers(roomy)
    for verb in ("begin_read", "write_rows"):
        with engine_of(demo, 70) as engine, monkeypatch.context() as patch:
            patch.setattr(type(engine.cache), verb, short)
            assert answers(engine) == wanted
            nothing_is_left(engine)
