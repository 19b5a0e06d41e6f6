"""Two replicas under Ray Serve: agents stay where they are, and outlive the replica."""

from __future__ import annotations

import os
import signal

import pytest

from tests.deploy.deployed import deployed

pytest.importorskip("ray")

AGENTS = [f"agent-{i}" for i in range(60)]
"""As many of these as it takes until both replicas have some, and at least so many:"""
LEAST = 6
TEXTS = ("Tell me of the sea.", "And of the wind?", "Go on.", "And then?")


@pytest.mark.slow
def test_agents_stay_with_their_replica_and_outlive_it(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    with deployed(tmp_path, "--shared", f"file://{shared}", "--dtype", "float32") as server:
        where, said = {}, {}

        def say(text, agents):
            stayed = 0
            for agent in agents:
                replica, answer = server.turn(agent, text)
                stayed += where.get(agent) == replica
                where[agent] = replica
                said.setdefault(agent, []).append(answer)
            return stayed

        for agent in AGENTS:
            say(TEXTS[0], [agent])
            if len(where) >= LEAST and len(set(where.values())) == 2:
                break
        agents = list(where)
        assert say(TEXTS[1], agents) == len(agents)
        before = dict(where)
        assert len(server.pids()) == 2
        os.kill(server.pids()[0], signal.SIGKILL)
        say(TEXTS[2], agents)
        moved = [agent for agent in agents if where[agent] != before[agent]]
        assert 0 < len(moved) < len(agents)
        assert say(TEXTS[3], agents) == len(agents)
        for agent in agents:
            assert said[agent] == said[agents[0]]
            turns = server.http.get(f"/v1/agents/{agent}").json()["n_turns"]
            assert turns == len(TEXTS)
