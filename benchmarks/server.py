"""Ask what 64 clients at once cost each of them, and how much of a session sent as text is reused.

A server of its own process, on loopback. Load: one client alone, then 64 with prompts and answers
of mixed lengths, by turns; the time between two tokens of an answer is taken where the client reads
it. Replay: the recorded session of a coding agent (see ``replay.py``) against the ideal reader.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from harness import run
from replay import replay, shared_tokens
from serving import frames, serving

from kvcellar.models import load_model

N_CLIENTS = 64
CAPACITY = 32 * 1024
WORDS = ["def", "return", "import", "self", "value", "index", "token", "cache", "model", "agent"]


class Client:
    """Asks again and again; knows the time between any two tokens, and what went wrong."""

    def __init__(self, port: int, seed: int) -> None:
        """Create counts of nothing."""
        self._port = port
        self._chance = random.Random(seed)
        self.gaps_s: list[float] = []
        self.first_s: list[float] = []
        self.errors: list[str] = []
        self.answers = 0

    async def work(self, until: float) -> None:
        """Ask until the time is over; an answer that has begun is read to its end."""
        while time.perf_counter() < until:
            try:
                await self._ask()
            except (OSError, ValueError, EOFError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")

    async def _ask(self) -> None:
        chance = self._chance
        text = " ".join(chance.choices(WORDS, k=chance.choice([5, 20, 60, 150])))
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": chance.choice([8, 24, 48, 96]),
            "ignore_eos": True,
            "stream": True,
        }
        started = time.perf_counter()
        last = None
        async for data in frames(self._port, "/v1/chat/completions", body):
            if b'"content":' in data and b'"role"' not in data:
                now = time.perf_counter()
                if last is None:
                    self.first_s.append(now - started)
                else:
                    self.gaps_s.append(now - last)
                last = now
        self.answers += 1


async def load(port: int, n_clients: int, seconds: float, seed: int) -> list[Client]:
    """Let so many clients ask for so long."""
    clients = [Client(port, seed * 1000 + i) for i in range(n_clients)]
    until = time.perf_counter() + seconds
    await asyncio.gather(*(client.work(until) for client in clients))
    return clients


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure the load by turns, then the replay."""
    rounds, alone_s, crowd_s = (2, 1.5, 3.5) if quick else (4, 8.0, 30.0)
    alone: list[Client] = []
    crowd: list[Client] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as folder,
        serving(["--capacity", CAPACITY], Path(folder)) as port,
    ):
        asyncio.run(load(port, 4, 2.0, 9))  # warm
        for i in range(rounds):
            alone += asyncio.run(load(port, 1, alone_s, 100 + i))
            crowd += asyncio.run(load(port, N_CLIENTS, crowd_s, i))
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with httpx.Client(timeout=120) as client:

            def post(body: dict[str, Any]) -> dict[str, Any]:
                response = client.post(url, json=body)
                response.raise_for_status()
                return dict(response.json())

            reuse = replay(post, n_shared=shared_tokens(load_model("demo").tokenizer))
    errors = [error for client in (*alone, *crowd) for error in client.errors]
    gaps = [gap for client in crowd for gap in client.gaps_s]
    single = [gap for client in alone for gap in client.gaps_s]
    p95, p95_single = _p95(gaps), _p95(single)
    result = {
        "errors": len(errors),
        "p95_over_single": round(p95 / p95_single, 2),
        "p95_ms": round(p95 * 1e3, 2),
        "p95_single_ms": round(p95_single * 1e3, 2),
        "median_ms": round(statistics.median(gaps) * 1e3, 2),
        "median_single_ms": round(statistics.median(single) * 1e3, 2),
        "answers": sum(client.answers for client in crowd),
        "tokens_per_s": round(len(gaps) / (rounds * crowd_s), 1),
        "first_token_median_ms": round(
            statistics.median(first for client in crowd for first in client.first_s) * 1e3, 1
        ),
        "reuse_of_ideal": round(reuse.share, 4),
        "worst_step": list(reuse.worst),
    }
    print(f"{N_CLIENTS} clients, {result['answers']} answers, {len(gaps)} tokens:")
    print(f"  errors                 {result['errors']} (goal 0) {errors[:3] or ''}")
    print(
        f"  between tokens, p95    {result['p95_ms']} ms, alone {result['p95_single_ms']} ms: "
        f"{result['p95_over_single']} times (goal under 3)"
    )
    print(f"  tokens                 {result['tokens_per_s']} a second")
    print("a session of a coding agent, sent as text:")
    print(f"  reused of the ideal    {result['reuse_of_ideal']} (goal 0.95)")
    return result


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


if __name__ == "__main__":
    run(__doc__ or "", measure)
