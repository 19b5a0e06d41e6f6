"""The model's own settings of sampling are the default of every protocol; a client's win."""

from __future__ import annotations

import json

import pytest

from kvcellar.agents import open_host
from kvcellar.engine import EngineService
from tests.models.tiny_checkpoints import make_checkpoint
from tests.server.live import serving

SAID = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9}
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/agents/mine/generate": {"text": "hi", "max_tokens": 3},
}


def load(path, progress):
    return open_host(path, progress=progress)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A server of a model that says how it wants to be sampled, and of one that does not."""
    folder = tmp_path_factory.mktemp("tuned")
    says, silent = make_checkpoint("llama", folder / "says"), make_checkpoint("qwen2", folder / "q")
    (says / "generation_config.json").write_text(json.dumps(SAID))
    offered = {"says": str(says), "silent": str(silent)}
    with serving(folder / "store", load=load, offered=offered) as live:
        live.post("/v1/agents", {"id": "mine"})
        yield live


@pytest.fixture
def seen(monkeypatch):
    """The settings of every request that comes to an engine."""
    params = []
    before = EngineService.submit

    async def submit(self, request, *args, **more):
        params.append(request.params)
        return await before(self, request, *args, **more)

    monkeypatch.setattr(EngineService, "submit", submit)
    return params


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.slow
def test_the_models_own_settings_hold_where_a_client_gives_none(tuned, seen, path):
    tuned.post(path, ROUTES[path])
    tuned.post(path, ROUTES[path] | {"temperature": 0})
    tuned.post(path, ROUTES[path] | {"top_p": 0.5, "top_k": 3})
    found = [(p.temperature, p.top_k, p.top_p) for p in seen]
    assert found == [(0.6, 20, 0.9), (0.0, 20, 0.9), (0.6, 3, 0.5)]


@pytest.mark.parametrize("path", [path for path in ROUTES if "agents" not in path])
def test_a_model_that_says_nothing_is_sampled_as_the_protocol_says(tuned, seen, path):
    tuned.post(path, ROUTES[path] | {"model": "silent"})
    assert [(p.temperature, p.top_k, p.top_p) for p in seen] == [(1.0, 0, 1.0)]


def test_a_response_says_what_it_was_sampled_with(tuned):
    body = ROUTES["/v1/responses"]
    said = tuned.post("/v1/responses", body)
    assert (said["temperature"], said["top_p"]) == (0.6, 0.9)
    said = tuned.post("/v1/responses", body | {"temperature": 0.1, "model": "silent"})
    assert (said["temperature"], said["top_p"]) == (0.1, 1.0)
