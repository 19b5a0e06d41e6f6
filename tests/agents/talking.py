"""A process that says a few things to one agent, as quickly as it can.

python -m tests.agents.talking STORE AGENT WHO N [SHARED]

Prints a line per turn: what was said, and the agent in whose history it is.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kvcellar.agents import leasing
from tests.agents.fakes import manager, turn


async def talk(folder: Path, agent_id: str, who: str, n: int, shared: str | None = None) -> None:
    with manager(folder, shared=shared) as agents:
        print("open", flush=True)
        sys.stdin.readline()
        for i in range(n):
            end = await turn(agents, agent_id, f"{who} {i}")
            print(f"{who} {i}|{end.agent_id}", flush=True)


if __name__ == "__main__":
    leasing.PATIENCE_S = 0.02  # some turns go on from the newest, others become branches
    asyncio.run(talk(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:]))
