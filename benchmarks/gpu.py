"""Ask how near the torch backend comes to a GPU's bandwidth, and whether it computes the same.

A Llama of 1B shape with random weights in bfloat16 decodes, prefills, forks, reads quantised cells
and brings rows back from main memory on one card, beside transformers' own caches: eager, and a
static one that is compiled. A step's bytes are its weights and the K and V that it must read;
bandwidth is that of a copy. Parts run in the order of their worth until the time is over; what
fails or is left out is named. ``--dry`` runs all of them on a CPU, where Triton interprets and a
stand-in records graphs: it says whether the script works, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_checks
import numpy as np
import torch
from gpu_bench import Bench, Found, Sequences, stand_in
from harness import run

import kvcellar as kv
from kvcellar.backends.torch.gpu import choice, logits
from kvcellar.backends.torch.load.card import CONTEXT_BYTES, card_memory
from kvcellar.engine import Engine, Request, SamplingParams
from kvcellar.errors import DeviceMemoryError
from kvcellar.models import load_model
from kvcellar.models.kept_logits import RowSampling

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/backends/gpu/test_products.py",
    "tests/backends/gpu/test_between.py",
    "tests/engine/test_kept_logits.py",
    "tests/backends/gpu/test_on_card.py",
)
BLOCK = 256
"""Tokens of a stored block."""

# Decoding ----------------------------------------------------------------------------------------


def decode(bench: Bench) -> Found:
    """Measure a step of one token behind short and long histories, over the bytes it must read."""
    copied = _bandwidth(bench)
    weights = bench.model.size_bytes
    stored = bench.config(1).kv
    cell = sum(group.cell_bytes(stored) for group in bench.model.params.groups)
    times, n_graphs = _decoded(bench, None, bench.lengths)
    found: Found = {"copy_gb_per_s": round(copied / 1e9), "graphs_recorded": n_graphs}
    for length, ms in zip(bench.lengths, times, strict=True):
        least = (weights + length * cell) / copied * 1e3
        found[f"decode_{length}_ms"] = round(ms, 3)
        found[f"decode_{length}_fraction_of_bandwidth"] = round(least / ms, 3)
    return found


def _bandwidth(bench: Bench) -> float:
    """Return the bytes per second of a copy, reads and writes counted."""
    n_bytes = 1 << (16 if bench.is_dry else 30)
    source = torch.empty(n_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * n_bytes / (bench.timed(lambda: target.copy_(source)) * 1e-3)


def _decoded(bench: Bench, kv_dtype: str | None, lengths: Sequence[int]) -> tuple[list[float], int]:
    """Return the time of a step of one token behind so many, and how many graphs there are."""
    config = bench.config(max(lengths) + 64, kv_dtype)
    with kv.make_seq_session("torch", config) as session:
        sequences, found = Sequences(bench, session), []
        for length in lengths:
            sequences.fill(0, length)
            found.append(bench.timed(lambda: sequences.step([0])))
        return found, sequences.n_graphs


def weights(bench: Bench) -> Found:
    """Measure decoding and a prompt with weights in few bits, and by transformers' own modules."""
    copied, length = _bandwidth(bench), bench.lengths[1]
    dtype = str(bench.model.network.dtype).removeprefix("torch.")
    own, found = bench.model, {}
    cell = sum(group.cell_bytes(bench.config(1).kv) for group in own.params.groups)
    for name in ("int8",) if bench.is_dry else ("int8", "int4", "none"):
        bench.model = load_model(str(bench.folder), device=bench.device, dtype=dtype, weights=name)
        (ms,), _ = _decoded(bench, None, (length,))
        least = (bench.model.size_bytes + length * cell) / copied * 1e3
        found[f"decode_{length}_weights_{name}_ms"] = round(ms, 3)
        found[f"decode_{length}_weights_{name}_fraction_of_bandwidth"] = round(least / ms, 3)
        found[f"eight_weights_{name}_ms"] = round(_together(bench, 8, length, forks=True), 3)
        found[f"prefill_{length}_weights_{name}_ms"] = round(_prefill(bench, length), 2)
    bench.model = own
    return found


def batches(bench: Bench) -> Found:
    """Measure steps of eight sequences, of their own and over one trunk, against one."""
    one, eight = (_together(bench, n, bench.batch_length, forks=False) for n in (1, bench.branches))
    trunk, branches = (_together(bench, n, bench.trunk, forks=True) for n in (1, bench.branches))
    return {
        "eight_ms": round(eight, 3),
        "eight_over_one": round(eight / one, 3),
        "branches8_ms": round(branches, 3),
        "branches8_over_one": round(branches / trunk, 3),
    }


def _together(bench: Bench, n: int, length: int, *, forks: bool) -> float:
    """Return the time of a step of ``n`` sequences of a length: of their own, or over one trunk."""
    capacity = (length if forks else n * length) + 64 * n
    with kv.make_seq_session("torch", bench.config(capacity)) as session:
        sequences = Sequences(bench, session)
        for seq in range(n):
            if forks and seq:
                sequences.cache.seq_cp(0, seq)
            else:
                sequences.fill(seq, length)
        return bench.timed(lambda: sequences.step(range(n)))


def quantised(bench: Bench) -> Found:
    """Measure decoding over cells in fp8, 8 and 4 bits against the longest decode of plain ones."""
    longest = bench.lengths[-1]
    base = bench.found[f"decode_{longest}_ms"]
    found = {}
    for kv_dtype in ("fp8", "int8", "int4"):
        (ms,), _ = _decoded(bench, kv_dtype, (longest,))
        found[f"{kv_dtype}_kv_over_bf16"] = round(ms / base, 3)
    return found


def compiled(bench: Bench) -> Found:
    """Measure transformers' compiled static cache, one token behind a history."""
    from transformers import StaticCache

    length, network = bench.peer_length, bench.peer
    cache = StaticCache(config=network.config, max_cache_len=length + 64)
    settings = {"backend": "eager"} if bench.is_dry else {"mode": "reduce-overhead"}
    step = torch.compile(network, **settings)

    def token() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        out = step(bench.ids(1), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits.argmax(-1)

    with torch.no_grad():
        for start in range(0, length, bench.chunk):
            ids = bench.ids(min(bench.chunk, length - start))
            network(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for _ in range(3):
            token()
        theirs = bench.timed(token)
    ours = bench.found[f"decode_{length}_ms"]
    return {
        f"compiled_{length}_ms": round(theirs, 3),
        "decode_over_compiled": round(theirs / ours, 3),
    }


# Prompts -----------------------------------------------------------------------------------------


def prompts(bench: Bench) -> Found:
    """Measure a prompt in chunks, and transformers' own time for the same chunks."""
    from transformers import DynamicCache

    length = bench.peer_length
    ours = _prefill(bench, length)

    def prompt() -> None:
        cache = DynamicCache(config=bench.peer.config)
        for start in range(0, length, bench.chunk):
            ids = bench.ids(min(bench.chunk, length - start))
            bench.peer(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    with torch.inference_mode():
        theirs = bench.timed(prompt, min(bench.rounds, 3))
    return {
        f"prefill_{length}_ms": round(ours, 2),
        f"prefill_{length}_over_transformers": round(theirs / ours, 3),
    }


def _prefill(bench: Bench, length: int) -> float:
    """Return the time of a prompt in chunks."""
    with kv.make_seq_session("torch", bench.config(length + 64)) as session:
        sequences = Sequences(bench, session)

        def prompt() -> None:
            sequences.cache.clear()
            sequences.fill(0, length)

        return bench.timed(prompt, min(bench.rounds, 3))


def first_tokens(bench: Bench) -> Found:
    """Measure a forward of 16 tokens of each of four forks of a trunk against one's."""
    one, four = (_first(bench, n) for n in (1, 4))
    return {"first_tokens_ms": round(four, 3), "first_tokens_of_4_forks_over_one": _per(four, one)}


def _first(bench: Bench, n: int) -> float:
    length = bench.batch_length
    with kv.make_seq_session("torch", bench.config(length + 2048)) as session:
        sequences = Sequences(bench, session)
        sequences.fill(0, length)
        for seq in range(1, n):
            sequences.cache.seq_cp(0, seq)
        ids = [seq for seq in range(n) for _ in range(16)]

        def forward() -> None:
            sequences.step(ids)
            sequences.cache.cancel_step()

        return bench.timed(forward)


# Memory ------------------------------------------------------------------------------------------


def restore(bench: Bench) -> Found:
    """Measure how long rows take from pinned memory, block by block, against computing them."""
    length = bench.peer_length
    starts = range(0, length, BLOCK)
    with kv.make_seq_session("torch", bench.config(2 * length + 64)) as session:
        sequences, cache = Sequences(bench, session), session.cache
        sequences.fill(0, length)
        (table,) = cache.seq_table(0)
        start = time.perf_counter()
        blocks = [cache.read_rows([table[at : at + BLOCK]]) for at in starts]
        save_ms = (time.perf_counter() - start) * 1e3

        def bring() -> None:
            if cache.has_seq(1):
                cache.seq_rm(1)
            (cells,) = cache.seq_claim(1, [np.zeros(length, np.int64)])
            for at, rows in zip(starts, blocks, strict=True):
                cache.write_rows([cells[at : at + BLOCK]], rows)

        ms = bench.timed(bring)
        (cells,) = cache.seq_table(1)
        again = [cache.read_rows([cells[at : at + BLOCK]]) for at in starts]
    n_bytes = sum(part.nbytes for block in blocks for side in block[0] for part in side)
    recompute = bench.found.get(f"prefill_{length}_ms") or _prefill(bench, length)
    return {
        f"save_{length}_ms": round(save_ms, 2),
        f"restore_{length}_ms": round(ms, 2),
        "restore_gb_per_s": round(n_bytes / ms / 1e6, 1),
        "recompute_over_restore": _per(recompute, ms),
        "restore_is_exact": all(map(_equal, blocks, again)),
    }


def _equal(one: Any, other: Any) -> bool:
    sides = zip(one[0], other[0], strict=True)
    return all(np.array_equal(a, b) for pair in sides for a, b in zip(*pair, strict=True))


def shortage(bench: Bench) -> Found:
    """Run a prompt for which there is no memory, and go on; tell what torch does not count."""
    network = bench.model.network
    with kv.make_seq_session("torch", bench.config(4 * bench.chunk)) as session:
        sequences = Sequences(bench, session)
        sequences.fill(0, bench.chunk // 4)
        hook, card = None, card_memory(bench.device)
        if card is None:
            hook = network.model.layers[-1].register_forward_pre_hook(_has_no_memory)
        else:
            torch.cuda.empty_cache()
            card.bound(card.held_bytes + (16 << 20))
        try:
            sequences.step([1] * bench.chunk)
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


def engine(bench: Bench) -> Found:
    """Measure whole steps of the engine, all of its bookkeeping included, at greedy decoding."""
    found: Found = {}
    n_tokens = 4 if bench.is_dry else 80
    prompt_length = bench.batch_length // 2
    for n in (1, bench.branches):
        with kv.make_seq_session("torch", bench.config(n * (prompt_length + 128))) as session:
            made = Engine(bench.bound(bench.model, session), session.cache)
            params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
            for i in range(n):
                prompt = [(3 + i + 5 * j) % 250 for j in range(prompt_length)]
                made.submit(Request(prompt, params))
            times = []
            while not made.is_idle:
                start = time.perf_counter()
                made.step()
                times.append(time.perf_counter() - start)
        found[f"engine_{n}_step_ms"] = round(statistics.median(times[len(times) // 2 :]) * 1e3, 3)
    return found


# Correctness -------------------------------------------------------------------------------------


def agreement(bench: Bench) -> Found:
    """Measure how far logits are from transformers', with chunks, forks, windows, sinks, trees."""
    found: Found = {}
    families = {"qwen3": "tree"} if bench.is_dry else gpu_checks.FAMILIES
    for family, kind in families.items():
        apart, n_graphs = gpu_checks.apart(family, kind, bench.device, stand_in)
        found[f"float32_apart_{family}"] = float(f"{apart:.2g}")
        found[f"graphs_of_{family}"] = n_graphs
    n = 16 if bench.is_dry else 512
    ratio = gpu_checks.rounding(bench.folder, bench.model, bench.device, n)
    return found | {"bfloat16_error_over_transformers": round(ratio, 3)}


def sampling(bench: Bench) -> Found:
    """Measure sampling a token for each of eight rows of logits."""
    n, vocab = 8, bench.vocab
    kept = logits.DeviceLogits(torch.randn(n, vocab, device=bench.device))
    held = np.arange(0, vocab, 64)
    asked: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drawn": {"draw": 0.5},
        "top_k": {"draw": 0.5, "top_k": 40},
        "top_p": {"draw": 0.5, "top_p": 0.9},
        "guided": {"allowed": np.arange(vocab) % 2 == 0},
        "penalised": {"held": held, "repetition_penalty": 1.1},
        "logprobs": {"logprobs": 5},
    }
    found = {}
    for name, settings in asked.items():
        rows = [RowSampling(row, **settings) for row in range(n)]
        found[f"sample_{n}_{name}_ms"] = round(bench.timed(lambda r=rows: kept.sample(r)), 3)
    return found


def second_card(bench: Bench) -> Found:
    """Run the model on the second card while the first one has its own, where there are two."""
    kind = bench.device.split(":")[0]
    if not bench.is_dry and torch.get_device_module(kind).device_count() < 2:
        return {"second_card": "there is one card"}
    other = "cpu" if bench.is_dry else f"{kind}:1"
    dtype = str(bench.model.network.dtype).removeprefix("torch.")
    model = bench.load(other, dtype)
    said = []
    for each in (bench.model, model):
        with kv.make_seq_session("torch", bench.config(256)) as session:
            made = Engine(bench.bound(each, session), session.cache)
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            said.append(made.generate(Request(range(3, 20), params)).token_ids)
    return {"second_card_is_equal": said[0] == said[1]}


def conformance(bench: Bench) -> Found:
    """Run the conformance suite, and the tests of sampling, with their tensors on the card."""
    tests = ("tests/backends/gpu/test_plans.py",) if bench.is_dry else TESTS
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "TRITON_INTERPRET": str(int(bench.is_dry))}
    left = max(5.0, bench.ends_s - time.monotonic())
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=left
        )
        text, is_whole = done.stdout, True
    except subprocess.TimeoutExpired as error:
        text, is_whole = (error.stdout or b"").decode(errors="replace"), False
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", text)}
    dots = text.count(".") if not is_whole else counts.get("passed", 0)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if failed or not is_whole:
        print(text[-2000:].strip())
    return {
        "conformance_passed": dots,
        "conformance_failed": failed + len(re.findall(r"^[.]*F", text, re.M)) * (not is_whole),
        "conformance_is_whole": is_whole,
        "is_correct": is_whole and not failed and dots > 0,
    }


PARTS: dict[str, Callable[[Bench], Found]] = {
    "decode": decode,
    "batches": batches,
    "quantised": quantised,
    "prompts": prompts,
    "weights": weights,
    "first_tokens": first_tokens,
    "restore": restore,
    "shortage": shortage,
    "agreement": agreement,
    "compiled": compiled,
    "engine": engine,
    "sampling": sampling,
    "second_card": second_card,
    "conformance": conformance,
}
QUICK = ("decode", "sampling", "agreement")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the device, and for what is done there."""
    parser.add_argument("--device", default="cuda", help="as torch names it")
    parser.add_argument("--dry", action="store_true", help="try all parts on a CPU, tiny")
    parser.add_argument("--seconds", type=float, default=230.0, help="no part begins later")
    parser.add_argument("--part", action="append", choices=PARTS, help="these alone")


def measure(
    quick: bool, device: str, dry: bool, seconds: float, part: list[str] | None
) -> Mapping[str, Any]:
    """Measure everything on the card; say so where there is none."""
    kind = device.split(":")[0]
    if not dry and (kind == "cpu" or not torch.get_device_module(kind).is_available()):
        print(f"no {kind} device on this machine: nothing was measured")
        return {"measured": False}
    if dry:
        device = "cpu"
        _interpret()
    ends_s = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(device, dry, Path(name), ends_s)
        bench.found |= {"measured": not dry, **_card(device, dry)}
        left, broken = [], {}
        for each in part or (QUICK if quick else PARTS):
            if time.monotonic() > ends_s:
                left.append(each)
                continue
            began = time.monotonic()
            try:
                found = PARTS[each](bench)
            except Exception as error:  # the others are measured all the same
                traceback.print_exc()
                broken[each] = f"{type(error).__name__}: {str(error)[:200]}"
                found = {}
            bench.found |= found
            gc.collect()
            print(f"{each} ({time.monotonic() - began:.1f} s): {json.dumps(found)}", flush=True)
    return bench.found | {"left_out": left, "broken": broken}


def _interpret() -> None:
    """Let a CPU be a card: Triton, which nobody has imported yet, interprets, in small tiles."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(ROOT))
    from kvcellar.backends.torch.gpu import launch, multiply
    from kvcellar.backends.torch.gpu.plans import Tiling
    from tests.backends.gpu.interpreter import hasten

    def tiling(n_heads: int, pool: Any, dtype: Any, device: Any) -> Tiling:
        n_kv_heads = pool.k.data.shape[1]
        return Tiling(n_heads // n_kv_heads, n_kv_heads, 16, 32, 32, 2, 2)

    hasten()
    launch.tiling_of = tiling
    multiply.OUTPUTS_AT_ONCE = 512
    choice.ON_CPU, logits.ON_CPU = True, True


def _card(device: str, is_dry: bool) -> Found:
    """Return what the card and its compiler are called."""
    import triton

    name = "dry" if is_dry else torch.get_device_module(device).get_device_name(device)
    return {"card": name, "triton": triton.__version__}


def _per(one: float, other: float) -> float:
    return round(one / other, 3)


if __name__ == "__main__":
    run(__doc__ or "", measure, options)
