"""An agent's snapshot is any backend's: written by one, it is read by the others."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvcellar.agents import ModelHost, open_host
from kvcellar.engine import EngineConfig, SamplingParams
from tests.agents.fakes import manager, run, tokens_of, turn
from tests.agents.test_torch import held_rows_of, home, tokens_of_all
from tests.models.hybrid_checkpoints import FAMILIES, write_hybrid
from tests.models.tiny_checkpoints import make_checkpoint

__all__ = ["home"]

if importlib.util.find_spec("mlx_lm") is None:
    pytest.skip("needs mlx-lm: pip install 'kvcellar[mlx]'", allow_module_level=True)

HYBRIDS = [family for family in FAMILIES if family != "jamba"]
"""Jamba on torch is not exact in chunks with transformers' own cache."""

pytestmark = pytest.mark.usefixtures("eager")
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
CONFIG = EngineConfig(max_num_batched_tokens=32)
SAID = [list(t.encode()) for t in ("The first thing. " * 4, "And another.", "Then?")]


def loader(folder: str, backend: str, **options: Any) -> Any:
    def load(name: str) -> ModelHost:
        return open_host(folder, capacity=1024, config=CONFIG, backend=backend, **options)

    return load


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "gemma3", "gpt_oss", *HYBRIDS],
)
@pytest.mark.slow
def test_an_agent_goes_on_where_another_backend_left_it(family: str, tmp_path: Any) -> None:
    folder = str(tmp_path / family)
    (write_hybrid if family in HYBRIDS else make_checkpoint)(family, tmp_path / family)
    with manager(tmp_path / "one", loader(folder, "torch")) as agents:
        run(agents.lifecycle.create("a", model=folder))
        for said in SAID:
            run(turn(agents, "a", tokens=said, params=GREEDY))
        want = tokens_of(agents, "a")
    for i, said in enumerate(SAID):
        backend = ("torch", "mlx")[i % 2]
        with manager(tmp_path / "two", loader(folder, backend), verify="canary") as agents:
            if not i:
                run(agents.lifecycle.create("a", model=folder))
            before = len(tokens_of(agents, "a"))
            end = run(turn(agents, "a", tokens=said, params=GREEDY))
            if i:
                assert end.usage.restored_tokens == before - 1, "nothing was computed again"
                assert any("computed again and agree" in note for note in end.usage.notes)
            assert tokens_of(agents, "a") == want[: len(tokens_of(agents, "a"))]
            assert agents.store.take_events() == []


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "k8v4", "int4:g32:rot"])
@pytest.mark.slow
def test_rows_that_another_backend_wrote_are_read_bit_for_bit(kv_dtype: str, tmp_path: Any) -> None:
    for writer, reader in (("mlx", "torch"), ("torch", "mlx")):
        path = tmp_path / writer
        with manager(path, loader("demo", writer, kv_dtype=kv_dtype)) as agents:
            run(agents.lifecycle.create("a", model="demo"))
            run(turn(agents, "a", tokens=list(range(5, 305)), params=GREEDY))
            want = tokens_of_all(held_rows_of(agents, "demo"))
        with manager(path, loader("demo", reader, kv_dtype=kv_dtype)) as agents:
            back = run(agents.sleep.resume("a"))
            assert back.n_restored == len(tokens_of(agents, "a")) - 1
            assert tokens_of_all(held_rows_of(agents, "demo")) == want
