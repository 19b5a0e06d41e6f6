"""A server whose models run without torch: chats, forks, ways back, restarts, guesses, schemas.

Most tests of servers serve the bundled model, which is native as well; here are others beside it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcellar.agents import open_host
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.kernel import levels
from tests.models.test_native import OTHERS, SHAPE
from tests.server.live import Live, serving

pytestmark = pytest.mark.skipif(not levels.is_available(), reason="needs the CPU kernel")

FAMILIES = ("demo", "llama", "latents-parted", "short-convolutions-and-experts", "delta-net")
"""The bundled model; another dense one; over latents; recurrent, with experts and without."""

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "maximum": 9, "minimum": 0},
        "yes": {"type": "boolean"},
    },
    "required": ["n", "yes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: Any) -> Any:
    """Return a model of a family, with few random weights."""

    def made(family: str) -> str:
        if family == "demo":
            return family
        folder = tmp_path_factory.getbasetemp() / f"natively-{family}"
        kind, fields = OTHERS.get(family, (family, {}))
        shape = {**SHAPE, "num_hidden_layers": 3, "num_key_value_heads": 2, **fields}
        return str(folder if folder.is_dir() else write_tiny(kind, folder, **shape))

    return made


def asked(live: Live) -> list[Any]:
    """Ask a server for what its models have to do; return what they say."""
    greedy: Any = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    chat: Any = {
        "messages": [{"role": "user", "content": "import os, import os, import"}],
        **greedy,
    }
    said: list[Any] = [live.post("/v1/chat/completions", chat)["choices"]]
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
    held = live.post("/v1/chat/completions", {**chat, "max_tokens": 60, "response_format": form})
    told = held["choices"][0]["message"]["content"]
    assert {*json.loads(told)} == {"n", "yes"}
    live.post("/v1/agents", {"id": "poet"})
    turn = {"text": "A line of some length, and another one.", **greedy}
    said += [live.post("/v1/agents/poet/generate", turn)["text"] for _ in range(2)]
    live.post("/v1/agents/poet/fork", {"id": "twin", "turn": 1})
    live.post("/v1/agents/poet/rewind")
    names = ("twin", "poet")
    said += [live.post(f"/v1/agents/{name}/generate", turn)["text"] for name in names]
    assert said[-1] == said[-2] == said[2], "forked or gone back, it goes on from the same place"
    return [told, *said]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_native_model_says_is_what_torch_says(model_of, tmp_path, family):
    def loads(backend: str, speculate: str | None = None) -> Any:
        def load(path: str, progress: Any) -> Any:
            more: Any = {"capacity": 1024, "dtype": "float32", "weights": "none"}
            host = open_host(path, backend=backend, speculate=speculate, progress=progress, **more)
            assert type(host.engine.runner).__module__.startswith(f"kvcellar.backends.{backend}.")
            return host

        return load

    offered, said = {"one": model_of(family)}, []
    for backend in ("torch", "native"):
        with serving(tmp_path / backend, load=loads(backend), offered=offered) as live:
            said.append(asked(live))
    assert said[0] == said[1]
    turn = {"text": "And the last.", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    ends = []
    for backend in ("native", "torch"):  # who each goes on with what the other's process has left
        there = tmp_path / ("torch" if backend == "native" else "native")
        with serving(there, load=loads(backend), offered=offered) as live:
            ends.append(live.post("/v1/agents/poet/generate", turn)["text"])
    assert ends[0] == ends[1]
    with serving(tmp_path / "guessed", load=loads("native", "ngram"), offered=offered) as live:
        assert asked(live) == said[1], "guesses change nothing"
        assert live.engine().drafted_tokens > 0 or family != "demo"
