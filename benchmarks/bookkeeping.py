"""Ask whether the bookkeeping of a cache costs more when more is stored: 1k to 1M tokens.

Microseconds of a block allocation, an append, a match of 100k tokens, a fork of a 100k-token
sequence, and an eviction, each beside a growing number of other tokens. None of them may grow with
the capacity: growth is the time beside the most tokens over the time beside the fewest, measured in
the same rounds. What is left of growth is the processor's caches: more memory is touched.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from harness import median_ratio, run

from kvcellar.bookkeeping import BlockPool, Sequences
from kvcellar.cache_config import make_config
from kvcellar.prefix import RadixIndex
from kvcellar.types import ModelCacheParams

SIZES = (1_000, 10_000, 100_000, 1_000_000)
LONG = 100_000
HISTORY = 100
BLOCK = 16
N_BLOCKS = 32
N_APPENDS = 64


class Case(NamedTuple):
    """One operation beside so many tokens.

    Attributes:
        call: what is timed; takes the round.
        undo: brings everything back; takes the round, is not timed.
        n: how many operations one call makes.
    """

    call: Callable[[int], object]
    undo: Callable[[int], object]
    n: int


def tokens(n: int, seed: int) -> Any:
    """Return ``[n]`` token ids."""
    return np.random.default_rng(seed).integers(0, 150_000, n)


def full_cache(size: int) -> Sequences:
    """Create blocks with ``size`` tokens of others, and room for what is timed."""
    cache = Sequences(make_config(ModelCacheParams(1, 1, 1), size + LONG), block_size=BLOCK)
    for seq_id in range(1, 9):
        written(cache, seq_id, size // 8)
    return cache


def written(cache: Sequences, seq_id: int, n: int) -> None:
    """Let a forward bring ``n`` tokens of a sequence."""
    positions = cache.begin_step([(seq_id, n)])
    cache.steps.plan(0, n, positions)
    cache.steps.wrote(0)
    cache.end_step()


def allocation(size: int) -> Case:
    """Measure a new prompt that takes blocks beside those of others."""
    cache = full_cache(size)
    prompt = [(0, N_BLOCKS * BLOCK)]
    return Case(lambda i: cache.begin_step(prompt), lambda i: cache.cancel_step(), N_BLOCKS)


def append(size: int) -> Case:
    """Measure a sequence that decodes, token by token."""
    cache = full_cache(size)
    written(cache, 0, BLOCK)

    def call(i: int) -> None:
        for _ in range(N_APPENDS):
            written(cache, 0, 1)

    return Case(call, lambda i: cache.seq_rm(0, BLOCK), N_APPENDS)


def full_index(size: int) -> tuple[RadixIndex, Callable[[int], object]]:
    """Store histories of 100 tokens, ``size`` in all; return how to store another as well."""
    index = RadixIndex()
    stored = tokens(size + LONG, 3).reshape(-1, HISTORY)

    def store(i: int) -> object:
        first = i % len(stored) * HISTORY
        # The first token tells them apart: a flat tree, with as many leaves as can be.
        stored[i % len(stored), 0] = 200_000 + i
        return index.insert_prefix(stored[i % len(stored)], [np.arange(first, first + HISTORY)])

    for i in range(size // HISTORY):
        store(i)
    return index, store


def match(size: int) -> Case:
    """Measure the match of a prompt of 100k tokens that is stored."""
    index, _ = full_index(size)
    prompt = tokens(LONG, 4)
    index.insert_prefix(prompt, [np.arange(LONG)])
    assert index.match_prefix(prompt).length == LONG
    return Case(lambda i: index.match_prefix(prompt), lambda i: None, 1)


def eviction(size: int) -> Case:
    """Measure how the least recently used history of 100 tokens goes."""
    index, store = full_index(size)
    n = size // HISTORY
    return Case(lambda i: index.evict(HISTORY), lambda i: store(n + i), 1)


def fork(size: int) -> Case:
    """Measure a second owner for every cell of a sequence of 100k tokens."""
    pool = BlockPool(LONG + size)
    pool.claim(0, 0, LONG)
    for seq_id in range(1, 9):
        pool.claim(seq_id, 0, size // 8)
    return Case(lambda i: pool.share(99, pool.shareable(0, 99)), lambda i: pool.seq_rm(99), 1)


OPERATIONS: dict[str, Callable[[int], Case]] = {
    "block_allocation": allocation,
    "append": append,
    "match_100k": match,
    "fork_100k": fork,
    "eviction": eviction,
}


@contextmanager
def no_gc() -> Iterator[None]:
    """Keep the garbage collector from running inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def times_us(make: Callable[[int], Case], rounds: int) -> dict[str, list[float]]:
    """Return microseconds per operation and round, by size; sizes take turns in every round."""
    cases = {str(size): make(size) for size in SIZES}
    times: dict[str, list[float]] = {size: [] for size in cases}
    with no_gc():
        for i in range(-3, rounds):
            for size, case in cases.items() if i % 2 else reversed(cases.items()):
                start = time.perf_counter()
                case.call(i + 3)
                took = time.perf_counter() - start
                case.undo(i + 3)
                if i >= 0:
                    times[size].append(1e6 * took / case.n)
    return times


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure every operation beside every number of tokens."""
    result: dict[str, Any] = {}
    by_size: dict[str, dict[str, float]] = {}
    growth: dict[str, float] = {}
    sizes = "".join(f"{size:>11,}" for size in SIZES)
    print(f"microseconds beside so many tokens:{sizes}   growth")
    for name, make in OPERATIONS.items():
        times = times_us(make, rounds=150 if quick else 1000)
        by_size[name] = {size: round(statistics.median(t), 3) for size, t in times.items()}
        most, fewest = str(SIZES[-1]), str(SIZES[0])
        growth[name] = round(median_ratio(times, most, fewest), 3)
        result[f"{name}_us"] = by_size[name][most]
        row = "".join(f"{by_size[name][str(size)]:>11.2f}" for size in SIZES)
        print(f"  {name:<33}{row}{growth[name]:>9.2f}")
    result["max_growth"] = max(growth.values())
    print(f"  largest growth {result['max_growth']:.2f}, while the tokens grew 1000 times")
    return {**result, "growth": growth, "us_by_tokens": by_size}


if __name__ == "__main__":
    run(__doc__ or "", measure)
