"""Frozen prefixes beyond the conformance suite: whole models, bytes, refusals."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import kvcellar as kv
from kvcellar.budget import MemoryBudget
from kvcellar.engine import Engine, SamplingParams, generate, last
from kvcellar.errors import CacheFullError, ConfigError, RewindError, UnknownCacheError
from kvcellar.models import load_model
from tests.engine.fakes import FULL_PARAMS, HashRunner, make_cache

MAKERS = {
    "decode": kv.make_decode_session,
    "seq": kv.make_seq_session,
    "paged": kv.make_paged_session,
    "tree": kv.make_tree_session,
}


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo")


@pytest.fixture(scope="module")
def trunk(demo) -> list[int]:
    return demo.tokenizer.encode("import os\n\n\ndef walk(top):\n" * 6)


def said(demo: Any, session: Any, prompt: list[int], max_tokens: int = 8) -> Any:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return last(generate(demo.bind(session), session.cache, demo.tokenizer, prompt, params))


def frozen_trunk(demo: Any, trunk: list[int], kv_dtype: str = "float32", **more: Any) -> Any:
    with kv.make_seq_session("torch", kv.make_config(demo.params, 512, kv_dtype, **more)) as one:
        said(demo, one, trunk, 0)
        return kv.freeze_prefix(one.cache)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_a_model_says_the_same_behind_a_frozen_prefix(demo, trunk, kind, kv_dtype):
    prefix = frozen_trunk(demo, trunk, kv_dtype)
    for text in ("    for", "    return x\n" * 30):
        prompt = [*trunk, *demo.tokenizer.encode(text)]
        with kv.make_decode_session("torch", kv.make_config(demo.params, 1024, kv_dtype)) as one:
            said(demo, one, trunk, 0)
            want = said(demo, one, prompt)
        config = kv.make_config(demo.params, 512, kv_dtype, prefix=prefix)
        with MAKERS[kind]("torch", config) as session:
            got = said(demo, session, prompt)
            assert got.usage.cached_tokens == len(trunk)
            assert got.token_ids == want.token_ids


def test_two_caches_hold_the_bytes_of_one(demo, trunk):
    prefix = frozen_trunk(demo, trunk)
    cell_bytes = sum(group.cell_bytes(prefix_config(demo).kv) for group in demo.params.groups)
    assert prefix.size_bytes == len(trunk) * cell_bytes
    config = kv.make_config(demo.params, 64, min_chunk=16, prefix=prefix)
    for _ in range(2):
        with kv.make_decode_session("torch", config) as session:
            said(demo, session, [*trunk, 5])
            assert session.cache.usage().size_bytes <= 64 * cell_bytes
            pools = session.cache.pools.of_layer
            assert all(
                pool.beside is layer for pool, layer in zip(pools, prefix.layers, strict=True)
            )


def prefix_config(demo: Any) -> kv.CacheConfig:
    return kv.make_config(demo.params, 1)


def test_the_copy_is_counted_in_the_budget_until_its_last_holder_goes(demo, trunk):
    budget = MemoryBudget(1 << 30)
    prefix = frozen_trunk(demo, trunk, budget=budget)
    gc.collect()
    before = budget.held_bytes
    session = kv.make_decode_session("torch", kv.make_config(demo.params, 64, prefix=prefix))
    size_bytes = prefix.size_bytes
    del prefix
    gc.collect()
    assert budget.held_bytes == before
    del session
    gc.collect()
    assert budget.held_bytes == before - size_bytes


def test_a_copy_that_a_budget_has_no_room_for_is_refused(demo, trunk):
    budget = MemoryBudget(1 << 28)
    with kv.make_seq_session("torch", kv.make_config(demo.params, 512, budget=budget)) as one:
        said(demo, one, trunk, 0)
        assert budget.ask(budget.available_bytes)
        with pytest.raises(CacheFullError, match=f"a frozen prefix of {len(trunk)} tokens takes"):
            kv.freeze_prefix(one.cache)


def test_what_cannot_be_frozen_is_refused(demo, trunk):
    prefix = frozen_trunk(demo, trunk)
    with pytest.raises(UnknownCacheError, match="a SeqCells cannot be frozen"):
        kv.freeze_prefix(make_cache("seq", 64, FULL_PARAMS))
    config = kv.make_config(demo.params, 64, prefix=prefix)
    for make in MAKERS.values():
        with make("torch", config) as session:
            said(demo, session, [*trunk, 5])
            with pytest.raises(RewindError, match="freeze"):
                kv.freeze_prefix(session.cache)  # a part of it is not its own
    exact = kv.make_config(demo.params, 64, "int4:first4:last8")
    with kv.make_seq_session("torch", exact) as session:
        said(demo, session, trunk[:20], 0)
        with pytest.raises(ConfigError, match="keeps the ends of each history in float32"):
            kv.freeze_prefix(session.cache)


def test_a_prefix_of_another_backend_is_refused(demo, trunk):
    config = kv.make_config(demo.params, 64, prefix=frozen_trunk(demo, trunk))
    with pytest.raises(ConfigError, match="frozen in a cache of another backend"):
        kv.make_seq_session("reference", config)


def test_an_engine_takes_no_cache_with_a_frozen_prefix(demo, trunk):
    config = kv.make_config(demo.params, 64, prefix=frozen_trunk(demo, trunk))
    with kv.make_seq_session("torch", config) as session:
        runner = HashRunner(session.cache, 10)
        with pytest.raises(ConfigError, match="an engine shares prefixes inside of its cache"):
            Engine(runner, session.cache)
