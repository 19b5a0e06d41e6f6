"""The engine and the plain loop on the bundled model, run by MLX: the tokens of torch, in fp32."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import numpy as np
import pytest

import kvcellar as kv
from kvcellar.engine import (
    Engine,
    EngineConfig,
    EngineService,
    FinishEvent,
    Request,
    SamplingParams,
    branch,
    generate,
    last,
)
from kvcellar.models import load_model
from tests.engine.test_on_torch import prompts

if importlib.util.find_spec("mlx_lm") is None:
    pytest.skip("needs mlx-lm: pip install 'kvcellar[mlx]'", allow_module_level=True)

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
CAPACITY = 640


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo", backend="mlx")


@pytest.fixture(scope="module")
def wanted() -> list[tuple[int, ...]]:
    """The plain loop on torch, one prompt at a time."""
    model, results = load_model("demo"), []
    for prompt in prompts(model):
        with kv.make_decode_session("torch", kv.make_config(model.params, CAPACITY)) as session:
            events = generate(model.bind(session), session.cache, model.tokenizer, prompt, PARAMS)
            results.append(last(events).token_ids)
    return results


def test_the_plain_loop_says_what_it_says_on_torch(demo: Any, wanted: Any) -> None:
    for prompt, want in zip(prompts(demo), wanted, strict=True):
        with kv.make_decode_session("mlx", kv.make_config(demo.params, CAPACITY)) as session:
            events = generate(demo.bind(session), session.cache, demo.tokenizer, prompt, PARAMS)
            assert last(events).token_ids == want


MAKERS = {
    "cells": lambda params, n: kv.make_seq_session("mlx", kv.make_config(params, n)),
    "blocks": lambda params, n: kv.make_paged_session("mlx", kv.make_config(params, n)),
    "trees": lambda params, n: kv.make_tree_session("mlx", kv.make_config(params, n)),
}


@pytest.mark.parametrize("cache", MAKERS)
def test_requests_in_flat_batches_say_the_same(demo: Any, wanted: Any, cache: str) -> None:
    index = "hashed" if cache == "blocks" else "radix"
    with MAKERS[cache](demo.params, CAPACITY) as session:
        config = EngineConfig(
            index=index, block_size=16 if cache == "blocks" else 1, max_num_batched_tokens=24
        )
        engine = Engine(demo.bind(session), session.cache, demo.tokenizer, config=config)
        for round_ in range(2):
            ids = [engine.submit(Request(tuple(p), PARAMS)) for p in prompts(demo)]
            ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
            assert [ends[i].token_ids for i in ids] == wanted
            assert not round_ or all(ends[i].usage.cached_tokens > 0 for i in ids)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_rows_that_were_taken_out_come_back_bit_for_bit(demo: Any, kv_dtype: str) -> None:
    config = kv.make_config(demo.params, 64, kv_dtype)
    with kv.make_seq_session("mlx", config) as session:
        cache, runner = session.cache, demo.bind(session)
        runner.forward(range(5, 45), cache.begin_step([(0, 40)]))
        tables = cache.seq_table(0)
        rows = cache.read_rows(tables)
        cache.seq_rm(0)
        runner.forward(range(90, 100), cache.begin_step([(1, 10)]))
        new = cache.seq_claim(2, tables)
        cache.write_rows(new, rows)
        for group, other in zip(rows, cache.read_rows(new), strict=True):
            for side, back in zip(group, other, strict=True):
                for a, b in zip(side, back, strict=True):
                    np.testing.assert_array_equal(a, b)


def test_requests_that_had_to_give_way_say_the_same(demo: Any) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    long = prompts(demo)[:3]

    def run(capacity: int, at_once: bool) -> tuple[list[Any], int]:
        with MAKERS["cells"](demo.params, capacity) as session:
            config = EngineConfig(index="naive")
            engine = Engine(demo.bind(session), session.cache, config=config)
            if not at_once:
                return [engine.generate(Request(tuple(p), params)).token_ids for p in long], 0
            ids = [engine.submit(Request(tuple(p), params)) for p in long]
            ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
            return [ends[i].token_ids for i in ids], engine.stats().preemptions

    alone, _ = run(CAPACITY, False)
    together, n_preemptions = run(140, True)
    assert n_preemptions > 0
    assert together == alone


def test_branches_of_a_trunk_share_its_cells(demo: Any) -> None:
    trunk = prompts(demo)[0]
    with MAKERS["cells"](demo.params, CAPACITY) as session:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        report = branch(demo.bind(session), session.cache, demo.tokenizer, trunk, params, 3)
        assert len({tuple(one.token_ids) for one in report.branches}) == 1
        assert report.usage.groups[0].shared >= len(trunk) - 1


def test_the_engines_thread_and_others_take_turns(demo: Any, wanted: Any) -> None:
    """Arrays of MLX that are not evaluated belong to a thread; none may stay so between steps."""
    with MAKERS["cells"](demo.params, CAPACITY) as session:
        engine = Engine(demo.bind(session), session.cache, demo.tokenizer)
        service = EngineService(engine)
        try:
            for prompt, want in zip(prompts(demo), wanted, strict=True):
                request = Request(tuple(prompt), PARAMS)
                end = service.run(lambda engine, r=request: engine.generate(r)).result(120)
                assert end.token_ids == want
        finally:
            service.close()
        said: list[Any] = []

        def other() -> None:
            end = engine.generate(Request(tuple(prompts(demo)[0]), PARAMS))
            said.append(end.token_ids)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(120)
        assert said == [wanted[0]]
        assert engine.generate(Request(tuple(prompts(demo)[1]), PARAMS)).token_ids == wanted[1]


def test_a_forward_that_raised_leaves_the_cache_as_it_was(demo: Any, monkeypatch: Any) -> None:
    from kvcellar.backends.mlx.cache.caches import MlxSeqCache

    with MAKERS["cells"](demo.params, CAPACITY) as session:
        cache, runner = session.cache, demo.bind(session)
        first = runner.forward(range(5, 25), cache.begin_step([(0, 20)]))
        before = cache.usage().groups
        real, calls = MlxSeqCache.update_and_attend, []

        def failing(self: Any, *args: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("a layer fails")
            return real(self, *args)

        monkeypatch.setattr(MlxSeqCache, "update_and_attend", failing)
        with pytest.raises(RuntimeError, match="a layer fails"):
            runner.forward([7, 8], cache.begin_step([(0, 1), (1, 1)]))
        monkeypatch.undo()
        assert not cache.is_step_open
        assert cache.usage().groups == before and not cache.has_seq(1)
        cache.seq_rm(0, 19)
        again = runner.forward([24], cache.begin_step([(0, 1)]))
        np.testing.assert_allclose(again, first, atol=1e-4)
