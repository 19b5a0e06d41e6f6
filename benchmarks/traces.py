"""Traces of agents: who begins when and from what, tokens of each turn, and rests between them.

Agents of one kind begin with one trunk (instructions and tools). Some turns hand work to
sub-agents, which begin with all that their parent has read. A turn begins when the one before it
has ended and the agent's tool, or its person, has answered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One turn: tokens that come in, tokens that are answered, and the rest before the next."""

    n_in: int
    n_out: int
    pause_s: float


@dataclass(frozen=True)
class AgentTrace:
    """One agent.

    Attributes:
        name: its own.
        trunk: what its history begins with: the name of a trunk, or its parent's.
        n_trunk: tokens of that.
        parent_turn: turn of its parent after which it begins; None: it has no parent.
        start_s: when it begins, counted from the trace's beginning, or from that turn's end.
        turns: what it does.
    """

    name: str
    trunk: str
    n_trunk: int
    parent_turn: int | None
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Shape:
    """Sizes of a trace; times and tokens are spread log-normally around their medians."""

    n_trunks: int
    trunk_tokens: int
    turns: int
    in_tokens: int
    out_tokens: int
    pause_s: float
    start_s: float
    sub_agents: float = 0.1
    most_tokens: int = 32_000


CODING = Shape(
    n_trunks=8,
    trunk_tokens=12_000,
    turns=12,
    in_tokens=400,
    out_tokens=150,
    pause_s=8.0,
    start_s=120.0,
)
"""Coding agents on a model of 8B: a client's instructions and tools, and tools that answer soon."""

SMALL = Shape(
    n_trunks=4,
    trunk_tokens=700,
    turns=8,
    in_tokens=60,
    out_tokens=24,
    pause_s=0.4,
    start_s=2.0,
    most_tokens=2_600,
)
"""Shape for the bundled model, short enough to be sent to two real replicas on two cores."""


def make_trace(n_agents: int, shape: Shape, seed: int = 1) -> list[AgentTrace]:
    """Make a trace; sub-agents count as agents and come behind their parents."""
    rng = random.Random(seed)
    made: list[AgentTrace] = []
    while len(made) < n_agents:
        kind = int(shape.n_trunks * rng.random() ** 2)  # some are used much more than others
        name = f"agent-{len(made)}"
        n_trunk = shape.trunk_tokens // 2 + shape.trunk_tokens * kind // shape.n_trunks
        start_s = rng.uniform(0.0, shape.start_s)
        turns = _turns(rng, shape, n_trunk, max(1, round(_around(rng, shape.turns))))
        made.append(AgentTrace(name, f"trunk-{kind}", n_trunk, None, start_s, turns))
        n_tokens = n_trunk
        for at, turn in enumerate(turns):
            n_tokens += turn.n_in + turn.n_out
            if rng.random() < shape.sub_agents:
                for _ in range(rng.randint(1, 3)):
                    own = _turns(rng, shape, n_tokens, rng.randint(1, max(1, shape.turns // 3)))
                    child = f"agent-{len(made)}"
                    made.append(AgentTrace(child, name, n_tokens, at, 0.0, own))
    return made[:n_agents]


def _turns(rng: random.Random, shape: Shape, n_before: int, n: int) -> tuple[Turn, ...]:
    """Return so many turns, fewer where the context would be full."""
    found = []
    for _ in range(n):
        n_in = max(8, round(_around(rng, shape.in_tokens)))
        n_out = max(4, round(_around(rng, shape.out_tokens)))
        n_before += n_in + n_out
        if n_before > shape.most_tokens:
            break
        found.append(Turn(n_in, n_out, _around(rng, shape.pause_s)))
    return tuple(found)


def _around(rng: random.Random, median: float) -> float:
    return median * rng.lognormvariate(0.0, 0.7)
