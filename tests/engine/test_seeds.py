"""A seed gives one text in float32: in a batch or alone, warm or cold, in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvcellar as kv
from kvcellar.engine import Engine, EngineConfig, FinishEvent, Request, SamplingParams
from kvcellar.engine.sampler.sampling import SamplingState, sample
from kvcellar.engine.speculate import NgramDrafter
from kvcellar.models import load_model

torch = pytest.importorskip("torch")

PROMPT = tuple(range(20, 70))
OTHERS = [tuple(range(i, i + 30)) for i in (100, 200, 300)]
SEEDS = range(6)


def params_of(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_p=0.95, seed=seed, max_tokens=24, ignore_eos=True, top_k=200
    )


@pytest.fixture(scope="module")
def model() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model("demo", dtype="float32")
    torch.set_num_threads(before)


@pytest.fixture
def engine_of(model: Any) -> Iterator[Any]:
    """Makes engines over a fresh cache each."""

    with contextlib.ExitStack() as stack:

        def make(capacity: int = 1024, drafter: Any = None, **config: Any) -> Engine:
            make_session = kv.make_seq_session if drafter is None else kv.make_tree_session
            config_of_cache = kv.make_config(model.params, capacity)
            session = stack.enter_context(make_session("torch", config_of_cache))
            return Engine(
                model.bind(session),
                session.cache,
                config=EngineConfig(**config),
                drafter=drafter,
            )

        yield make


def ends_of(engine: Engine, *requests: Request) -> list[tuple[int, ...]]:
    ids = [engine.submit(request) for request in requests]
    ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    assert all(ends[i].error is None for i in ids)
    return [ends[i].token_ids for i in ids]


@pytest.fixture(scope="module")
def alone(model: Any) -> dict[int, tuple[int, ...]]:
    """What each seed says by itself, cold."""
    found = {}
    for seed in SEEDS:
        with kv.make_seq_session("torch", kv.make_config(model.params, 1024)) as session:
            engine = Engine(model.bind(session), session.cache)
            (found[seed],) = ends_of(engine, Request(PROMPT, params_of(seed)))
    assert len(set(found.values())) == len(SEEDS), "seeds differ"
    return found


@pytest.mark.slow
def test_in_a_batch_of_others_with_seeds_of_their_own(engine_of, alone):
    engine = engine_of()
    others = [Request(prompt, params_of(50 + i)) for i, prompt in enumerate(OTHERS)]
    for seed in SEEDS:
        assert ends_of(engine, *others, Request(PROMPT, params_of(seed)))[-1] == alone[seed]


def test_all_seeds_of_one_prompt_in_one_batch(engine_of, alone):
    found = ends_of(engine_of(), *(Request(PROMPT, params_of(seed)) for seed in SEEDS))
    assert dict(zip(SEEDS, found, strict=True)) == alone


def test_on_a_prefix_that_the_cache_holds(engine_of, alone):
    engine = engine_of()
    ends_of(engine, Request(PROMPT[:33], SamplingParams(max_tokens=1)))
    for seed in SEEDS:
        assert ends_of(engine, Request(PROMPT, params_of(seed))) == [alone[seed]]


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_with_a_prompt_in_chunks(engine_of, alone, chunk):
    engine = engine_of(max_num_batched_tokens=chunk)
    assert ends_of(engine, Request(PROMPT, params_of(0))) == [alone[0]]


def test_after_giving_way_to_others(engine_of, alone):
    engine = engine_of(capacity=160, index="naive")
    requests = [Request(PROMPT, params_of(seed)) for seed in (1, 2, 3)]
    assert ends_of(engine, *requests) == [alone[1], alone[2], alone[3]]
    assert engine.stats().preemptions > 0


def test_with_guesses_that_are_verified(engine_of, alone):
    engine = engine_of(drafter=NgramDrafter(), verify_all_drafts=True)
    for seed in SEEDS:
        ends_of(engine, Request((*PROMPT, *alone[seed]), SamplingParams(max_tokens=1)))
        assert ends_of(engine, Request(PROMPT, params_of(seed))) == [alone[seed]]
    assert engine.stats().accepted_tokens > 0


def test_guesses_do_not_change_the_law_by_which_tokens_come():
    """A guess is right where sampling chooses it: as often as the token is sampled without it."""
    from kvcellar.engine.requests.draft import Draft
    from kvcellar.engine.speculate import verify

    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]], dtype=np.float32))
    n = 4000
    counts = np.zeros((2, 4))
    for seed in range(n):
        state = SamplingState(SamplingParams(temperature=1.0, seed=seed), 4)
        verdict = verify(logits, Draft((1,), "test"), state)
        assert verdict.choices[0] == sample(logits[:1], [state])[0]
        for row, choice in enumerate(verdict.choices):
            counts[row, choice.token_id] += 1
    assert np.abs(counts[0] / n - [0.5, 0.3, 0.15, 0.05]).max() < 0.03
    assert np.abs(counts[1] / counts[1].sum() - [0.1, 0.2, 0.3, 0.4]).max() < 0.05
