"""Processes whose agents talk until they are killed.

Run as a script this is a server of a model of ``MODELS``: for every line ``FOLDER SEED WHEN`` it
forks a child that opens the folder and takes turns. It prints ``open`` when all agents are stored,
``begin NAME N`` before a turn and ``done NAME N`` when its save says published, or, where WHEN is
``acknowledged``, as soon as the turn has ended, with a disk that takes its time; the server prints
``pid N`` before and ``end`` when it is dead.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.store import StoreConfig
from kvcellar.store.disk.folder import Folder
from tests.agents.fakes import PARAMS, make_host, manager, turn
from tests.engine.fakes import MIXED_PARAMS, STATE_PARAMS

NAMES = ("a", "b", "c")
CONFIG = StoreConfig(warm_bytes=1 << 20)
MODELS = {"windows": PARAMS, "states": STATE_PARAMS, "both": MIXED_PARAMS}


def loader(model: str) -> Any:
    """Load a model that hashes what it sees."""
    return partial(make_host, params=MODELS[model])


def new_tokens(name: str, i: int) -> list[int]:
    """What the i-th turn of an agent brings."""
    return [(ord(name) + 31 * i + 7 * j) % 250 for j in range(3 + i % 9)]


def slow_down(folder: Folder) -> None:
    """Let every file of the store take a while, as on a disk that much is written to."""
    write = folder.write

    def slowly(data: Any) -> Path:
        time.sleep(0.02)
        return write(data)

    folder.write = slowly  # type: ignore[method-assign]


async def talk(agents: Any, seed: int, when: str) -> None:
    rng = np.random.default_rng(seed)
    known = {info.agent_id for info in agents.directory.infos()}
    for name in set(NAMES) - known:
        await agents.lifecycle.create(name)
    agents.store.flush()
    if when == "acknowledged":
        slow_down(agents.store._folder)
    print("open\n", end="", flush=True)
    while True:
        name = NAMES[int(rng.integers(len(NAMES)))]
        i = (await agents.directory.describe(name)).n_turns
        print(f"begin {name} {i + 1}\n", end="", flush=True)
        end = await turn(agents, name, tokens=new_tokens(name, i))
        if when == "acknowledged":
            print(f"done {name} {i + 1}\n", end="", flush=True)
            continue
        if rng.random() < 0.3:
            await agents.sleep.pause(name)
        if end.save is None or end.save.wait() != "published":
            print("failed", end, flush=True)
            return
        print(f"done {name} {i + 1}\n", end="", flush=True)


def serve(model: str) -> None:
    for line in sys.stdin:
        folder, seed, when = line.split()
        pid = os.fork()
        if not pid:
            with manager(Path(folder), loader(model), CONFIG) as agents:
                asyncio.run(talk(agents, int(seed), when))
            os._exit(0)
        print(f"pid {pid}\n", end="", flush=True)
        os.waitpid(pid, 0)
        print("end\n", end="", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
