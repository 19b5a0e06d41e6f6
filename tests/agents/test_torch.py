"""On real models: what is restored is bit for bit what was computed, and so are the next tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvcellar as kv
from kvcellar.agents import ModelHost, open_host
from kvcellar.backends.torch.cache import caches
from kvcellar.engine import EngineConfig, SamplingParams
from tests.agents.fakes import manager, run, tokens_of, turn
from tests.models.tiny_checkpoints import FAMILIES, make_checkpoint

pytestmark = pytest.mark.usefixtures("eager")
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
CONFIG = EngineConfig(max_num_batched_tokens=32)
ON_CARD = ("llama", "gemma2", "gpt_oss", "gemma3")
"""Families that are restored on a card, too: one that sees all, and one with windows."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("family", "block_size"),
    [
        pytest.param(family, 1, marks=[pytest.mark.card] if family in ON_CARD else [])
        for family in sorted(FAMILIES)
    ]
    + [("llama", 16), ("gpt_oss", 16)],
)
@pytest.mark.slow
def test_greedy_tokens_after_a_restore_are_those_of_an_agent_that_never_left(
    family, block_size, tmp_path
):
    folder = str(make_checkpoint(family, tmp_path / family))
    cache = {"cache": "paged", "block_size": block_size} if block_size > 1 else {}

    def load(name: str) -> ModelHost:
        return open_host(folder, capacity=1024, config=CONFIG, **cache)

    said = [list(text.encode()) for text in ("The first thing. " * 4, "And another.", "Then?")]

    with manager(tmp_path / "one", load) as agents:
        run(agents.lifecycle.create("a", model=folder))
        for part in said:
            run(turn(agents, "a", tokens=part, params=GREEDY))
        want = tokens_of(agents, "a")
        rows = held_rows_of(agents, folder)
    for i, part in enumerate(said):
        with manager(tmp_path / "two", load) as agents:
            if not i:
                run(agents.lifecycle.create("a", model=folder))
            before = len(tokens_of(agents, "a"))
            end = run(turn(agents, "a", tokens=part, params=GREEDY))
            if i:
                known = (before - 1) // block_size * block_size
                assert end.usage.restored_tokens == end.usage.cached_tokens == known
                assert end.usage.miss is None
            got = held_rows_of(agents, folder)
            assert tokens_of(agents, "a") == want[: len(tokens_of(agents, "a"))]
    assert tokens_of_all(got) == tokens_of_all(rows)


def held_rows_of(agents: Any, model: str) -> Any:
    """The bytes of the agent's rows in the cache."""
    host = agents.models.host(model)
    tokens = agents.directory.agent("a").tokens.tokens

    def read(engine: Any) -> Any:
        held = engine.hold(tokens)
        try:
            tables = [
                t if g.window is None else t[len(t) - min(len(t), g.window - 1) :]
                for t, g in zip(held.tables, engine.cache.steps.groups, strict=True)
            ]
            return engine.cache.read_rows(tables)
        finally:
            held.release()

    return host.service.run(read).result()


def tokens_of_all(rows: Any) -> list[bytes]:
    return [array.tobytes() for group in rows for side in group for array in side]


@pytest.mark.parametrize(
    "kv_dtype", ["bfloat16", "int8", "k8v4", "int4:g32:rot", "int4:first4:last64"]
)
@pytest.mark.slow
def test_rows_of_every_type_come_back_bit_for_bit(kv_dtype, tmp_path):
    def load(name: str) -> ModelHost:
        return open_host("demo", capacity=1024, kv_dtype=kv_dtype, config=CONFIG)

    with manager(tmp_path, load) as agents:
        run(agents.lifecycle.create("a", model="demo"))
        run(turn(agents, "a", tokens=list(range(5, 305)), params=GREEDY))
        want = held_rows_of(agents, "demo")
        run(agents.sleep.pause("a"))
        back = run(agents.sleep.resume("a"))
        assert back.n_restored == len(tokens_of(agents, "a")) - 1
        assert tokens_of_all(held_rows_of(agents, "demo")) == tokens_of_all(want)
        before = tokens_of(agents, "a")
        # Twice: first it comes together with the last token of before, and bits depend on that.
        for _ in range(2):
            run(agents.lifecycle.rewind("a", position=len(before)))
            run(turn(agents, "a", tokens=[7], params=GREEDY))
        warm = tokens_of(agents, "a")[len(before) :]
    with manager(tmp_path, load) as agents:
        run(agents.lifecycle.rewind("a", position=len(before)))
        run(agents.sleep.resume("a"))
        run(turn(agents, "a", tokens=[7], params=GREEDY))
        assert tokens_of(agents, "a")[len(before) :] == warm


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8", "int4", "k8v4"])
@pytest.mark.parametrize("make", [kv.make_seq_session, kv.make_paged_session])
@pytest.mark.parametrize("layout", ["layer_first", "block_first"])
def test_host_rows_say_what_the_pools_hold_wherever_they_lie(kv_dtype, make, layout):
    params = kv.ModelCacheParams(3, 2, 64)
    config = kv.make_config(params, 256, kv_dtype, block_size=16, layout=layout)
    rng = torch.Generator().manual_seed(1)
    with make("torch", config) as session:
        cache: Any = session.cache
        assert isinstance(cache, caches.TorchCache)
        cache.begin_step([(0, 40)])
        for layer in range(3):
            k, v = (torch.randn(1, 2, 40, 64, generator=rng) for _ in "kv")
            cache.update_and_attend(k, k, v, None, layer, 1.0, torch.float32)
        cache.end_step()
        (table,) = cache.seq_table(0)
        order = np.random.default_rng(2).permutation(40)
        rows = cache.read_rows([table])
        shuffled = cache.read_rows([table[order]])
        for a, b in zip(rows[0], shuffled[0], strict=True):
            for x, y in zip(a, b, strict=True):
                assert (x[:, :, order] == y).all()
        claimed = cache.seq_claim(1, [table])
        cache.write_rows(claimed, rows)
        assert tokens_of_all(cache.read_rows(claimed)) == tokens_of_all(rows)
