"""A paged cache behind the server: what is said is what a cache of cells says."""

from __future__ import annotations

import pytest

from kvcellar.agents import open_host
from tests.server.live import serving

CACHES = {
    "cells": {},
    "blocks": {"cache": "paged"},
    "small blocks, block first": {"cache": "paged", "block_size": 4, "layout": "block_first"},
}
ASK = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def load_with(cache):
    def load(path, progress):
        return open_host(path, capacity=1024, dtype="float32", progress=progress, **cache)

    return load


def chat(live, *texts, model="demo"):
    """A chat without a name, turn by turn; what was answered."""
    messages = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        body = {"model": model, "messages": messages, **ASK}
        answer = live.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})
    return [message["content"] for message in messages[1::2]]


def say(live, name, text):
    """A turn of a named agent: its text, and how many tokens were not computed."""
    said = live.post(f"/v1/agents/{name}/generate", {"text": text, **ASK})
    return said["text"], said["usage"]["cached_tokens"]


def first_day(live):
    """A chat, an agent, a fork, and a turn of each of the two."""
    said = [*chat(live, "How are you? " * 8, "And now?")]
    live.post("/v1/agents", {"id": "one"})
    said.append(say(live, "one", "def add(a, b):\n" * 6)[0])
    live.post("/v1/agents/one/fork", {"id": "two"})
    said += [say(live, "two", "    return a")[0], say(live, "one", "    print(b)")[0]]
    return said


def second_day(live):
    """Both go on, from what is on disk."""
    turns = [say(live, name, "\n\ndef") for name in ("one", "two")]
    return [text for text, _ in turns], [n for _, n in turns]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    with serving(folder, load=load_with(CACHES["cells"])) as live:
        said = first_day(live)
    with serving(folder, load=load_with(CACHES["cells"])) as live:
        return said, second_day(live)[0]


@pytest.mark.parametrize("name", ["blocks", "small blocks, block first"])
def test_a_chat_a_fork_and_a_resume_from_disk_are_those_of_cells(name, wanted, tmp_path):
    block_size = CACHES[name].get("block_size", 16)
    with serving(tmp_path, load=load_with(CACHES[name])) as live:
        assert first_day(live) == wanted[0]
        (model,) = live.get("/v1/cache")["models"]
        assert model["block_size"] == block_size
        assert_blocks_go_whole(model, block_size)
    with serving(tmp_path, load=load_with(CACHES[name])) as live:
        said, cached = second_day(live)
        assert said == wanted[1]
        for agent, n in zip(("one", "two"), cached, strict=True):
            n_before = live.get(f"/v1/agents/{agent}")["n_tokens"] - len("\n\ndef") - 12
            assert n > 0 and n >= (n_before - 1) // block_size * block_size - block_size


def test_what_cells_have_stored_goes_on_in_blocks(wanted, tmp_path):
    with serving(tmp_path, load=load_with(CACHES["cells"])) as live:
        assert first_day(live) == wanted[0]
    with serving(tmp_path, load=load_with(CACHES["blocks"])) as live:
        said, cached = second_day(live)
        assert said == wanted[1] and all(cached)


def assert_blocks_go_whole(model, block_size):
    """The map shows no block of which a part could be had."""
    states = [state for n, _, state in model["cell_runs"] for _ in range(n)]
    assert len(states) == model["capacity"]
    blocks = [states[i : i + block_size] for i in range(0, len(states), block_size)]
    assert any(set(block) == {0} for block in blocks)
    assert all(0 not in block or set(block) == {0} for block in blocks)
    assert states.count(0) == model["free_cells"]
