"""Two replicas under Ray Serve: agents stay where they are, and outlive the replica."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from tests.deploy.deployed import deployed

pytest.importorskip("ray")

AGENTS = [f"agent-{i}" for i in range(60)]
"""As many of these as it takes until both replicas have some, and at least so many:"""
LEAST = 6
TEXTS = ("Tell me of the sea.", "And of the wind?", "Go on.", "And then?")


@pytest.mark.slow
def test_agents_stay_with_their_replica_and_outlive_it(tmp_path, monkeypatch):
    # Proxies take longer than Ray waits for them, as on a busy machine.
    (tmp_path / "sitecustomize.py").write_text(
        "from ray.serve._private import api, client\n\n"
        "api.HTTP_PROXY_TIMEOUT = client.HTTP_PROXY_TIMEOUT = 0.01\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
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
        for token in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "x" * 64}):
            assert server.met_by_stranger(**{"RAY_AUTH_MODE": "token"} | token) == "refused"
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_proxies_that_never_answer_are_an_error(monkeypatch):
    from ray import serve

    from kvcellar.deploy import application

    monkeypatch.setattr(application, "_PROXIES_S", 0.0)
    for starting in ({"node": "STARTING"}, {"node": "HEALTHY", "new": "STARTING"}):
        status = SimpleNamespace(proxies=starting)
        monkeypatch.setattr(serve, "status", lambda status=status: status)
        with pytest.raises(TimeoutError, match="do not answer within 0 s"):
            application._wait_for_proxies()
    for fine in ({}, {"node": "HEALTHY"}, {"node": "HEALTHY", "other": "DRAINING"}):
        status = SimpleNamespace(proxies=fine)
        monkeypatch.setattr(serve, "status", lambda status=status: status)
        application._wait_for_proxies()
