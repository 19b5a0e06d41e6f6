"""Parts of ``gpu.py`` that ask what a step of a Llama costs on a card, over the bytes it reads.

Steps of one token behind short and long histories, of eight sequences, over K and V and with
weights of few bits, prompts, and sampling; transformers' compiled static cache and its own prompts
beside them. A step's bytes are its weights and the K and V that it must read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpu_bench import TINY, Bench, Found, Sequences, products_of
from random_models import LLAMA_1B, write_blocks

import kvcellar as kv
from kvcellar.backends.torch.gpu.sampler.logits import DeviceLogits
from kvcellar.models.kept_logits import RowSampling
from kvcellar.sampler_settings import SAMPLER_SETTINGS, SamplerSettings

LENGTHS = (128, 2048, 8192, 32_768)
PACKED = {"int8": None, "int4": None, "none": None, "Q4_K": "Q4_K", "Q6_K": "Q6_K"}
"""Weights -> the kind of a GGUF file's blocks; None: they are packed, or left, when loaded."""


def decode(bench: Bench) -> Found:
    """Measure a step of one token behind short and long histories, over the bytes it must read."""
    found: Found = {"copy_gb_per_s": round(bench.bandwidth / 1e9)}
    with kv.make_seq_session("torch", bench.config(bench.n(max(LENGTHS)) + 64)) as session:
        sequences = Sequences(bench, session)
        for length in LENGTHS:
            n = bench.n(length)
            sequences.fill(0, n)
            ms = bench.timed(lambda: sequences.step([0]))
            least = bench.least_bytes(bench.model, n) / bench.bandwidth * 1e3
            found[f"decode_{length}_ms"] = round(ms, 3)
            found[f"decode_{length}_fraction_of_bandwidth"] = round(least / ms, 3)
        found["decode_is_recorded"] = sequences.n_graphs > 0
    return found | {"products": products_of(bench.model)}


def _decoded(bench: Bench, length: int, kv_dtype: str | None = None, model: Any = None) -> float:
    """Return the time of a step of one token behind so many."""
    config = bench.config(length + 64, kv_dtype, model)
    with kv.make_seq_session("torch", config) as session:
        sequences = Sequences(bench, session, model)
        sequences.fill(0, length)
        return bench.timed(lambda: sequences.step([0]))


def branches(bench: Bench) -> Found:
    """Measure steps of eight sequences, of their own and over one trunk, against one."""
    n, own, trunk = bench.branches, bench.n(4096), bench.n(16_384)
    one, eight = (_together(bench, each, own, forks=False) for each in (1, n))
    first, forks = (_together(bench, each, trunk, forks=True) for each in (1, n))
    return {
        "eight_ms": round(eight, 3),
        "eight_over_one": round(eight / one, 3),
        "branches8_ms": round(forks, 3),
        "branches8_over_one": round(forks / first, 3),
    }


def _together(bench: Bench, n: int, length: int, *, forks: bool, model: Any = None) -> float:
    """Return the time of a step of ``n`` sequences of a length: of their own, or over one trunk."""
    capacity = (length if forks else n * length) + 64 * n
    with kv.make_seq_session("torch", bench.config(capacity, model=model)) as session:
        sequences = Sequences(bench, session, model)
        for seq in range(n):
            if forks and seq:
                sequences.cache.seq_cp(0, seq)
            else:
                sequences.fill(seq, length)
        return bench.timed(lambda: sequences.step(range(n)))


def few_bits_of_kv(bench: Bench) -> Found:
    """Measure decoding over cells in fp8, 8 and 4 bits against that over plain ones."""
    length = bench.n(32_768)
    base = _decoded(bench, length)
    return {
        f"{kv_dtype}_kv_over_bf16": round(_decoded(bench, length, kv_dtype) / base, 3)
        for kv_dtype in ("int8", "fp8", "int4")
    }


def weights(bench: Bench) -> Found:
    """Measure steps and prompts with weights in few bits, and by torch, over those of bfloat16."""
    length = bench.n(2048)
    plain = _three(bench, bench.model, length)
    found: Found = {"weights_bf16_1_ms": round(plain[0], 3)}
    for name, kind in PACKED.items():
        if kind is None:
            model = bench.load_prepared(bench.path, weights=name)
        else:
            model = bench.load_prepared(_blocks(bench, kind), dtype=None)
        of_bytes = bench.least_bytes(model, length) / bench.bandwidth * 1e3
        times = _three(bench, model, length)
        found[f"weights_{name}_1_ms"] = round(times[0], 3)
        found[f"weights_{name}_fraction_of_bandwidth"] = round(of_bytes / times[0], 3)
        for what, ms, base in zip(("1", "8", "prompt"), times, plain, strict=True):
            found[f"weights_{name}_{what}_over_bf16"] = round(ms / base, 3)
        found[f"weights_{name}_products"] = products_of(model)
        del model
    return found


def _three(bench: Bench, model: Any, length: int) -> tuple[float, float, float]:
    """Return the times of a step of one row and of eight, and of a prompt."""
    one = _decoded(bench, length, model=model)
    eight = _together(bench, bench.branches, length, forks=True, model=model)
    return one, eight, _prompt(bench, length, model)


def _blocks(bench: Bench, kind: str) -> Any:
    """Return a GGUF file of the Llama's shape, all of whose matrices are blocks of a kind."""
    tiny = {**TINY, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    shape = {**tiny, "head_dim": 128, "vocab_size": 320} if bench.is_dry else LLAMA_1B
    folder = bench.made(kind, lambda folder: write_blocks(shape, folder / "model.gguf", kind))
    return folder / "model.gguf"


def prompts(bench: Bench) -> Found:
    """Measure a prompt in chunks, and transformers' own time for the same chunks."""
    from transformers import DynamicCache

    length = bench.n(8192)
    ours = _prompt(bench, length)

    def theirs() -> None:
        bench.read_by(bench.peer, DynamicCache(config=bench.peer.config), length, bench.chunk)

    with torch.inference_mode():
        ms = bench.timed(theirs, min(bench.rounds, 3))
    return {
        "prefill_8192_ms": round(ours, 2),
        "prefill_8192_over_transformers": round(ms / ours, 3),
    }


def _prompt(bench: Bench, length: int, model: Any = None) -> float:
    """Return the time of a prompt in chunks."""
    with kv.make_seq_session("torch", bench.config(length + 64, model=model)) as session:
        sequences = Sequences(bench, session, model)

        def prompt() -> None:
            sequences.cache.clear()
            sequences.fill(0, length)

        return bench.timed(prompt, min(bench.rounds, 3))


def first_tokens(bench: Bench) -> Found:
    """Measure a forward of 16 tokens of each of four forks of a trunk against one's."""
    one, four = (_first(bench, n) for n in (1, 4))
    return {
        "first_tokens_ms": round(four, 3),
        "first_tokens_of_4_forks_over_one": round(four / one, 3),
    }


def _first(bench: Bench, n: int) -> float:
    length = bench.n(4096)
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


def compiled(bench: Bench) -> Found:
    """Measure transformers' compiled static cache, one token behind a history, beside ours."""
    from transformers import StaticCache

    length, network = bench.n(8192), bench.peer
    ours = _decoded(bench, length)
    cache = StaticCache(config=network.config, max_cache_len=length + 64)
    settings = {"backend": "eager"} if bench.is_dry else {"mode": "reduce-overhead"}
    step = torch.compile(network, **settings)

    def token() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        out = step(bench.ids(1), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits.argmax(-1)

    with torch.no_grad():
        bench.read_by(network, cache, length, bench.chunk)
        for _ in range(3):
            token()
        theirs = bench.timed(token)
    return {
        "compiled_8192_ms": round(theirs, 3),
        "decode_over_compiled": round(theirs / ours, 3),
    }


def sampling(bench: Bench) -> Found:
    """Measure sampling a token for each of eight rows of logits, by every setting."""
    n, vocab = 8, bench.vocab
    kept = DeviceLogits(torch.randn(n, vocab, device=bench.device))
    tokens = np.arange(0, vocab, 64)
    drawn = {"draw": 0.5, "temperature": 0.8}
    cut = {**drawn, "top_k": 40, "top_p": 0.9, "min_p": 0.05}
    counted = {"sampled": tokens, "times": np.ones(len(tokens), np.float32)}
    asked: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drawn": drawn,
        "top_k": {**drawn, "top_k": 40},
        "top_p": {**drawn, "top_p": 0.9},
        "min_p": {**drawn, "min_p": 0.05},
        "guided": {"allowed": np.arange(vocab) % 2 == 0},
        "repetition": {"held": tokens, "repetition_penalty": 1.1},
        "penalties": {**counted, "frequency_penalty": 0.2, "presence_penalty": 0.1},
        "bias": {"bias_ids": tokens[:8], "bias": np.full(8, -1.0, np.float32)},
        "barred": {"barred": tokens[:8]},
        "logprobs": {"logprobs": 5},
        "all": {**cut, **counted, "held": tokens, "repetition_penalty": 1.1, "logprobs": 5},
    }
    found: Found = {}
    for name, settings in asked.items():
        own = {key: settings.pop(key) for key in SAMPLER_SETTINGS if key in settings}
        values = SamplerSettings(**{"temperature": 1.0, **own})
        rows = [RowSampling(row, values, **settings) for row in range(n)]
        ms = bench.timed(lambda given=rows: kept.sample(given))
        found[f"sample_8_{name}_ms"] = round(ms, 3)
    return found | {"sample_8_slowest_ms": max(found.values())}
