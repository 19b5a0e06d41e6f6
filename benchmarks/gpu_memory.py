"""Parts of ``gpu.py`` that ask how fast rows move to main memory and back, and what none left is.

Restoring is worth what computing again takes more. Where a card has no memory for a prompt the
sequences that are there go on.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from gpu_bench import Bench, Found, Sequences

import kvcellar as kv
from kvcellar.backends.torch.load.card import CONTEXT_BYTES, card_memory
from kvcellar.errors import DeviceMemoryError

BLOCK = 256
"""Tokens of a stored block."""


def transfers(bench: Bench) -> Found:
    """Measure rows to pinned memory and back, block by block, against computing them.

    Beside a save's time stands how long the engine is held up by it: steps go on meanwhile.
    """
    length = bench.n(8192)
    starts = range(0, length, BLOCK)
    with kv.make_seq_session("torch", bench.config(2 * length + 64)) as session:
        sequences, cache = Sequences(bench, session), session.cache

        def compute() -> None:
            cache.clear()
            sequences.fill(0, length)

        recompute_ms = bench.timed(compute, min(bench.rounds, 3))
        (table,) = cache.seq_table(0)
        blocks: list[Any] = []
        called: list[float] = []

        def save() -> None:
            began = time.perf_counter()
            leaving = [cache.begin_read([table[at : at + BLOCK]]) for at in starts]
            called.append(time.perf_counter() - began)
            for one in leaving:
                one.landing.arrival.wait()
            blocks[:] = [one.rows for one in leaving]

        def bring() -> None:
            if cache.has_seq(1):
                cache.seq_rm(1)
            (cells,) = cache.seq_claim(1, [np.zeros(length, np.int64)])
            for at, rows in zip(starts, blocks, strict=True):
                cache.write_rows([cells[at : at + BLOCK]], rows)

        save_ms, restore_ms = bench.timed(save), bench.timed(bring)
        (cells,) = cache.seq_table(1)
        again = [cache.read_rows([cells[at : at + BLOCK]]) for at in starts]
    n_bytes = sum(part.nbytes for block in blocks for side in block[0] for part in side)
    return {
        "save_8192_ms": round(save_ms, 2),
        "save_8192_call_ms": round(statistics.median(called) * 1e3, 2),
        "restore_8192_ms": round(restore_ms, 2),
        "save_gb_per_s": round(n_bytes / save_ms / 1e6, 1),
        "restore_gb_per_s": round(n_bytes / restore_ms / 1e6, 1),
        "save_over_restore": round(save_ms / restore_ms, 2),
        "recompute_over_restore": round(recompute_ms / restore_ms, 2),
        "restore_is_exact": all(map(_equal, blocks, again)),
    }


def _equal(one: Any, other: Any) -> bool:
    sides = zip(one[0], other[0], strict=True)
    return all(np.array_equal(a, b) for pair in sides for a, b in zip(*pair, strict=True))


def shortage(bench: Bench) -> Found:
    """Run a prompt for which there is no memory, and go on; tell what torch does not count."""
    network, chunk = bench.model.network, bench.chunk
    with kv.make_seq_session("torch", bench.config(4 * chunk)) as session:
        sequences = Sequences(bench, session)
        sequences.fill(0, chunk // 4)
        hook, card = None, card_memory(bench.device)
        if card is None:
            hook = network.model.layers[-1].register_forward_pre_hook(_has_no_memory)
        else:
            torch.cuda.empty_cache()
            card.bound(card.held_bytes + (16 << 20))
        try:
            sequences.step([1] * chunk)
            is_refused = False
        except DeviceMemoryError:
            is_refused = True
        finally:
            if card is not None:
                card.bound(2 * card.total_bytes)
            elif hook is not None:
                hook.remove()
        sequences.step([0, 1])
    found: Found = {"shortage_is_survived": is_refused}
    if card is not None:
        free, total = torch.cuda.mem_get_info(bench.device)
        beside = total - free - torch.cuda.memory_reserved(bench.device)
        found |= {"context_mib": beside >> 20, "context_mib_set_aside": CONTEXT_BYTES >> 20}
    return found


def _has_no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("there is none")
