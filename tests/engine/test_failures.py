"""What raises in the engine: who is concerned is told, nobody waits for ever, no token is wrong."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvcellar.bookkeeping import Sequences
from kvcellar.engine import (
    Engine,
    EngineService,
    FinishEvent,
    GeneratedToken,
    Request,
    SamplingParams,
)
from kvcellar.engine.kv.residency import Residency
from kvcellar.engine.schedule.outcomes import Outcomes
from kvcellar.engine.schedule.policy import Mixed
from kvcellar.engine.schedule.scheduler import Scheduler
from kvcellar.engine.speculate import Speculator
from kvcellar.errors import CacheFullError, EngineClosedError, EngineFailedError, ModelError
from tests.engine.fakes import (
    FULL_PARAMS,
    PARAMS,
    ByteTokenizer,
    GuessTrees,
    HashRunner,
    make_cache,
)
from tests.engine.test_engine import Heard, make_engine, nothing_is_left, plain_loop

PATIENCE_S = 180
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=200, ignore_eos=True)


class BrokenError(RuntimeError):
    """What the tests inject."""


def raises(*_: Any, **__: Any) -> Any:
    raise BrokenError("a book is torn")


def ends_of(engine: Engine, heard: Heard | None = None) -> dict[int, FinishEvent]:
    heard = heard or Heard()
    for _ in range(2000):
        if engine.is_idle:
            return heard.ends
        heard.take(engine.step())
    raise AssertionError("the engine stands still")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, logger="kvcellar.engine")


SCHEDULE_AND_RECORD: list[tuple[type, str]] = [
    (Mixed, "allot"),
    (Mixed, "may_admit"),
    (Mixed, "ran"),
    (Residency, "make_room_for"),
    (Residency, "n_reusable"),
    (Residency, "enter"),
    (Residency, "publish"),
    (Residency, "leave"),
    (Scheduler, "_batch"),
    (Outcomes, "_keep_computed"),
    (Outcomes, "fail"),
    (Speculator, "propose"),
    (Speculator, "learn"),
    (Sequences, "end_step"),
]


@pytest.fixture(params=SCHEDULE_AND_RECORD, ids=lambda where: f"{where[0].__name__}.{where[1]}")
def broken(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[HashRunner], None]:
    """Call it to have something in ``schedule`` or ``record`` raise from then on."""
    where, name = request.param

    def break_it(runner: HashRunner) -> None:
        monkeypatch.setattr(where, name, raises)
        if name == "fail":
            runner.fail_after = 0  # it is called when a forward has raised

    return break_it


def test_an_error_in_the_books_ends_every_request_with_it_and_the_engine_takes_no_more(broken):
    engine = make_engine(
        cache=make_cache("tree", 200, FULL_PARAMS),
        drafter=GuessTrees(FULL_PARAMS, ByteTokenizer.vocab_size),
        max_num_seqs=2,
    )
    heard = Heard()
    ids = [engine.submit(Request((i, *range(20)), ENDLESS)) for i in range(3)]
    for _ in range(4):
        heard.take(engine.step())
    ids.append(engine.submit(Request((7, 7, 7), SamplingParams(max_tokens=1))))
    broken(engine.runner)
    ends = ends_of(engine, heard)
    assert set(ends) == set(ids)
    failed = [end for end in ends.values() if isinstance(end.error, EngineFailedError)]
    assert failed and all("a book is torn" in str(end.error) for end in failed)
    assert isinstance(engine.failure, EngineFailedError)
    assert isinstance(engine.failure.__cause__, BrokenError)
    assert engine.is_idle and engine.step() == []
    with pytest.raises(EngineFailedError, match="stopped after BrokenError: a book is torn"):
        engine.submit(Request((1,), GREEDY))
    assert not engine.cancel(ids[0]) and not engine.tidy()
    for request_id, tokens in heard.tokens.items():  # and what was told before was right
        prompt = (ids.index(request_id), *range(20))
        want = plain_loop(prompt, ENDLESS, FULL_PARAMS).token_ids
        assert want[: len(tokens)] == tuple(tokens)


def test_all_listeners_hear_of_an_error_in_the_books_and_later_callers_are_refused_at_once(
    broken, monkeypatch
):
    engine = make_engine(
        cache=make_cache("tree", 300, FULL_PARAMS),
        drafter=GuessTrees(FULL_PARAMS, ByteTokenizer.vocab_size),
        max_num_seqs=2,
    )
    told: list[FinishEvent] = []
    step = engine.step

    def unhurried():
        time.sleep(0.02)  # nobody ends before something is broken
        return step()

    monkeypatch.setattr(engine, "step", unhurried)

    async def main(service: EngineService) -> None:
        streams = [
            await service.submit(Request((i, *range(20)), ENDLESS), told.append) for i in range(3)
        ]
        await anext(streams[0])
        await asyncio.wrap_future(service.run(lambda engine: broken(engine.runner)))
        for stream in streams:
            last = [event async for event in stream][-1]
            assert isinstance(last, FinishEvent)
            assert isinstance(last.error, EngineFailedError), last
            await stream.cancel()  # of what is over: nothing to do
        assert {event.request_id for event in told} == {s.request_id for s in streams}
        assert service.failure is not None
        for call in (service.stats, lambda: service.submit(Request((1,), GREEDY))):
            with pytest.raises(EngineFailedError, match="a book is torn"):
                await call()
        with pytest.raises(EngineFailedError):
            service.run(lambda engine: None)

    with EngineService(engine) as service:
        asyncio.run(asyncio.wait_for(main(service), PATIENCE_S))


@pytest.mark.parametrize("verb", ["cancel", "publish"])
def test_an_error_in_the_books_between_steps_stops_the_engine_too(verb, monkeypatch):
    engine = make_engine(capacity=200)
    running = engine.submit(Request(tuple(range(20)), ENDLESS))
    engine.step()
    monkeypatch.setattr(Residency, "publish", raises)
    with pytest.raises(EngineFailedError, match="a book is torn"):
        getattr(engine, verb)(running)
    ends = ends_of(engine)
    assert isinstance(ends[running].error, EngineFailedError)


def test_compaction_that_raises_stops_the_engine_before_a_wrong_cell_is_read(monkeypatch):
    monkeypatch.setattr("kvcellar.engine.service.REST_S", 0.01)
    monkeypatch.setattr(Residency, "tidy", raises)
    engine = make_engine(capacity=200)

    async def main(service: EngineService) -> None:
        async for _ in await service.submit(Request((1, 2), GREEDY)):
            pass
        while service.failure is None:
            await asyncio.sleep(0.005)
        with pytest.raises(EngineFailedError, match="a book is torn"):
            await service.submit(Request((1,), GREEDY))

    with EngineService(engine) as service:
        asyncio.run(asyncio.wait_for(main(service), PATIENCE_S))


def test_a_thread_that_ends_for_any_reason_leaves_nobody_waiting():
    engine = make_engine(capacity=300)
    told: list[FinishEvent] = []
    gate, is_in_step = threading.Event(), threading.Event()

    def dies() -> list[Any]:
        is_in_step.set()
        gate.wait(PATIENCE_S)
        raise SystemExit("killed from inside")

    engine.step = dies  # type: ignore[method-assign]

    async def main(service: EngineService) -> None:
        stream = await service.submit(Request((1, 2), ENDLESS), told.append)
        await asyncio.to_thread(is_in_step.wait, PATIENCE_S)
        asked = asyncio.wrap_future(service.run(lambda engine: engine.stats()))
        gate.set()
        events = [event async for event in stream]
        assert isinstance(events[-1].error, EngineFailedError)
        assert "SystemExit: killed from inside" in str(events[-1].error)
        assert [event.request_id for event in told] == [stream.request_id]
        with pytest.raises(EngineClosedError):
            await asked
        with pytest.raises(EngineClosedError):
            await service.submit(Request((1,), GREEDY))

    with EngineService(engine) as service:
        asyncio.run(asyncio.wait_for(main(service), PATIENCE_S))


def test_a_callback_that_raises_keeps_nobody_elses_events_back():
    engine = make_engine(capacity=300)

    async def main(service: EngineService) -> None:
        first = await service.submit(Request((1, 2), GREEDY), raises)
        second = await service.submit(Request((3, 4), GREEDY))
        for stream, prompt in ((first, (1, 2)), (second, (3, 4))):
            *tokens, end = [event async for event in stream]
            want = list(plain_loop(prompt, GREEDY).token_ids)
            assert [event.token_id for event in tokens] == want
            assert end.error is None
        assert service.failure is None

    with EngineService(engine) as service:
        asyncio.run(asyncio.wait_for(main(service), PATIENCE_S))
    nothing_is_left(engine)


def test_work_that_was_put_off_and_raises_does_not_end_the_thread(monkeypatch):
    monkeypatch.setattr("kvcellar.engine.service.REST_S", 0.01)
    done = threading.Event()
    with EngineService(make_engine()) as service:

        def put_off(_: Any) -> None:
            service.when_at_rest("a", raises)
            service.when_at_rest("b", done.set)

        service.run(put_off).result(PATIENCE_S)
        assert done.wait(PATIENCE_S)
        assert service.run(lambda engine: engine.is_idle).result(PATIENCE_S)


# What is not the engine's own: only its request ends ---------------------------------------------


class Torn:
    """A guide that lets all come, and raises at its third token."""

    is_complete = False
    end_id = None

    def __init__(self, where: str, n: int = 0) -> None:
        self.where, self.n = where, n

    def allowed(self) -> np.ndarray:
        if self.where == "allowed" and self.n == 2:
            raise BrokenError("no grammar")
        return np.ones(ByteTokenizer.vocab_size, dtype=np.bool_)

    def accept(self, token_id: int) -> None:
        self.n += 1
        if self.where == "accept" and self.n == 3:
            raise BrokenError("no grammar")

    def fork(self) -> Torn:
        if self.where == "fork" and self.n:
            raise BrokenError("no grammar")
        return Torn(self.where, self.n)


def others(engine: Engine) -> dict[int, tuple[int, ...]]:
    """Three requests whose tokens are known, beside the one that is in trouble."""
    prompts = [(i, *range(20)) for i in range(3)]
    return {engine.submit(Request(prompt, GREEDY)): prompt for prompt in prompts}


def the_others_are_right(ends: dict[int, FinishEvent], asked: dict[int, tuple[int, ...]]) -> None:
    for request_id, prompt in asked.items():
        assert ends[request_id].token_ids == plain_loop(prompt, GREEDY).token_ids


@pytest.mark.parametrize("where", ["allowed", "accept"])
def test_a_grammar_that_raises_ends_its_own_request_alone(where):
    engine = make_engine(capacity=200)
    asked = others(engine)
    guided = SamplingParams(max_tokens=6, ignore_eos=True, guide=lambda: Torn(where))
    bad = engine.submit(Request((5, 5), guided))
    heard = Heard()
    ends = ends_of(engine, heard)
    the_others_are_right(ends, asked)
    assert isinstance(ends[bad].error, BrokenError) and ends[bad].reason == "error"
    want = plain_loop((5, 5), GREEDY).token_ids
    assert ends[bad].token_ids == want[:2] == tuple(heard.tokens[bad])
    assert engine.failure is None
    again = engine.generate(Request((5, 5), GREEDY))
    assert again.token_ids == want
    nothing_is_left(engine)


def test_a_grammar_that_raises_while_guesses_are_verified_ends_its_own_request_alone():
    engine = make_engine(
        cache=make_cache("tree", 200),
        drafter=GuessTrees(PARAMS, ByteTokenizer.vocab_size),
        verify_all_drafts=True,
    )
    asked = others(engine)
    guided = SamplingParams(max_tokens=6, ignore_eos=True, guide=lambda: Torn("fork"))
    bad = engine.submit(Request((5, 5), guided))
    ends = ends_of(engine)
    the_others_are_right(ends, asked)
    assert isinstance(ends[bad].error, BrokenError)
    assert engine.failure is None
    nothing_is_left(engine)


def test_a_tokenizer_that_raises_ends_the_request_whose_token_it_was():
    class Strict(ByteTokenizer):
        def decode(self, token_ids: Any, **more: Any) -> str:
            if fatal in token_ids:
                raise BrokenError("no such token")
            return super().decode(token_ids, **more)

    prompts = [(i, *range(20)) for i in range(3)]
    wants = [plain_loop(prompt, GREEDY).token_ids for prompt in prompts]
    fatal = wants[1][3]
    assert all(fatal not in want for want in (wants[0], wants[2]))
    engine = make_engine(capacity=200)
    engine.scheduler.tokenizer = Strict()
    ids = [engine.submit(Request(prompt, GREEDY)) for prompt in prompts]
    ends = ends_of(engine)
    assert isinstance(ends[ids[1]].error, BrokenError)
    for i in (0, 2):
        assert ends[ids[i]].token_ids == wants[i]
    assert engine.failure is None
    nothing_is_left(engine)


def test_logits_that_are_no_numbers_end_their_own_request_and_its_kv_is_not_reused():
    engine = make_engine(capacity=200)
    asked = others(engine)
    forward = engine.runner.forward
    bad_prompt = (5, 5, 5)

    def poisoned(token_ids: Any, positions: Any, rows: Any = None) -> np.ndarray:
        logits = forward(token_ids, positions, rows)
        for i, row in enumerate(rows):
            if token_ids[row] == 5:
                logits[i] = np.nan
        return logits

    engine.runner.forward = poisoned
    bad = engine.submit(Request(bad_prompt, GREEDY))
    ends = ends_of(engine)
    assert isinstance(ends[bad].error, ModelError) and not ends[bad].token_ids
    the_others_are_right({k: v for k, v in ends.items() if v.error is None}, asked)
    engine.runner.forward = forward
    again = engine.generate(Request(bad_prompt, GREEDY))
    assert again.usage is not None and again.usage.cached_tokens == 0
    nothing_is_left(engine)


def test_a_place_that_cannot_be_had_after_all_ends_the_request_that_wanted_it(monkeypatch):
    engine = make_engine(capacity=200)
    engine.generate(Request(tuple(range(30)), GREEDY))
    seq_map = Sequences.seq_map

    def full_once(self: Any, *args: Any) -> None:
        monkeypatch.setattr(Sequences, "seq_map", seq_map)
        raise CacheFullError("another cache took it")

    monkeypatch.setattr(Sequences, "seq_map", full_once)
    bad = engine.submit(Request((*range(30), 1), GREEDY))
    good = engine.submit(Request((*range(30), 2), GREEDY))
    ends = ends_of(engine)
    assert isinstance(ends[bad].error, CacheFullError)
    assert ends[good].token_ids == plain_loop((*range(30), 2), GREEDY).token_ids
    assert engine.failure is None
    nothing_is_left(engine)


def test_an_event_loop_that_is_closed_costs_only_its_own_request():
    engine = make_engine(capacity=300)
    with EngineService(engine) as service:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(service.submit(Request((1, 2), ENDLESS)))
        loop.close()

        async def main() -> list[int]:
            stream = await service.submit(Request((3, 4), GREEDY))
            return [e.token_id async for e in stream if isinstance(e, GeneratedToken)]

        tokens = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
        assert tokens == list(plain_loop((3, 4), GREEDY).token_ids)
        assert service.failure is None


def test_every_thread_of_ours_is_known_to_a_test_of_its_failure():
    assert dict(threads_of_ours()) == {
        "kvcellar-engine": "engine/service.py",  # here
        "kvcellar-store": "store/writer.py",  # tests/store/test_faults.py
        "kvcellar-restore": "agents/kv/overlap_restore.py",  # tests/agents/test_failures.py
        "kvcellar-release": "agents/leasing.py",  # ends with what it gives back
        "kvcellar-render": "models/text/rendering.py",  # tests/server/test_templates.py
        "kvcellar-shared-push": "store/shared/pusher.py",  # tests/store/shared/test_tier.py
        "kvcellar-pictures": "engine/picture_rows.py",  # tests/pictures/test_engine.py
        "kvcellar-models": "hosting/models.py",  # tests/agents/test_failures.py
        "kvcellar-cellar": "cellar/waiting.py",  # tests/cellar/test_cellar.py
        "kvcellar-close": "cellar/waiting.py",  # ends with what it closes
        "progress": "cli/common/terminal.py",  # tests/cli/test_terminal.py
    }


def threads_of_ours() -> Iterator[tuple[str, str]]:
    import ast
    from pathlib import Path

    import kvcellar

    root = Path(kvcellar.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "threading.Thread":
                names = [k.value for k in node.keywords if k.arg == "name"]
                assert names, f"{path}: a thread needs a name"
                yield ast.literal_eval(names[0]), str(path.relative_to(root))
