"""Ask what a turn pays for being on disk, as tokens and messages, before its end is told.

Turns of 300 tokens and two messages behind histories of several lengths, one after the other.
Beside it, what the disk takes for one synchronised write of 4 KiB: no promise can cost less. The
first turn after a start is apart: it has the whole history to look at once.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import run

from kvcellar.agents.publishing import Publisher
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.views import TurnRecord
from kvcellar.history import History
from kvcellar.store import ModelKey, RowLayout, Store
from kvcellar.types import LayerGroup

N_NEW = 300
KEY = ModelKey("weights", RowLayout((LayerGroup((0,), 1, 8, 8),), "float32"))


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure histories of each length."""
    n_turns = 40 if quick else 200
    lengths = (1000, 20_000) if quick else (1000, 20_000, 100_000)
    with tempfile.TemporaryDirectory(prefix="kvcellar-durable-", dir=Path.cwd()) as name:
        disk_ms = measure_disk(Path(name), n_turns)
        print(f"one synchronised write of 4 KiB: {disk_ms:.2f} ms")
        found: dict[str, Any] = {"disk_ms": round(disk_ms, 2)}
        with Store(Path(name) / "store") as store:
            for n in lengths:
                first_ms, times = asyncio.run(measure_turns(store, n, n_turns))
                median, most = statistics.median(times), sorted(times)[int(0.95 * len(times))]
                found[f"turn_{n}_ms"] = round(median, 2)
                found[f"turn_{n}_p95_ms"] = round(most, 2)
                found[f"first_{n}_ms"] = round(first_ms, 2)
                print(
                    f"a turn behind {n:>6} tokens: {median:.2f} ms, 95 of 100 within {most:.2f}; "
                    f"the first {first_ms:.2f}"
                )
    return found


def measure_disk(folder: Path, n: int) -> float:
    """Return the median milliseconds of a small write and its synchronisation."""
    fd = os.open(folder / "plain", os.O_CREAT | os.O_WRONLY, 0o600)
    times = []
    for _ in range(n):
        started = time.perf_counter()
        os.write(fd, bytes(4096))
        os.fdatasync(fd)
        times.append(1e3 * (time.perf_counter() - started))
    os.close(fd)
    return statistics.median(times)


async def measure_turns(store: Store, n: int, n_turns: int) -> tuple[float, list[float]]:
    """Return milliseconds of the first turn behind so many tokens, and of those that follow."""
    publisher = Publisher(store)
    agent = AgentRecord(f"agent-{n}", "model", KEY)
    agent.tokens = History(range(n))
    agent.messages = tuple(message(i) for i in range(n // 150))
    agent.advance()
    times = []
    for i in range(n_turns + 1):
        at, n_messages = len(agent.tokens), len(agent.messages) + 1
        agent.tokens = History((*agent.tokens, *range(i, i + N_NEW)))
        agent.messages = (*agent.messages, message(2 * i), message(2 * i + 1))
        new = TurnRecord(at, at + 100, len(agent.tokens), n_messages, "stop")
        agent.turns = (*agent.turns, new)
        agent.advance()
        started = time.perf_counter()
        await publisher.make_durable(agent)
        times.append(1e3 * (time.perf_counter() - started))
    return times[0], times[1:]


def message(i: int) -> dict[str, str]:
    """Write a message of about 150 tokens."""
    return {"role": "assistant" if i % 2 else "user", "content": f"word {i} of it " * 60}


if __name__ == "__main__":
    run(__doc__ or "", measure)
