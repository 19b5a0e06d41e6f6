"""Histories of several adapters, and of strangers, in one engine: batched together, never mixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.engine import Engine, EngineConfig, Request, SamplingParams
from kvcellar.engine.speculate.drafter import DraftRequest
from kvcellar.engine.speculate.ngram import NgramDrafter
from kvcellar.errors import ConfigError
from kvcellar.history import History
from kvcellar.prefix import key_of
from kvcellar.space import SHARED, Space
from tests.engine.fakes import FULL_PARAMS, PARAMS, HashRunner, logits_of, make_cache
from tests.engine.test_engine import VOCAB, make_engine, nothing_is_left

STEP = 1000
"""Between the K and V of one token under two adapters."""


class AdaptingHashRunner(HashRunner):
    """A model whose adapters store other K and V, of which the logits are hashes."""

    adapters = ("first", "second")
    own_adapter = ""
    runs: Sequence[tuple[str, int]] = ()

    @contextmanager
    def adapting(self, runs: Sequence[tuple[str, int]]) -> Iterator[None]:
        self.runs = runs
        try:
            yield
        finally:
            self.runs = ()

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], rows: Any = None) -> Any:
        names = ["", *self.adapters]
        numbers = [names.index(name) for name, n in self.runs for _ in range(n)]
        assert not numbers or len(numbers) == len(token_ids)
        apart = STEP * np.array(numbers or [0] * len(token_ids))
        return super().forward((np.asarray(token_ids) + apart).tolist(), positions, rows)


def adapting_engine(params: Any = FULL_PARAMS, **config: Any) -> Engine:
    cache = make_cache("seq", 160, params)
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4, **config}
    return Engine(AdaptingHashRunner(cache, VOCAB), cache, config=EngineConfig(**limits))


def greedy(space: Space, prompt: Sequence[int], n: int, params: Any = FULL_PARAMS) -> list[int]:
    """The oracle: the likeliest tokens of one history, from its tokens alone."""
    number = ["", *AdaptingHashRunner.adapters].index(space.adapter)
    tokens = list(prompt)
    for _ in range(n):
        seen = [token + STEP * number for token in tokens]
        tokens.append(int(logits_of(seen, VOCAB, params).argmax()))
    return tokens[len(prompt) :]


SPACES = [SHARED, Space("first"), Space("second"), Space(salt="ours"), Space("first", "ours")]


@pytest.mark.parametrize("params", [FULL_PARAMS, PARAMS], ids=["full", "window"])
@settings(max_examples=40)
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(SPACES),
            st.sampled_from([(), tuple(range(1, 40))]),
            st.lists(st.integers(0, 3), min_size=1, max_size=8),
        ),
        min_size=1,
        max_size=8,
    ),
    index=st.sampled_from(["radix", "hashed"]),
)
def test_any_mixture_of_spaces_gives_the_tokens_of_each_alone(params, asked, index):
    engine = adapting_engine(params, index=index, block_size=4)
    prompts = [(*trunk, *tail) for _, trunk, tail in asked]
    for (space, *_), prompt in zip(asked, prompts, strict=True):
        sampling = SamplingParams(max_tokens=5, ignore_eos=True)
        engine.submit(Request(prompt, sampling, space=space))
    ends = {event.request_id: event for event in engine.run() if hasattr(event, "reason")}
    for at, ((space, *_), prompt) in enumerate(zip(asked, prompts, strict=True)):
        assert list(ends[at].token_ids) == greedy(space, prompt, 5, params)
    nothing_is_left(engine)


def test_the_same_tokens_in_another_space_are_computed_again():
    engine = adapting_engine()
    prompt, few = tuple(range(1, 30)), SamplingParams(max_tokens=2, ignore_eos=True)
    for space in SPACES:
        end = engine.generate(Request(prompt, few, space=space))
        assert end.usage is not None and end.usage.cached_tokens == 0
        again = engine.generate(Request(prompt, few, space=space))
        assert again.usage is not None and again.usage.cached_tokens == len(prompt) - 1


def test_what_is_asked_of_the_cache_is_asked_of_one_space():
    engine = adapting_engine()
    history, first = np.arange(1, 20), Space("first")
    engine.generate(Request(history, SamplingParams(max_tokens=1, ignore_eos=True), space=first))
    assert engine.match(history) == 0
    assert engine.match(history, first) == len(history)
    assert engine.hold(history, Space("second")).n_tokens == 0
    seen = engine.cell_map([(history, None, SHARED), (history, None, first)])
    assert [len(table) for table in seen.tables] == [0, len(history)]
    assert engine.drop(history) == 0
    assert engine.drop(history, space=first) == len(history)


def test_a_prefix_of_another_space_that_is_just_computed_is_not_waited_for():
    engine = adapting_engine()
    prompt = tuple(range(1, 60))
    for space in (SHARED, Space("first")):
        engine.submit(Request(prompt, SamplingParams(max_tokens=1), space=space))
    engine.step()
    assert len(engine.scheduler.running) == 2


def test_an_adapter_that_is_not_loaded_is_refused_by_name():
    with pytest.raises(ConfigError, match="'third' is not loaded; there are: first, second"):
        adapting_engine().submit(Request((1, 2), space=Space("third")))
    with pytest.raises(ConfigError, match="'first' is not loaded; there are: none"):
        make_engine().submit(Request((1, 2), space=Space("first")))


# Guesses ------------------------------------------------------------------------------------------


def test_guesses_come_from_histories_of_the_same_space():
    drafter = NgramDrafter((2,))
    spaces = (SHARED, Space(salt="a"), Space(salt="b"))
    said = {SHARED: 5, spaces[1]: 6}
    for i, space in enumerate(said):
        drafter.propose([DraftRequest(i, History([1, 2, said[space], 7]), 2, space=space)])
        drafter.ended(i)
    for i, space in enumerate(spaces, 10):
        (draft,) = drafter.propose([DraftRequest(i, History([9, 1, 2]), 2, space=space)])
        assert list(draft.tokens) == ([said[space], 7] if space in said else [])


def test_keys_of_spaces_differ_at_every_token_and_are_the_same_for_one():
    tokens = np.arange(9)
    keys = [key_of(tokens, Space(salt=salt)) for salt in ("a", "b", "a")]
    assert (keys[0] != keys[1]).all() and (keys[0] == keys[2]).all()
    assert key_of(tokens, SHARED) is tokens and (keys[0] & 0xFFFFFFFF == tokens).all()
    assert (keys[0][:4] == key_of(tokens[:4], Space(salt="a"))).all() and keys[0].min() > 0
