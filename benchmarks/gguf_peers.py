"""One GGUF file in kvcellar and in llama.cpp (xllamacpp's server), for ``peers.py --gguf``.

Both run whole: our engine, and llama.cpp's own server in its process, asked without HTTP, which
says itself how long prompts and tokens took, and for which instructions it was built.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import median_ms
from peer_engines import Remote

import kvcellar as kv
from kvcellar.engine import Engine, FinishEvent, GeneratedToken, Request, SamplingParams
from kvcellar.models import load_model
from kvcellar.models.gguf.reader import read_gguf

RANDOM_1B = "random-1b"
"""Stands for a file of Llama 3.2 1B's shape with random blocks, as a Q4_K_M file mixes them."""

DEPTH, ROOM = 8192, 64
LONG = 512


class OurFile:
    """A file behind our engine; K and V in bfloat16, weights as by default."""

    weight_bytes = 0

    def __init__(self, path: Path, capacity: int) -> None:
        """Load it and compute a first token."""
        self._stack = contextlib.ExitStack()
        model = load_model(path)
        config = kv.make_config(model.params, capacity, "bfloat16")
        session = self._stack.enter_context(kv.make_seq_session(model.backend, config))
        self._engine = Engine(model.bind(session), session.cache)
        self.prefill([1])

    def prefill(self, tokens: Sequence[int]) -> float:
        """Return the seconds from a prompt that is new to its first token."""
        return self._run(tokens, 1)[0]

    def decode(self, tokens: Sequence[int], n: int) -> float:
        """Return the seconds of a token, of n that follow the first one of a prompt."""
        return self._run(tokens, n + 1)[1] / n

    def _run(self, tokens: Sequence[int], n: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        started = time.perf_counter()
        self._engine.submit(Request(tuple(tokens), params))
        times = [
            time.perf_counter()
            for event in self._engine.run()
            if isinstance(event, (GeneratedToken, FinishEvent))
        ]
        return times[0] - started, times[n - 1] - times[0]


class TheirFile:
    """A file behind llama.cpp's server; K and V in float16, which is its default."""

    weight_bytes = 0

    def __init__(self, path: Path, capacity: int, has_flash: bool) -> None:
        """Load it and compute a first token."""
        import xllamacpp as api

        options = api.CommonParams()
        options.model.path = str(path)
        options.n_ctx, options.n_parallel, options.n_gpu_layers = capacity, 1, 0
        options.n_batch, options.n_ubatch, options.warmup = 2048, 512, False
        kinds = api.llama_flash_attn_type
        options.flash_attn_type = (
            kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if has_flash
            else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        options.cpuparams.n_threads = torch.get_num_threads()
        options.cpuparams_batch.n_threads = torch.get_num_threads()
        options.verbosity = -1
        self._server = api.Server(options)
        self.prefill([1])

    def built_for(self) -> str:
        """Return the instructions that it was built for, as it says them."""
        import xllamacpp as api

        said = str(api.get_system_info())
        return said.strip(" |").replace(" = 1", "").replace(" |", "")

    def prefill(self, tokens: Sequence[int]) -> float:
        """See :class:`OurFile`."""
        said = self._ask(tokens, 1, is_kept=False)
        return float(said["prompt_ms"]) / 1e3

    def decode(self, tokens: Sequence[int], n: int) -> float:
        """See :class:`OurFile`; its time begins with the first token."""
        said = self._ask(tokens, n + 1, is_kept=True)
        return float(said["predicted_ms"]) / 1e3 / (said["predicted_n"] - 1)

    def _ask(self, tokens: Sequence[int], n: int, *, is_kept: bool) -> Mapping[str, Any]:
        said = self._server.handle_completions(
            {
                "prompt": list(tokens),
                "n_predict": n,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": is_kept,
            }
        )
        timings: Mapping[str, Any] = said["timings"]
        if timings["prompt_n"] != len(tokens) and not is_kept:
            raise RuntimeError(f"it computed {timings['prompt_n']} of {len(tokens)} tokens")
        return timings


def measure_file(path: Path, quick: bool) -> dict[str, Any]:
    """Load a file in both, and take turns: prompts of 512, tokens at 128 and at 8,192.

    llama.cpp runs with its flash attention and without it, and is compared by the better one. Where
    the file's context is shorter, tokens are decoded near its end; ``depth`` says where. With
    ``--quick`` that is 2,048.
    """
    n_vocab, context = _facts(path)
    depth = min(2048 if quick else DEPTH, context - ROOM)
    capacity = depth + ROOM
    engines = [Remote("ours", OurFile, path, capacity)]
    for has_flash in (True, False):
        name = "llama.cpp" + ("" if has_flash else ", no flash")
        engines.append(Remote(name, TheirFile, path, capacity, has_flash))
    found: dict[str, Any] = {"file": path.name, "depth": depth}
    for engine in engines[:2]:
        found["load_s" if engine.name == "ours" else "llamacpp_load_s"] = round(engine.made_s, 2)
    found["llamacpp_built_for"] = engines[1].call("built_for")
    print(f"  llama.cpp was built for: {found['llamacpp_built_for']}")
    print(f"  loaded to a first token: {', '.join(f'{e.name} {e.made_s:.2f} s' for e in engines)}")
    random = np.random.default_rng(0)

    def prompt(n: int) -> list[int]:
        return [int(token) for token in random.integers(10, n_vocab - 10, n)]

    rounds = 3 if quick else 7
    at = prompt(128)
    _turns(engines, "decode", [(at, 4)])
    _show(found, "decode_128", _turns(engines, "decode", [(at, 16)] * rounds))
    prompts = [(prompt(LONG),) for _ in range(2 if quick else 4)]
    _show(found, "prefill_512", _turns(engines, "prefill", prompts))
    at = prompt(depth)
    _turns(engines, "decode", [(at, 4)])
    deep = f"decode_{2048 if quick else DEPTH}"
    _show(found, deep, _turns(engines, "decode", [(at, 16)] * rounds))
    for engine in engines:
        engine.close()
    return found


def _facts(path: Path) -> tuple[int, int]:
    """Return how many tokens a file's vocabulary has, and for how many it was trained."""
    file = read_gguf(path)
    context = file.whole(f"{file.architecture}.context_length")
    return len(file.texts("tokenizer.ggml.tokens") or []), context or DEPTH + ROOM


def _turns(
    engines: Sequence[Remote], method: str, calls: Sequence[tuple[Any, ...]]
) -> dict[str, list[float]]:
    """Return the seconds that each engine says for each call, taken in turns."""
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for i, arguments in enumerate(calls):
        for engine in engines if i % 2 == 0 else list(reversed(engines)):
            times[engine.name].append(engine.call(method, *arguments))
    return times


def _show(found: dict[str, Any], what: str, times: Mapping[str, list[float]]) -> None:
    """Print an engine's median a line; keep ours, and llama.cpp's better way over it."""
    for name, some in times.items():
        print(f"    {what:13s} {name:20s} {median_ms(some):10.2f} ms")
    theirs = min((name for name in times if name != "ours"), key=lambda n: median_ms(times[n]))
    ratios = [a / b for a, b in zip(times[theirs], times["ours"], strict=True)]
    found[f"{what}_ms"] = round(median_ms(times["ours"]), 3)
    found[f"{what}_over_llamacpp"] = round(statistics.median(ratios), 3)
    print(f"    {what:13s} theirs over ours    {found[f'{what}_over_llamacpp']:10.2f}")
