"""Agents of real models with recurrent layers: what a new process restores is what was computed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcellar.agents import ModelHost, open_host
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.engine import EngineConfig, SamplingParams
from kvcellar.engine.kv.restore import states_in
from kvcellar.store import Store
from tests.agents.fakes import Eager, manager, run, tokens_of, turn

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
CONFIG = EngineConfig(max_num_batched_tokens=32)
SAID = [list(text.encode()) for text in ("The first thing. " * 4, "And another.", "Then?")]
FAMILIES = (
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
)


@pytest.fixture(autouse=True)
def quiet_machine():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loader(folder: str, **more: Any) -> Any:
    def load(name: str) -> ModelHost:
        host = open_host(folder, capacity=1024, config=CONFIG, **more)
        host.costs = Eager()
        return host

    return load


def end_states(agents: Any, model: str) -> list[np.ndarray]:
    """The states that the agent goes on from."""
    tokens = agents.directory.agent("a").tokens.tokens

    def read(engine: Any) -> Any:
        held = engine.hold(tokens)
        try:
            return states_in(engine.cache, held.end_slot)
        finally:
            held.release()

    layers = agents.models.host(model).service.run(read).result()
    return [state for layer in layers for state in layer]


@pytest.mark.parametrize(
    ("family", "block_size"),
    [
        *(
            pytest.param(family, 1, marks=[pytest.mark.card] if family == "lfm2" else [])
            for family in FAMILIES
        ),
        ("qwen3_next", 16),
        ("lfm2", 16),
    ],
)
def test_greedy_tokens_after_a_restore_are_those_of_an_agent_that_never_left(
    family, block_size, tmp_path
):
    folder = str(write_tiny(family, tmp_path / family))
    load = loader(folder, **({"cache": "paged", "block_size": 16} if block_size > 1 else {}))
    with manager(tmp_path / "one", load) as agents:
        run(agents.lifecycle.create("a", model=folder))
        for part in SAID:
            run(turn(agents, "a", tokens=part, params=GREEDY))
        want, states = tokens_of(agents, "a"), end_states(agents, folder)
    for i, part in enumerate(SAID):
        with manager(tmp_path / "two", load, verify="canary") as agents:
            if not i:
                run(agents.lifecycle.create("a", model=folder))
            before = len(tokens_of(agents, "a"))
            end = run(turn(agents, "a", tokens=part, params=GREEDY))
            if i:
                known = (before - 1) // block_size * block_size
                assert end.usage.restored_tokens == end.usage.cached_tokens == known
                assert end.usage.miss is None
                assert any("computed again and agree" in note for note in end.usage.notes)
            assert tokens_of(agents, "a") == want[: len(tokens_of(agents, "a"))]
            assert agents.store.take_events() == []
            got = end_states(agents, folder)
    for a, b in zip(got, states, strict=True):
        assert np.allclose(a, b, atol=1e-4 * max(1.0, np.abs(b).max()))


def test_a_cache_in_blocks_goes_on_behind_whole_ones_of_what_one_in_cells_has_stored(
    tmp_path, monkeypatch
):
    folder = str(write_tiny("qwen3_next", tmp_path / "tiny"))
    blocks = {"cache": "paged", "block_size": 16}
    loaded: list[int] = []
    load_boundary = Store.load_boundary

    def count(self: Store, *args: Any) -> Any:
        state = load_boundary(self, *args)
        loaded.append(state.n_tokens)
        return state

    monkeypatch.setattr(Store, "load_boundary", count)
    with manager(tmp_path / "store", loader(folder)) as agents:
        run(agents.lifecycle.create("a", model=folder))
        run(turn(agents, "a", tokens=[7] * 73, params=GREEDY))  # 80 and the last, not computed
        run(agents.sleep.pause("a"))
        run(turn(agents, "a", tokens=[8] * 20, params=GREEDY))
        before = tokens_of(agents, "a")
        want = run_on(agents, folder, before)
        loaded.clear()
    with manager(tmp_path / "store", loader(folder, **blocks)) as agents:
        end = run(turn(agents, "a", tokens=[9] * 20, params=GREEDY))
        assert end.usage.restored_tokens == 80 and loaded == [80]
        assert tokens_of(agents, "a") == want


def test_why_says_that_no_stored_state_lies_behind_whole_blocks(tmp_path):
    folder = str(write_tiny("lfm2", tmp_path / "tiny"))
    blocks = {"cache": "paged", "block_size": 64}
    with manager(tmp_path / "store", loader(folder)) as agents:
        run(agents.lifecycle.create("a", model=folder))
        run(turn(agents, "a", tokens=[7] * 73, params=GREEDY))
        known = len(tokens_of(agents, "a"))
    with manager(tmp_path / "store", loader(folder, **blocks)) as agents:
        end = run(turn(agents, "a", tokens=[9] * 20, params=GREEDY))
        miss = end.usage.miss
        assert (miss.cause, miss.position, end.usage.cached_tokens) == ("snapshot", 0, 0)
        assert miss.tokens_lost == known - 1 and "whole blocks" in miss.advice


def run_on(agents: Any, folder: str, before: Any) -> Any:
    """Return what a new agent answers that is given all of the history at once: the oracle."""
    run(agents.lifecycle.create("b", model=folder))
    run(turn(agents, "b", tokens=[*before, *[9] * 20], params=GREEDY))
    return tokens_of(agents, "b")


def child(folder: str, store: Path, text: str) -> Any:
    """Take a turn in a process of its own, which is killed as soon as it is on disk."""
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.agents.test_hybrids"]
    done = subprocess.run(
        [*command, folder, str(store), text], capture_output=True, text=True, cwd=ROOT, env=env
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_process_that_was_killed_is_followed_by_one_that_computes_nothing_again(tmp_path):
    folder = str(write_tiny("qwen3_next", tmp_path / "tiny"))
    first = child(folder, tmp_path / "store", "The first thing. " * 6)
    second = child(folder, tmp_path / "store", "And another.")
    assert second["restored"] == len(first["tokens"]) - 1
    assert second["tokens"][: len(first["tokens"])] == first["tokens"]
    with manager(tmp_path / "other", loader(folder)) as agents:
        run(agents.lifecycle.create("a", model=folder))
        for said in ("The first thing. " * 6, "And another."):
            run(turn(agents, "a", tokens=list(said.encode()), params=GREEDY))
        assert list(tokens_of(agents, "a")) == second["tokens"]


def _take_a_turn(folder: str, store: str, text: str) -> None:
    with manager(Path(store), loader(folder)) as agents:
        if not agents.directory.infos():
            run(agents.lifecycle.create("a", model=folder))
        end = run(turn(agents, "a", tokens=list(text.encode()), params=GREEDY))
        run(agents.sleep.pause("a"))
        said = {"restored": end.usage.restored_tokens, "tokens": tokens_of(agents, "a")}
        print(json.dumps(said), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _take_a_turn(*sys.argv[1:])
