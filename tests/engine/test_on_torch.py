"""The engine on a real model: the same trace on token cells and on blocks, in either layout."""

from __future__ import annotations

from typing import Any

import pytest

import kvcellar as kv
from kvcellar.engine import (
    Engine,
    EngineConfig,
    FinishEvent,
    Request,
    SamplingParams,
    generate,
    last,
)
from kvcellar.errors import ConfigError
from kvcellar.models import load_model

CAPACITY = 640
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo")


def prompts(model: Any) -> list[list[int]]:
    trunk = model.tokenizer("import os\nimport sys\n\n\ndef main(argv):\n    for arg in argv:\n")
    tails = [
        "        print(arg)\n",
        "        os.remove(arg)\n",
        "        with open(arg) as f:\n",
        "",
    ]
    encoded = [model.tokenizer(tail)["input_ids"] for tail in tails]
    return [list(trunk["input_ids"]) + list(tail) for tail in encoded]


@pytest.fixture(scope="module")
def wanted(demo: Any) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The plain loop, one prompt at a time, in a contiguous cache."""
    results = {}
    for prompt in prompts(demo):
        config = kv.make_config(demo.params, CAPACITY)
        with kv.make_decode_session("torch", config) as session:
            runner = demo.bind(session)
            events = generate(runner, session.cache, demo.tokenizer, prompt, PARAMS)
            results[tuple(prompt)] = last(events).token_ids
    return results


CACHES = {
    "cells": lambda params, n=CAPACITY: kv.make_seq_session("torch", kv.make_config(params, n)),
    "blocks, layer first": lambda params, n=CAPACITY: kv.make_paged_session(
        "torch", kv.make_config(params, n, block_size=16, layout="layer_first")
    ),
    "blocks, block first": lambda params, n=CAPACITY: kv.make_paged_session(
        "torch", kv.make_config(params, n, block_size=16, layout="block_first")
    ),
}


@pytest.mark.parametrize("index", ["radix", "hashed", "naive"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.slow
def test_the_same_trace_gives_the_same_tokens_on_cells_and_on_blocks(demo, wanted, cache, index):
    block_size = 1 if cache == "cells" and index == "radix" else 16
    with CACHES[cache](demo.params) as session:
        engine = Engine(
            demo.bind(session),
            session.cache,
            demo.tokenizer,
            config=EngineConfig(
                index=index,
                block_size=None if index == "naive" else block_size,
                max_num_batched_tokens=24,
            ),
        )
        for round_ in range(2):
            ids = {engine.submit(Request(tuple(p), PARAMS)): tuple(p) for p in prompts(demo)}
            ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
            for request_id, prompt in ids.items():
                assert ends[request_id].token_ids == wanted[prompt], ends[request_id].error
                if round_ and index != "naive":
                    reused = ends[request_id].usage.cached_tokens
                    assert reused >= len(prompt) - 1 - (block_size - 1)
        stats = engine.stats()
        assert stats.protected_tokens == 0 and not session.cache.seq_ids()
        if cache == "cells":
            assert stats.free_cells + stats.evictable_cells == CAPACITY


def test_an_index_of_other_blocks_than_the_cache_has_is_refused(demo):
    with (
        CACHES["blocks, layer first"](demo.params) as session,
        pytest.raises(ConfigError, match="block_size 24 cannot be used over blocks of 16 cells"),
    ):
        Engine(demo.bind(session), session.cache, config=EngineConfig(block_size=24))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.slow
def test_requests_that_had_to_give_way_say_the_same(demo, cache):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    long = [tuple(prompt) for prompt in prompts(demo)[:3]]
    config = EngineConfig(index="naive")
    with CACHES[cache](demo.params) as session:
        engine = Engine(demo.bind(session), session.cache, config=config)
        alone = [engine.generate(Request(prompt, params)).token_ids for prompt in long]
    with CACHES[cache](demo.params, 192) as session:
        engine = Engine(demo.bind(session), session.cache, config=config)
        ids = [engine.submit(Request(prompt, params)) for prompt in long]
        ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
        assert engine.stats().preemptions > 0
        assert [ends[i].token_ids for i in ids] == alone
