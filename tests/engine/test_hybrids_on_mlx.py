"""The engine on hybrid models run by MLX: what one prompt at a time says, however it is served."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path
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
from kvcellar.engine.speculate import DraftModel, NgramDrafter
from kvcellar.models import load_model
from tests.models.hybrid_checkpoints import write_hybrid
from tests.models.players import text

if importlib.util.find_spec("mlx_lm") is None:
    pytest.skip("needs mlx-lm: pip install 'kvcellar[mlx]'", allow_module_level=True)

FAMILIES = [
    "qwen3_5",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("falcon_h1", "kimi_linear")),
]
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
TRUNK = 30
PROMPTS = [(*text(TRUNK), *text(n, n)) for n in (5, 11, 1, 20)]
CAPACITY = 320


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: Any, tmp_path_factory: Any) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_hybrid(request.param, folder)
    return load_model(folder, backend="mlx")


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[tuple[int, ...]]:
    """The plain loop, one prompt at a time."""
    results = []
    for prompt in PROMPTS:
        with kv.make_decode_session("mlx", kv.make_config(model.params, CAPACITY)) as session:
            events = generate(model.bind(session), session.cache, model.tokenizer, prompt, PARAMS)
            results.append(last(events).token_ids)
    return results


MAKERS = {
    "seq": kv.make_seq_session,
    "paged": kv.make_paged_session,
    "tree": kv.make_tree_session,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_requests_in_flat_batches_say_the_same_and_reuse_states(
    model: Any, wanted: Any, kind: str
) -> None:
    config = EngineConfig(
        index="hashed" if kind == "paged" else "radix",
        block_size=16 if kind == "paged" else 1,
        max_num_batched_tokens=24,
    )
    least = 16 if kind == "paged" else TRUNK
    with MAKERS[kind]("mlx", kv.make_config(model.params, CAPACITY)) as session:
        engine = Engine(model.bind(session), session.cache, model.tokenizer, config=config)
        for round_ in range(2):
            ids = [engine.submit(Request(p, PARAMS, snapshots_at=(TRUNK,))) for p in PROMPTS]
            ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
            assert [ends[i].token_ids for i in ids] == wanted
            assert not round_ or min(ends[i].usage.cached_tokens for i in ids) >= least


def test_requests_that_had_to_give_way_say_the_same(model: Any, wanted: Any) -> None:
    with kv.make_seq_session("mlx", kv.make_config(model.params, 88)) as session:
        engine = Engine(model.bind(session), session.cache, config=EngineConfig(index="naive"))
        ids = [engine.submit(Request(p, PARAMS)) for p in PROMPTS]
        ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
        assert engine.stats().preemptions > 0
        assert [ends[i].token_ids for i in ids] == wanted


@pytest.mark.parametrize("kind", ["ngram", "draft model"])
def test_guesses_that_are_verified_leave_states_and_tokens_as_they_are(
    model: Any, wanted: Any, kind: str
) -> None:
    config = EngineConfig(verify_all_drafts=True)
    with ExitStack() as stack:
        ours, other = (
            stack.enter_context(kv.make_tree_session("mlx", kv.make_config(model.params, n)))
            for n in (CAPACITY, 2 * CAPACITY)
        )
        drafter: Any = NgramDrafter((2, 1))
        if kind == "draft model":
            drafter = DraftModel(model.bind(other), other.cache, model.vocab_size)
        engine = Engine(model.bind(ours), ours.cache, config=config, drafter=drafter)
        ids = [engine.submit(Request(p, PARAMS)) for p in PROMPTS]
        ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
        assert [ends[i].token_ids for i in ids] == wanted
        stats = engine.stats()
        assert stats.drafter_failures == 0 and stats.drafted_tokens > 0
        assert kind == "ngram" or stats.accepted_tokens > 0


def test_rows_of_its_attention_may_be_quantised(model: Any, wanted: Any) -> None:
    config = kv.make_config(model.params, CAPACITY, "int8")
    with kv.make_seq_session("mlx", config) as session:
        engine = Engine(model.bind(session), session.cache)
        ends = [engine.generate(Request(p, PARAMS)) for p in PROMPTS]
        assert [end.token_ids[0] for end in ends] == [tokens[0] for tokens in wanted]
