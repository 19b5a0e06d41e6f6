"""The engine in its own thread, and callers that come, listen, and leave when they like."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from kvcellar.engine import EngineService, FinishEvent, GeneratedToken, Request, SamplingParams
from kvcellar.errors import EngineClosedError, PromptError
from tests.engine.test_engine import make_engine, nothing_is_left, plain_loop

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def hold_after_one_step(service: EngineService) -> None:
    """Let the engine take one step, then none until somebody asks it for something.

    An engine this small runs through hundreds of tokens while its caller waits for a processor.
    """
    step, n_taken = service._engine.step, 0

    def held_step() -> list[Any]:
        nonlocal n_taken
        if n_taken:
            deadline = time.monotonic() + 60
            while service._commands.empty() and time.monotonic() < deadline:
                time.sleep(0.001)
        n_taken += 1
        return step()

    service._engine.step = held_step  # type: ignore[method-assign]


async def listen(service: EngineService, request: Request) -> tuple[list[int], FinishEvent]:
    tokens: list[int] = []
    async for event in await service.submit(request):
        if isinstance(event, GeneratedToken):
            tokens.append(event.token_id)
        else:
            return tokens, event
    raise AssertionError("a stream ends with a FinishEvent")


def test_many_callers_each_hear_their_own_tokens_and_nothing_after_the_end():
    engine = make_engine(capacity=300)
    prompts = [(*range(10), i) for i in range(12)]

    async def main(service: EngineService) -> list[Any]:
        return await asyncio.gather(*(listen(service, Request(p, GREEDY)) for p in prompts))

    with EngineService(engine) as service:
        heard = asyncio.run(main(service))
    for prompt, (tokens, end) in zip(prompts, heard, strict=True):
        assert tokens == list(end.token_ids) == list(plain_loop(prompt, GREEDY).token_ids)
    nothing_is_left(engine)


def test_callers_on_several_event_loops_share_one_engine():
    engine = make_engine(capacity=300)
    heard: dict[int, list[int]] = {}

    def caller(i: int, service: EngineService) -> None:
        heard[i] = asyncio.run(listen(service, Request((5, i), GREEDY)))[0]

    with EngineService(engine) as service:
        threads = [threading.Thread(target=caller, args=(i, service)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert heard == {i: list(plain_loop((5, i), GREEDY).token_ids) for i in range(4)}


def test_leaving_a_stream_early_cancels_the_request():
    engine = make_engine(capacity=300)

    async def main(service: EngineService) -> None:
        hold_after_one_step(service)
        endless = SamplingParams(max_tokens=250, ignore_eos=True)
        async with await service.submit(Request((1, 2), endless)) as stream:
            async for event in stream:
                assert isinstance(event, GeneratedToken)
                break
        stats = await service.stats()
        assert (stats.running, stats.finished) == (0, 1)
        assert stats.sampled_tokens < 10

    with EngineService(engine) as service:
        asyncio.run(main(service))
    nothing_is_left(engine)


def test_a_caller_that_is_gone_before_its_request_is_in_leaves_nothing_behind():
    engine = make_engine(capacity=300)
    gate = threading.Event()
    step = engine.step

    async def main(service: EngineService) -> None:
        first = await service.submit(Request((9,), GREEDY))
        endless = SamplingParams(max_tokens=250, ignore_eos=True)
        task = asyncio.create_task(service.submit(Request((1, 2), endless)))
        await asyncio.sleep(0)  # it is on its way, and the engine is held up in a step
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        async for _ in first:
            pass
        stats = await service.stats()  # whatever was queued before this has been done
        assert (stats.finished, stats.running, stats.waiting) == (2, 0, 0)
        assert stats.sampled_tokens < 20

    def slow_step() -> list[Any]:
        gate.wait(60)
        return step()

    engine.step = slow_step  # type: ignore[method-assign]
    with EngineService(engine) as service:
        asyncio.run(main(service))
    nothing_is_left(engine)


def test_a_refused_request_raises_where_it_was_submitted():
    engine = make_engine(capacity=64)

    async def main(service: EngineService) -> None:
        with pytest.raises(PromptError, match="can never fit"):
            await service.submit(Request(tuple(range(100)), GREEDY))
        tokens, _ = await listen(service, Request((1,), GREEDY))
        assert len(tokens) == 6

    with EngineService(engine) as service:
        asyncio.run(main(service))


def test_closing_tells_every_listener_and_takes_no_more_requests():
    engine = make_engine(capacity=400)
    endless = SamplingParams(max_tokens=350, ignore_eos=True)

    async def main(service: EngineService) -> None:
        hold_after_one_step(service)
        stream = await service.submit(Request((1, 2), endless))
        await anext(stream)
        closing = asyncio.get_running_loop().run_in_executor(None, service.close)
        events = [event async for event in stream]
        await closing
        assert isinstance(events[-1], FinishEvent) and events[-1].reason == "cancelled"
        with pytest.raises(EngineClosedError, match="closed"):
            await service.submit(Request((1,), GREEDY))

    service = EngineService(engine)
    asyncio.run(main(service))
    service.close()
    nothing_is_left(engine)


def test_what_was_put_off_is_done_once_when_nobody_asks_any_more(monkeypatch):
    monkeypatch.setattr("kvcellar.engine.service.REST_S", 0.01)
    done: list[str] = []
    at_rest = threading.Event()
    with EngineService(make_engine()) as service:

        def put_off(_: Any) -> None:
            service.when_at_rest("a", lambda: done.append("first"))
            service.when_at_rest("b", lambda: (done.append("b"), at_rest.set()))
            service.when_at_rest("a", lambda: (done.append("last"), at_rest.set()))
            service._engine.submit(Request((1,), GREEDY))

        service.run(put_off).result()
        assert at_rest.wait(60)
        deadline = time.monotonic() + 60
        while len(done) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert done == ["b", "last"]
        assert service.run(lambda engine: engine.is_idle).result()
