"""Ask whether turning the store on can ever make a turn slower, and by how much.

The model of ``restore.py``; each kind of turn with a store and without one, alternating, in one
run. A talk whose every turn is saved in the background while the next goes on; an agent that comes
back from disk; and the same where the disk turns out twice as slow as computing, at its first turn
(nobody knows of it yet) and later (it was measured). Ratios above 1 say that the store costs time.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import run
from restore import agents_of, make_model, turn

from kvcellar.agents import AgentManager, ModelHost, Turn, TurnEnd, open_host
from kvcellar.engine import SamplingParams
from kvcellar.hosting.costs import START_S_PER_BYTE
from kvcellar.store import Store

ANSWER = SamplingParams(max_tokens=16, ignore_eos=True)


@contextmanager
def without_store() -> Iterator[None]:
    """Have managers save nothing and find nothing meanwhile, as if there were no store."""
    from kvcellar.agents import publishing, turn
    from kvcellar.agents.kv.residence import BroughtBack

    async def nothing(*_: Any, **__: Any) -> BroughtBack:
        return BroughtBack(0)

    bring, publish = turn.bring_back, publishing.Publisher._publish
    turn.bring_back = nothing
    publishing.Publisher._publish = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        turn.bring_back = bring
        publishing.Publisher._publish = publish  # type: ignore[method-assign]


@contextmanager
def slow_disk(seconds_per_block: float) -> Iterator[None]:
    """Have every block take so much longer to load."""
    load = Store.load

    def slow(self: Store, *args: Any) -> Iterator[Any]:
        for loaded in load(self, *args):
            time.sleep(seconds_per_block)
            yield loaded

    Store.load = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        Store.load = load  # type: ignore[method-assign]


async def talk(agents: AgentManager, agent_id: str, seed: int, n_turns: int) -> float:
    """Return the seconds of a conversation, from its first prompt to its last token."""
    await agents.lifecycle.create(agent_id)
    started = time.perf_counter()
    for i in range(n_turns):
        tokens = [(seed * 131 + i * 977 + j * 31) % 8000 for j in range(64)]
        async for event in agents.turns.generate(Turn(agent_id, tokens=tokens, params=ANSWER)):
            if isinstance(event, TurnEnd):
                break
    return time.perf_counter() - started


async def come_back(agents: AgentManager, agent_id: str) -> tuple[float, TurnEnd]:
    """Return the seconds to the first token on a history that is in no cell; go back to there."""
    first, end = await turn(agents, agent_id, [7])
    await agents.lifecycle.rewind(agent_id, turn=1)
    await agents.sleep.pause(agent_id)
    return first, end


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure all kinds of turns."""
    n, n_rounds, n_turns = (1024, 3, 5) if quick else (4096, 5, 12)
    with tempfile.TemporaryDirectory(prefix="kvcellar-tiers-") as name:
        root = Path(name)
        os.environ["KVCELLAR_HOME"] = str(root / "home")
        make_model(root / "model")
        host = open_host(str(root / "model"), capacity=2 * n + 2048)
        try:
            found = {"talk_ratio": measure_talk(root / "talk", host, n_rounds, n_turns)}
            found |= measure_return(root / "return", host, n, n_rounds)
        finally:
            host.close()
    return found | {"worst_ratio": max(found.values()), "tokens": n}


def measure_talk(folder: Path, host: ModelHost, n_rounds: int, n_turns: int) -> float:
    """Measure saving beside the next turn, over not saving."""
    ratios = []
    with agents_of(folder, host, 1 << 30) as agents:
        for i in range(n_rounds + 1):
            with without_store():
                off = asyncio.run(talk(agents, f"off-{i}", 2 * i, n_turns))
            on = asyncio.run(talk(agents, f"on-{i}", 2 * i + 1, n_turns))
            agents.store.flush()
            if i:  # the first is to warm up
                ratios.append(on / off)
    ratio = statistics.median(ratios)
    print(f"a talk of {n_turns} turns, saved beside: {ratio:.3f} of the time without a store")
    return round(ratio, 3)


def measure_return(folder: Path, host: ModelHost, n: int, n_rounds: int) -> dict[str, float]:
    """Measure how an agent comes back, from the disk as it is and from a very slow one."""
    prompt = [(i * 7919 + n) % 8000 for i in range(n)]
    ratios: dict[str, list[float]] = {"good": [], "slow_first": [], "slow_known": []}
    with agents_of(folder, host, 0) as agents:
        asyncio.run(agents.lifecycle.create("a"))
        asyncio.run(turn(agents, "a", prompt))
        asyncio.run(agents.sleep.pause("a"))
        with without_store():
            asyncio.run(come_back(agents, "a"))  # to warm up
        for _ in range(n_rounds):
            for kind in ratios:
                with without_store():
                    off, _end = asyncio.run(come_back(agents, "a"))
                per_block = 0.0 if kind == "good" else 2 * off * 256 / n
                if kind != "slow_known":  # as before anything was measured
                    host.costs.s_per_byte.update(START_S_PER_BYTE)
                with slow_disk(per_block):
                    on, _end = asyncio.run(come_back(agents, "a"))
                ratios[kind].append(on / off)
    found = {}
    for kind, values in ratios.items():
        found[f"{kind}_disk_ratio"] = round(statistics.median(values), 3)
        print(f"coming back from a {kind} disk: {statistics.median(values):.3f} of computing again")
    return found


if __name__ == "__main__":
    run(__doc__ or "", measure)
