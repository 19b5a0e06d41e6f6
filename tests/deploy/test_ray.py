"""Two replicas under Ray Serve: agents stay where they are, and outlive the replica."""

from __future__ import annotations

import os
import signal

import pytest

from tests.deploy.deployed import deployed

pytest.importorskip("ray")

AGENTS = [f"agent-{i}" for i in range(8)]
TEXTS = ("Tell me of the sea.", "And of the wind?", "Go on.", "And then?")


@pytest.mark.slow
def test_agents_stay_with_their_replica_and_outlive_it(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    with deployed(tmp_path, "--shared", f"file://{shared}", "--dtype", "float32") as server:
        where, said = {}, {agent: [] for agent in AGENTS}

        def say(text):
            stayed = 0
            for agent in AGENTS:
                replica, answer = server.turn(agent, text)
                stayed += where.get(agent) == replica
                where[agent] = replica
                said[agent].append(answer)
            return stayed

        say(TEXTS[0])
        assert len(set(where.values())) == 2
        assert say(TEXTS[1]) == len(AGENTS)
        before = dict(where)
        assert len(server.pids()) == 2
        os.kill(server.pids()[0], signal.SIGKILL)
        say(TEXTS[2])
        moved = [agent for agent in AGENTS if where[agent] != before[agent]]
        assert 0 < len(moved) < len(AGENTS)
        assert say(TEXTS[3]) == len(AGENTS)
        for agent in AGENTS:
            assert said[agent] == said[AGENTS[0]]
            turns = server.http.get(f"/v1/agents/{agent}").json()["n_turns"]
            assert turns == len(TEXTS)
