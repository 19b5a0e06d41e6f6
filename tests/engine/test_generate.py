"""The plain loop: the same tokens behind every cache, and as from the history alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine import (
    GeneratedToken,
    Generation,
    SamplingParams,
    SamplingState,
    generate,
    last,
    sample,
)
from kvcellar.errors import ConfigError, PromptError, UnknownCacheError
from kvcellar.history import History
from tests.engine.fakes import FULL_PARAMS, PARAMS, ByteTokenizer, HashRunner, logits_of, make_cache

VOCAB = ByteTokenizer.vocab_size
TOKENIZER = ByteTokenizer()
KINDS = ["contiguous", "seq", "tree"]

every_cache = pytest.mark.parametrize("kind", KINDS)


def tokens_of_the_oracle(
    prompt: list[int], params: SamplingParams, vocab_size: int = VOCAB
) -> list[int]:
    """No cache at all: the logits of each step from the whole history."""
    state = SamplingState(params, vocab_size, History(prompt))
    tokens: list[int] = []
    assert params.max_tokens is not None
    for _ in range(params.max_tokens):
        logits = logits_of([*prompt, *tokens], vocab_size, PARAMS)
        tokens.append(sample(logits[None], [state])[0].token_id)
        state.record(tokens[-1])
    return tokens


def letter_runner(cache: Any) -> HashRunner:
    """A model that writes lower-case letters alone."""
    runner = HashRunner(cache, VOCAB)
    runner.bias = dict.fromkeys(range(ord("a"), ord("z") + 1), 100.0)
    return runner


def texts_of(events: list[GeneratedToken | Generation]) -> list[str]:
    return [event.text for event in events if isinstance(event, GeneratedToken)]


@given(
    prompt=st.lists(st.one_of(st.integers(0, 127), st.integers(256, VOCAB - 1)), min_size=1),
    chunk=st.integers(1, 50),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_every_cache_gives_the_tokens_of_the_history_alone(
    prompt: list[int], chunk: int, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=25, repetition_penalty=1.1)
    want = tokens_of_the_oracle(prompt, params)
    for kind in KINDS:
        cache = make_cache(kind)
        runner = HashRunner(cache, VOCAB)
        result = last(generate(runner, cache, TOKENIZER, prompt, params, prefill_chunk=chunk))
        assert list(result.token_ids) == want
        assert result.text == TOKENIZER.decode(want, skip_special_tokens=True)
        assert max(map(len, runner.forwards)) <= max(chunk, 1)


@every_cache
def test_a_prompt_goes_on_from_what_the_cache_holds(kind: str) -> None:
    params = SamplingParams(max_tokens=6)
    cache = make_cache(kind)
    runner = HashRunner(cache, VOCAB)
    prompt = [1, 2, 3, 4]
    first = last(generate(runner, cache, TOKENIZER, prompt, params))
    assert first.usage.cached_tokens == 0
    longer = [*prompt, *first.token_ids, 7, 8, 9]
    runner.forwards.clear()
    second = last(generate(runner, cache, TOKENIZER, longer, params))
    assert runner.forwards[0] == [first.token_ids[-1], 7, 8, 9]
    assert second.usage.cached_tokens == len(prompt) + len(first.token_ids) - 1
    assert second.usage.prompt_tokens == len(longer)
    assert list(second.token_ids) == tokens_of_the_oracle(longer, params)


@every_cache
def test_a_prompt_that_is_held_whole_computes_its_last_token_again(kind: str) -> None:
    params = SamplingParams(max_tokens=1)
    cache = make_cache(kind)
    runner = HashRunner(cache, VOCAB)
    prompt = [5, 6, 7]
    first = last(generate(runner, cache, TOKENIZER, prompt, params))
    runner.forwards.clear()
    again = last(generate(runner, cache, TOKENIZER, prompt, params))
    assert runner.forwards == [[7]]
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == 2


def test_any_sequence_of_a_cache_can_be_continued() -> None:
    cache = make_cache("seq")
    runner = HashRunner(cache, VOCAB)
    params = SamplingParams(max_tokens=5)
    last(generate(runner, cache, TOKENIZER, [9, 9], params))
    result = last(generate(runner, cache, TOKENIZER, [1, 2, 3], params, seq_id=4))
    assert list(result.token_ids) == tokens_of_the_oracle([1, 2, 3], params)
    assert cache.seq_ids() == [0, 4]


def test_a_contiguous_cache_has_sequence_0_alone() -> None:
    cache = make_cache("contiguous")
    with pytest.raises(UnknownCacheError, match="holds sequence 0 alone, asked for 4"):
        generate(HashRunner(cache, VOCAB), cache, TOKENIZER, [1], SamplingParams(), seq_id=4)


@every_cache
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt has no tokens"),
        ([1, VOCAB], f"holds token id {VOCAB} and the model has ids 0 to {VOCAB - 1}: its tokens "),
        ([-1], "holds token id -1"),
        ([1] * 21, "the prompt has 21 tokens; the cache has 20 cells free of 20; shorten the "),
    ],
    ids=["empty", "beyond", "negative", "long"],
)
def test_a_prompt_that_cannot_work_is_refused_before_any_compute(
    kind: str, prompt: list[int], message: str
) -> None:
    cache = make_cache(kind, capacity=20)
    runner = HashRunner(cache, VOCAB)
    with pytest.raises(PromptError, match=message):
        generate(runner, cache, TOKENIZER, prompt, SamplingParams())  # not even iterated
    assert runner.forwards == []


@every_cache
def test_a_prompt_with_too_many_new_tokens_names_them(kind: str) -> None:
    cache = make_cache(kind, capacity=20)
    runner = HashRunner(cache, VOCAB)
    last(generate(runner, cache, TOKENIZER, [1] * 10, SamplingParams(max_tokens=1)))
    with pytest.raises(PromptError, match="25 tokens, 15 of them new; the cache has 10 cells free"):
        generate(runner, cache, TOKENIZER, [1] * 25, SamplingParams())


@every_cache
def test_a_prompt_shorter_than_what_is_held_is_refused(kind: str) -> None:
    cache = make_cache(kind)
    runner = HashRunner(cache, VOCAB)
    last(generate(runner, cache, TOKENIZER, [1] * 10, SamplingParams(max_tokens=1)))
    with pytest.raises(PromptError, match="holds 10 tokens and the prompt has 3"):
        generate(runner, cache, TOKENIZER, [1] * 3, SamplingParams())


def test_a_chunk_of_no_tokens_is_refused() -> None:
    cache = make_cache("seq")
    with pytest.raises(ConfigError, match="prefill_chunk must be at least 1"):
        generate(HashRunner(cache, VOCAB), cache, TOKENIZER, [1], prefill_chunk=0)


# How it ends --------------------------------------------------------------------------------------


@every_cache
def test_a_full_cache_ends_with_length_and_says_so(kind: str) -> None:
    cache = make_cache(kind, capacity=20)
    result = last(generate(HashRunner(cache, VOCAB), cache, TOKENIZER, [1] * 16))
    assert result.finish_reason == "length"
    assert result.finish.cause == "cache_full"
    assert result.finish.detail == ("the cache is full: no cell is free of 20; raise capacity")
    assert len(result.token_ids) == 5  # the last one needs no cell


@every_cache
def test_a_prompt_that_fills_the_cache_still_gives_one_token(kind: str) -> None:
    cache = make_cache(kind, capacity=20)
    result = last(generate(HashRunner(cache, VOCAB), cache, TOKENIZER, [1] * 20))
    assert len(result.token_ids) == 1
    assert result.finish.cause == "cache_full"


@every_cache
def test_max_tokens_ends_with_length(kind: str) -> None:
    cache = make_cache(kind)
    params = SamplingParams(max_tokens=3)
    result = last(generate(HashRunner(cache, VOCAB), cache, TOKENIZER, [1], params))
    assert (result.finish_reason, result.finish.cause) == ("length", "max_tokens")
    assert len(result.token_ids) == 3


def test_the_end_token_ends_with_stop_and_has_no_text() -> None:
    cache = make_cache("seq")
    runner = letter_runner(cache)
    free = last(generate(runner, cache, TOKENIZER, [1], SamplingParams(max_tokens=9)))
    cache.clear()
    eos = free.token_ids[4]
    events = list(generate(runner, cache, TOKENIZER, [1], eos_token_ids={eos}))
    result = events[-1]
    assert isinstance(result, Generation)
    n = free.token_ids.index(eos) + 1
    assert result.token_ids == free.token_ids[:n]
    assert (result.finish_reason, result.finish.cause) == ("stop", "eos")
    assert result.text == "".join(texts_of(events)) == free.text[: n - 1]


def test_the_end_token_is_a_token_like_any_other_where_it_is_to_be_ignored() -> None:
    cache = make_cache("seq")
    runner = letter_runner(cache)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    result = last(generate(runner, cache, TOKENIZER, [1], params, eos_token_ids=set(range(VOCAB))))
    assert len(result.token_ids) == 9
    assert len(result.text) == 9


def test_a_stop_token_ends_with_stop() -> None:
    cache = make_cache("seq")
    params = SamplingParams(stop_token_ids=tuple(range(VOCAB)))
    result = last(generate(letter_runner(cache), cache, TOKENIZER, [1], params))
    assert (result.finish_reason, result.finish.cause, result.text) == ("stop", "stop_token", "")


@given(start=st.integers(0, 127), length=st.integers(1, 4), at=st.integers(0, 10))
def test_nothing_of_a_stop_text_is_streamed(start: int, length: int, at: int) -> None:
    cache = make_cache("seq")
    runner = letter_runner(cache)
    free = last(generate(runner, cache, TOKENIZER, [start], SamplingParams(max_tokens=20)))
    stop = free.text[at : at + length]
    cache.clear()
    params = SamplingParams(max_tokens=20, stop=(stop, "?"))
    events = list(generate(runner, cache, TOKENIZER, [start], params))
    result = events[-1]
    assert isinstance(result, Generation)
    assert result.text == "".join(texts_of(events)) == free.text[: free.text.index(stop)]
    assert (result.finish_reason, result.finish.cause) == ("stop", "stop_text")
    assert result.finish.detail == f"stop text {stop!r}"
    assert len(result.token_ids) == free.text.index(stop) + length


def test_what_was_held_back_for_a_stop_text_comes_with_the_last_token() -> None:
    cache = make_cache("seq")
    runner = letter_runner(cache)
    free = last(generate(runner, cache, TOKENIZER, [1], SamplingParams(max_tokens=4)))
    cache.clear()
    params = SamplingParams(max_tokens=4, stop=(free.text + "!",))
    events = list(generate(runner, cache, TOKENIZER, [1], params))
    assert texts_of(events) == ["", "", "", free.text]


# What it tells on the way -------------------------------------------------------------------------


def test_logprobs_come_with_each_token() -> None:
    cache = make_cache("seq")
    params = SamplingParams(max_tokens=3, logprobs=2)
    events = list(generate(HashRunner(cache, VOCAB), cache, TOKENIZER, [1], params))
    for event in events[:-1]:
        assert isinstance(event, GeneratedToken)
        assert event.top_logprobs[0] == (event.token_id, event.logprob)
        assert len(event.top_logprobs) == 2


def test_prefill_is_reported_before_the_first_chunk_and_after_each() -> None:
    cache = make_cache("seq")
    runner = HashRunner(cache, VOCAB)
    params = SamplingParams(max_tokens=1)
    last(generate(runner, cache, TOKENIZER, [1, 2, 3], params))
    seen: list[tuple[int, int]] = []
    prompt = [1, 2, 3, *range(10)]
    events = generate(
        runner,
        cache,
        TOKENIZER,
        prompt,
        params,
        prefill_chunk=4,
        on_prefill=lambda done, total: seen.append((done, total)),
    )
    last(events)
    assert seen == [(0, 10), (4, 10), (8, 10), (10, 10)]


def test_usage_counts_tokens_and_seconds() -> None:
    cache = make_cache("seq")
    params = SamplingParams(max_tokens=4)
    usage = last(generate(HashRunner(cache, VOCAB), cache, TOKENIZER, [1, 2], params)).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 4)
    assert usage.time_to_first_token_s > 0
    assert usage.tokens_per_second is not None and usage.tokens_per_second > 0
    cache.clear()
    params = SamplingParams(max_tokens=1)
    usage = last(generate(HashRunner(cache, VOCAB), cache, TOKENIZER, [1, 2], params)).usage
    assert usage.tokens_per_second is None


# Given up half-way --------------------------------------------------------------------------------


@every_cache
def test_a_prefill_that_is_given_up_keeps_the_finished_chunks(kind: str) -> None:
    class LeftError(Exception):
        pass

    def leave(done: int, total: int) -> None:
        if done == 8:
            raise LeftError

    cache = make_cache(kind)
    runner = HashRunner(cache, VOCAB)
    prompt = list(range(20))
    params = SamplingParams(max_tokens=3)
    with pytest.raises(LeftError):
        last(generate(runner, cache, TOKENIZER, prompt, params, prefill_chunk=4, on_prefill=leave))
    result = last(generate(runner, cache, TOKENIZER, prompt, params))
    assert result.usage.cached_tokens == 8
    assert list(result.token_ids) == tokens_of_the_oracle(prompt, params)


@every_cache
def test_a_generation_that_is_given_up_can_be_taken_up_again(kind: str) -> None:
    cache = make_cache(kind)
    runner = HashRunner(cache, VOCAB)
    prompt = [3, 1, 4]
    events = generate(runner, cache, TOKENIZER, prompt)
    begun = [event.token_id for event, _ in zip(events, range(7), strict=False)]  # type: ignore[union-attr]
    events.close()  # type: ignore[attr-defined]
    rest = last(generate(runner, cache, TOKENIZER, [*prompt, *begun], SamplingParams(max_tokens=5)))
    assert [*begun, *rest.token_ids] == tokens_of_the_oracle(prompt, SamplingParams(max_tokens=12))


@every_cache
def test_a_forward_that_fails_loses_no_token_of_before(kind: str) -> None:
    cache = make_cache(kind)
    runner = HashRunner(cache, VOCAB)
    runner.fail_after = 3
    tokens = []
    with pytest.raises(RuntimeError, match="on fire"):
        for event in generate(runner, cache, TOKENIZER, [3, 1, 4]):
            assert isinstance(event, GeneratedToken)
            tokens.append(event.token_id)
    runner.fail_after = None
    rest = last(
        generate(runner, cache, TOKENIZER, [3, 1, 4, *tokens], SamplingParams(max_tokens=5))
    )
    assert rest.usage.cached_tokens == 3 + len(tokens) - 1
    want = tokens_of_the_oracle([3, 1, 4], SamplingParams(max_tokens=8))
    assert [*tokens, *rest.token_ids] == want


def test_the_fake_model_is_told_apart_by_its_history() -> None:
    assert not np.array_equal(logits_of([1, 2], 5, FULL_PARAMS), logits_of([2, 1], 5, FULL_PARAMS))
