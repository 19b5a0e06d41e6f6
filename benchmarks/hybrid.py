"""Ask what turns, forks, restarts and steps cost on a model with recurrent layers.

A random model of Qwen3.5-0.8B's shape with four of its layers (three gated delta nets, one of
attention) and a small vocabulary, in bfloat16. A conversation of 4,096 tokens whose template drops
old reasoning goes on, warm and cold; an agent is forked; an agent is loaded from the store into a
new engine, and computed; a token is decoded, against transformers with its own cache; and a prompt
is read with snapshots on its way and without.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import alternate, median_ms, median_ratio, run
from random_models import QWEN35_08B
from restore import Always, turn

import kvcellar as kv
from kvcellar.agents import AgentManager, ModelRegistry, open_host
from kvcellar.engine import Engine, EngineConfig, FinishEvent, Request, SamplingParams
from kvcellar.models import load_model
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.store import Store, StoreConfig

HISTORY, CONTEXT, VOCABULARY = 4096, 128, 8192
SHAPE = {**QWEN35_08B, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
THINK, ANSWER, QUESTION = [11] * 2, 24, 16
"""Tokens: a generation prompt that begins to think, an answer, and what the user says next."""


def make_model(folder: Path) -> None:
    """Save the random model, with the bundled tokenizer."""
    config = transformers.CONFIG_MAPPING["qwen3_5_text"](
        **SHAPE, tie_word_embeddings=True, max_position_embeddings=32768, dtype="bfloat16"
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (DEMO_FOLDER / name).exists():
            shutil.copy(DEMO_FOLDER / name, folder / name)


def words(n: int, seed: int) -> list[int]:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 8000, (n,), generator=generator).tolist()


# Turns --------------------------------------------------------------------------------------------


@contextmanager
def engine_of(model: Any, index: str, capacity: int) -> Iterator[Engine]:
    """Open an engine for a model."""
    config = kv.make_config(model.params, capacity, kv_dtype="bfloat16", n_slots=64)
    with kv.make_seq_session("torch", config) as session:
        yield Engine(
            model.bind(session), session.cache, config=EngineConfig(index=index, max_num_seqs=4)
        )


def ask(engine: Engine, prompt: list[int], at: tuple[int, ...], n: int = 1) -> FinishEvent:
    """Run one request to its end."""
    params = SamplingParams(max_tokens=n, ignore_eos=True)
    engine.submit(Request(prompt, params, snapshots_at=at))
    end = next(event for event in engine.run() if isinstance(event, FinishEvent))
    assert end.usage is not None, end.error
    return end


def turn_ratio(model: Any) -> dict[str, Any]:
    """Time the first token of a conversation's next turn, which has lost its reasoning."""
    history = words(HISTORY, 1)
    with engine_of(model, "radix", 2 * HISTORY) as engine:
        first = ask(engine, [*history, *THINK], (HISTORY,), 8 + ANSWER)
        answer = first.token_ids[8:]
        # Each another one from where the reasoning was.
        turns = [[*history, 20 + i, *answer, *words(QUESTION, i), *THINK] for i in range(5)]
        at = (len(turns[0]) - len(THINK),)
        warm = [ask(engine, tokens, at).usage for tokens in turns]
    with engine_of(model, "radix", 2 * HISTORY) as engine:
        cold = ask(engine, turns[0], at).usage
    warm_ms = median_ms([usage.time_to_first_token_s for usage in warm])
    cold_ms = cold.time_to_first_token_s * 1e3
    reused = min(usage.cached_tokens for usage in warm)
    print(
        f"next turn of {len(turns[0])} tokens: warm {warm_ms:.0f} ms ({reused} reused), "
        f"cold {cold_ms:.0f} ms"
    )
    return {"warm_turn_over_cold": round(warm_ms / cold_ms, 4), "reused_tokens": reused}


def snapshot_overhead(model: Any, quick: bool) -> float:
    """Time a long prompt that leaves snapshots on its way, over one that leaves nothing.

    In seconds of the processor: it is a few percent, which whoever else runs here would hide.
    """
    prompt = words(2048, 3)
    seconds: dict[str, list[float]] = {"radix": [], "naive": []}
    for i in range(3 if quick else 9):
        for index in list(seconds)[:: 1 if i % 2 else -1]:
            with engine_of(model, index, 4096) as engine:
                started = time.process_time()
                ask(engine, prompt, (len(prompt) - 8,))
                seconds[index].append(time.process_time() - started)
    print(
        f"prompt of {len(prompt)} tokens: {median_ms(seconds['radix']):.0f} ms of the processor "
        f"with snapshots, {median_ms(seconds['naive']):.0f} ms without"
    )
    return median_ratio(seconds, "radix", "naive")


# Agents -------------------------------------------------------------------------------------------


@contextmanager
def agents_of(folder: Path, model: Path) -> Iterator[tuple[AgentManager, Engine]]:
    """Open a manager over the folder, and a new engine; nothing is kept in memory."""
    host = open_host(
        str(model), backend="torch", capacity=HISTORY + 512, dtype="bfloat16", is_unchecked=True
    )
    host.costs = Always()
    try:
        with Store(folder, StoreConfig(warm_bytes=0, queue_bytes=1 << 30)) as store:
            registry = ModelRegistry(lambda _: host)
            yield AgentManager(store, registry, default_model=host.name), host.engine
    finally:
        host.close()


async def fork(agents: AgentManager, n: int) -> list[float]:
    """Fork an agent some times; return the seconds of each."""
    times = []
    for i in range(n):
        started = time.perf_counter()
        await agents.lifecycle.fork("a", f"fork-{i}", is_passing=True)
        times.append(time.perf_counter() - started)
    return times


def agent_figures(root: Path, model: Path, quick: bool) -> dict[str, Any]:
    """Fork an agent, and load it into new engines."""
    with agents_of(root, model) as (agents, engine):
        asyncio.run(agents.lifecycle.create("a"))
        computed, first = asyncio.run(turn(agents, "a", words(HISTORY, 4)))
        before = engine.stats().free_cells
        forks = asyncio.run(fork(agents, 25))
        moved = before - engine.stats().free_cells
        asyncio.run(agents.sleep.pause("a"))
    restored, restored_tokens = [], set()
    for _ in range(3 if quick else 9):
        with agents_of(root, model) as (agents, _):
            seconds, end = asyncio.run(turn(agents, "a", [7]))
            restored.append(seconds)
            restored_tokens.add(end.usage.restored_tokens)
            asyncio.run(agents.lifecycle.rewind("a", turn=1))
    assert min(restored_tokens) >= HISTORY, restored_tokens
    restore_ms = median_ms(restored)
    print(
        f"{HISTORY} tokens computed in {computed * 1e3:.0f} ms, restored in new engines in "
        f"{restore_ms:.0f} ms; a fork takes {median_ms(forks):.2f} ms and {moved} cells"
    )
    assert first.usage.restored_tokens == 0
    return {
        "fork_ms": round(median_ms(forks), 3),
        "fork_kv_cells": moved,
        "restore_speedup_at_4k": round(computed * 1e3 / restore_ms, 1),
        "restore_ms": round(restore_ms, 1),
    }


# Steps --------------------------------------------------------------------------------------------


def decode_ratio(model: Any, folder: Path, quick: bool) -> dict[str, Any]:
    """Time a decode step over transformers' own with its cache."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompt = words(CONTEXT, 5)
    config = kv.make_config(model.params, 1024, kv_dtype="bfloat16")
    with kv.make_decode_session("torch", config) as session, torch.inference_mode():
        runner = model.bind(session)
        runner.forward(prompt, range(CONTEXT))
        past = transformers.DynamicCache(config=theirs.config)
        theirs(input_ids=torch.tensor([prompt]), past_key_values=past, use_cache=True)

        def ours() -> None:
            runner.forward([7], [session.cache.length])

        def base() -> None:
            theirs(input_ids=torch.tensor([[7]]), past_key_values=past, use_cache=True)

        times = alternate({"ours": ours, "transformers": base}, rounds=16 if quick else 200)
    ours_ms, theirs_ms = median_ms(times["ours"]), median_ms(times["transformers"])
    print(f"decode step: {ours_ms:.2f} ms, transformers {theirs_ms:.2f} ms")
    return {
        "decode_over_transformers": round(median_ratio(times, "ours", "transformers"), 3),
        "decode_ms": round(ours_ms, 3),
        "transformers_decode_ms": round(theirs_ms, 3),
    }


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure the figures."""
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="kvcellar-hybrid-") as name:
        root = Path(name)
        os.environ["KVCELLAR_HOME"] = str(root / "home")
        make_model(root / "model")
        model = load_model(
            str(root / "model"), backend="torch", dtype="bfloat16", is_unchecked=True
        )
        result = decode_ratio(model, root / "model", quick)
        result |= turn_ratio(model)
        result["snapshot_overhead"] = round(snapshot_overhead(model, quick), 3)
        gc.collect()
        return result | agent_figures(root / "store", root / "model", quick)


if __name__ == "__main__":
    run(__doc__ or "", measure)
