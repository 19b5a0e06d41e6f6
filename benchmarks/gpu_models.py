"""Parts of ``gpu.py`` that ask what models with recurrent layers and mixtures cost on a card.

Qwen3.5 0.8B in its whole shape, with random weights: how long its first prompt takes when all is
set up, later ones beside transformers', and a token over the bytes it must read. Then layers of
gpt-oss, with its experts in MXFP4, and of Qwen3-30B-A3B: a token over its bytes, and whether such
steps are recorded as graphs.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench, Found, Sequences, answered, n_graphs_of, prompt_of
from random_models import QWEN35_08B, random_gpt_oss, random_model

import kvcellar as kv

TINY_HYBRID = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "vocab_size": 262,
}  # fmt: skip


def hybrid(bench: Bench) -> Found:
    """Measure a model with recurrent layers: set-up, the first prompt, later ones, and tokens."""
    length, n_tokens = bench.n(8192), bench.n(128)
    shape = TINY_HYBRID if bench.is_dry else QWEN35_08B
    path = bench.made(
        "hybrid",
        lambda folder: random_model(
            "qwen3_5_text", shape, folder, bench.device, tie_word_embeddings=True
        ),
    )
    began = time.perf_counter()
    model = bench.load(path)
    found: Found = {}
    with bench.engine(model, 2 * length + n_tokens, bench.branches) as engine:
        found["hybrid_up_s"] = round(time.perf_counter() - began, 1)

        def read(seed: int) -> float:
            return answered(engine, [prompt_of(length, seed, model.vocab_size)], 1).first_s

        found["hybrid_first_prompt_s"] = round(read(0), 3)
        ours = statistics.median(read(seed) for seed in range(1, 2 if bench.is_dry else 4))
        short = prompt_of(bench.n(2048), 9, model.vocab_size)
        ms = answered(engine, [short], n_tokens).step_ms
        found["hybrid_is_recorded"] = n_graphs_of(engine.runner) > 0
    least = bench.least_bytes(model, len(short)) / bench.bandwidth * 1e3
    theirs = _by_transformers(bench, path, length)
    return found | {
        "hybrid_prompt_ms": round(ours * 1e3, 1),
        "hybrid_transformers_prompt_ms": round(theirs, 1),
        "hybrid_prompt_over_transformers": round(ours * 1e3 / theirs, 3),
        "hybrid_decode_ms": round(ms, 3),
        "hybrid_decode_over_bytes": round(ms / least, 2),
    }


def _by_transformers(bench: Bench, path: Path, length: int) -> float:
    """Return transformers' time for a prompt in steps as long as the engine's."""
    from transformers import DynamicCache

    network = bench.by_transformers(path)

    def prompt() -> None:
        bench.read_by(network, DynamicCache(config=network.config), length, bench.step)

    with torch.inference_mode():
        return bench.timed(prompt, min(bench.rounds, 3))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Layers of a mixture.

    Attributes:
        kind: the family, as transformers has it.
        shape: of the layers.
        tiny: what is otherwise where nothing is measured.
        expert_bits: of a weight of its experts.
    """

    kind: str
    shape: dict[str, Any]
    tiny: dict[str, Any]
    expert_bits: float

    def write(self, folder: Path, bench: Bench) -> None:
        """Write it with random weights."""
        shape = {**self.shape, **self.tiny} if bench.is_dry else self.shape
        make = random_gpt_oss if self.kind == "gpt_oss" else _random_mixture
        make(shape, folder, bench.device)

    def unread_bytes(self, config: Any) -> float:
        """Return the bytes of the experts that a token does not choose."""
        inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
        n_left = config.num_local_experts - config.num_experts_per_tok
        each = 3 * config.hidden_size * inner * self.expert_bits / 8
        return float(config.num_hidden_layers * n_left * each)


def _random_mixture(shape: dict[str, Any], folder: Path, device: str) -> Path:
    return random_model("qwen3_moe", shape, folder, device)


_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "vocab_size": 262, "num_experts_per_tok": 2,
}  # fmt: skip

MIXTURES = {
    "gpt_oss": Mixture(
        "gpt_oss",
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 6,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
            "vocab_size": 32_768,
        },
        {**_SMALL, "intermediate_size": 64, "num_local_experts": 4, "sliding_window": 8},
        4.25,
    ),
    "qwen3_moe": Mixture(
        "qwen3_moe",
        {
            "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144,
            "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "vocab_size": 32_768,
        },
        {**_SMALL, "moe_intermediate_size": 32, "intermediate_size": 64, "num_experts": 4},
        16,
    ),
}  # fmt: skip
"""gpt-oss-20b with 6 of its 24 layers, and Qwen3-30B-A3B with 4 of 48; words are few."""


def mixture(bench: Bench) -> Found:
    """Measure a token of mixtures over the bytes of what it chooses; tell if it is recorded."""
    found: Found = {}
    length = bench.n(2048)
    for name, one in MIXTURES.items():
        path = bench.made(name, lambda folder, one=one: one.write(folder, bench))
        model = bench.load(path)
        with kv.make_seq_session("torch", bench.config(length + 64, model=model)) as session:
            sequences = Sequences(bench, session, model)
            sequences.fill(0, length)
            ms = bench.timed(lambda of=sequences: of.step([0]))
            found[f"{name}_is_recorded"] = sequences.n_graphs > 0
        n_bytes = bench.least_bytes(model, length) - one.unread_bytes(model.network.config)
        found[f"{name}_decode_ms"] = round(ms, 3)
        found[f"{name}_decode_over_bytes"] = round(ms / (n_bytes / bench.bandwidth * 1e3), 2)
        found[f"{name}_mib_of_a_token"] = round(n_bytes / (1 << 20))
        del model, sequences
    return found
