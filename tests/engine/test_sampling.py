"""Sampling: against slow oracles, exact distributions, and itself in other batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.sampler.sampling import SamplingParams, SamplingState, sample
from kvcellar.errors import ConfigError, ModelError
from kvcellar.history import History

VOCAB = 12

LOGITS = st.lists(
    st.one_of(
        st.floats(-8, 8, width=32),
        st.sampled_from([0.0, 1.0, 1.5, -math.inf]),  # ties and impossible tokens
    ),
    min_size=VOCAB,
    max_size=VOCAB,
).filter(lambda row: max(row) > -math.inf)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    presence_penalty=st.sampled_from([0.0, 1.1]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=16), max_size=3),
    seed=st.integers(0, 99),
    logprobs=st.sampled_from([None, 0, 3]),
)


def exact_probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The oracle: every rule spelled out over a list of Python floats."""
    top = max(logits)
    if params.temperature == 0.0 or params.top_k == 1:
        first = list(logits).index(top)
        return [1.0 if i == first else 0.0 for i in range(len(logits))]
    # In float32, as logits are: what is no more than a rounding apart ties.
    with np.errstate(over="ignore"):
        differences = np.array(logits, dtype=np.float32) - np.float32(top)
        scaled = (differences / np.float32(params.temperature)).astype(float).tolist()
    kept = [i for i in range(len(logits)) if scaled[i] > -math.inf]
    if params.top_k:
        ranked = sorted((scaled[i] for i in range(len(logits))), reverse=True)
        edge = ranked[min(params.top_k, len(ranked)) - 1]
        kept = [i for i in kept if scaled[i] >= edge]
    if params.top_p < 1.0:
        total = sum(math.exp(scaled[i]) for i in kept)
        mass, edge = 0.0, 0.0
        for value in sorted((scaled[i] for i in kept), reverse=True):
            edge = value
            mass += math.exp(value)
            if mass >= params.top_p * total:
                break
        kept = [i for i in kept if scaled[i] >= edge]
    if params.min_p:
        kept = [i for i in kept if scaled[i] >= math.log(params.min_p)]
    total = sum(math.exp(scaled[i]) for i in kept)
    return [math.exp(scaled[i]) / total if i in kept else 0.0 for i in range(len(logits))]


def exact_penalties(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """The oracle of the penalties, token by token."""
    out = []
    for token_id, value in enumerate(logits):
        if token_id in prompt or token_id in output:
            if value > 0:
                value = value / params.repetition_penalty
            else:
                value = value * params.repetition_penalty
        times = list(output).count(token_id)
        value -= times * params.frequency_penalty
        if times:
            value -= params.presence_penalty
        out.append(value + params.logit_bias.get(token_id, 0.0))
    return out


class FixedDraw(SamplingState):
    """A state whose next random number the test chooses."""

    number = 0.0

    def draw(self) -> float:
        return self.number


def choose(logits: Sequence[float], params: SamplingParams, number: float) -> int:
    state = FixedDraw(params, len(logits))
    state.number = number
    return sample(np.array([logits]), [state])[0].token_id


@given(logits=LOGITS, params=PARAMS, number=st.floats(0, 1, exclude_max=True))
def test_a_random_number_picks_the_token_of_the_exact_distribution_it_falls_on(
    logits: list[float], params: SamplingParams, number: float
) -> None:
    params = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
    logits = np.array(logits, dtype=np.float32).tolist()
    probabilities = exact_probabilities(logits, params)
    got = choose(logits, params, number)
    below = sum(probabilities[:got])
    slack = 1e-5  # float32 weights against Python floats
    assert below - slack <= number <= below + probabilities[got] + slack
    assert probabilities[got] > 0 or _is_near_an_edge(logits, params, got)


def _is_near_an_edge(logits: Sequence[float], params: SamplingParams, token_id: int) -> bool:
    """True if a rounding error could move the token over the edge of a cut."""
    for nudge in (0.999, 1.001):
        nudged = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=min(1.0, params.top_p * nudge),
            min_p=min(1.0, params.min_p * nudge),
        )
        if exact_probabilities(logits, nudged)[token_id] > 0:
            return True
    return False


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=4),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.2, top_k=6, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "top_k", "top_p", "min_p", "all"],
)
@pytest.mark.slow
def test_many_seeds_sample_the_exact_distribution(params: SamplingParams) -> None:
    logits = np.random.default_rng(3).normal(0, 1.5, VOCAB).astype(np.float32)
    n = 8000
    states = [
        SamplingState(SamplingParams(**{**_as_dict(params), "seed": seed}), VOCAB)
        for seed in range(n)
    ]
    choices = sample(np.tile(logits, (n, 1)), states)
    counts = np.bincount([choice.token_id for choice in choices], minlength=VOCAB)
    expected = np.array(exact_probabilities(logits.tolist(), params)) * n
    assert not counts[expected == 0].any()
    possible = expected > 0
    chi_square = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    assert chi_square < 35  # 11 degrees of freedom: one in 4,000 seeds would exceed it


def _as_dict(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_the_tokens_of_one_seed_sample_the_exact_distribution_too() -> None:
    logits = np.random.default_rng(4).normal(0, 1.5, VOCAB).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=11)
    state = SamplingState(params, VOCAB)
    counts = np.zeros(VOCAB)
    n = 4000
    for _ in range(n):
        token_id = sample(logits[None], [state])[0].token_id
        state.record(token_id)
        counts[token_id] += 1
    expected = np.array(exact_probabilities(logits.tolist(), params)) * n
    assert ((counts - expected) ** 2 / expected).sum() < 35


@given(rows=st.lists(st.tuples(LOGITS, PARAMS, st.integers(0, 5)), min_size=1, max_size=6))
def test_a_row_is_sampled_alike_in_every_batch(
    rows: list[tuple[list[float], SamplingParams, int]],
) -> None:
    def state_of(params: SamplingParams, n_before: int) -> SamplingState:
        state = SamplingState(params, VOCAB, History([1, 2]))
        for i in range(n_before):
            state.record(i % 3)
        return state

    logits = np.array([row[0] for row in rows], dtype=np.float32)
    together = sample(logits, [state_of(params, n) for _, params, n in rows])
    alone = [
        sample(logits[i : i + 1], [state_of(params, n)])[0] for i, (_, params, n) in enumerate(rows)
    ]
    backwards = sample(logits[::-1], [state_of(params, n) for _, params, n in rows[::-1]])
    assert together == alone == backwards[::-1]


@given(
    logits=LOGITS,
    params=PARAMS,
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=8),
)
def test_penalties_and_bias_are_those_of_the_slow_oracle(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    state = SamplingState(params, VOCAB, History(prompt))
    for token_id in output:
        state.record(token_id)
    adjusted = np.array(logits, dtype=np.float32)
    state.adjust(adjusted)
    np.testing.assert_allclose(
        adjusted, exact_penalties(logits, params, prompt, output), rtol=1e-5, atol=1e-5
    )


def test_penalties_change_what_is_sampled() -> None:
    logits = np.array([[3.0, 2.9, 0.0]])
    state = SamplingState(SamplingParams(presence_penalty=0.5), 3)
    assert sample(logits, [state])[0].token_id == 0
    state.record(0)
    assert sample(logits, [state])[0].token_id == 1


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = np.array([[1.0, 5.0, 5.0, 5.0]])
    for params in (SamplingParams(), SamplingParams(temperature=2.0, top_k=1, seed=3)):
        assert sample(logits, [SamplingState(params, 4)])[0].token_id == 1


def test_each_token_has_a_half_open_share_of_the_random_numbers() -> None:
    params = SamplingParams(temperature=1.0)
    assert [choose([0.0, 0.0], params, number) for number in (0.0, 0.49, 0.5, 0.99)] == [0, 0, 1, 1]


def test_equal_tokens_at_the_edge_of_top_k_all_stay() -> None:
    logits = [5.0, 4.0, 4.0, 4.0, 1.0]
    params = SamplingParams(temperature=1.0, top_k=2)
    assert {choose(logits, params, number / 50) for number in range(50)} == {0, 1, 2, 3}


@given(logits=LOGITS, n=st.integers(0, VOCAB + 2), bias=st.booleans())
def test_logprobs_are_those_of_the_model_itself(logits: list[float], n: int, bias: bool) -> None:
    row = np.array(logits, dtype=np.float32)
    params = SamplingParams(
        temperature=0.7, seed=5, logprobs=n, logit_bias={0: 3.0} if bias else {}
    )
    choice = sample(row[None], [SamplingState(params, VOCAB)])[0]
    exact = row.astype(np.float64) - max(row)
    exact -= math.log(sum(math.exp(value) for value in exact))
    assert choice.logprob == pytest.approx(exact[choice.token_id])
    ranked = sorted(range(VOCAB), key=lambda i: (-row[i], i))[:n]
    assert [top.token_id for top in choice.top_logprobs] == ranked
    assert [top.logprob for top in choice.top_logprobs] == pytest.approx(exact[ranked].tolist())


def test_without_logprobs_none_are_computed() -> None:
    choice = sample(np.zeros((1, 3)), [SamplingState(SamplingParams(), 3)])[0]
    assert choice.logprob is None
    assert choice.top_logprobs == ()


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    rows = np.random.default_rng(0).normal(size=(60, 50)).astype(np.float32)

    def run(seed: int | None) -> list[int]:
        state = SamplingState(SamplingParams(temperature=1.0, seed=seed), 50)
        tokens = []
        for row in rows:
            tokens.append(sample(row[None], [state])[0].token_id)
            state.record(tokens[-1])
        return tokens

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(None) != run(None)


def test_a_state_with_a_seed_of_its_own_says_which() -> None:
    state = SamplingState(SamplingParams(temperature=1.0), 50)
    again = SamplingState(SamplingParams(temperature=1.0, seed=state.seed), 50)
    assert [state.draw()] == [again.draw()]


def test_sampling_changes_nothing_until_it_is_recorded() -> None:
    logits = np.random.default_rng(1).normal(size=(1, 50)).astype(np.float32)
    before = logits.copy()
    state = SamplingState(
        SamplingParams(temperature=1.0, seed=4, repetition_penalty=2.0, logit_bias={3: 1.0}),
        50,
        History([7]),
    )
    first = sample(logits, [state])
    assert sample(logits, [state]) == first
    assert np.array_equal(logits, before)
    draws = []
    for _ in range(200):
        draws.append(state.draw())
        state.record(0)
    assert len(set(draws)) == 200


def test_a_temperature_near_zero_neither_overflows_nor_leaves_the_best_token() -> None:
    logits = np.array([[80.0, -80.0, 79.9]], dtype=np.float32)
    for temperature in (1e-30, 1e-5, 1e-4):
        state = SamplingState(SamplingParams(temperature=temperature, seed=0), 3)
        assert sample(logits, [state])[0].token_id == 0


def test_no_rows_give_no_tokens() -> None:
    assert sample(np.empty((0, 5)), []) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    logits = np.zeros((2, 4), dtype=np.float32)
    logits[1, 2] = value
    with pytest.raises(ModelError, match="row 1 of the logits"):
        sample(logits, [SamplingState(SamplingParams(), 4)] * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"temperature": math.inf}, "temperature must be"),
        ({"top_k": -1}, "top_k must be 0 .all tokens. or more, got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and up to 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"min_p": -0.1}, "min_p must be 0 to 1"),
        ({"min_p": 2.0}, "min_p must be 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be a number"),
        ({"presence_penalty": math.inf}, "presence_penalty must be a number"),
        ({"logit_bias": {3: -math.inf}}, "logit_bias.3. must be a number"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"max_tokens": -1}, "max_tokens must be 0 or more, got -1"),
        ({"logprobs": -1}, "logprobs must be 0 or more"),
        ({"stop": ("",)}, "stop holds texts of at least one character"),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**changes)  # type: ignore[arg-type]


def test_a_bias_of_a_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="logit_bias names token 9; the model has tokens 0 to 3"):
        SamplingState(SamplingParams(logit_bias={9: 1.0}), 4)


def test_one_stop_text_may_be_given_without_a_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_no_end_is_sampled_before_the_tokens_that_there_must_be() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(3,))
    state = SamplingState(params, 5, eos_token_ids=[4])
    logits = np.array([[0.0, 1.0, 2.0, 9.0, 8.0]])
    chosen = []
    for _ in range(3):
        chosen.append(sample(logits, [state])[0].token_id)
        state.record(chosen[-1])
    assert chosen == [2, 2, 3]
    free = SamplingState(replace(params, ignore_eos=True), 5, eos_token_ids=[4])
    assert sample(logits, [free])[0].token_id == 4
    with pytest.raises(ConfigError, match="min_tokens must be 0 to max_tokens, which is 1, got 2"):
        SamplingParams(min_tokens=2, max_tokens=1)


def test_an_end_comes_early_where_a_guide_lets_nothing_else_come() -> None:
    class OnlyEnd:
        is_complete = False
        end_id = None

        def allowed(self) -> Any:
            return np.arange(5) == 4

        def accept(self, token_id: int) -> None:
            pass

        def fork(self) -> Any:
            return self

    state = SamplingState(SamplingParams(min_tokens=2, guide=OnlyEnd), 5, eos_token_ids=[4])
    assert sample(np.zeros((1, 5)), [state])[0].token_id == 4
