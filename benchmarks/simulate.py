"""Ask what a policy of routing is worth to agents on up to a thousand replicas, on paper.

Traces of agents run on simulated replicas (`simulated.py`): time is computed, and the router is the
real one, of `kvcellar deploy`: its knowledge of who holds what, its digests, its decision. Other
policies stand beside it: at random, round robin, the least loaded, and the agent's own replica
whatever waits there. `docs/scale.md` says what came out, and how a real run compares.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import xxhash
from harness import run
from simulated import CARD, Costs, Job, Replica
from traces import CODING, AgentTrace, make_trace

from kvcellar.deploy.routing import ReplicaHoldings, Report, RoutingPolicy, Wanted, agent_hash, rank
from kvcellar.prefix import PrefixDigest
from kvcellar.prefix.digest import CHUNK, MOST

AGENTS = 40
"""Agents for each replica."""

REPORT_S = 5.0
"""Seconds between two reports of a replica: a real one reports each second; this is quicker."""

ROUTER = "prefix and spill-over"

Choose = Callable[["Simulation", Wanted], str]


def at_random(sim: Simulation, wanted: Wanted) -> str:
    """Choose whoever comes up."""
    return sim.rng.choice(sim.names)


def round_robin(sim: Simulation, wanted: Wanted) -> str:
    """Choose one after the other."""
    return sim.names[sim.n_turns % len(sim.names)]


def least_loaded(sim: Simulation, wanted: Wanted) -> str:
    """Choose one of those that have least to do."""
    least = min(sim.loads.values())
    return sim.rng.choice([name for name, load in sim.loads.items() if load == least])


def own_replica(sim: Simulation, wanted: Wanted) -> str:
    """Choose the agent's own replica, however much waits there."""
    return sim.holdings.holder(wanted.agent) or least_loaded(sim, wanted)


def by_prefix(sim: Simulation, wanted: Wanted) -> str:
    """Choose as the router of `kvcellar deploy` does."""
    return rank(wanted, sim.holdings, sim.loads, sim.policy)[0]


POLICIES: Mapping[str, Choose] = {
    "random": at_random,
    "round robin": round_robin,
    "least loaded": least_loaded,
    "own replica": own_replica,
    ROUTER: by_prefix,
}


@dataclass
class _Agent:
    """One agent at one moment: the hashes of its history's chunks, and where it stands."""

    trace: AgentTrace
    chunks: list[int] = field(default_factory=list)
    length: int = 0
    at: int = 0
    where: str = ""


@dataclass
class Outcome:
    """Sums over all turns of a run, in tokens and seconds."""

    known: int = 0
    reused: int = 0
    fetched: int = 0
    prompts: int = 0
    stayed: int = 0
    returned: int = 0
    waits_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    decided_s: float = 0.0
    ended_s: float = 0.0
    busy: float = 0.0
    fetched_bytes: int = 0

    def as_row(self) -> dict[str, float]:
        """Return the figures of a run."""
        ordered = sorted(self.first_s)
        return {
            "hit_rate": self.reused / self.known,
            "cached": (self.reused + self.fetched) / self.prompts,
            "affinity": self.stayed / max(1, self.returned),
            "recomputed": (self.known - self.reused - self.fetched) / self.known,
            "queued_s": statistics.fmean(self.waits_s),
            "first_token_s": statistics.median(ordered),
            "first_token_p95_s": ordered[int(0.95 * (len(ordered) - 1))],
            "fetched_gb": self.fetched_bytes / 1e9,
            "busy": self.busy,
            "ended_s": self.ended_s,
            "decision_us": 1e6 * self.decided_s / len(ordered),
        }


class Simulation:
    """A trace on so many replicas under one policy."""

    def __init__(
        self,
        n_replicas: int,
        trace: list[AgentTrace],
        costs: Costs,
        choose: Choose,
        *,
        seed: int = 1,
    ) -> None:
        """Prepare a run."""
        self.rng = random.Random(seed)
        self.names = [f"replica-{n}" for n in range(n_replicas)]
        self.replicas = {name: Replica(name, costs) for name in self.names}
        self.loads = dict.fromkeys(self.names, 0)
        self.policy = RoutingPolicy(busy_at=costs.running)
        self.holdings = ReplicaHoldings()
        self.holdings.keep(self.names)
        self.n_turns = 0
        self.outcome = Outcome()
        self._choose, self._door_s = choose, costs.door_s
        self._agents = {one.name: _Agent(one) for one in trace}
        self._children: dict[tuple[str, int], list[str]] = {}
        self._jobs: dict[int, tuple[Job, float]] = {}
        self._computed: set[int] = set()
        self._served: dict[str, dict[str, int]] = {name: {} for name in self.names}
        self._versions = dict.fromkeys(self.names, 0)
        self._events: list[tuple[float, int, str, str, int]] = []
        self._n_events = 0
        self._n_left = len(trace)
        for one in trace:
            if one.parent_turn is None:
                self._push(one.start_s, "turn", one.name)
            else:
                self._children.setdefault((one.trunk, one.parent_turn), []).append(one.name)

    def run(self) -> Outcome:
        """Run to the last turn's end."""
        if self._choose is by_prefix:
            for n, name in enumerate(self.names):
                self._push(REPORT_S * (1 + n / len(self.names)), "report", name)
        while self._events and self._n_left:
            now, _, kind, name, version = heapq.heappop(self._events)
            if kind == "turn":
                self._ask(now, self._agents[name])
            elif kind == "report":
                self._report(now, name)
            elif version == self._versions[name]:
                self._move(now, name)
        out, n = self.outcome, len(self.names)
        out.busy = sum(one.busy_s for one in self.replicas.values()) / n / max(1e-9, out.ended_s)
        out.fetched_bytes = sum(one.fetched_bytes for one in self.replicas.values())
        return out

    def _push(self, at_s: float, kind: str, name: str, version: int = 0) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (at_s, self._n_events, kind, name, version))

    def _ask(self, now: float, agent: _Agent) -> None:
        """Send an agent's next turn to a replica."""
        if not agent.trace.turns:
            self._n_left -= 1
            return
        if not agent.at:
            self._begin(agent)
        turn, out = agent.trace.turns[agent.at], self.outcome
        n_prompt = agent.length + turn.n_in
        prompt = self._chunks(agent, n_prompt)
        known = agent.length if agent.at else self._known(prompt)
        job = Job(
            agent.trace.name,
            prompt,
            self._chunks(agent, n_prompt + turn.n_out),
            n_prompt,
            turn.n_out,
            known,
            now,
        )
        is_known = bool(self.holdings.holder(job.agent))  # the gateway reads no prompt then
        wanted = Wanted(job.agent) if is_known else Wanted(job.agent, prompt, n_prompt)
        begun = time.perf_counter()
        name = self._choose(self, wanted)
        out.decided_s += time.perf_counter() - begun
        self.holdings.sent(wanted, name, now)
        self.n_turns += 1
        out.returned += bool(agent.where)
        out.stayed += agent.where == name
        agent.where = name
        self._served[name][job.agent] = int(now)
        self._move(now, name, job)

    def _begin(self, agent: _Agent) -> None:
        """Give an agent what it begins with: a trunk, or all that its parent has read by now."""
        one = agent.trace
        agent.length, n = one.n_trunk, one.n_trunk // CHUNK
        if one.parent_turn is None:
            agent.chunks = [xxhash.xxh64_intdigest(f"{one.trunk} {at}".encode()) for at in range(n)]
        else:
            agent.chunks = self._agents[one.trunk].chunks[:n]

    def _chunks(self, agent: _Agent, n_tokens: int) -> tuple[int, ...]:
        """Return the hashes of an agent's first tokens; what it has not said yet is its own."""
        for at in range(len(agent.chunks), n_tokens // CHUNK):
            agent.chunks.append(xxhash.xxh64_intdigest(f"{agent.trace.name} {at}".encode()))
        return tuple(agent.chunks[: n_tokens // CHUNK])

    def _known(self, prompt: tuple[int, ...]) -> int:
        """Return how many of a prompt's tokens anybody has computed: what could be reused."""
        gap = (n for n, one in enumerate(prompt) if one not in self._computed)
        return CHUNK * next(gap, len(prompt))

    def _move(self, now: float, name: str, job: Job | None = None) -> None:
        """Move a replica on to now, hand it a job, and note when it is to be looked at again."""
        one = self.replicas[name]
        for done in one.advance(now):
            self._end(now, done)
        if job is not None:
            one.take(job)
        self.loads[name] = one.load
        self._versions[name] += 1
        if one.load:
            self._push(one.next_s(), "replica", name, self._versions[name])

    def _end(self, now: float, job: Job) -> None:
        """Count a turn that has ended, and have its agent and its sub-agents go on."""
        agent, out = self._agents[job.agent], self.outcome
        self._computed.update(job.history)
        out.known += job.n_known
        out.prompts += job.n_prompt
        out.reused += min(job.n_known, job.n_reused)
        out.fetched += job.n_restored
        out.waits_s.append(job.started_s - job.arrived_s)
        out.first_s.append(self._door_s + job.answered_s - job.arrived_s)
        out.ended_s = now
        agent.length = job.n_prompt + job.n_out
        for child in self._children.get((job.agent, agent.at), ()):
            self._push(now, "turn", child)
        turn = agent.trace.turns[agent.at]
        agent.at += 1
        if agent.at < len(agent.trace.turns):
            self._push(now + self._door_s + turn.pause_s, "turn", job.agent)
        else:
            self._n_left -= 1

    def _report(self, now: float, name: str) -> None:
        """Have a replica report what it holds."""
        held = np.array(list(islice(reversed(self.replicas[name].held), MOST)), dtype=np.uint64)
        digest = PrefixDigest(CHUNK, int(1e6 * now), np.unique(held))
        served = [[agent_hash(agent), at] for agent, at in self._served[name].items()]
        agents = np.array(served, dtype=np.uint64).reshape(-1, 2)
        self.holdings.learn(name, Report(digest, agents), now)
        self._push(now + REPORT_S, "report", name)


def simulated(
    n_replicas: int, trace: list[AgentTrace], costs: Costs, policy: str
) -> dict[str, float]:
    """Run a trace under a policy and return its figures."""
    return Simulation(n_replicas, trace, costs, POLICIES[policy]).run().as_row()


def measure(
    quick: bool, replicas: str, agents: int, policies: str, tier_gb_per_s: float
) -> Mapping[str, Any]:
    """Compare the policies on more and more replicas."""
    costs = replace(CARD, tier_bytes_per_s=1e9 * tier_gb_per_s)
    counts = [int(n) for n in replicas.split(",") if n] or ([2, 10] if quick else [10, 100])
    shape = replace(CODING, turns=6) if quick else CODING
    found: dict[str, Any] = {}
    for n in counts:
        print(f"\n{n} replicas, {n * agents} agents")
        print(f"{'':22}  hits  own   again  queued  first  (p95)   GB     busy  a decision")
        trace = make_trace(agents * n, shape)
        for name in policies.split(","):
            row = simulated(n, trace, costs, name)
            found[f"{n} {name}"] = {key: round(value, 4) for key, value in row.items()}
            print(
                f"{name:22}  {row['hit_rate']:4.0%}  {row['affinity']:4.0%}  "
                f"{row['recomputed']:4.0%}  {row['queued_s']:5.2f} s {row['first_token_s']:5.2f} "
                f"{row['first_token_p95_s']:6.2f} s {row['fetched_gb']:7.0f}  {row['busy']:4.0%}  "
                f"{row['decision_us']:6.0f} us",
                flush=True,
            )
    return found


def add_options(parser: ArgumentParser) -> None:
    """Add what is compared."""
    parser.add_argument("--replicas", default="", help="numbers of replicas, with commas between")
    parser.add_argument("--agents", type=int, default=AGENTS, help="agents for each replica")
    parser.add_argument(
        "--tier-gb-per-s",
        type=float,
        default=CARD.tier_bytes_per_s / 1e9,
        help="what a replica fetches from the shared tier; 0: there is none",
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help="those to compare")


if __name__ == "__main__":
    run(__doc__ or "", measure, add_options)
