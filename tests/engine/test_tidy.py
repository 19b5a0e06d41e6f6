"""Cells that lie in crumbs are copied together at rest, and nobody sees a difference."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import kvcellar as kv
from kvcellar.engine import (
    Engine,
    EngineConfig,
    EngineService,
    Request,
    SamplingParams,
)
from kvcellar.models import load_model
from kvcellar.types import runs_of

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo")


def prompt(i: int, n: int = 12) -> tuple[int, ...]:
    return tuple((37 * i + 11 * j) % 4000 + 20 for j in range(n))


def engine_of(demo: Any, session: Any, **config: Any) -> Engine:
    return Engine(demo.bind(session), session.cache, config=EngineConfig(**config))


def crumble(engine: Engine) -> tuple[int, ...]:
    """Let the cache hold one history, in crumbs: it came when every second short one had gone."""
    said = []
    for i in range(14):
        end = engine.generate(Request(prompt(i), GREEDY))
        said.append(np.array((*prompt(i), *end.token_ids)))
    for tokens in said[::2]:
        engine.drop(tokens)
    long = prompt(99, 90)
    end = engine.generate(Request(long, GREEDY))
    for tokens in said[1::2]:
        engine.drop(tokens)
    return (*long, *end.token_ids[:-1])


def n_runs(engine: Engine, tokens: tuple[int, ...]) -> int:
    return len(runs_of(engine.index.peek_prefix(np.array(tokens))[0]))


def rows_of(engine: Engine, tokens: tuple[int, ...]) -> list[np.ndarray]:
    cells = engine.index.peek_prefix(np.array(tokens))
    (k, v), *_ = engine.cache.read_rows(cells)  # type: ignore[attr-defined]
    return [*k, *v]


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("index", ["radix", "hashed"])
def test_a_history_in_crumbs_is_gathered_byte_for_byte(demo, index, kv_dtype):
    config = kv.make_config(demo.params, 240, kv_dtype=kv_dtype)
    with kv.make_seq_session("torch", config) as session:
        engine = engine_of(demo, session, index=index, block_size=1)
        long = crumble(engine)
        before, rows = n_runs(engine, long), rows_of(engine, long)
        held = engine.hold(np.array(long))
        while engine.tidy():
            pass
        assert n_runs(engine, long) < before
        assert engine.stats().gathered_cells > 0
        for a, b in zip(rows, rows_of(engine, long), strict=True):
            np.testing.assert_array_equal(a, b)
        found = engine.index.peek_prefix(np.array(long))
        assert held.tables[0].tolist() == found[0].tolist(), "who holds cells knows where they are"
        held.release()
        usage = engine.generate(Request((*long, 5), GREEDY)).usage
        assert usage.cached_tokens == len(long)
        engine.index.check()


def test_what_comes_in_meanwhile_stands_on_what_was_moved(demo):
    with kv.make_seq_session("torch", kv.make_config(demo.params, 240)) as session:
        engine = engine_of(demo, session)
        long = crumble(engine)
        rows = rows_of(engine, long)
        engine.drop(np.array(long), keep=60)
        restore = engine.restore(np.array(long), [None])
        assert restore is not None and restore.first == 60
        before = n_runs(engine, long)
        engine.tidy()
        assert n_runs(engine, long) < before
        k, v = (part[:, :, 60:] for part in rows)
        restore.write([restore.tables[0][60:]], [((k,), (v,))])
        held = restore.publish(len(long))
        assert held.n_tokens == len(long)
        for a, b in zip(rows, rows_of(engine, long), strict=True):
            np.testing.assert_array_equal(a, b)
        held.release()
        engine.cache.check([np.concatenate(engine.index.held_cells()).tolist()])


def test_a_service_at_rest_gathers_by_itself(demo):
    with kv.make_seq_session("torch", kv.make_config(demo.params, 240)) as session:
        engine = engine_of(demo, session)
        done = threading.Event()
        tidy = engine.tidy

        def told() -> bool:
            has_more = tidy()
            if not has_more:
                done.set()
            return has_more

        long = crumble(engine)
        before = n_runs(engine, long)
        engine.tidy = told  # type: ignore[method-assign]
        with EngineService(engine) as service:
            over = threading.Event()
            service.submit_quietly(Request(prompt(3), GREEDY), lambda _: over.set()).result()
            assert over.wait(60) and done.wait(60)
        assert n_runs(engine, long) < before
