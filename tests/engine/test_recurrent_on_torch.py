"""The engine on real recurrent layers: batches, forks, later turns and guesses lose no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvcellar as kv
from kvcellar.budget import MemoryBudget
from kvcellar.engine import Engine, EngineConfig, FinishEvent, Request, SamplingParams
from kvcellar.engine.speculate import Draft
from tests.models.players import TOLERANCE
from tests.models.recurrent_pairs import Pair, pair

FAMILIES = ["qwen3_5", "falcon_h1", "lfm2"]
SIX = SamplingParams(max_tokens=6, ignore_eos=True)
SESSIONS = {
    "seq": kv.make_seq_session,
    "tree": kv.make_tree_session,
    "paged": kv.make_paged_session,
}


def text(seed: int, n: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 250, n).tolist())


def run(engine: Engine, *requests: Request) -> list[FinishEvent]:
    ids = [engine.submit(request) for request in requests]
    ends = {event.request_id: event for event in engine.run() if isinstance(event, FinishEvent)}
    assert not any(end.error for end in ends.values())
    return [ends[i] for i in ids]


def assert_greedy(model: Pair, prompt: Sequence[int], said: Sequence[int]) -> None:
    """Each token is the likeliest, by the model's own code, but for what rounding decides."""
    rows = model.want(*prompt, *said)[len(prompt) - 1 : -1]
    chosen = rows[np.arange(len(said)), list(said)]
    assert (rows.max(axis=1) - chosen <= 2 * TOLERANCE).all()


def engine_of(model: Pair, session: Any, **more: Any) -> Engine:
    config = EngineConfig(max_num_batched_tokens=24, verify_all_drafts=True)
    return Engine(model.bind(session), session.cache, config=config, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_that_part_at_a_snapshot_go_on_from_it(family):
    model = pair(family)
    config = kv.make_config(model.facts.params, 600, n_slots=40)
    with kv.make_seq_session("torch", config) as session:
        engine = engine_of(model, session)
        trunk = text(1, 37)
        prompts = [trunk, (*trunk, *text(2, 5)), text(3, 9)]
        firsts = run(engine, *(Request(prompt, SIX, snapshots_at=(30,)) for prompt in prompts[:1]))
        firsts += run(engine, *(Request(prompt, SIX) for prompt in prompts[1:]))
        later = [(*trunk[:33], *text(4, 6)), (*prompts[0], *firsts[0].token_ids, 9, 9)]
        lasts = run(engine, *(Request(prompt, SIX) for prompt in later))
    assert firsts[1].usage.cached_tokens == 37
    assert [end.usage.cached_tokens for end in lasts] == [30, 42]
    for prompt, end in zip([*prompts, *later], [*firsts, *lasts], strict=True):
        assert_greedy(model, prompt, end.token_ids)


def test_no_more_run_than_a_memory_budget_has_slots_for():
    model, trunk = pair("qwen3_5"), text(6, 200)
    config = kv.make_config(model.facts.params, 512, n_slots=99, budget=MemoryBudget(190_000))
    prompts = [(*trunk[: 25 * i], *text(i, 20)) for i in range(5)]
    with kv.make_seq_session("torch", config) as session:
        engine = engine_of(model, session)
        rounds = [run(engine, *(Request(prompt, SIX) for prompt in prompts)) for _ in range(3)]
        stats = engine.stats()
    assert stats.preemptions <= 2, "who is let in can go on"
    n_wanted = 3 * sum(len(prompt) + 5 for prompt in prompts)
    n_skipped = sum(end.usage.cached_tokens for ends in rounds for end in ends)
    assert stats.computed_tokens <= n_wanted - n_skipped + 40, "what was reused was skipped"


def test_snapshots_never_take_the_memory_that_a_prompt_was_promised():
    model, trunk = pair("qwen3_5"), text(6, 30)
    budget = MemoryBudget(130_000)
    config = kv.make_config(model.facts.params, 300, n_slots=99, min_chunk=8, budget=budget)
    prompts = [(*trunk[: 5 * i], *text(i, 20)) for i in range(6)]
    with kv.make_seq_session("torch", config) as session:
        engine = engine_of(model, session)
        ends = [end for _ in range(2) for end in run(engine, *(Request(p, SIX) for p in prompts))]
    assert [len(end.token_ids) for end in ends] == [6] * 12


class HalfRight:
    """A drafter that knows what comes, and is wrong in its third token and in a branch."""

    is_free = True

    def __init__(self, known: Sequence[int], *, has_trees: bool) -> None:
        self.known, self.has_trees = list(known), has_trees

    def propose(self, asks: Any) -> list[Draft]:
        return [self.guess(self.known[len(ask.tokens) :][: ask.limit]) for ask in asks]

    def guess(self, right: list[int]) -> Draft:
        if len(right) < 3:
            return Draft((), "half")
        wrong = (right[2] + 1) % 250
        if self.has_trees:
            return Draft((wrong, right[0], right[1], wrong), "half", (-1, -1, 1, 2))
        return Draft((right[0], right[1], wrong), "half")

    def ended(self, request_id: int) -> None:
        pass


@pytest.mark.parametrize("kind", SESSIONS)
@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.card), *FAMILIES[1:]])
def test_guesses_that_are_taken_back_leave_no_trace_in_the_states(family, kind):
    model, prompt = pair(family), text(5, 12)
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    config = kv.make_config(model.facts.params, 200, n_slots=40)
    with SESSIONS[kind]("torch", config) as session:
        (plain,) = run(engine_of(model, session), Request(prompt, params))
        session.cache.clear()
        drafter = HalfRight([*prompt, *plain.token_ids], has_trees=kind != "seq")
        (guessed,) = run(engine_of(model, session, drafter=drafter), Request(prompt, params))
    assert_greedy(model, prompt, guessed.token_ids)
    assert 0 < guessed.usage.accepted_tokens < guessed.usage.drafted_tokens
