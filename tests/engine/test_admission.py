"""Who may run beside others where slots are few: not at the cost of what all of them begin with."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcellar.engine.config import EngineConfig
from kvcellar.engine.engine import Engine
from kvcellar.engine.requests.request import FinishEvent, Request
from kvcellar.engine.sampler.sampling import SamplingParams
from tests.engine.fakes import STATE_PARAMS, ByteTokenizer, HashRunner, make_cache
from tests.engine.test_engine import nothing_is_left, plain_loop

N_AGENTS = 8
TRUNK = 240


class TimedRunner(HashRunner):
    """A model whose forwards take some seconds, and one more for each token."""

    def __init__(self, cache: Any, forward_s: float) -> None:
        super().__init__(cache, ByteTokenizer.vocab_size)
        self.forward_s, self.now = forward_s, 0.0

    def forward(self, token_ids: Any, positions: Any, rows: Any = None) -> Any:
        self.now += self.forward_s + len(token_ids)
        return super().forward(token_ids, positions, rows)


def timed_engine(n_slots: int, forward_s: float = 10.0) -> Engine:
    runner = TimedRunner(make_cache("seq", 4000, STATE_PARAMS, n_slots=n_slots), forward_s)
    config = EngineConfig(max_num_batched_tokens=64)
    return Engine(runner, runner.cache, config=config, clock=lambda: runner.now)


class Agents:
    """Eight agents on one trunk that ask at the same time, turn by turn."""

    def __init__(self, engine: Engine, n_answer: int = 6) -> None:
        self.engine = engine
        self.params = SamplingParams(max_tokens=n_answer, ignore_eos=True)
        self.chance = random.Random(5)
        trunk = self.words(TRUNK)
        self.histories = [(*trunk, *self.words(4)) for _ in range(N_AGENTS)]
        self.most_running = self.n_turns = self.reused = 0

    def words(self, n: int) -> list[int]:
        return [self.chance.randrange(256) for _ in range(n)]

    def turn(self) -> bool:
        """Let all ask and be answered; return whether they began in their order."""
        ids = [
            self.engine.submit(Request(history, self.params, snapshots_at=(len(history) - 1,)))
            for history in self.histories
        ]
        ends: dict[int, FinishEvent] = {}
        began: list[int] = []
        while not self.engine.is_idle:
            events = self.engine.step()
            ends |= {e.request_id: e for e in events if isinstance(e, FinishEvent)}
            running = [sequence.request_id for sequence in self.engine.scheduler.running]
            began += [request_id for request_id in running if request_id not in began]
            self.most_running = max(self.most_running, self.engine.stats().running)
        for i, request_id in enumerate(ids):
            usage = ends[request_id].usage
            assert usage is not None
            self.reused += usage.cached_tokens
            self.n_turns += 1
            self.histories[i] = (*self.histories[i], *ends[request_id].token_ids, *self.words(4))
        return began == ids


@pytest.mark.parametrize("n_slots", [8, 10, 12, 16, 24])
def test_agents_on_one_trunk_compute_it_once_however_few_the_slots(n_slots):
    agents = Agents(timed_engine(n_slots))
    for _ in range(4):
        assert agents.turn(), "none overtook"
    assert agents.reused >= (agents.n_turns - 1) * TRUNK
    assert agents.most_running >= n_slots // 4
    nothing_is_left(agents.engine)


def test_with_slots_for_all_of_them_all_run_at_once():
    agents = Agents(timed_engine(64))
    for _ in range(2):
        agents.turn()
    assert agents.most_running == N_AGENTS


def test_where_long_answers_cost_more_than_the_trunk_as_many_run_as_there_are_slots_for():
    agents = Agents(timed_engine(8), n_answer=90)
    for _ in range(2):
        agents.turn()
    assert agents.most_running == 4


def test_requests_that_share_nothing_run_beside_each_other_on_few_slots():
    engine = timed_engine(8)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for turn in range(2):
        prompts = [(i, turn, *range(10)) for i in range(4)]
        for prompt in prompts:
            engine.submit(Request(prompt, params))
        most = 0
        while not engine.is_idle:
            engine.step()
            most = max(most, engine.stats().running)
    assert most == 4


def test_who_waits_for_a_trunk_to_stay_is_let_in_before_a_long_answer_ends():
    engine = timed_engine(4)
    trunk = tuple(i % 256 for i in range(TRUNK))
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.generate(Request((*trunk, 1), short, snapshots_at=(TRUNK,)))
    long = engine.submit(Request((9, 9, 9), SamplingParams(max_tokens=400, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    prompt = (7, 7, 7, 7)
    waits = engine.submit(Request(prompt, SamplingParams(max_tokens=60, ignore_eos=True)))
    engine.step()
    assert engine.stats().waiting == 1, "the trunk is worth more than two tokens side by side"
    ends = [event for event in engine.run() if isinstance(event, FinishEvent)]
    assert [end.request_id for end in ends] == [waits, long]
    want = plain_loop(prompt, SamplingParams(max_tokens=60, ignore_eos=True), STATE_PARAMS)
    assert ends[0].token_ids == want.token_ids
    nothing_is_left(engine)
