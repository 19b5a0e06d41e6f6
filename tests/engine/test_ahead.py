"""Steps that are begun while a device works: the same tokens, whatever comes in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import kvcellar as kv
from kvcellar.backends.torch.gpu.sampler import logits as device
from kvcellar.engine import Engine, FinishEvent, Request, SamplingParams
from kvcellar.engine.speculate import NgramDrafter
from kvcellar.errors import ModelError
from kvcellar.models import load_model
from kvcellar.models.kept_logits import RowSampling
from tests.backends.gpu.interpreter import hasten
from tests.engine.test_engine import nothing_is_left


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo")


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten()
    monkeypatch.setattr(device, "ON_CPU", True)


@pytest.fixture
def engines(demo: Any) -> Iterator[Any]:
    """An engine that begins ahead, and one that does not, over caches of so many cells."""
    sessions: list[Any] = []

    def make(capacity: int, make_session: Any = kv.make_seq_session) -> list[Engine]:
        made = []
        for _ in range(2):
            session = make_session("torch", kv.make_config(demo.params, capacity, min_chunk=16))
            sessions.append(session.__enter__())
            made.append(Engine(demo.bind(session), session.cache))
        made[1]._ahead = made[1].scheduler.residency.ahead = None
        return made

    yield make
    for session in sessions:
        session.__exit__(None, None, None)


def said(engine: Engine, script: dict[int, list[Request]], cancels: dict[int, int] | None = None):
    """Submit requests at steps, cancel some, and return each one's tokens and end."""
    ends: dict[int, Any] = {}
    for step in range(400):
        for request in script.get(step, []):
            engine.submit(request)
        if cancels and step in cancels:
            engine.cancel(cancels[step])
        for event in engine.step():
            if isinstance(event, FinishEvent):
                ends[event.request_id] = (event.reason, event.token_ids)
        if engine.is_idle and step > max(script):
            return ends
    raise AssertionError("the engine stands still")


def asked(first: int, n: int, n_tokens: int, **settings: Any) -> Request:
    params = {"ignore_eos": True, "max_tokens": n_tokens, **settings}
    return Request([3 + (first + i) % 50 for i in range(n)], SamplingParams(**params))


@pytest.mark.parametrize("make", [kv.make_seq_session, kv.make_paged_session])
def test_requests_that_come_and_go_are_answered_as_without(engines, make) -> None:
    ahead, plain = engines(512, make)
    script = {
        0: [asked(0, 7, 12), asked(9, 3, 30)],
        6: [asked(0, 9, 5)],  # it shares the first one's beginning
        15: [asked(20, 40, 6, temperature=0.8, seed=3)],
        22: [asked(5, 4, 1)],
    }
    found, wanted = (said(engine, script, {18: 1}) for engine in (ahead, plain))
    assert found == wanted and len(found) == 5
    assert ahead._ahead is not None and ahead._ahead.n_used >= 10
    nothing_is_left(ahead)
    assert ahead.n_available == plain.n_available == 512


@pytest.mark.card(first=True)
def test_where_cells_are_short_nobody_ends_or_gives_way_earlier(engines) -> None:
    ahead, plain = engines(24)
    script = {0: [asked(0, 8, 18)], 3: [asked(20, 9, 9), asked(30, 3, 4)]}
    found, wanted = (said(engine, script) for engine in (ahead, plain))
    assert found == wanted
    assert ahead.stats().preemptions == plain.stats().preemptions > 0
    nothing_is_left(ahead)


def test_what_others_do_between_steps_takes_the_step_back(engines) -> None:
    ahead, plain = engines(256)
    ids = [engine.submit(asked(0, 8, 20)) for engine in (ahead, plain)]
    ends = {}
    for step in range(60):
        for engine, request_id in zip((ahead, plain), ids, strict=True):
            if step == 5:
                engine.publish(request_id)
            if step in (7, 9):
                held = engine.hold(np.arange(3, 11))
                assert held.n_tokens
                held.release()
            if step == 11:
                engine.restore(np.arange(100, 120), [None]).give_up()
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    ends[id(engine)] = event.token_ids
    assert ends[id(ahead)] == ends[id(plain)]
    nothing_is_left(ahead)


def test_a_device_that_fails_while_it_samples_ends_its_batch_alone(engines, monkeypatch) -> None:
    ahead, plain = engines(256)
    wanted = plain.generate(asked(0, 8, 10)).token_ids
    ahead.submit(asked(0, 8, 30))
    for _ in range(4):
        ahead.step()

    def fails(*_: Any) -> Any:
        raise ModelError("the device has fallen off the bus")

    monkeypatch.setattr(device.DeviceLogits, "sample", fails)
    (end,) = ahead.step()
    monkeypatch.undo()
    monkeypatch.setattr(device, "ON_CPU", True)
    assert isinstance(end, FinishEvent) and "off the bus" in str(end.error)
    assert ahead.failure is None and not ahead.cache.is_step_open
    assert ahead.generate(asked(0, 8, 10)).token_ids == wanted
    nothing_is_left(ahead)


def test_guesses_are_not_begun_ahead(demo) -> None:
    with kv.make_seq_session("torch", kv.make_config(demo.params, 128)) as session:
        assert Engine(demo.bind(session), session.cache, drafter=NgramDrafter())._ahead is None


def test_the_step_is_made_ready_before_anything_is_sampled(engines, monkeypatch) -> None:
    ahead, _ = engines(256)
    order: list[str] = []
    sample = device.DeviceLogits.sample

    def sampled(self: Any, rows: list[RowSampling]) -> Any:
        order.append("sampled")
        return sample(self, rows)

    monkeypatch.setattr(device.DeviceLogits, "sample", sampled)
    monkeypatch.setattr(type(ahead.runner), "prepare", lambda *_: order.append("ready"))
    ahead.generate(asked(0, 5, 4))
    assert order == ["sampled", "ready", "sampled", "ready", "sampled", "sampled"]
