"""Ask how much sooner an agent's first token comes when its KV is loaded and not computed again.

A model of about 100 million parameters with random weights, float32; one agent per length. Time to
the first token of a turn of one token: behind a history that is computed (recomputed), loaded from
RAM (warm) and loaded from disk with nothing of it in the system's page cache (cold). Beside it, a
plain read of the same files, as cold. Every case's tokens have to be the same.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import run

from kvcellar.agents import AgentManager, ModelHost, ModelRegistry, Turn, TurnEnd, open_host
from kvcellar.engine import SamplingParams
from kvcellar.hosting.costs import Costs, Estimate
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.store import Store, StoreConfig

ONE = SamplingParams(max_tokens=1, ignore_eos=True)
SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}


class Always(Costs):
    """Whatever is stored is loaded: here it is asked what that takes, not whether it pays."""

    def estimate(self, match: Any, n_cached: int, n_rows: int, stop: int) -> Estimate:
        """Return 0: to load is free."""
        return Estimate(0.0, None)

    def patience_s(self, n_tokens: int, n_loaded: int) -> float | None:
        """Return an endless patience."""
        return None


def make_model(folder: Path) -> int:
    """Save a model with random weights and the bundled tokenizer; return its parameters."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, dtype="float32"))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (DEMO_FOLDER / name).exists():
            shutil.copy(DEMO_FOLDER / name, folder / name)
    return sum(p.numel() for p in model.parameters())


def forget_files(folder: Path) -> list[Path]:
    """Have the system drop what it remembers of the blocks' files; returns them."""
    files = [path for path in folder.rglob("*") if path.is_file() and "blocks" in path.parts]
    os.sync()
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return files


def read_plainly(files: list[Path]) -> tuple[int, float]:
    """Return (bytes, seconds) of reading files one after the other and doing nothing else."""
    started, n_bytes = time.perf_counter(), 0
    buffer = bytearray(1 << 24)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(buffer):
                n_bytes += n
    return n_bytes, time.perf_counter() - started


@contextmanager
def agents_of(folder: Path, host: ModelHost, warm_bytes: int) -> Iterator[AgentManager]:
    """Open a manager over the folder; the model stays loaded in between."""
    config = StoreConfig(warm_bytes=warm_bytes, queue_bytes=4 << 30)
    with Store(folder, config) as store:
        yield AgentManager(store, ModelRegistry(lambda _: host), default_model=host.name)


async def turn(agents: AgentManager, agent_id: str, tokens: list[int]) -> tuple[float, TurnEnd]:
    """Take a turn; return the seconds to the first token, and the end."""
    started, first = time.perf_counter(), 0.0
    async for event in agents.turns.generate(Turn(agent_id, tokens=tokens, params=ONE)):
        if isinstance(event, TurnEnd):
            return first, event
        first = first or time.perf_counter() - started
    raise AssertionError("a turn ends with a TurnEnd")


async def once(
    agents: AgentManager, agent_id: str, n: int, prompt: list[int] | None
) -> tuple[float, TurnEnd]:
    """Measure a turn, from empty cells and back to them."""
    if prompt is not None:
        await agents.lifecycle.create(agent_id)
        first, end = await turn(agents, agent_id, prompt)
    else:
        first, end = await turn(agents, agent_id, [7])
        assert end.usage.restored_tokens >= n - 1, end.usage
        await agents.lifecycle.rewind(agent_id, turn=1)
    await agents.sleep.pause(agent_id)
    return first, end


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure all lengths and cases."""
    lengths = [512, 2048, 4096] if quick else [512, 1024, 2048, 4096, 8192, 16384]
    n_rounds = 3 if quick else 5
    with tempfile.TemporaryDirectory(prefix="kvcellar-restore-") as name:
        root = Path(name)
        os.environ["KVCELLAR_HOME"] = str(root / "home")
        n_parameters = make_model(root / "model")
        host = open_host(str(root / "model"), capacity=max(lengths) + 64)
        host.costs = Always()
        print(f"{n_parameters / 1e6:.0f} million parameters, float32")
        print(f"{'tokens':>7} {'recomputed':>11} {'warm':>9} {'cold':>9} {'plain read':>11}")
        try:
            result: dict[str, Any] = {"parameters": n_parameters}
            for n in lengths:
                result |= measure_one(root / f"store-{n}", host, n, n_rounds)
        finally:
            host.close()
    return result


def measure_one(folder: Path, host: ModelHost, n: int, n_rounds: int) -> dict[str, Any]:
    """Measure one length."""
    prompt = [(i * 7919 + n) % 8000 for i in range(n)]
    first: dict[str, list[float]] = {"recomputed": [], "warm": [], "cold": []}
    said: set[tuple[int, ...]] = set()
    plain: list[float] = []
    loads: list[float] = []
    with agents_of(folder, host, 8 << 30) as agents:
        seconds, _ = asyncio.run(once(agents, "a", n, prompt))
        first["recomputed"].append(seconds)
        for i in range(n_rounds + 1):
            seconds, end = asyncio.run(once(agents, "a", n, None))
            said.add(end.finish.token_ids)
            if i:  # the first is to warm up
                first["warm"].append(seconds)
    n_bytes = 0
    for _ in range(n_rounds):
        with agents_of(folder, host, 0) as agents:
            forget_files(folder)
            seconds, end = asyncio.run(once(agents, "a", n, None))
            assert set(end.usage.restored_from) == {"cold"}, end.usage
            said.add(end.finish.token_ids)
            first["cold"].append(seconds)
            loads.append(end.usage.restore_s)
        n_bytes, took = read_plainly(forget_files(folder))
        plain.append(took)
    assert len(said) == 1, f"every case says the same, these said {said}"
    ms = {name: statistics.median(times) * 1e3 for name, times in first.items()}
    plain_ms = statistics.median(plain) * 1e3
    print(
        f"{n:>7} {ms['recomputed']:>8.0f} ms {ms['warm']:>6.1f} ms {ms['cold']:>6.1f} ms "
        f"{plain_ms:>8.1f} ms  {n_bytes / 1e6:.0f} MB; disk {ms['recomputed'] / ms['cold']:.0f} "
        f"and RAM {ms['recomputed'] / ms['warm']:.0f} times as fast"
    )
    size = f"{n // 1024}k" if n >= 1024 else str(n)
    found = {
        f"disk_speedup_at_{size}": round(ms["recomputed"] / ms["cold"], 1),
        f"ram_speedup_at_{size}": round(ms["recomputed"] / ms["warm"], 1),
    }
    if n == 4096:
        ratios = [a / b for a, b in zip(plain, loads, strict=True)]
        found["read_bandwidth_fraction"] = round(statistics.median(ratios), 2)
        found["read_mb_per_s"] = round(n_bytes / 1e6 / statistics.median(plain))
    return found


if __name__ == "__main__":
    run(__doc__ or "", measure)
