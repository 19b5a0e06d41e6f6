"""Parts of ``gpu.py`` that ask what requests take: through the engine, and over HTTP.

Prompts are shorter and several times longer than a step of the engine. A request that ends with an
error or with fewer tokens than were asked for fails its part.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from pathlib import Path

import torch
from gpu_bench import Bench, Found, answered, command_of, n_graphs_of, prompt_of
from serving import Answer, continued, serving

LENGTHS = (300, 2048, 5000)
ANSWER = 160
"""Tokens of an answer of the engine: the first of eight goes on until the last one has begun."""

KINDS = {4000: 200, 500: 128}
"""Tokens of a prompt to the server -> tokens of its answer."""

CLIENTS = {1: 3, 8: 2, 32: 1}
"""Clients -> how often they ask, all at once, after the first request of a kind."""


def engine(bench: Bench) -> Found:
    """Measure the engine's steps, all of its bookkeeping included, and prompts of several steps."""
    found: Found = {}
    n_tokens, most = bench.n(ANSWER), bench.branches
    capacity = most * (bench.n(max(LENGTHS)) + n_tokens + 1)
    vocab = bench.model.vocab_size
    began = time.perf_counter()
    with bench.engine(bench.model, capacity, most) as made:
        found["engine_up_s"] = round(time.perf_counter() - began, 1)
        for n, word in ((1, "1"), (most, "8")):
            for length in LENGTHS:
                prompts = [
                    prompt_of(bench.n(length), length + 100 * n + i, vocab) for i in range(n)
                ]
                times = answered(made, prompts, n_tokens)
                found[f"engine_{word}_at_{length}_step_ms"] = round(times.step_ms, 3)
                found[f"engine_{word}_at_{length}_first_token_ms"] = round(times.first_s * 1e3, 1)
        found["engine_is_recorded"] = n_graphs_of(made.runner) > 0
    return found


def serve(bench: Bench) -> Found:
    """Start ``kvcellar serve`` on the card, twice, and ask it with 1, 8 and 32 clients.

    The first start finds nothing that was kept. Of each kind of request the first one is told apart
    from those behind it.
    """
    home = bench.folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    most = bench.branches if bench.is_dry else max(CLIENTS)
    longest = bench.n(max(KINDS)) + bench.n(KINDS[max(KINDS)]) + 8
    options = [f"llama={bench.path}", "--parallel", most, "--capacity", (most + 1) * longest]
    options += [] if bench.is_dry else ["--device", bench.device]
    found: Found = {"serve_parallel": most}
    for name in ("serve_up_s", "serve_up_again_s"):
        command, began = command_of(is_dry=bench.is_dry), time.perf_counter()
        with serving(options, _made(home), command=command) as port:
            found[name] = round(time.perf_counter() - began, 1)
            if name == "serve_up_s":
                for length in KINDS:
                    found |= _asked(bench, port, length)
        if bench.is_dry:
            break
    return found


def _made(home: Path) -> Path:
    home.mkdir(exist_ok=True)
    return home


def _asked(bench: Bench, port: int, length: int) -> Found:
    """Ask for answers behind prompts of a length, that share nothing."""
    n_prompt, n_tokens, seeds = bench.n(length), bench.n(KINDS[length]), iter(range(10**6))
    vocab = bench.model.vocab_size

    def ask(n: int) -> tuple[list[Answer], float]:
        prompts = [prompt_of(n_prompt, 7 * length + next(seeds), vocab) for _ in range(n)]

        async def together() -> list[Answer]:
            asked = (continued(port, "llama", prompt, n_tokens) for prompt in prompts)
            return list(await asyncio.gather(*asked))

        began = time.perf_counter()
        answers = asyncio.run(together())
        return answers, time.perf_counter() - began

    name = f"serve_{length}"
    ((first,), _) = ask(1)
    found: Found = {
        f"{name}_first_request_s": round(first.whole_s, 3),
        f"{name}_first_request_first_token_ms": round(first.first_s * 1e3, 1),
    }
    for of, times in [*CLIENTS.items()][: 2 if bench.is_dry else None]:
        n, again = (min(of, bench.branches), 1) if bench.is_dry else (of, times)
        rounds = [ask(n) for _ in range(again)]
        answers = [answer for each, _ in rounds for answer in each]
        seconds = sum(took for _, took in rounds)
        n_sampled = sum(answer.n_tokens for answer in answers)
        of_first = statistics.median(answer.first_s for answer in answers)
        of_whole = statistics.median(answer.whole_s for answer in answers)
        found[f"{name}_clients_{of}_request_s"] = round(of_whole, 3)
        found[f"{name}_clients_{of}_first_token_ms"] = round(of_first * 1e3, 1)
        found[f"{name}_clients_{of}_tokens_per_s"] = round(n_sampled / seconds, 1)
    return found


def second_card(bench: Bench) -> Found:
    """Run the model on the second card while the first one has its own, where there are two."""
    kind = bench.device.split(":")[0]
    if not bench.is_dry and torch.get_device_module(kind).device_count() < 2:
        return {"second_card": "there is one card"}
    other = bench.load(bench.path, device="cpu" if bench.is_dry else f"{kind}:1")
    said = []
    for model in (bench.model, other):
        with bench.engine(model, 256, 1) as made:
            said.append(answered(made, [prompt_of(17, 0, model.vocab_size)], 4).token_ids)
    return {"second_card_is_equal": said[0] == said[1]}
