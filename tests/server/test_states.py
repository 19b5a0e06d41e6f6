"""A model with recurrent layers behind the server: routes, what they say was reused, the page."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.server.hybrid import OPENING, letters, load_hybrid, write_hybrid
from tests.server.live import serving

LONG = "Tell me about the sea, and about all that lives in it. " * 3
SAID = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hybrid(tmp_path_factory.mktemp("model") / "hybrid")


def serve(folder, store, **more):
    return serving(store, load=load_hybrid(**more), offered={"hybrid": str(folder)})


def ask(live, messages):
    """A chat without a name: its answer, and how many tokens it had and were not computed."""
    body = {"messages": messages, "logit_bias": letters(), **SAID}
    value = live.post("/v1/chat/completions", body)
    usage = value["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return value["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def chat(live, n_turns=3):
    """Some turns: the messages, and per turn tokens of the prompt and those that were reused."""
    messages, counts = [{"role": "system", "content": "You are brief. " * 4}], []
    for turn in range(n_turns):
        messages.append({"role": "user", "content": f"{turn}: {LONG}"})
        text, n_prompt, n_cached = ask(live, messages)
        messages.append({"role": "assistant", "content": text})
        counts.append((n_prompt, n_cached))
    return messages, counts


@pytest.mark.parametrize("cache", [{}, {"cache": "paged", "kv_dtype": "bfloat16"}])
def test_turns_go_on_from_before_the_thoughts_and_say_so_and_answer_as_if_all_was_read(
    folder, tmp_path, cache
):
    with serve(folder, tmp_path / "warm", **cache) as live:
        messages, counts = chat(live)
    block = 16 if cache else 1
    for (n_before, _), (_, n_cached) in pairwise(counts):
        known = n_before - OPENING
        assert known - known % block <= n_cached <= known + 1
    with serve(folder, tmp_path / "cold", **cache) as live:
        text, n_prompt, n_cached = ask(live, messages[:-1])
    assert (n_prompt, n_cached) == (counts[-1][0], 0)
    assert text == messages[-1]["content"]


def test_anthropic_clients_are_told_what_was_read_from_the_cache(folder, tmp_path):
    with serve(folder, tmp_path) as live:
        messages, _ = chat(live, 1)
        body = {"model": "hybrid", "system": messages[0]["content"], "max_tokens": 8}
        said = [{"role": "user", "content": LONG}]
        first = live.post("/v1/messages", {**body, "messages": said})["usage"]
        said += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
        second = live.post("/v1/messages", {**body, "messages": said})["usage"]
        n_first = first["input_tokens"] + first["cache_read_input_tokens"]
        known = n_first - OPENING
        assert known <= second["cache_read_input_tokens"] <= known + 1


def test_an_agent_goes_on_after_a_restart_and_forks_share_its_states(folder, tmp_path):
    ask = {"logit_bias": letters(), **SAID}
    with serve(folder, tmp_path) as live:
        live.post("/v1/agents", {"id": "poet", "system": "You write verse. " * 4})
        for text in (LONG, f"More. {LONG}"):
            live.post("/v1/agents/poet/generate", {"text": text, **ask})
    with serve(folder, tmp_path) as live:
        again = live.post("/v1/agents/poet/generate", {"text": "On.", **ask})["usage"]
        assert again["restored_tokens"] > 0
        assert again["prompt_tokens"] - again["cached_tokens"] < 2 * 12 + OPENING + 16
        live.post("/v1/agents/poet/fork", {"id": "twin"})
        texts = [
            live.post(f"/v1/agents/{name}/generate", {"text": "Then?", **ask})["text"]
            for name in ("poet", "twin")
        ]
        assert texts[0] == texts[1]


def test_the_page_is_told_of_slots_and_whose_they_are(folder, tmp_path):
    with serve(folder, tmp_path) as live:
        live.post("/v1/agents", {"id": "poet", "system": "You write verse. " * 4})
        live.post("/v1/agents/poet/generate", {"text": LONG, **SAID})
        live.post("/v1/agents/poet/fork", {"id": "twin"})
        (model,) = live.get("/v1/cache")["models"]
        n_taken = model["n_slots"] - model["free_slots"]
        assert len(model["slots"]) == n_taken == model["snapshots"] > 0
        assert model["live_slots"] == 0 and model["slot_bytes"] > 0
        lengths = model["snapshots_of"]["poet"]
        assert lengths == model["snapshots_of"]["twin"] == sorted(lengths)
        shared = model["owner_sets"].index(["poet", "twin"])
        drawn = sorted((at, cost) for at, cost, owners, _ in model["slots"] if owners == shared)
        assert [at for at, _ in drawn] == lengths
        assert sum(cost for _, cost in drawn) == lengths[-1]
        said = live.http.get("/metrics").text
        assert f'kvcellar_engine_snapshots{{model="{folder}"}} {n_taken}.0' in said
        assert f'kvcellar_engine_evicted_snapshots_total{{model="{folder}"}} 0.0' in said
