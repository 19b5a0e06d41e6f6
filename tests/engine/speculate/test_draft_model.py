"""A smaller model's guesses: its cache follows the target's, whatever is accepted or forked."""

from __future__ import annotations

from typing import Any

import pytest

from kvcellar.engine import Request, SamplingParams
from kvcellar.engine.speculate import Ask, DraftModel
from kvcellar.errors import ConfigError
from kvcellar.types import make_config
from tests.engine.fakes import FULL_PARAMS, PARAMS, HashRunner, TreeCells, logits_of
from tests.engine.test_engine import VOCAB, make_engine, nothing_is_left, plain_loop


def draft_of(params: Any, capacity: int = 2000, vocab: int = VOCAB) -> DraftModel:
    cache = TreeCells(make_config(params, capacity, min_chunk=16))
    return DraftModel(HashRunner(cache, vocab), cache, VOCAB)


@pytest.mark.parametrize("params", [FULL_PARAMS, PARAMS], ids=["full", "window"])
def test_its_guesses_are_what_it_would_say_itself(params):
    drafter = draft_of(params)
    tokens = [5, 6, 7]
    for truth in (3, 250, 4, 4, 9):
        (draft,) = drafter.propose([Ask(7, tokens, 4)])
        said = list(tokens)
        for _ in range(4):
            said.append(int(logits_of(said, VOCAB, params).argmax()))
        assert list(draft.tokens) == said[len(tokens) :]
        tokens = [*tokens, *draft.tokens[:2], truth]  # two were right
    drafter.ended(7)
    assert drafter._cache.n_free == drafter._cache.capacity


@pytest.mark.parametrize("params", [FULL_PARAMS, PARAMS], ids=["full", "window"])
@pytest.mark.parametrize("capacity", [2000, 120])
def test_the_same_tokens_in_fewer_steps(params, capacity):
    drafter = draft_of(params, capacity)
    engine = make_engine(
        params=params, capacity=1500, drafter=drafter, verify_all_drafts=True, max_num_seqs=4
    )
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [tuple(range(i, 20 + 2 * i)) for i in range(8)]
    ids = [engine.submit(Request(prompt, sampling)) for prompt in prompts]
    ends = {e.request_id: e for e in engine.run() if hasattr(e, "reason")}
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert ends[request_id].token_ids == plain_loop(prompt, sampling, params).token_ids
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0, "it is the target itself"
    if capacity == 2000:
        assert stats.n_steps < 30, "not 24 for each of two batches"
    nothing_is_left(engine)
    assert drafter._cache.n_free == drafter._cache.capacity


def test_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="the target's own vocabulary"):
        draft_of(FULL_PARAMS, vocab=VOCAB + 1)
