"""Adapters over HTTP: models of their own, each with its parent, in one engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.agents import Hosting
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.models import LoadOptions
from kvcellar.models.adapter_names import adapted
from kvcellar.server.look.snapshot import take_snapshot
from tests.models.adapters import logits_of, merged, write_adapter
from tests.server.live import Live, serving

PROMPT = list(range(7, 50))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    base = write_tiny("llama", root / "llama")
    adapters = {name: write_adapter(root / name, base, seed=i) for i, name in enumerate(("a", "b"))}
    return {"base": base, **adapters}


@pytest.fixture(scope="module")
def live(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    base = str(folders["base"])
    adapters = {name: folders[name] for name in ("a", "b")}
    options = LoadOptions(base, capacity=2048, dtype="float32", adapters=adapters)
    hosting = Hosting(options)
    offered = {"base": base, **{name: adapted(base, name) for name in adapters}}
    models = {"split": hosting.split, "context_of": hosting.context_of}
    folder = tmp_path_factory.mktemp("store")
    with serving(folder, load=hosting.open, offered=offered, models=models) as served:
        yield served


def said(live: Live, model: str, **more: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 0}
    return live.post("/v1/completions", {**body, "ignore_eos": True, **more})


def wanted(folders: dict[str, Path], model: str) -> list[float]:
    """The oracle: log probabilities of the likeliest tokens under merged weights."""
    found, tokens = merged(folders["base"], None if model == "base" else folders[model]), PROMPT
    logprobs = []
    for _ in range(6):
        last = logits_of(found, tokens)[-1].astype(np.float64)
        tokens = [*tokens, int(last.argmax())]
        logprobs.append(last.max() - np.log(np.exp(last).sum()))
    return logprobs


def test_adapters_are_models_with_a_parent(live):
    listed = {one["id"]: one for one in live.get("/v1/models")["data"]}
    assert {name: one["parent"] for name, one in listed.items()} == {
        "base": None,
        "a": "base",
        "b": "base",
    }
    assert listed["a"]["max_model_len"] == listed["base"]["max_model_len"] > 0
    assert live.get("/v1/models/a")["parent"] == "base"
    tags = {one["name"]: one for one in live.get("/api/tags")["models"]}
    assert tags["a"]["details"]["parent_model"] == "base"
    assert tags["a"]["size"] == tags["base"]["size"] > 0


@pytest.mark.card
def test_requests_at_a_time_are_each_answered_by_the_model_that_they_name(live, folders):
    names = ["base", "a", "b", "a", "base"]
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda name: said(live, name), names))
    assert [answer["model"] for answer in answers] == names
    for name, answer in zip(names, answers, strict=True):
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs == pytest.approx(wanted(folders, name), abs=1e-3)
    host = live.host()
    assert host.service.run(lambda engine: engine.stats().requests).result() >= 5


@pytest.mark.card
def test_what_one_has_computed_no_other_reuses(live):
    def cached(model: str) -> int:
        prompt = [9, *PROMPT, *PROMPT]
        return said(live, model, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(name) for name in ("a", "b", "base")] == [0, 0, 0]
    assert [cached(name) for name in ("a", "b", "base")] == [2 * len(PROMPT)] * 3


@pytest.mark.card
def test_a_conversation_goes_on_with_the_adapter_that_answered_it(live):
    def turn(model: str, messages: list[dict[str, str]]) -> tuple[str, int]:
        body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
        letters = {str(token): 100 for token in b"abcdefgh"}  # text that comes back as it was
        answer = live.post("/v1/chat/completions", {**body, "logit_bias": letters})
        reused = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], reused

    messages = [{"role": "user", "content": "A conversation that is long enough to be reused."}]
    text, _ = turn("a", messages)
    more = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "On."}]
    assert turn("base", more)[1] < 10
    assert turn("a", more)[1] > len(messages[0]["content"])


@pytest.mark.card
def test_agents_are_of_a_model_or_of_its_adapter(live):
    made = live.post("/v1/agents", {"id": "poet", "model": "a"})
    assert made["model"] == "a"
    asked = {"text": "Say it.", "max_tokens": 3, "temperature": 0}
    live.post("/v1/agents/poet/generate", asked)
    assert live.get("/v1/agents/poet")["n_cached"] > 0
    (model,) = live.run(take_snapshot(live.service))["models"]
    assert (model["name"], "poet" in model["agents"]) == ("base", True)


def test_adapters_that_are_asked_for_otherwise_are_refused_by_name(live):
    for field in ("lora", "lora_request", "lora_name"):
        body = {"model": "base", "prompt": "x", field: "a"}
        refused = live.http.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert "name it as the model" in refused.json()["error"]["message"]
    missing = live.http.post("/v1/completions", json={"model": "c", "prompt": "x"})
    assert missing.status_code == 404 and "base, a, b" in missing.json()["error"]["message"]


@pytest.mark.card
def test_vectors_are_made_by_the_model_that_is_named(live):
    def vector(model: str) -> Any:
        found = live.post("/v1/embeddings", {"model": model, "input": "A text."})
        return np.array(found["data"][0]["embedding"])

    plain, one, again = vector("base"), vector("a"), vector("a")
    assert one == pytest.approx(again, abs=1e-5)
    assert np.abs(one - plain).max() > 0.01
