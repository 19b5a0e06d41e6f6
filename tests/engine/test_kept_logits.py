"""Rows that are sampled where their logits are: the same tokens as from NumPy, one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import kvcellar as kv
from kvcellar.backends.torch.gpu.sampler import logits as device
from kvcellar.backends.torch.gpu.sampler import sampling
from kvcellar.backends.torch.gpu.sampler.logits import DeviceLogits
from kvcellar.engine import Engine, FinishEvent, GeneratedToken, PromptEvent, Request
from kvcellar.engine.sample_on_device import choice_of
from kvcellar.engine.sampler.sampling import Choice, SamplingParams, SamplingState, sample, score
from kvcellar.engine.speculate import Draft, NgramDrafter, verify
from kvcellar.engine.speculate.verify import states_of, walk
from kvcellar.errors import ModelError
from kvcellar.history import History
from kvcellar.models import load_model
from tests.backends.gpu import interpreter

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what tiles throw away

VOCAB = 41

DEVICE = interpreter.device().type

FEW = settings(max_examples=max(1, settings().max_examples // 4))
"""For what is interpreted, which takes long."""


@pytest.fixture(scope="module", autouse=True)
def tiles() -> Iterator[None]:
    """Rows of several tiles, the last of which is not full."""
    interpreter.hasten()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "TILE", 16)
        yield


class Only:
    """A guide that lets some tokens come, others after each one, and ends behind a few."""

    def __init__(self, seed: int, end_id: int | None, share: float, n_left: int) -> None:
        self.seed, self.end_id, self.share, self.n_left = seed, end_id, share, n_left

    @property
    def is_complete(self) -> bool:
        return self.n_left == 0

    def allowed(self) -> Any:
        mask = np.random.default_rng(self.seed).random(VOCAB) < self.share
        if self.end_id is not None:
            mask[self.end_id] = True
        return mask

    def accept(self, token_id: int) -> None:
        assert self.allowed()[token_id]
        self.seed = 31 * self.seed + token_id + 1
        self.n_left -= 1

    def fork(self) -> Only:
        return Only(self.seed, self.end_id, self.share, self.n_left)


GUIDES = st.one_of(
    st.none(),
    st.builds(
        lambda *given: lambda: Only(*given),
        st.integers(0, 99),
        st.sampled_from([None, 3]),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.sampled_from([2, 4, 99]),
    ),
)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.93, 0.47, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    presence_penalty=st.sampled_from([0.0, 1.1]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=16), max_size=3),
    seed=st.integers(0, 9999),
    min_tokens=st.sampled_from([0, 9]),
    stop_token_ids=st.sampled_from([(), (1, 2, 3), tuple(range(VOCAB))]),
    logprobs=st.sampled_from([None, 0, 3, VOCAB + 9]),
    guide=GUIDES,
)

ROWS = st.lists(st.tuples(PARAMS, st.lists(st.integers(0, VOCAB - 1), max_size=6)), max_size=3)


def random_logits(n_rows: int, seed: int, kind: str) -> Any:
    """Logits ``[n_rows, VOCAB]``: of few values, so that many tie, and impossible ones."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (n_rows, VOCAB))
    if kind != "all differ":
        logits = np.round(logits)
    if kind == "some impossible":
        logits[rng.random(logits.shape) < 0.3] = -math.inf
        logits[:, 7] = 0.0
    return logits.astype(np.float32)


KINDS = st.sampled_from(["all differ", "many tie", "some impossible"])


def state_of(params: SamplingParams, held: list[int]) -> SamplingState:
    """A state behind two tokens of a prompt and some of an output."""
    state = SamplingState(params, VOCAB, History(held[:2]), (0, 5))
    for token_id in held[2:]:
        if not state.is_complete and state.may_sample(token_id):
            state.record(token_id)
    return state


def one_by_one(logits: Any, state: SamplingState) -> Choice | ModelError:
    try:
        return sample(logits[None], [state])[0]
    except ModelError as error:
        return error


def kept(logits: Any, states: list[SamplingState]) -> list[Choice | ModelError]:
    asked = [state.row_sampling(row) for row, state in enumerate(states)]
    found: list[Choice | ModelError] = []
    for row, choice in enumerate(DeviceLogits(torch.from_numpy(logits).to(DEVICE)).sample(asked)):
        try:
            found.append(choice_of(row, choice))
        except ModelError as error:
            found.append(error)
    return found


def assert_same(found: Any, wanted: Any, bound: float = 1e-6) -> None:
    if isinstance(found, ModelError) or isinstance(wanted, ModelError):
        assert type(found) is type(wanted), (found, wanted)
        return
    assert found.token_id == wanted.token_id
    assert [top.token_id for top in found.top_logprobs] == [
        top.token_id for top in wanted.top_logprobs
    ]
    assert (found.logprob is None) == (wanted.logprob is None)
    if found.logprob is not None:
        assert found.logprob == pytest.approx(wanted.logprob, abs=bound)
    for mine, theirs in zip(found.top_logprobs, wanted.top_logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=bound)


@FEW
@given(ROWS.filter(bool), st.integers(0, 2**20), KINDS)
def test_rows_of_any_settings_are_sampled_as_each_is_by_itself(
    rows: list[tuple[SamplingParams, list[int]]], seed: int, kind: str
) -> None:
    states = [state_of(*row) for row in rows]
    logits = random_logits(len(rows), seed, kind)
    before = logits.copy()
    for found, row, state in zip(kept(logits, states), logits, states, strict=True):
        assert_same(found, one_by_one(row, state))
    assert (logits == before).all()


@FEW
@given(PARAMS, st.integers(0, 2**20), KINDS)
def test_draws_of_one_seed_choose_the_same_tokens_one_after_another(
    params: SamplingParams, seed: int, kind: str
) -> None:
    state = state_of(params, [1, 2])
    for step in range(3):
        logits = random_logits(1, seed + step, kind)
        wanted = one_by_one(logits[0], state)
        assert_same(kept(logits, [state])[0], wanted)
        if isinstance(wanted, ModelError) or not state.may_sample(wanted.token_id):
            return
        state.record(wanted.token_id)
        if state.is_complete:
            return


def test_more_rows_than_are_sampled_at_a_time_are_all_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "MOST_ROWS", 4)
    n = 2 * device.MOST_ROWS + 3
    logits = random_logits(n, 5, "all differ")
    states = [
        SamplingState(SamplingParams(temperature=row % 3, seed=row), VOCAB) for row in range(n)
    ]
    assert kept(logits, states) == sample(logits, states)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_numbers_is_refused_and_the_others_are_sampled(bad: float) -> None:
    logits = random_logits(3, 1, "all differ")
    logits[1, 4] = bad
    states = [SamplingState(SamplingParams(temperature=1, seed=row), VOCAB) for row in range(3)]
    found = kept(logits, states)
    assert isinstance(found[1], ModelError)
    assert [found[0], found[2]] == sample(logits[[0, 2]], [states[0], states[2]])


def a_draft(logits: Any, state: SamplingState, guesses: list[tuple[bool, int]]) -> Draft:
    """Guesses behind any of those before them, and many of them right."""
    tokens: list[int] = []
    parents: list[int] = []
    states = [state]
    for is_right, up in guesses:
        parent = min(len(tokens) - 1, up)
        chosen = one_by_one(logits[parent + 1], states[parent + 1])
        token_id = chosen.token_id if is_right and isinstance(chosen, Choice) else up + 7
        siblings = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
        here = states[parent + 1].fork()
        if token_id in siblings or here.is_complete:
            continue
        if here.may_sample(token_id):
            here.record(token_id)
        tokens.append(token_id)
        parents.append(parent)
        states.append(here)
    return Draft(tuple(tokens), "any", tuple(parents))


@FEW
@given(
    PARAMS,
    st.lists(st.tuples(st.booleans(), st.integers(-1, 4)), max_size=4),
    st.integers(0, 2**20),
)
def test_guesses_are_verified_at_once_as_they_are_one_by_one(
    params: SamplingParams, guesses: list[tuple[bool, int]], seed: int
) -> None:
    logits = random_logits(1 + len(guesses), seed, "many tie")
    state = state_of(params, [1, 2, 3])
    draft = a_draft(logits, state, guesses)
    states = states_of(draft, state)
    asked = [s.row_sampling(row) for row, s in enumerate(states) if s is not None]
    sampled = DeviceLogits(torch.from_numpy(logits).to(DEVICE)).sample(asked)
    found = {ask.row: choice for ask, choice in zip(asked, sampled, strict=True)}
    try:
        wanted = verify(logits, draft, state)
    except ModelError:
        with pytest.raises(ModelError):
            walk(draft, states, lambda row: choice_of(row, found[row]))
        return
    verdict = walk(draft, states, lambda row: choice_of(row, found[row]))
    assert verdict.accepted == wanted.accepted
    for mine, theirs in zip(verdict.choices, wanted.choices, strict=True):
        assert_same(mine, theirs)


def test_nothing_is_guessed_behind_the_end_of_what_a_guide_lets_come() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    params = SamplingParams(guide=lambda: Only(0, None, 1.0, 1))
    draft = Draft((0,), "any")
    state = SamplingState(params, VOCAB)
    assert states_of(draft, state)[1] is None
    assert verify(logits, draft, state).accepted == ()


@given(st.integers(0, 2**20), KINDS, st.sampled_from([0, 3, VOCAB + 1]))
def test_tokens_of_a_prompt_are_scored_as_by_numpy(seed: int, kind: str, n_top: int) -> None:
    logits = random_logits(device.MOST_ROWS + 9, seed, kind)
    tokens = np.random.default_rng(seed).integers(0, VOCAB, device.MOST_ROWS + 5)
    found = DeviceLogits(torch.from_numpy(logits).to(DEVICE)).score(2, tokens, n_top)
    for row, (mine, theirs) in enumerate(zip(found, score(logits[2:], tokens, n_top), strict=True)):
        assert_same(choice_of(row, mine), theirs)


@FEW
@given(
    st.integers(1, 4),
    st.integers(0, 2**20),
    KINDS,
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([math.nan, math.inf, -math.inf]))),
)
def test_the_likeliest_of_all_rows_are_found_in_one_launch(
    n_rows: int, seed: int, kind: str, odd: list[tuple[int, float]]
) -> None:
    """Some rows have tiles in which no token may come, or numbers that are none."""
    logits = random_logits(n_rows, seed, kind)
    for row, value in odd:
        logits[row % n_rows, 16 : None if value == -math.inf else 20] = value
    for row, value in odd:
        logits[row % n_rows, :16] = -math.inf if value == -math.inf else logits[row % n_rows, :16]
    counts = torch.zeros(n_rows, dtype=torch.int32, device=DEVICE)
    rows = torch.from_numpy(logits).to(DEVICE)
    for _ in range(2):  # what counts programs is as it was
        found = sampling.likeliest(rows, counts).cpu().numpy()
        assert not counts.any()
        for row, (token_id, best) in zip(logits, found, strict=True):
            np.testing.assert_equal(best, row.max())
            if math.isfinite(row.max()):
                assert token_id == row.argmax()
            elif row.max() == -math.inf:
                assert token_id == -1


# The engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo")


def requests(model: Any) -> list[Request]:
    """Requests of all kinds, whose prompts share a trunk."""
    trunk = model.tokenizer("import os\nimport sys\n\n\ndef main(argv):\n    for arg in argv:\n")
    ids = list(trunk["input_ids"])
    common = {"max_tokens": 6, "ignore_eos": True}

    class Letters:
        is_complete, end_id = False, None

        def allowed(self) -> Any:
            return np.arange(model.vocab_size) % 2 == 0

        def accept(self, token_id: int) -> None:
            assert token_id % 2 == 0

        def fork(self) -> Letters:
            return self

    return [
        Request(ids, SamplingParams(**common)),
        Request(ids + ids[:9], SamplingParams(temperature=0.8, seed=1, logprobs=2, **common)),
        Request(ids[:17], SamplingParams(temperature=1.1, top_k=9, top_p=0.9, seed=2, **common)),
        Request(ids[3:], SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, **common)),
        Request(ids, SamplingParams(temperature=0.7, min_p=0.1, guide=Letters, seed=4, **common)),
        Request(ids[:9], SamplingParams(logit_bias={65: 3.0}, **common), prompt_logprobs=2),
    ]


def outputs(model: Any, drafter: Any = None) -> tuple[dict[int, list[Any]], type]:
    """Run all requests at once; return what each was told, and the class of the runner."""
    with kv.make_tree_session("torch", kv.make_config(model.params, 2048)) as session:
        runner = model.bind(session)
        engine = Engine(runner, session.cache, model.tokenizer, drafter=drafter)
        order = {engine.submit(request): i for i, request in enumerate(requests(model))}
        told: dict[int, list[Any]] = {i: [] for i in order.values()}
        for event in engine.run():
            if isinstance(event, GeneratedToken):
                told[order[event.request_id]].append(event)
            elif isinstance(event, PromptEvent):
                told[order[event.request_id]] += event.scores
            elif isinstance(event, FinishEvent):
                assert event.error is None
    return told, type(runner)


@pytest.mark.parametrize("is_guessing", [False, True])
def test_an_engine_says_the_same_wherever_its_logits_are_sampled(
    demo: Any, is_guessing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drafter() -> Any:
        return NgramDrafter() if is_guessing else None

    wanted, plain = outputs(demo, drafter())
    monkeypatch.setattr(device, "ON_CPU", DEVICE == "cpu")
    monkeypatch.setattr(sampling, "TILE", 1024)
    there = demo if DEVICE == "cpu" else load_model("demo", device=DEVICE)
    found, kind = outputs(there, drafter())
    assert kind is not plain
    for i, of_one in wanted.items():
        assert len(found[i]) == len(of_one) >= 6
        for mine, theirs in zip(found[i], of_one, strict=True):
            assert_same(mine, theirs, 1e-4)  # without the decoder, which rounds otherwise
