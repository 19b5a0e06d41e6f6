"""The simulator of replicas: its engine against a loop of single steps, and its policies."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.deploy.routing import RoutingPolicy
from kvcellar.prefix.digest import CHUNK

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def simulate():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("simulate")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def simulated(simulate):
    return sys.modules["simulated"]


def steps_of(costs, jobs):
    """When each job of ``(to read, to write)`` has ended, step by step, all of them running."""
    left = [[float(n), float(out)] for n, out in jobs]
    ended, now = [0.0] * len(jobs), 0.0
    while not all(ended):
        writing = [one for one in left if not one[0] and one[1]]
        reading = next((one for one in left if one[0]), None)
        piece = 0.0
        if reading is not None:
            piece = min(reading[0], costs.beside if writing else costs.piece)
        now += costs.step_s + costs.sequence_s * len(writing) + piece / costs.read_per_s
        for one in writing:
            one[1] -= 1
        if reading is not None:
            reading[0] -= piece
        for at, one in enumerate(left):
            if not any(one) and not ended[at]:
                ended[at] = now
    return ended


@given(jobs=st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 200)), min_size=1, max_size=6))
@settings(max_examples=40)
def test_stretches_take_as_long_as_the_steps_that_they_stand_for(simulated, jobs):
    costs = replace(simulated.CARD, tier_bytes_per_s=0.0, running=8)
    replica = simulated.Replica("alone", costs)
    for at, (to_read, to_write) in enumerate(jobs):
        replica.take(simulated.Job(str(at), (), (), to_read, to_write, 0, 0.0))
    ended = {}
    while replica.load:
        for done in replica.advance(replica.next_s()):
            ended[int(done.agent)] = replica.now_s
    step_s = costs.step_s + costs.sequence_s * len(jobs) + costs.piece / costs.read_per_s
    for at, want in enumerate(steps_of(costs, jobs)):
        assert ended[at] == pytest.approx(want, rel=0.02, abs=2 * len(jobs) * step_s)


def test_what_is_not_in_a_cache_any_more_is_read_again_and_a_trunk_outlives_its_ends(simulated):
    costs = replace(simulated.CARD, cells=6 * CHUNK, tier_bytes_per_s=0.0)
    replica = simulated.Replica("small", costs)

    def ask(agent, *chunks):
        job = simulated.Job(agent, chunks, chunks, len(chunks) * CHUNK + 1, 1, 0, replica.now_s)
        replica.take(job)
        while replica.load:
            replica.advance(replica.next_s())
        return job.n_reused

    assert ask("a", 1, 2, 3, 4) == 0
    assert ask("b", 1, 2, 5, 6) == 2 * CHUNK
    assert ask("c", 1, 2, 7, 8) == 2 * CHUNK
    assert ask("b", 1, 2, 5, 6) == 4 * CHUNK, "what was used last is there"
    assert ask("a", 1, 2, 3, 4) == 2 * CHUNK, "what was used longest ago is gone, but its trunk"


def test_what_the_tier_has_is_fetched_where_that_is_faster(simulated):
    chunks = tuple(range(100))
    for speed, is_fetched in ((1e9, True), (1e6, False)):
        costs = replace(simulated.CARD, tier_bytes_per_s=speed)
        replica = simulated.Replica("far", costs)
        job = simulated.Job("a", chunks, chunks, 6401, 1, 6400, 0.0)
        replica.take(job)
        while replica.load:
            replica.advance(replica.next_s())
        assert job.n_restored == (6400 if is_fetched else 0)
        assert replica.fetched_bytes == job.n_restored * costs.kv_bytes


def test_every_turn_is_answered_once_whatever_the_policy(simulate):
    trace = simulate.make_trace(60, replace(simulate.CODING, turns=4))
    n_turns = sum(len(one.turns) for one in trace)
    for name, choose in simulate.POLICIES.items():
        sim = simulate.Simulation(4, trace, simulate.CARD, choose)
        out = sim.run()
        assert len(out.first_s) == sim.n_turns == n_turns, name
        assert out.reused + out.fetched <= out.known <= out.prompts
        assert all(load == 0 for load in sim.loads.values())


def test_affinity_keeps_agents_where_they_are_and_reads_less_than_chance(simulate):
    trace = simulate.make_trace(120, replace(simulate.CODING, turns=4))
    rows = {name: simulate.simulated(6, trace, simulate.CARD, name) for name in simulate.POLICIES}
    ours, chance = rows[simulate.ROUTER], rows["random"]
    assert ours["affinity"] > 0.95 > chance["affinity"]
    assert ours["hit_rate"] > max(chance["hit_rate"], rows["own replica"]["hit_rate"])
    assert ours["fetched_gb"] < chance["fetched_gb"] / 5


def test_agents_that_begin_alike_all_at_once_do_not_pile_up_where_their_trunk_is(simulate):
    shape = replace(simulate.CODING, n_trunks=1, turns=3, start_s=1.0, pause_s=0.1)
    trace = simulate.make_trace(80, shape)
    ended, used = [], []
    for policy in (None, RoutingPolicy(busy_at=1_000_000, request_tokens=0)):
        sim = simulate.Simulation(4, trace, simulate.CARD, simulate.by_prefix)
        sim.policy = policy or sim.policy
        ended.append(sim.run().ended_s)
        used.append(sum(one.busy_s > 0 for one in sim.replicas.values()))
    assert used == [4, 1], "without bounds all of them go to one"
    assert ended[0] < 0.6 * ended[1]
