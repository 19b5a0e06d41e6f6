"""The engine against the plain loop: the same tokens, however requests are mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.engine.config import EngineConfig
from kvcellar.engine.engine import Engine
from kvcellar.engine.loop.generating import Generation, generate, last
from kvcellar.engine.requests.request import (
    Event,
    FinishEvent,
    GeneratedToken,
    PromptEvent,
    Request,
)
from kvcellar.engine.sampler.sampling import Choice, SamplingParams, score
from kvcellar.engine.schedule import scheduler
from kvcellar.engine.speculate import Draft
from kvcellar.errors import DeadlineError, PromptError
from kvcellar.types import ModelCacheParams
from tests.engine.fakes import (
    CHUNK_PARAMS,
    FULL_PARAMS,
    PARAMS,
    ByteTokenizer,
    GuessTrees,
    HashRunner,
    PagedCells,
    TellingRunner,
    logits_of,
    make_cache,
)

VOCAB = ByteTokenizer.vocab_size
EOS = (ByteTokenizer.END,)


@dataclass
class Clock:
    """Time that passes when the test says so, and a little with every look."""

    now: float = 0.0
    tick: float = 0.001

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def make_engine(
    capacity: int = 96,
    params: ModelCacheParams = PARAMS,
    drafter: Any = None,
    cache: Any = None,
    **config: Any,
) -> Engine:
    cache = cache or make_cache("seq", capacity, params)
    return Engine(
        TellingRunner(cache, VOCAB),
        cache,
        ByteTokenizer(),
        eos_token_ids=EOS,
        config=EngineConfig(**{"max_num_batched_tokens": 16, "max_num_seqs": 4, **config}),
        drafter=drafter,
        clock=Clock(),
    )


def plain_loop(
    prompt: Sequence[int], params: SamplingParams, cache_params: ModelCacheParams = PARAMS
) -> Generation:
    """The oracle: one request alone in a fresh cache."""
    cache = make_cache("seq", 512, cache_params)
    runner = HashRunner(cache, VOCAB)
    return last(generate(runner, cache, ByteTokenizer(), prompt, params, eos_token_ids=EOS))


def nothing_is_left(engine: Engine) -> None:
    """Every cell is free or evictable, no lock is left, and the pool's counts are right."""
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.protected_tokens) == (0, 0, 0)
    assert stats.free_cells + stats.evictable_cells == engine.cache.capacity
    assert not engine.cache.seq_ids()
    sizes = engine.index.size_info()
    assert (stats.live_slots, stats.snapshots) == (0, engine.index.n_snapshots)
    if sizes.evictable:
        evicted = engine.index.evict(sizes.evictable)
        engine.cache.release_cells(evicted.cells)
    engine.cache.check()
    assert engine.cache.n_free == engine.cache.capacity
    usage = engine.cache.usage()
    assert usage.slots is None or usage.slots.live == 0


@dataclass
class Heard:
    """What was told of each request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    scores: dict[int, list[Choice]] = field(default_factory=dict)
    ends: dict[int, FinishEvent] = field(default_factory=dict)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.request_id not in self.ends, "nothing follows the end"
            if isinstance(event, PromptEvent):
                assert event.request_id not in self.scores, "it is told once"
                assert event.request_id not in self.tokens, "it comes before the first token"
                self.scores[event.request_id] = list(event.scores)
            elif isinstance(event, GeneratedToken):
                self.tokens.setdefault(event.request_id, []).append(event.token_id)
                text = self.texts.get(event.request_id, "") + event.text
                self.texts[event.request_id] = text
            else:
                self.ends[event.request_id] = event


# Any mixture of requests ------------------------------------------------------------------------

TRUNKS = st.sampled_from([(), (1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 50, 60)])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    tail = draw(st.lists(st.integers(0, 3), min_size=1, max_size=25))
    params = SamplingParams(
        max_tokens=draw(st.integers(0, 12)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.8])),
        seed=draw(st.integers(0, 3)),
        ignore_eos=draw(st.booleans()),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
    )
    return Request(
        (*draw(TRUNKS), *tail),
        params,
        priority=draw(st.integers(0, 1)),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 2])),
    )


def prompt_scores(request: Request, params: ModelCacheParams) -> list[Choice]:
    """The oracle: each token of a prompt under the logits after those before it."""
    prompt, n_top = request.prompt_ids, request.prompt_logprobs or 0
    return [
        score(logits_of(prompt[:i], VOCAB, params)[None], prompt[i : i + 1], n_top)[0]
        for i in range(1, len(prompt))
    ]


class GuessAgain:
    """A drafter that is sometimes right: it repeats what followed the last token before."""

    is_free = True

    def propose(self, asks: Any) -> list[Draft]:
        return [Draft(self.after(ask.tokens, min(ask.limit, 3)), "again") for ask in asks]

    def after(self, tokens: list[int], limit: int) -> tuple[int, ...]:
        at = next((i for i in range(len(tokens) - 2, -1, -1) if tokens[i] == tokens[-1]), None)
        return () if at is None else tuple(tokens[at + 1 : at + 1 + limit])

    def ended(self, request_id: int) -> None:
        pass


@pytest.mark.parametrize(
    "params", [FULL_PARAMS, PARAMS, CHUNK_PARAMS], ids=["full", "window", "chunk"]
)
@settings(max_examples=60)
@given(
    arrivals=st.lists(
        st.tuples(requests(), st.integers(0, 4), st.none() | st.integers(0, 12)), max_size=9
    ),
    config=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["mixed", "prefill-first"]),
            "is_delayed": st.booleans(),
            "index": st.sampled_from(["radix", "hashed", "naive"]),
            "block_size": st.sampled_from([1, 4]),
            "max_num_batched_tokens": st.integers(1, 24),
            "max_num_seqs": st.integers(1, 5),
            "verify_all_drafts": st.booleans(),
        }
    ),
    capacity=st.integers(48, 110),
    kind=st.sampled_from(["none", "chain", "tree", "tree in chains"]),
    tidy_every=st.sampled_from([1, 3, 10**9]),
    scored_at_once=st.sampled_from([1, 3, 10**6]),
)
@pytest.mark.slow
def test_any_mixture_gives_the_tokens_of_the_plain_loop(
    params, arrivals, config, capacity, kind, tidy_every, scored_at_once
):
    cache = make_cache("tree" if kind in ("tree", "chain") else "seq", capacity, params)
    drafter: Any = None
    if kind != "none":
        drafter = GuessAgain() if kind == "chain" else GuessTrees(params, VOCAB)
    if config.pop("is_delayed") and config["policy"] == "prefill-first":
        config["delay_factor"] = 2.0
    if config["index"] == "naive":
        del config["block_size"]
    engine = make_engine(cache=cache, drafter=drafter, **config)
    heard = Heard()
    asked: dict[int, Request] = {}
    cancelled: set[int] = set()
    cancels: list[tuple[int, int]] = []
    n_steps = 0

    def step() -> None:
        nonlocal n_steps
        n_steps += 1
        for request_id, at in cancels:
            if at == n_steps and engine.cancel(request_id):
                cancelled.add(request_id)
        with patch.object(scheduler, "SCORED_BYTES", 4 * VOCAB * scored_at_once):
            heard.take(engine.step())
        if n_steps % tidy_every == 0:
            engine.tidy()
        assert n_steps < 5000, "the engine stands still"

    for request, pause, cancel_after in arrivals:
        request_id = engine.submit(request)
        asked[request_id] = request
        if cancel_after is not None:
            cancels.append((request_id, n_steps + 1 + cancel_after))
        for _ in range(pause):
            step()
    while not engine.is_idle:
        step()

    assert set(heard.ends) == set(asked)
    for request_id, request in asked.items():
        want = plain_loop(request.prompt_ids, request.params, params)
        end = heard.ends[request_id]
        assert list(end.token_ids) == heard.tokens.get(request_id, [])
        assert end.text == heard.texts.get(request_id, "") or end.reason == "cancelled"
        if request_id in cancelled:
            assert end.reason == "cancelled"
            assert want.token_ids[: len(end.token_ids)] == end.token_ids
        elif end.finish is not None and end.finish.cause == "cache_full":
            assert want.token_ids[: len(end.token_ids)] == end.token_ids
            assert len(request.prompt_ids) + len(end.token_ids) >= capacity
        else:
            if request.prompt_logprobs is None:
                assert request_id not in heard.scores
            else:
                assert heard.scores[request_id] == prompt_scores(request, params)
                assert end.usage is not None and end.usage.cached_tokens == 0
            assert end.token_ids == want.token_ids
            assert (end.reason, end.text) == (want.finish_reason, want.text)
            assert end.usage is not None
            assert end.usage.prompt_tokens == len(request.prompt_ids)
            assert end.usage.cached_tokens < len(request.prompt_ids)
    nothing_is_left(engine)


@settings(max_examples=60)
@given(
    arrivals=st.lists(st.tuples(requests(), st.integers(0, 4)), max_size=9),
    index=st.sampled_from(["radix", "hashed", "naive"]),
    params=st.sampled_from([FULL_PARAMS, PARAMS, CHUNK_PARAMS]),
    block_size=st.sampled_from([1, 3, 4]),
    n_blocks=st.integers(16, 30),
    max_num_seqs=st.integers(1, 5),
    drafter=st.sampled_from([None, GuessAgain()]),
)
def test_any_mixture_gives_the_tokens_of_the_plain_loop_on_blocks(
    arrivals, index, params, block_size, n_blocks, max_num_seqs, drafter
):
    capacity = max(48, n_blocks * block_size)
    capacity -= capacity % block_size
    cache = PagedCells(replace(make_cache("seq", capacity, params).config, block_size=block_size))
    engine = make_engine(cache=cache, drafter=drafter, index=index, max_num_seqs=max_num_seqs)
    heard = Heard()
    asked: dict[int, Request] = {}
    for request, pause in arrivals:
        asked[engine.submit(request)] = request
        for _ in range(pause):
            heard.take(engine.step())
    for event in engine.run():
        heard.take([event])
    for request_id, request in asked.items():
        want = plain_loop(request.prompt_ids, request.params, params)
        end = heard.ends[request_id]
        assert end.error is None
        assert want.token_ids[: len(end.token_ids)] == end.token_ids
        assert end.token_ids == want.token_ids or end.finish.cause == "cache_full"
        if request_id in heard.scores:
            assert heard.scores[request_id] == prompt_scores(request, params)
    sizes = engine.index.size_info()
    assert sizes.protected == 0 and not cache.seq_ids()
    if sizes.evictable:
        cache.release_cells(engine.index.evict(sizes.evictable).cells)
    cache.check()
    assert cache.n_free == capacity


# Reuse ------------------------------------------------------------------------------------------


def ran_tokens(engine: Engine) -> int:
    return engine.runner.n_tokens


GREEDY8 = SamplingParams(max_tokens=8, ignore_eos=True)


def test_a_second_turn_prefills_only_what_is_new():
    engine = make_engine(capacity=200)
    first = engine.generate(Request(tuple(range(40)), GREEDY8))
    before = ran_tokens(engine)
    prompt = (*range(40), *first.token_ids, 7, 7, 7)
    second = engine.generate(Request(prompt, SamplingParams(max_tokens=1)))
    # the last sampled token was never computed, so it is new as well
    assert ran_tokens(engine) - before == 4
    assert second.usage.cached_tokens == 47
    assert second.token_ids == plain_loop(prompt, SamplingParams(max_tokens=1)).token_ids


def test_a_prompt_that_is_still_generating_is_matched_already():
    engine = make_engine(capacity=200)
    engine.submit(Request(tuple(range(30)), SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    before = ran_tokens(engine)
    engine.submit(Request((*range(30), 9), SamplingParams(max_tokens=1)))
    engine.step()
    assert ran_tokens(engine) - before == 2  # one decode beside it, one new token


def test_the_finished_chunks_of_a_cancelled_prefill_are_reused():
    engine = make_engine(capacity=200)
    request_id = engine.submit(Request(tuple(range(60)), GREEDY8))
    for _ in range(3):
        engine.step()
    n_done = ran_tokens(engine)
    assert n_done == 48 and engine.cancel(request_id)
    assert not engine.cache.seq_ids()  # its cells are the index's alone now
    end = engine.generate(Request(tuple(range(60)), SamplingParams(max_tokens=1)))
    assert end.usage.cached_tokens == n_done


@pytest.mark.parametrize("state", ["waiting", "in prefill", "decoding"])
def test_cancelling_frees_private_cells_before_the_next_step(state):
    engine = make_engine(capacity=100, max_num_seqs=1)
    ids = [engine.submit(Request(tuple(range(20 + i, 60 + i)), GREEDY8)) for i in range(2)]
    for _ in range({"waiting": 1, "in prefill": 1, "decoding": 4}[state]):
        engine.step()
    victim = ids[1] if state == "waiting" else ids[0]
    assert engine.cancel(victim) and not engine.cancel(victim)
    stats = engine.stats()
    assert stats.running == (1 if state == "waiting" else 0)
    assert stats.free_cells + stats.evictable_cells + stats.live_cells == 100
    ended = [e for e in engine.run() if isinstance(e, FinishEvent)]
    assert {e.request_id: e.reason for e in ended} == {
        victim: "cancelled",
        ids[0] if victim == ids[1] else ids[1]: "length",
    }
    nothing_is_left(engine)


def test_eviction_takes_the_oldest_and_never_what_somebody_stands_on():
    engine = make_engine(capacity=64)
    engine.generate(Request(tuple(range(20)), SamplingParams(max_tokens=1)))
    engine.generate(Request(tuple(range(100, 120)), SamplingParams(max_tokens=1)))
    engine.generate(Request(tuple(range(200, 230)), SamplingParams(max_tokens=1)))
    assert engine.stats().evicted_tokens > 0
    again = engine.generate(Request(tuple(range(200, 231)), SamplingParams(max_tokens=1)))
    assert again.usage.cached_tokens == 30
    nothing_is_left(engine)


# Shared prefixes ---------------------------------------------------------------------------------


def test_eight_that_start_at_once_on_one_trunk_compute_it_once():
    engine = make_engine(capacity=400, max_num_batched_tokens=24, max_num_seqs=8)
    trunk = range(60)
    ids = [
        engine.submit(Request((*trunk, 70 + i, i), SamplingParams(max_tokens=1))) for i in range(8)
    ]
    ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    assert ran_tokens(engine) == 60 + 8 * 2
    for i, request_id in enumerate(ids):
        want = plain_loop((*trunk, 70 + i, i), SamplingParams(max_tokens=1))
        assert ends[request_id].token_ids == want.token_ids
    nothing_is_left(engine)


def test_who_waits_for_a_prefix_goes_on_alone_when_the_other_is_cancelled():
    engine = make_engine(capacity=400, max_num_seqs=4)
    first = engine.submit(Request((*range(60), 1), SamplingParams(max_tokens=1)))
    second = engine.submit(Request((*range(60), 2), SamplingParams(max_tokens=1)))
    engine.step()
    assert engine.stats().waiting == 1 and engine.cancel(first)
    ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    want = plain_loop((*range(60), 2), SamplingParams(max_tokens=1))
    assert ends[second].token_ids == want.token_ids
    assert ends[second].usage.cached_tokens == 16
    nothing_is_left(engine)


def test_a_window_resumes_where_an_earlier_branch_left_the_trunk():
    engine = make_engine(capacity=300)
    one = SamplingParams(max_tokens=1)
    trunk = tuple(range(40))
    engine.generate(Request((*trunk, *range(100, 220)), one))
    second = engine.generate(Request((*trunk, 1, 2), one))
    assert second.usage.cached_tokens == 0  # the window had moved on; it passes there again
    third = engine.generate(Request((*trunk, 3, 4), one))
    assert third.usage.cached_tokens == 40
    assert third.token_ids == plain_loop((*trunk, 3, 4), one).token_ids
    nothing_is_left(engine)


# Fairness ---------------------------------------------------------------------------------------


def tokens_by_step(engine: Engine, n_steps: int) -> list[set[int]]:
    return [
        {e.request_id for e in engine.step() if isinstance(e, GeneratedToken)}
        for _ in range(n_steps)
    ]


def test_a_long_prompt_never_holds_up_a_decode():
    engine = make_engine(capacity=400)
    decode = engine.submit(Request((1, 2), SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.step()
    engine.submit(Request(tuple(range(200)), SamplingParams(max_tokens=1)))
    assert all(decode in told for told in tokens_by_step(engine, 12))
    assert engine.scheduler.running[1].n_left > 0  # the prompt was under way all the time


def test_a_short_prompt_does_not_wait_for_a_long_one():
    engine = make_engine(capacity=400)
    engine.submit(Request(tuple(range(200)), SamplingParams(max_tokens=1)))
    engine.step()
    short = engine.submit(Request((5, 6, 7), SamplingParams(max_tokens=1)))
    assert short in tokens_by_step(engine, 1)[0]


def test_a_stream_of_short_prompts_never_starves_a_long_one():
    engine = make_engine(capacity=400)
    long = engine.submit(Request(tuple(range(120)), SamplingParams(max_tokens=1)))
    for i in range(60):
        engine.submit(Request((5, i, 7, 8, 9, 10, 11), SamplingParams(max_tokens=1)))
        if any(e.request_id == long for e in engine.step()):
            break
    else:
        pytest.fail("the long prompt never came to its first token")
    assert i < 40


def test_more_decodes_than_budget_take_turns():
    engine = make_engine(capacity=400, max_num_batched_tokens=3, max_num_seqs=6)
    ids = [
        engine.submit(Request((i,), SamplingParams(max_tokens=40, ignore_eos=True)))
        for i in range(6)
    ]
    for _ in range(4):
        engine.step()
    told = tokens_by_step(engine, 8)
    assert all(sum(i in t for t in told) == 4 for i in ids)


def test_a_higher_priority_goes_first_and_is_not_the_one_to_give_way():
    engine = make_engine(capacity=400, max_num_seqs=1)
    low = engine.submit(Request((1, 2), SamplingParams(max_tokens=2, ignore_eos=True)))
    high = engine.submit(Request((3, 4), SamplingParams(max_tokens=2, ignore_eos=True), priority=1))
    ends = [e.request_id for e in engine.run() if isinstance(e, FinishEvent)]
    assert ends == [high, low]


def test_prefill_first_runs_no_decode_while_a_prompt_is_left():
    engine = make_engine(capacity=400, policy="prefill-first")
    decode = engine.submit(Request((1, 2), SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.step()
    engine.submit(Request(tuple(range(40)), SamplingParams(max_tokens=1)))
    told = tokens_by_step(engine, 4)
    assert [decode in t for t in told] == [False, False, False, True]


def test_with_a_delay_factor_prompts_gather_before_they_are_let_in():
    engine = make_engine(capacity=400, policy="prefill-first", delay_factor=1e6)
    engine.submit(Request((1, 2), SamplingParams(max_tokens=5, ignore_eos=True)))
    engine.step()
    engine.submit(Request((3, 4), SamplingParams(max_tokens=1)))
    engine.step()
    assert (engine.stats().waiting, engine.stats().running) == (1, 1)
    list(engine.run())  # once nothing else runs it is let in all the same
    nothing_is_left(engine)


# Preemption -------------------------------------------------------------------------------------


def test_a_preempted_sequence_ends_with_the_same_tokens():
    engine = make_engine(capacity=64, params=FULL_PARAMS, index="naive")
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [(i, *range(10)) for i in range(3)]
    ids = [engine.submit(Request(p, params)) for p in prompts]
    ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert ends[request_id].token_ids == plain_loop(prompt, params, FULL_PARAMS).token_ids
    assert engine.stats().preemptions > 0
    nothing_is_left(engine)


# Bad input and trouble --------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers():
    engine = make_engine(capacity=64)
    with pytest.raises(PromptError, match="65 tokens and the cache 64 cells"):
        engine.submit(Request(tuple(range(65)), GREEDY8))
    assert engine.is_idle and not engine.runner.forwards


@pytest.mark.parametrize("prompt", [(), (VOCAB,), (-1,)])
def test_an_impossible_prompt_is_refused(prompt):
    with pytest.raises(PromptError):
        make_engine().submit(Request(prompt, GREEDY8))


def test_a_prompt_that_fills_the_cache_gives_one_token_and_says_why_it_ended():
    engine = make_engine(capacity=40)
    end = engine.generate(Request(tuple(range(40)), GREEDY8))
    assert (end.reason, len(end.token_ids)) == ("length", 1)
    assert end.finish.cause == "cache_full" and "raise capacity" in end.finish.detail
    nothing_is_left(engine)


class Placed(HashRunner):
    """Remembers the furthest position that was ever computed."""

    furthest = -1

    def forward(self, token_ids, positions, rows=None):
        self.furthest = max(self.furthest, *(int(p) for p in positions))
        return super().forward(token_ids, positions, rows)


@pytest.mark.parametrize("has_guesses", [False, True])
def test_no_position_is_computed_that_the_model_was_not_made_for(has_guesses):
    cache = make_cache("tree" if has_guesses else "seq", 256)
    runner = Placed(cache, VOCAB)
    engine = Engine(
        runner,
        cache,
        ByteTokenizer(),
        eos_token_ids=EOS,
        config=EngineConfig(verify_all_drafts=True),
        drafter=GuessTrees(PARAMS, VOCAB) if has_guesses else None,
        max_positions=50,
    )
    params = SamplingParams(ignore_eos=True, max_tokens=100)
    with pytest.raises(PromptError, match="51 tokens and the model was made for 50 positions"):
        engine.submit(Request(tuple(range(51)), params))
    for i in range(3):  # together they have more tokens than one may have
        engine.submit(Request(tuple(range(i, 40 + i)), params))
    ends = [event for event in engine.run() if isinstance(event, FinishEvent)]
    assert len(ends) == 3
    for end in ends:
        want = plain_loop(tuple(range(end.request_id, 40 + end.request_id)), params)
        assert (end.reason, end.finish.cause) == ("length", "context_full")
        assert end.token_ids == want.token_ids[:11]
        assert end.text == want.text[: len(end.text)] and end.text
    assert runner.furthest == 49
    nothing_is_left(engine)


def test_what_another_computed_too_is_given_up_before_a_request_ends():
    """Both compute the same prompt, and the index keeps the first one's cells of it."""
    engine = make_engine(capacity=64)
    prompt = tuple(range(30))  # too short to wait for
    engine.submit(Request(prompt, SamplingParams(max_tokens=1)))
    long = engine.submit(Request(prompt, SamplingParams(max_tokens=33, ignore_eos=True)))
    ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    assert ends[long].finish.cause == "max_tokens" and len(ends[long].token_ids) == 33
    nothing_is_left(engine)


def test_a_request_that_waits_past_its_deadline_is_told_with_numbers():
    engine = make_engine(capacity=64, max_num_seqs=1)
    engine.submit(Request(tuple(range(40)), SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    late = engine.submit(Request((1, 2), GREEDY8, deadline_s=0.002))
    ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    assert ends[late].reason == "deadline" and isinstance(ends[late].error, DeadlineError)
    assert "waited" in str(ends[late].error) and ends[late].usage is None
    nothing_is_left(engine)


def test_a_forward_that_raises_fails_its_batch_only_and_the_engine_lives_on():
    engine = make_engine(capacity=200, max_num_seqs=2)
    ids = [engine.submit(Request((i, *range(20)), GREEDY8)) for i in range(3)]
    heard = Heard()
    heard.take(engine.step())
    heard.take(engine.step())
    engine.runner.fail_after = len(engine.runner.forwards)
    heard.take(engine.step())
    assert {i: e.reason for i, e in heard.ends.items()} == {ids[0]: "error", ids[1]: "error"}
    assert isinstance(heard.ends[ids[0]].error, RuntimeError)
    engine.runner.fail_after = None
    for event in engine.run():
        heard.take([event])
    want = plain_loop((2, *range(20)), GREEDY8)
    assert heard.ends[ids[2]].token_ids == want.token_ids
    again = engine.generate(Request((0, *range(20)), GREEDY8))
    assert again.token_ids == plain_loop((0, *range(20)), GREEDY8).token_ids
    nothing_is_left(engine)


@pytest.mark.slow
def test_ten_thousand_requests_later_every_count_is_back_where_it_began():
    engine = make_engine(capacity=300, max_num_batched_tokens=64, max_num_seqs=16)
    n_done = 0
    for i in range(10_000):
        engine.submit(Request((i % 7, i % 11, i % 13), SamplingParams(max_tokens=1)))
        if i % 16 == 15:
            n_done += sum(isinstance(e, FinishEvent) for e in engine.step())
    n_done += sum(isinstance(e, FinishEvent) for e in engine.run())
    assert n_done == 10_000 == engine.stats().finished
    assert len(engine.scheduler.residency._free_seq_ids) <= 16
    nothing_is_left(engine)


# Postprocessing ---------------------------------------------------------------------------------


def test_a_stop_text_ends_the_request_and_is_never_streamed():
    want = plain_loop((1, 2, 3), SamplingParams(max_tokens=30, ignore_eos=True))
    stop = want.text[4:6]
    engine = make_engine(capacity=200)
    heard = Heard()
    request_id = engine.submit(
        Request((1, 2, 3), SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)))
    )
    for event in engine.run():
        heard.take([event])
    end = heard.ends[request_id]
    assert end.reason == "stop" and end.finish.cause == "stop_text"
    assert heard.texts[request_id] == end.text == want.text[: want.text.index(stop)]


def test_drafted_tokens_change_how_many_forwards_run_and_nothing_else():
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=3)
    want = plain_loop((1, 2, 1, 2, 1), params)

    class Oracle:
        """Right for three tokens, then wrong."""

        is_free = True

        def propose(self, asks: Any) -> list[Draft]:
            (ask,) = asks
            done = len(ask.tokens) - 5
            right = want.token_ids[done : done + min(3, ask.limit)]
            return [Draft((*right, 0)[: ask.limit], "oracle")]

        def ended(self, request_id: int) -> None:
            pass

    engine = make_engine(capacity=200, drafter=Oracle(), verify_all_drafts=True)
    end = engine.generate(Request((1, 2, 1, 2, 1), params))
    assert end.token_ids == want.token_ids
    stats = engine.stats()
    assert end.usage is not None
    assert end.usage.drafted_tokens == stats.drafted_tokens
    assert end.usage.accepted_tokens == stats.accepted_tokens
    assert stats.accepted_tokens >= 27 and stats.drafted_tokens > stats.accepted_tokens
    assert stats.n_steps <= 12
    nothing_is_left(engine)
