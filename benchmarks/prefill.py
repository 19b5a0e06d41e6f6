"""Ask whether it pays to have long prompts read by a replica that only reads.

Two replicas of the bundled model on one core each, under Ray: both do everything, or one only reads
(`--prefill 1`). Some clients take answers without a pause, each in its own conversation; another
sends prompts of 1,800 tokens that nobody holds, one after the other. Reported for each of the two:

- `gap_p50_ms`, `gap_p99_ms`, `gap_max_ms`: time between two tokens of the running answers;
- `tokens_per_s`: of these answers;
- `long_first_s`: median time to the first token of the long prompts.

`gap_p99_ratio`: the gap beside two that do everything over that beside roles; it pays above 1.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import httpx
from deployed import ANSWER_S, Clients, deployment
from harness import run

N_LONG = 1_800
CELLS = 40_000
ROLES = {"both": (2, ()), "split": (1, ("--prefill", "1"))}


class Load:
    """Clients of one deployment for some seconds."""

    def __init__(self, url: str, seconds: float, n_answers: int) -> None:
        """Prepare; nothing is asked."""
        self._clients = Clients(url)
        self._url, self._seconds, self._n_answers = url, seconds, n_answers
        self.gaps: list[float] = []
        self.firsts: list[float] = []

    async def play(self) -> None:
        """Ask until the time is over."""
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=self._url, timeout=ANSWER_S, limits=limits) as client:
            until = time.perf_counter() + self._seconds
            answers = [self._answers(client, f"talk {i}", until) for i in range(self._n_answers)]
            await asyncio.gather(*answers, self._long(client, until))

    async def _answers(self, client: httpx.AsyncClient, name: str, until: float) -> None:
        n = 0
        while time.perf_counter() < until:
            text = self._clients.text(24, f"{name} {n}")
            times = await self._tokens(client, text, 256)
            self.gaps += [later - now for now, later in pairwise(times[1:])]
            n += 1

    async def _long(self, client: httpx.AsyncClient, until: float) -> None:
        n = 0
        while time.perf_counter() < until:
            times = await self._tokens(client, self._clients.text(N_LONG, f"long {n}"), 1)
            self.firsts.append(times[1] - times[0])
            n += 1

    async def _tokens(self, client: httpx.AsyncClient, text: str, n: int) -> list[float]:
        """Return when an answer was asked for, and when each of its tokens came."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": n,
            "ignore_eos": True,
            "stream": True,
        }
        times = [time.perf_counter()]
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:500]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if any(one["delta"].get("content") for one in json.loads(line[6:])["choices"]):
                    times.append(time.perf_counter())
        return times if len(times) > 1 else [*times, time.perf_counter()]


def measure(quick: bool) -> Mapping[str, Any]:
    """Put the same load on replicas that do everything, and on roles."""
    found: dict[str, Any] = {}
    for name, (n_replicas, more) in ROLES.items():
        with deployment(n_replicas, "--capacity", str(CELLS), *more) as url:
            asyncio.run(Load(url, 3, 4).play())
            load = Load(url, 15 if quick else 60, 4)
            asyncio.run(load.play())
        gaps = sorted(load.gaps)
        found[name] = {
            "gap_p50_ms": 1e3 * gaps[len(gaps) // 2],
            "gap_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
            "gap_max_ms": 1e3 * gaps[-1],
            "tokens_per_s": len(gaps) / (15 if quick else 60),
            "long_first_s": statistics.median(load.firsts),
            "n_long": len(load.firsts),
        }
        print(f"{name:6} " + "  ".join(f"{key} {value:.4g}" for key, value in found[name].items()))
    found["gap_p99_ratio"] = found["both"]["gap_p99_ms"] / found["split"]["gap_p99_ms"]
    return found


if __name__ == "__main__":
    run(__doc__ or "", measure)
