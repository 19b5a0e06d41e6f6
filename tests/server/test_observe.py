"""Health, readiness, metrics and the snapshot of the cache."""

from __future__ import annotations

import threading

import anthropic
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcellar.agents import open_host
from kvcellar.engine import EngineConfig
from tests.models.tiny_checkpoints import make_checkpoint
from tests.server.live import PATIENCE_S, load_demo, serving

SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def metrics_of(live):
    response = live.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[sample.name, *sorted(sample.labels.items())] = sample.value
    return found


def test_metrics_count_what_was_done(live):
    body = {"messages": [{"role": "user", "content": "Count this. " * 9}], **SHORT}
    live.post("/v1/chat/completions", body)
    before = metrics_of(live)
    live.post("/v1/chat/completions", body)
    after = metrics_of(live)
    engine = ("model", "demo")

    def more(name, *labels):
        return after[name, *labels] - before.get((name, *labels), 0)

    assert more("kvcellar_engine_sampled_tokens_total", engine) == 4
    assert more("kvcellar_engine_requests_total", engine) == 1
    prompt = more("kvcellar_engine_prompt_tokens_total", engine)
    assert more("kvcellar_engine_reused_tokens_total", engine) == prompt - 1 > 10
    assert more("kvcellar_first_token_seconds_count", engine) == 1
    assert more("kvcellar_between_tokens_seconds_count", engine) == 3
    route = (("method", "POST"), ("route", "/v1/chat/completions"), ("status", "200"))
    assert more("kvcellar_http_requests_total", *route) == 1
    assert after["kvcellar_active",] == 0 and after["kvcellar_agents",] >= 1
    assert after["kvcellar_resident_bytes",] > 1e7


@pytest.mark.slow
def test_guesses_are_counted_in_metrics_and_told_with_each_answer(tmp_path):
    """A model that has to say one word again and again: after it n-grams are mostly right."""

    def load(path, progress):
        every = EngineConfig(verify_all_drafts=True)
        return open_host(path, capacity=1024, dtype="float32", speculate="ngram", config=every)

    word = {"logit_bias": {"97": 100.0}, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    with serving(tmp_path, load=load) as server:
        body = {"messages": [{"role": "user", "content": "Say it."}], **word}
        usage = server.post("/v1/chat/completions", body)["usage"]
        told = usage["completion_tokens_details"]
        right, wrong = told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]
        assert right > 10 and wrong >= 0
        plain = server.post("/v1/completions", {"prompt": "Say it.", **word})["usage"]
        told = plain["completion_tokens_details"]
        right += told["accepted_prediction_tokens"]
        wrong += told["rejected_prediction_tokens"]
        server.post("/v1/agents", {"id": "guessed"})
        end = server.post("/v1/agents/guessed/generate", {"text": "Say it. ", **word})["usage"]
        for told in told_by_other_clients(server):
            assert told["accepted_prediction_tokens"] > 0
            right += told["accepted_prediction_tokens"]
            wrong += told["rejected_prediction_tokens"]
        right += end["accepted_tokens"]
        seen = metrics_of(server)
    engine = ("model", "demo")
    assert seen["kvcellar_engine_accepted_tokens_total", engine] == right
    verified = seen["kvcellar_engine_drafted_tokens_total", engine]
    assert verified == right + wrong + end["drafted_tokens"] - end["accepted_tokens"]


def told_by_other_clients(server):
    """What OpenAI's and Anthropic's own clients are told of guesses: whole and in a stream."""
    text = "self.width = width; self.height = height\n" * 6
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
    ) as client:
        ask = {"model": "demo", "input": text, "max_output_tokens": 40, "temperature": 0}
        usage = client.responses.create(**ask).usage
        assert usage.output_tokens_details.reasoning_tokens == 0
        yield usage.output_tokens_details.model_extra
        *_, last = client.responses.create(**ask, stream=True)
        yield last.response.usage.output_tokens_details.model_extra
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", timeout=PATIENCE_S, max_retries=0
    ) as client:
        ask = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 40}
        ask["extra_body"] = {"temperature": 0}
        yield client.messages.create(**ask).usage.model_extra
        with client.messages.stream(**ask) as stream:
            deltas = [event for event in stream if event.type == "message_delta"]
        yield deltas[-1].usage.model_extra


def test_the_snapshot_says_whose_every_cell_is(live):
    live.post("/v1/agents", {"id": "map-a"})
    live.post("/v1/agents/map-a/generate", {"text": "Own this. " * 30, **SHORT})
    live.post("/v1/agents/map-a/fork", {"id": "map-b"})
    live.post("/v1/agents/map-b/generate", {"text": "Mine alone. " * 20, **SHORT})
    snapshot = live.get("/v1/cache")
    (model,) = snapshot["models"]
    runs, sets = model["cell_runs"], model["owner_sets"]
    assert sum(n for n, _, _ in runs) == model["capacity"] == 4096
    free = sum(n for n, _, state in runs if state == 0)
    assert free == model["free_cells"] == model["groups"][0]["free"]
    both = sum(n for n, owners, _ in runs if {"map-a", "map-b"} <= set(sets[owners]))
    info = {agent["id"]: agent for agent in snapshot["agents"]}
    assert info["map-b"]["parent_position"] - 1 <= both <= info["map-b"]["parent_position"]
    alone = sum(n for n, owners, _ in runs if sets[owners] == ["map-b"])
    assert alone >= info["map-b"]["n_tokens"] - 1 - info["map-b"]["parent_position"] > 0
    assert model["cached"]["map-b"] == info["map-b"]["n_tokens"] - 1
    assert "Mine" in info["map-b"]["fork_text"]["behind"]
    assert info["map-b"]["fork_text"]["before"]
    assert snapshot["store"]["warm"]["limit_bytes"] > 0


def test_to_look_is_not_to_use(tmp_path):
    """The order in which prefixes would be evicted is the same after a look."""
    with serving(tmp_path) as server:  # on one that tests share others' turns may end meanwhile
        for agent_id in ("look-a", "look-b"):
            server.post("/v1/agents", {"id": agent_id})
            text = f"By {agent_id}. " * 9
            server.post(f"/v1/agents/{agent_id}/generate", {"text": text, **SHORT})
        service = server.host().service

        def order():
            return service.run(lambda e: [id(node) for node in e.index._lru]).result(PATIENCE_S)

        before = order()
        for _ in range(3):
            server.get("/v1/cache")
        assert order() == before and len(before) > 1


def test_a_running_answer_is_seen_in_the_map(live):
    live.post("/v1/agents", {"id": "runner"})
    body = {"messages": [{"role": "user", "content": "Run. " * 40}], "stream": True}
    body |= {"agent_id": "runner", "max_tokens": 2000, "ignore_eos": True}
    with live.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        (model,) = live.get("/v1/cache")["models"]
        assert model["running"] == 1
        sets = model["owner_sets"]
        standing = [sets[owners] for _, owners, state in model["cell_runs"] if state == 3]
        assert any("runner" in owners for owners in standing)
        states = {agent["id"]: agent["state"] for agent in live.get("/v1/agents")["data"]}
        assert states["runner"] == "generating"
        stuck = live.http.post("/v1/agents/runner/wait")
        assert stuck.status_code == 409 and "is generating" in stuck.text
    live.until(live.is_still, "the end")


@pytest.fixture
def two_models(tmp_path):
    path = str(make_checkpoint("llama", tmp_path / "tiny"))
    gate = threading.Event()
    gate.set()

    def load(name, progress):
        progress(0.5, "half way")
        assert gate.wait(PATIENCE_S)
        if name == "demo":
            return load_demo(512)(name, progress)
        return open_host(name, capacity=256, progress=progress)

    with serving(
        tmp_path / "store",
        load=load,
        offered={"demo": "demo", "tiny": path},
        models={"budget_bytes": 60 << 20, "size_of": lambda name: 40 << 20},
    ) as live:
        live.gate = gate
        yield live


@pytest.mark.slow
def test_a_swap_of_models_is_seen_in_health(two_models):
    live = two_models
    assert live.http.get("/ready").status_code == 503
    body = {"prompt": [7, 8, 9], **SHORT}
    live.post("/v1/completions", {"model": "demo", **body})
    assert live.http.get("/ready").status_code == 200
    live.gate.clear()
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(live.post("/v1/completions", {"model": "tiny", **body}))
    )
    asking.start()

    def states():
        return {model["name"]: model for model in live.get("/health")["models"]}

    live.until(lambda: states()["tiny"]["state"] == "loading", "the load")
    assert live.get("/health")["swapping"] is True
    assert states()["tiny"]["detail"] == "half way" and states()["tiny"]["fraction"] == 0.5
    live.gate.set()
    asking.join(PATIENCE_S)
    assert answers[0]["model"] == "tiny"
    assert {name: model["state"] for name, model in states().items()} in (
        {"demo": "absent", "tiny": "ready"},
        {"demo": "ready", "tiny": "ready"},
    )


def test_an_unknown_name_is_refused_unless_any_will_do(tmp_path):
    with serving(tmp_path, models={"takes_any": True}) as live:
        body = {"messages": [{"role": "user", "content": "x"}], **SHORT}
        answer = live.post("/v1/chat/completions", {"model": "claude-sonnet-9", **body})
        assert answer["model"] == "demo"
