"""A process of its own whose agents run inside a budget, and says how much memory it took.

python -m tests.agents.hosting STORE MEMORY CAPACITY N_AGENTS N_TOKENS MODEL...

Agents take turns on the models one after the other, twice; the last line is one object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcellar.agents import AgentManager, MemoryPlan, ModelHost, ModelRegistry, open_host
from kvcellar.budget import parse_size, resident_bytes
from kvcellar.engine import EngineConfig, SamplingParams
from kvcellar.models import LoadOptions
from kvcellar.registry import load_backend
from kvcellar.store import Store, StoreConfig
from tests.agents.fakes import Eager, turn
from tests.engine.loaded import peak_bytes

CONFIG = EngineConfig(max_num_batched_tokens=128, max_num_seqs=8)
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


async def talk(agents: AgentManager, models: list[str], n_agents: int, n: int) -> list[Any]:
    ends = []
    loaded: list[list[str]] = []
    for round_ in range(2):
        for m, model in enumerate(models):
            for i in range(n_agents):
                if not round_:
                    await agents.lifecycle.create(f"{m}-{i}", model=model)
                tokens = [(7 * i + j * j) % 250 for j in range(n if not round_ else 20)]
                end = await turn(agents, f"{m}-{i}", tokens=tokens, params=PARAMS)
                assert end.finish.error is None, end.finish.error
                ends.append([end.usage.prompt_tokens, end.usage.cached_tokens])
            loaded.append(sorted(models.index(name) for name in agents.models.names))
    return [ends, loaded]


def main(folder: str, memory: str, capacity: str, n_agents: str, n: str, *models: str) -> None:
    load_backend("torch")
    plan = MemoryPlan.divide(parse_size(memory), resident_bytes())
    asked = LoadOptions(capacity=int(capacity))

    def size_of(name: str) -> int:
        return plan.size_of(replace(asked, model=name), CONFIG)

    def load(name: str) -> ModelHost:
        host = open_host(asked, model=name, memory_bytes=size_of(name), config=CONFIG)
        host.costs = Eager()  # whatever is stored is loaded
        return host

    config = StoreConfig(warm_bytes=plan.warm_bytes, queue_bytes=plan.queue_bytes)
    with Store(Path(folder), config) as store:
        registry = ModelRegistry(load, budget_bytes=plan.models_bytes, size_of=size_of)
        agents = AgentManager(store, registry)
        ends, loaded = asyncio.run(talk(agents, list(models), int(n_agents), int(n)))
        registry.close()
    print(
        json.dumps(
            {
                "limit": plan.limit_bytes,
                "process": plan.process_bytes,
                "sizes": [size_of(name) for name in models],
                "models": plan.models_bytes,
                "peak": peak_bytes(),
                "ends": ends,
                "loaded": loaded,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
