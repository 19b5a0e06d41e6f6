"""Ask how near the torch backend comes to a GPU's bandwidth, and whether it computes the same.

A Llama of 1B shape with random weights in bfloat16 decodes, prefills, forks and reads quantised
cells on one card, beside transformers' own eager cache. A step's bytes are its weights and the K
and V that it must read; bandwidth is that of a copy. Attention alone is timed by events. Without a
GPU there is nothing to measure, and that is said.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import run
from random_models import LLAMA_1B, random_llama

import kvcellar as kv
from kvcellar.backends.torch.gpu.logits import DeviceLogits
from kvcellar.models import LoadedModel, load_model
from kvcellar.models.kept_logits import RowSampling, SamplingRunner

LENGTHS = (128, 2048, 8192, 32_768)
CHUNK = 2048
ROUNDS = 7
TESTS = ("tests/backends/gpu/test_on_card.py", "tests/engine/test_kept_logits.py")
VOCAB = 128_256


def options(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the device."""
    parser.add_argument("--device", default="cuda", help="as torch names it")


def timed(call: Callable[[], object], device: str, rounds: int = ROUNDS) -> float:
    """Return the median time of a call in ms, with the device's work done."""
    found = []
    for i in range(rounds + 2):
        torch.get_device_module(device).synchronize()
        start = time.perf_counter()
        call()
        torch.get_device_module(device).synchronize()
        if i > 1:
            found.append(time.perf_counter() - start)
    return statistics.median(found) * 1e3


def bandwidth(device: str) -> float:
    """Return the bytes per second of a copy, reads and writes counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timed(lambda: target.copy_(source), device) * 1e-3)


def config_of(model: LoadedModel, capacity: int, kv_dtype: str = "bfloat16") -> kv.CacheConfig:
    """Return the config of a cache of so many cells."""
    return kv.make_config(model.params, capacity, kv_dtype=kv_dtype)


class Sequences:
    """Sequences in one session, and forwards over them."""

    def __init__(self, model: LoadedModel, session: Any) -> None:
        """Bind a model to a session."""
        runner = model.bind(session)
        assert isinstance(runner, SamplingRunner), "on a GPU logits stay there"
        self.runner, self.cache = runner, session.cache

    def step(self, seq_ids: Sequence[int]) -> None:
        """Run one forward; each id is a token of its sequence; sample behind each one's last."""
        positions = self.cache.begin_step(list(seq_ids))
        ends = [i for i, s in enumerate(seq_ids) if i + 1 == len(seq_ids) or seq_ids[i + 1] != s]
        logits, _ = self.runner.forward_kept([7] * len(seq_ids), positions, ends)
        logits.sample([RowSampling(row) for row in range(len(ends))])

    def fill(self, seq: int, length: int) -> None:
        """Prefill a sequence in chunks up to a length."""
        there = self.cache.seq_len(seq) if self.cache.has_seq(seq) else 0
        for start in range(there, length, CHUNK):
            self.step([seq] * min(CHUNK, length - start))


def decode(
    model: LoadedModel, device: str, kv_dtype: str, lengths: Sequence[int]
) -> tuple[list[float], int]:
    """Return the time of a step of one token behind so many, and how many graphs there are."""
    config = config_of(model, max(lengths) + 64, kv_dtype)
    with kv.make_seq_session("torch", config) as session:
        sequences, found = Sequences(model, session), []
        for length in lengths:
            sequences.fill(0, length)
            found.append(timed(lambda: sequences.step([0]), device))
        graphs = sequences.runner.graphs
        return found, 0 if graphs is None else graphs.n_graphs


def together(model: LoadedModel, device: str, n: int, length: int, *, forks: bool) -> float:
    """Return the time of a step of ``n`` sequences of a length: of their own, or over one trunk."""
    capacity = (length if forks else n * length) + 64 * n
    with kv.make_seq_session("torch", config_of(model, capacity)) as session:
        sequences = Sequences(model, session)
        for seq in range(n):
            if forks and seq:
                sequences.cache.seq_cp(0, seq)
            else:
                sequences.fill(seq, length)
        return timed(lambda: sequences.step(range(n)), device)


def first_tokens(model: LoadedModel, device: str, n: int, length: int) -> float:
    """Return the time of a forward of 16 tokens of each of ``n`` forks of a trunk."""
    with kv.make_seq_session("torch", config_of(model, length + 2048)) as session:
        sequences = Sequences(model, session)
        sequences.fill(0, length)
        for seq in range(1, n):
            sequences.cache.seq_cp(0, seq)
        ids = [seq for seq in range(n) for _ in range(16)]

        def forward() -> None:
            sequences.step(ids)
            sequences.cache.cancel_step()

        return timed(forward, device)


def prefill(model: LoadedModel, device: str, length: int) -> float:
    """Return the time of a prompt in chunks."""
    with kv.make_seq_session("torch", config_of(model, length + 64)) as session:
        sequences = Sequences(model, session)

        def prompt() -> None:
            sequences.cache.clear()
            sequences.fill(0, length)

        return timed(prompt, device, 3)


def sampling(device: str, n: int) -> dict[str, float]:
    """Return the times, in ms, of sampling a token for each of ``n`` rows of logits."""
    kept = DeviceLogits(torch.randn(n, VOCAB, device=device))
    allowed = np.arange(VOCAB) % 2 == 0
    held = np.arange(0, VOCAB, 64)
    asked: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drawn": {"draw": 0.5},
        "top_k": {"draw": 0.5, "top_k": 40},
        "top_p": {"draw": 0.5, "top_p": 0.9},
        "guided": {"allowed": allowed},
        "penalised": {"held": held, "repetition_penalty": 1.1},
        "logprobs": {"logprobs": 5},
    }
    found = {}
    for name, settings in asked.items():
        rows = [RowSampling(row, **settings) for row in range(n)]
        found[f"sample_{n}_{name}_ms"] = round(timed(lambda r=rows: kept.sample(r), device), 3)
    return found


def transformers_prefill(folder: Path, device: str, length: int) -> float:
    """Return transformers' time for a prompt in the same chunks, by its own cache."""
    from transformers import AutoModelForCausalLM, DynamicCache

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)

    def prompt() -> None:
        cache = DynamicCache()
        for start in range(0, length, CHUNK):
            ids = torch.full((1, min(CHUNK, length - start)), 7, device=device)
            network(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    with torch.inference_mode():
        return timed(prompt, device, 3)


def is_correct() -> bool:
    """Run the conformance suite, and the tests of sampling, with their tensors on the card."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", *TESTS]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    print(done.stdout[-300:].strip())
    return done.returncode == 0


def measure(quick: bool, device: str) -> Mapping[str, Any]:
    """Measure everything on the card; say so where there is none."""
    kind = device.split(":")[0]
    if kind == "cpu" or not torch.get_device_module(kind).is_available():
        print(f"no {kind} device on this machine: nothing was measured")
        return {"measured": False}
    lengths = LENGTHS[:2] if quick else LENGTHS
    found: dict[str, Any] = {"measured": True, "card": torch.cuda.get_device_name(device)}
    copied = found["copy_gb_per_s"] = round(bandwidth(device) / 1e9)
    with tempfile.TemporaryDirectory() as name:
        folder = random_llama(LLAMA_1B, Path(name))
        model = load_model(str(folder), device=device, dtype="bfloat16")
        weights = 2 * sum(p.numel() for p in model.network.parameters())
        stored = config_of(model, 1).kv
        cell = sum(group.cell_bytes(stored) for group in model.params.groups)
        times, found["graphs_recorded"] = decode(model, device, "bfloat16", lengths)
        for length, ms in zip(lengths, times, strict=True):
            least = (weights + length * cell) / (copied * 1e6)
            found[f"decode_{length}_ms"] = round(ms, 3)
            found[f"decode_{length}_fraction_of_bandwidth"] = round(least / ms, 3)
        if not quick:
            found |= _ratios(model, folder, device, found["decode_32768_ms"])
    found |= sampling(device, 8)
    found["is_correct"] = is_correct()
    for key, value in found.items():
        print(f"  {key}: {value}")
    return found


def _ratios(model: LoadedModel, folder: Path, device: str, decode_32k: float) -> dict[str, float]:
    """Measure what is compared with something else."""
    one, eight = (together(model, device, n, 4096, forks=False) for n in (1, 8))
    trunk, branches = (together(model, device, n, 16_384, forks=True) for n in (1, 8))
    fork, forks = (first_tokens(model, device, n, 4096) for n in (1, 4))
    (int8,), _ = decode(model, device, "int8", (32_768,))
    ours, theirs = prefill(model, device, 8192), transformers_prefill(folder, device, 8192)
    return {
        "eight_over_one": round(eight / one, 3),
        "branches8_over_one": round(branches / trunk, 3),
        "first_tokens_of_4_forks_over_one": round(forks / fork, 3),
        "int8_kv_over_bf16": round(int8 / decode_32k, 3),
        "prefill_8192_ms": round(ours, 1),
        "prefill_8192_over_transformers": round(theirs / ours, 3),
    }


if __name__ == "__main__":
    run(__doc__ or "", measure, options)
