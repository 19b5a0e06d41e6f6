"""A process of its own that runs an engine inside a budget, and says how much memory it took.

python -m tests.engine.loaded FOLDER KIND MEMORY KV_DTYPE N_REQUESTS N_TOKENS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvcellar.cli.talk.session import bound_model
from kvcellar.engine import Engine, FinishEvent, Request, SamplingParams
from kvcellar.models import LoadOptions


def peak_bytes() -> int:
    """The most that this process ever had in memory, as Linux counts it (since its exec)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc/self/status")


def main(folder: str, kind: str, memory: str, kv_dtype: str, n_requests: str, n: str) -> None:
    """Load the model, run the requests, all at once, and print one object."""
    options = LoadOptions(folder, kv_dtype=kv_dtype, cache=kind)
    with bound_model(options, memory=memory, n_sequences=1000) as bound:
        budget = bound.cache.config.budget
        engine = Engine(bound.runner, bound.cache)
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        for i in range(int(n_requests)):
            prompt = tuple((7 * i + j * j) % 250 for j in range(int(n)))
            engine.submit(Request(prompt, params))
        ends: list[FinishEvent] = []
        most = 0
        for event in engine.run():
            most = max(most, budget.held_bytes)
            if isinstance(event, FinishEvent):
                ends.append(event)
        stats: Any = engine.stats()
        print(
            json.dumps(
                {
                    "limit": budget.limit_bytes,
                    "base": budget.base_bytes,
                    "reserve": budget.reserve_bytes,
                    "kv": budget.kv_bytes,
                    "most_held": most,
                    "pools": stats.cache.size_bytes,
                    "peak": peak_bytes(),
                    "tokens": [len(end.token_ids) for end in ends],
                    "errors": [repr(end.error) for end in ends if end.error],
                    "evicted": stats.evicted_tokens,
                    "preempted": stats.preemptions,
                }
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
