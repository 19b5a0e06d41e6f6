"""The usable context: what is told of it, and what becomes of prompts that are longer."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from kvcellar.agents import open_host
from kvcellar.errors import CacheFullError, ModelError
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.server.errors import ApiError, as_api_error
from tests.server.live import serving

CAPACITY = 256


def demo_with(folder, **fields):
    """The bundled model's folder with another config."""
    folder.mkdir()
    for file in DEMO_FOLDER.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return str(folder)


@pytest.fixture(scope="module", params=["few cells", "few positions"])
def small(request, tmp_path_factory):
    """A server whose context is short: for want of cells, or of positions where cells abound."""
    folder = tmp_path_factory.mktemp("small")
    model, capacity = "demo", CAPACITY
    if request.param == "few positions":
        model = demo_with(folder / "short", max_position_embeddings=CAPACITY)
        capacity = 4 * CAPACITY

    def load(path, progress):
        return open_host(path, capacity=capacity, dtype="float32", progress=progress)

    offered = {"demo": model}
    with serving(folder / "store", load=load, offered=offered, max_tokens=10_000) as live:
        live.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        yield live


LONG = "word " * 600


def long_bodies():
    said = [{"role": "user", "content": LONG}]
    yield "/v1/chat/completions", {"messages": said}
    yield "/v1/chat/completions", {"messages": said, "stream": True}
    yield "/v1/completions", {"prompt": LONG}
    yield "/v1/completions", {"prompt": [5] * (CAPACITY + 1), "stream": True}
    yield "/v1/responses", {"input": LONG}
    yield "/v1/responses", {"input": LONG, "stream": True}
    yield "/v1/messages", {"messages": said, "max_tokens": 8}
    yield "/v1/messages", {"messages": said, "max_tokens": 8, "stream": True}


@pytest.mark.parametrize(("path", "body"), list(long_bodies()))
@pytest.mark.slow
def test_a_prompt_that_no_waiting_makes_fit_is_a_400_in_the_words_of_its_protocol(
    small, path, body
):
    refused = small.http.post(path, json=body)
    assert refused.status_code == 400, refused.text
    assert "retry-after" not in refused.headers
    error = refused.json()["error"]
    assert error["available"] == CAPACITY and error["needed"] > CAPACITY
    n = error["needed"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
        assert error["message"] == f"prompt is too long: {n} tokens > {CAPACITY} maximum"
    else:
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CAPACITY} tokens" in error["message"]
        assert f"your {error['param']} resulted in {n} tokens" in error["message"]
        assert error["param"] in body
    assert "/" not in refused.json()["error"]["message"], "no path of ours"
    assert small.is_still()


def test_an_agents_turn_beyond_the_context_is_a_400(small):
    small.post("/v1/agents", {"id": "long-winded"})
    refused = small.http.post("/v1/agents/long-winded/generate", json={"text": LONG})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_the_clients_of_both_protocols_do_not_ask_again(small):
    def n_refused():
        return small.service.metrics.refused.labels("context")._value.get()

    said, before = [{"role": "user", "content": LONG}], n_refused()
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="x") as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="demo", messages=said)
        assert caught.value.code == "context_length_exceeded"
    with (
        anthropic.Anthropic(base_url=small.url, api_key="x") as client,
        pytest.raises(anthropic.BadRequestError, match="prompt is too long"),
    ):
        client.messages.create(model="demo", messages=said, max_tokens=5)
    assert n_refused() == before + 2


def test_an_answer_ends_with_length_where_the_context_does(small):
    """Whatever max_tokens says: it is at most what is left."""
    prompt = [5] * (CAPACITY - 10)
    body = {"prompt": prompt, "max_tokens": 5000, "temperature": 0, "ignore_eos": True}
    answer = small.post("/v1/completions", body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 11, "the last one needs no cell"
    body = {"messages": [{"role": "user", "content": "word " * 30}], "max_tokens": 5000}
    more = {"temperature": 0, "ignore_eos": True}
    chat = small.post("/v1/chat/completions", body | more)
    usage = chat["usage"]
    assert chat["choices"][0]["finish_reason"] == "length"
    assert usage["total_tokens"] == CAPACITY + 1
    whole = small.post("/v1/completions", {"prompt": [5] * CAPACITY, "max_tokens": 9})
    assert whole["usage"]["completion_tokens"] == 1
    assert small.is_still()


def test_the_list_of_models_tells_the_usable_context(small):
    (model,) = small.get("/v1/models")["data"]
    assert model == small.get("/v1/models/demo")
    assert model["context_length"] == model["max_model_len"] == CAPACITY
    assert model["max_input_tokens"] == model["meta"]["n_ctx"] == CAPACITY
    with anthropic.Anthropic(base_url=small.url, api_key="x") as client:
        assert client.models.list().data[0].max_input_tokens == CAPACITY


def test_the_context_is_told_before_a_model_is_loaded(tmp_path):
    never = {"demo": "demo", "other": "never-loaded", "broken": "nowhere"}

    def context_of(path):
        if path == "nowhere":
            raise ModelError("there is no such model")
        return 1000, 4096

    with serving(tmp_path, offered=never, models={"context_of": context_of}) as live:
        data = {model["id"]: model for model in live.get("/v1/models")["data"]}
        assert data["demo"]["context_length"] == data["other"]["context_length"] == 1000
        assert data["broken"]["context_length"] is None
        live.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert live.get("/v1/models/demo")["context_length"] == 4096, "as it was loaded"


def test_a_tokenizer_that_says_nothing_of_lengths_changes_nothing(small):
    host = small.host()
    before = host.tokenizer.model_max_length
    host.tokenizer.model_max_length = int(1e30)
    try:
        refused = small.http.post("/v1/completions", json={"prompt": LONG})
        assert refused.status_code == 400
        assert host.context == CAPACITY
        host.tokenizer.model_max_length = 8
        assert small.post("/v1/completions", {"prompt": "word " * 20, "max_tokens": 1})
        assert host.context == CAPACITY
    finally:
        host.tokenizer.model_max_length = before


def test_cells_that_others_hold_are_worth_waiting_for():
    busy = as_api_error(CacheFullError("no cell is free"))
    assert isinstance(busy, ApiError) and busy.status == 503 and busy.retry_after_s
    json.dumps(busy.details)
