"""Killed at any instruction, an agent is at its last state or the one before."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from tests.agents.crashing import CONFIG, MODELS, NAMES, loader, new_tokens
from tests.agents.fakes import BLOCK_TOKENS, manager, oracle, run, tokens_of, turn
from tests.processes import started
from tests.store.fakes import QUICK

N_KILLS = int(os.environ.get("KVCELLAR_KILLS", "20"))


def states_of(name: str, n: int, model: str = "windows") -> list[tuple[int, ...]]:
    """The history of an agent that is never interrupted, after each of its turns."""
    states: list[tuple[int, ...]] = [()]
    for i in range(n):
        tokens = [*states[-1], *new_tokens(name, i)]
        states.append((*tokens, *oracle(tokens, 6, MODELS[model])))
    return states


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.slow
def test_agents_that_were_killed_go_on_as_if_they_had_not_been(model: str) -> None:
    rng = np.random.default_rng(11)
    with (
        started("tests.agents.crashing", model) as process,
        tempfile.TemporaryDirectory(dir=QUICK) as name,
    ):
        folder = Path(name)
        done = dict.fromkeys(NAMES, 0)
        begun = dict.fromkeys(NAMES, 0)
        for kill in range(N_KILLS):
            process.stdin.write(f"{folder} {kill} published\n")
            process.stdin.flush()
            pid = int(process.stdout.readline().split()[1])
            assert process.stdout.readline() == "open\n"
            n_turns = int(rng.integers(4))  # however slow the machine is, so many are over
            is_killed = False
            for line in iter(process.stdout.readline, "end\n"):
                word, agent_id, n = line.split()
                assert word in ("begin", "done"), line
                (begun if word == "begin" else done)[agent_id] = int(n)
                n_turns -= word == "done"
                if n_turns <= 0 and not is_killed:
                    time.sleep(float(rng.exponential(0.01)))
                    os.kill(pid, signal.SIGKILL)
                    is_killed = True
            if kill % 10 and kill + 1 < N_KILLS:
                continue
            with manager(folder, loader(model), CONFIG) as agents:
                for agent_id in NAMES:
                    n = run(agents.directory.describe(agent_id)).n_turns
                    assert done[agent_id] <= n <= begun[agent_id]
                    want = states_of(agent_id, n + 1, model)
                    assert tokens_of(agents, agent_id) == want[n]
                    end = run(turn(agents, agent_id, tokens=new_tokens(agent_id, n)))
                    assert tokens_of(agents, agent_id) == want[n + 1]
                    n_owed = BLOCK_TOKENS  # less than a block waits until the engine rests
                    published = want[done[agent_id]]  # of a turn behind that the KV may follow
                    if len(published) > 20 + n_owed:
                        assert end.usage.cached_tokens >= len(published) - 1 - n_owed
                    done[agent_id] = begun[agent_id] = n + 1
        assert sum(done.values()) > N_KILLS
