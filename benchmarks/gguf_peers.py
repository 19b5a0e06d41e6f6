"""One GGUF file in kvcellar and in llama.cpp (llama-cpp-python), for ``peers.py --gguf``.

Ours is the whole engine. Of llama.cpp it is its C interface, with the best token taken of the
logits; it says for which instructions it was built.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import median_ms
from peer_engines import LlamaCpp, Remote

import kvcellar as kv
from kvcellar.engine import Engine, FinishEvent, GeneratedToken, Request, SamplingParams
from kvcellar.models import load_model
from kvcellar.models.gguf.reader import read_gguf

RANDOM_1B = "random-1b"
"""Stands for a file of Llama 3.2 1B's shape with random blocks, as a Q4_K_M file mixes them."""

DEPTHS, PROMPTS = (128, 2048, 8192), (512, 2048)
ROOM = 64
"""Tokens that may follow a prompt, in a cache that holds the longest."""


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
    """A file behind llama.cpp; K and V in float16, which is its default."""

    weight_bytes = 0

    def __init__(self, path: Path, has_flash: bool) -> None:
        """Load it and compute a first token."""
        self._engine = LlamaCpp(path, 0, is_repacked=True, has_flash=has_flash)
        self._read: Sequence[int] = ()
        self.prefill([1])

    def built_for(self) -> str:
        """Return the instructions that it was built for, as it says them."""
        return self._engine.built_for()

    def prefill(self, tokens: Sequence[int]) -> float:
        """See :class:`OurFile`."""
        self._read = ()
        started = time.perf_counter()
        int(self._engine.prefill(tokens).argmax())
        return time.perf_counter() - started

    def decode(self, tokens: Sequence[int], n: int) -> float:
        """See :class:`OurFile`; a prompt that it has read is put back as it was kept."""
        if tokens == self._read:
            self._engine.restore()
        else:
            self.prefill(tokens)
            self._engine.save()
            self._read = tokens
        token = tokens[-1]
        started = time.perf_counter()
        for _ in range(n):
            token = self._engine.best_after(token)
        return (time.perf_counter() - started) / n


def measure_file(path: Path, quick: bool) -> dict[str, Any]:
    """Load a file in both, and take turns: tokens at each of ``DEPTHS``, prompts of ``PROMPTS``.

    llama.cpp runs with its flash attention and without it, and is compared by the better one. Where
    the file's context is shorter, tokens are decoded near its end; ``depth`` says where. With
    ``--quick`` the last depth and the last prompt are left out.
    """
    n_vocab, context = _facts(path)
    depths = {f"decode_{depth}": min(depth, context - ROOM) for depth in DEPTHS[: 3 - quick]}
    depth = max(depths.values())
    engines = [Remote("ours", OurFile, path, depth + ROOM)]
    for has_flash in (True, False):
        name = "llama.cpp" + ("" if has_flash else ", no flash")
        engines.append(Remote(name, TheirFile, path, has_flash))
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
    for n in [n for n in PROMPTS[: 2 - quick] if n <= depth]:
        prompts = [(prompt(n),) for _ in range(2 if quick else 4)]
        _show(found, f"prefill_{n}", _turns(engines, "prefill", prompts))
    for name, n in depths.items():
        at = prompt(n)
        _turns(engines, "decode", [(at, 4)])
        _show(found, name, _turns(engines, "decode", [(at, 16)] * rounds))
    for engine in engines:
        engine.close()
    return found


def _facts(path: Path) -> tuple[int, int]:
    """Return how many tokens a file's vocabulary has, and for how many it was trained."""
    file = read_gguf(path)
    context = file.whole(f"{file.architecture}.context_length")
    return len(file.texts("tokenizer.ggml.tokens") or []), context or DEPTHS[-1] + ROOM


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
