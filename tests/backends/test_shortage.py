"""Forwards for which a device has no memory: their batch ends, and nothing else does."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kvcellar as kv  # noqa: E402
from kvcellar.backends.torch.cache import memory  # noqa: E402
from kvcellar.backends.torch.cache.shortage import within_memory  # noqa: E402
from kvcellar.engine import Engine, FinishEvent, Request, SamplingParams  # noqa: E402
from kvcellar.errors import DeviceMemoryError  # noqa: E402
from kvcellar.models import load_model  # noqa: E402
from kvcellar.server.errors import as_api_error  # noqa: E402

FEW = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo", weights="none")


@pytest.fixture
def engine(demo: Any) -> Iterator[Engine]:
    with kv.make_seq_session("torch", kv.make_config(demo.params, 256)) as session:
        yield Engine(demo.bind(session), session.cache)


def short_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")


def test_a_forward_without_memory_ends_its_batch_and_the_next_one_is_right(demo, engine) -> None:
    wanted = engine.generate(Request([5, 6, 7, 8], FEW)).token_ids
    engine.drop(torch.tensor([5, 6, 7, 8]).numpy())
    hook = demo.network.model.layers[-1].register_forward_pre_hook(short_of_memory)
    try:
        failed = engine.generate(Request([5, 6, 7, 8], FEW))
    finally:
        hook.remove()
    assert isinstance(failed.error, DeviceMemoryError) and "no memory on cpu" in str(failed.error)
    assert as_api_error(failed.error).status == 503
    assert engine.failure is None
    assert engine.generate(Request([5, 6, 7, 8], FEW)).token_ids == wanted


def test_who_waits_while_a_batch_runs_out_of_memory_is_answered(demo, engine) -> None:
    first = engine.submit(Request([5, 6, 7], FEW))
    hook = demo.network.model.layers[0].register_forward_pre_hook(short_of_memory)
    events = engine.step()
    hook.remove()
    engine.submit(Request([9, 9, 9], FEW))
    events += list(engine.run())
    ends = [event for event in events if isinstance(event, FinishEvent)]
    assert [end.error is None for end in ends] == [False, True] and ends[0].request_id == first


def test_nothing_refers_to_what_a_forward_held_when_its_memory_is_given_back() -> None:
    freed: list[bool] = []
    held: list[Any] = []

    def forward() -> None:
        activation = torch.zeros(8)
        held.append(weakref.ref(activation))
        short_of_memory()

    with pytest.raises(DeviceMemoryError):
        within_memory(forward, torch.device("cpu"), lambda: freed.append(held[0]() is None))
    assert freed == [True]


def test_a_pool_that_finds_no_memory_for_its_v_is_as_it_was(demo, monkeypatch) -> None:
    with kv.make_seq_session("torch", kv.make_config(demo.params, 256, min_chunk=8)) as session:
        runner, cache, made = demo.bind(session), session.cache, memory.empty
        before = runner.forward([1, 2, 3], cache.begin_step([(0, 3)]))
        calls = iter([True, False])

        def empty(*given: Any) -> Any:
            return made(*given) if next(calls) else short_of_memory()

        monkeypatch.setattr(memory, "empty", empty)
        pool = cache.pools.of_layer[0]
        with pytest.raises(torch.OutOfMemoryError):
            pool.ensure(100, torch.device("cpu"))
        monkeypatch.undo()
        assert pool.k.n_cells == pool.v.n_cells == 8
        pool.ensure(100, torch.device("cpu"))
        assert pool.k.n_cells == pool.v.n_cells >= 100
        again = runner.forward([1, 2, 3], cache.begin_step([(1, 3)]))
    assert (before == again).all()
