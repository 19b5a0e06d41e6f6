"""Branches of one prompt: each as if it had been alone, on shared cells, in one batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcellar.engine import SamplingParams, branch, generate, last
from kvcellar.engine.loop.branches import bytes_per_cell
from kvcellar.errors import ConfigError, PromptError
from kvcellar.types import ModelCacheParams
from tests.engine.fakes import FULL_PARAMS, STATE_PARAMS, ByteTokenizer, HashRunner, make_cache
from tests.engine.fakes import PARAMS as WINDOW_PARAMS

VOCAB = ByteTokenizer.vocab_size
TOKENIZER = ByteTokenizer()
PROMPT = list(b"once upon a time")
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=12)

both_caches = pytest.mark.parametrize("kind", ["seq", "tree"])


@both_caches
@pytest.mark.parametrize("params", [WINDOW_PARAMS, STATE_PARAMS], ids=["window", "state"])
def test_each_branch_is_as_if_it_had_been_alone(kind: str, params: ModelCacheParams) -> None:
    cache = make_cache(kind, params=params, n_slots=9)
    report = branch(HashRunner(cache, VOCAB), cache, TOKENIZER, PROMPT, PARAMS, 4)
    for index, one in enumerate(report.branches):
        fresh = make_cache(kind, params=params)
        seeded = replace(PARAMS, seed=5 + index)
        alone = last(generate(HashRunner(fresh, VOCAB), fresh, TOKENIZER, PROMPT, seeded))
        assert tuple(one.token_ids) == alone.token_ids
        assert one.text == alone.text
        assert one.finish == alone.finish


def test_the_prompt_is_computed_once_and_all_branches_in_one_forward() -> None:
    cache = make_cache("seq", params=FULL_PARAMS)
    runner = HashRunner(cache, VOCAB)
    report = branch(runner, cache, TOKENIZER, PROMPT, PARAMS, 4)
    assert [len(tokens) for tokens in runner.forwards] == [len(PROMPT), *[4] * 11]
    assert report.n_forwards == 11
    assert report.n_sampled == 48
    for one in report.branches:
        assert one.shared_cells == len(PROMPT)
        assert one.private_cells == 11
    assert report.usage.groups[0].live == len(PROMPT) + 4 * 11


def test_the_likeliest_branch_is_kept_and_goes_on() -> None:
    cache = make_cache("seq", params=FULL_PARAMS)
    runner = HashRunner(cache, VOCAB)
    report = branch(runner, cache, TOKENIZER, PROMPT, PARAMS, 4)
    best = report.branches[report.best]
    assert best.mean_logprob == max(one.mean_logprob for one in report.branches)
    assert cache.seq_ids() == [best.seq_id]
    assert report.usage_kept.groups[0].live == len(PROMPT) + 11
    more = SamplingParams(max_tokens=3)
    history = [*PROMPT, *best.token_ids]
    rest = last(generate(runner, cache, TOKENIZER, history, more, seq_id=best.seq_id))
    fresh = make_cache("contiguous", params=FULL_PARAMS)
    want = last(generate(HashRunner(fresh, VOCAB), fresh, TOKENIZER, history, more))
    assert rest.token_ids == want.token_ids


def test_a_branch_that_ends_leaves_the_batch() -> None:
    cache = make_cache("seq", params=FULL_PARAMS)
    runner = HashRunner(cache, VOCAB)
    free = branch(runner, cache, TOKENIZER, PROMPT, PARAMS, 3)
    eos = free.branches[1].token_ids[4]
    cache = make_cache("seq", params=FULL_PARAMS)
    runner = HashRunner(cache, VOCAB)
    report = branch(runner, cache, TOKENIZER, PROMPT, PARAMS, 3, eos_token_ids={eos})
    for one, whole in zip(report.branches, free.branches, strict=True):
        n = whole.token_ids.index(eos) + 1 if eos in whole.token_ids else len(whole.token_ids)
        assert one.token_ids == whole.token_ids[:n]
    assert len(report.branches[1].token_ids) == 5
    assert runner.n_tokens == len(PROMPT) + sum(len(b.token_ids) - 1 for b in report.branches)


def test_steps_are_reported() -> None:
    cache = make_cache("seq")
    steps: list[tuple[int, int]] = []
    branch(
        HashRunner(cache, VOCAB),
        cache,
        TOKENIZER,
        PROMPT,
        replace(PARAMS, max_tokens=3),
        2,
        on_step=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_branches_that_do_not_fit_are_refused_before_any_compute() -> None:
    cache = make_cache("seq", capacity=50)
    runner = HashRunner(cache, VOCAB)
    with pytest.raises(
        PromptError, match="has 16 tokens and its continuation 44; the cache has 50"
    ):
        branch(runner, cache, TOKENIZER, PROMPT, PARAMS, 4)
    assert runner.forwards == []
    assert branch(runner, cache, TOKENIZER, PROMPT, PARAMS, 3).n_sampled == 36


def test_branches_whose_states_have_no_slots_are_refused_before_any_compute() -> None:
    cache = make_cache("seq", params=STATE_PARAMS, n_slots=8)
    runner = HashRunner(cache, VOCAB)
    with pytest.raises(PromptError, match=r"4 branches take 9 slots .* 8 are free of 8; ask for"):
        branch(runner, cache, TOKENIZER, PROMPT, PARAMS, 4)
    assert runner.forwards == []
    assert branch(runner, cache, TOKENIZER, PROMPT, PARAMS, 3).n_sampled == 36


def test_branches_need_a_number_and_an_end() -> None:
    cache = make_cache("seq")
    runner = HashRunner(cache, VOCAB)
    with pytest.raises(ConfigError, match="n_branches must be at least 1, got 0"):
        branch(runner, cache, TOKENIZER, PROMPT, PARAMS, 0)
    with pytest.raises(ConfigError, match="branches need max_tokens"):
        branch(runner, cache, TOKENIZER, PROMPT, SamplingParams(), 2)


def test_the_bytes_of_a_cell_are_k_and_v_of_all_layers() -> None:
    config = make_cache("seq", params=FULL_PARAMS).config
    assert bytes_per_cell(config) == 2 * 1 * (4 + 4) * 4
