"""Ask whether replicas under Ray do what they promise: on this machine, with the bundled model.

Two replicas on one core each, behind a gateway, with clients beside them:

- `affinity`: how many turns of agents go to the replica that has their history;
- `throughput_two_over_one`: tokens per second of both replicas over those of one alone;
- `resume_over_recompute`: how much sooner an agent goes on that another machine left in a shared
  place, at 4k tokens, than one whose history is computed again (`machines.py`): of all places that
  there are here, the one where it is least.

The same trace then runs in the simulator (`simulate.py`), with the costs that were measured here:
what it says is compared with what was seen.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import machines
from deployed import RUNNING, Answered, Clients, affinity, as_played, deployment
from harness import run
from simulate import ROUTER, simulated
from simulated import Costs
from traces import SMALL, AgentTrace, make_trace

CELLS = 40_000
"""Cells of each replica: enough for every agent of the trace."""


def seen(found: list[Answered]) -> dict[str, float]:
    """Return the figures of turns that were played."""
    first = sorted(one.first_s for one in found)
    return {
        "cached": sum(one.n_cached for one in found) / sum(one.n_prompt for one in found),
        "affinity": affinity(found),
        "first_token_s": statistics.median(first),
        "first_token_p95_s": first[int(0.95 * (len(first) - 1))],
    }


def named(trace: list[AgentTrace], mark: str) -> list[AgentTrace]:
    """Return the trace of other agents, and with other trunks."""
    return [replace(one, name=f"{mark}{one.name}", trunk=f"{mark}{one.trunk}") for one in trace]


def measure(quick: bool) -> Mapping[str, Any]:
    """Run everything on one deployment of two replicas."""
    trace = make_trace(16 if quick else 48, SMALL)
    found: dict[str, Any] = {}
    with deployment(2, "--capacity", str(CELLS)) as url:
        clients = Clients(url)
        costs = clients.costs(CELLS)
        for policy, mark in ((ROUTER, "a"), ("random", "b")):
            own = named(trace, mark)
            played = clients.play(own, "" if policy == ROUTER else policy)
            found[policy] = _compared(policy, seen(played), as_played(own, played), costs)
        found |= _throughput(clients, 3 if quick else 7)
    found["affinity"] = found[ROUTER]["seen"]["affinity"]
    resumed = machines.measure(quick, large=False)
    return found | resumed | {"resume_over_recompute": min(resumed.values())}


def _compared(
    policy: str, real: dict[str, float], trace: list[AgentTrace], costs: Costs
) -> dict[str, dict[str, float]]:
    """Print what was seen of a policy beside what is simulated."""
    on_paper = simulated(2, trace, costs, policy)
    print(f"\n{policy:24} {'seen':>8} {'simulated':>10}")
    for name, value in real.items():
        print(f"  {name:22} {value:8.3f} {on_paper[name]:10.3f}")
    return {"seen": real, "simulated": {name: on_paper[name] for name in real}}


def _throughput(clients: Clients, rounds: int) -> dict[str, float]:
    """Have one replica answer, and both, in turns.

    Whatever else the machine does has a share of the cores, and both replicas together may get no
    more of them than one: the load average stands beside the ratio.
    """
    pairs = [
        [clients.tokens_per_s(at, 2 * RUNNING, 160, is_one=is_one) for is_one in (True, False)]
        for at in range(rounds)
    ]
    ratio = statistics.median(both / one for one, both in pairs)
    for at, name in enumerate(("one replica", "two replicas")):
        print(f"{name:24} {statistics.median(pair[at] for pair in pairs):8.0f} tokens/s")
    load = os.getloadavg()[0]
    print(f"two over one             {ratio:8.2f}  (load average {load:.0f})")
    return {"throughput_two_over_one": ratio, "load_average": load}


if __name__ == "__main__":
    run(__doc__ or "", measure)
