"""Ask what a swappable cache costs one decode step, against a hand-written contiguous cache.

The same bundled model decodes single tokens twice, in alternation: through our contiguous cache,
and through the least that one could write by hand (two tensors per layer, a slice to write, a slice
to read, the same SDPA call on the GQA group folded into the query axis). Then the integers alone:
what a step of 8 sequences costs in bookkeeping when 32k cells are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from harness import alternate, median_ms, median_ratio, run
from transformers import AttentionInterface

import kvcellar as kv
from kvcellar.bookkeeping import Sequences
from kvcellar.models import load_model

CONTEXT = 1024
N_CELLS = 32 * 1024
N_SEQS = 8


class HandWritten:
    """A contiguous cache as one would write it for one model and one sequence."""

    def __init__(self, params: kv.ModelCacheParams, capacity: int) -> None:
        """Create zeroed tensors ``[1, n_kv_heads, capacity, head_dim]`` per layer."""
        shape = (1, params.n_kv_heads, capacity, params.head_dim)
        self.k = [torch.zeros(shape) for _ in range(params.n_layers)]
        self.v = [torch.zeros(shape) for _ in range(params.n_layers)]
        self.length = 0

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        scaling: float,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Write a slice, read a slice, one SDPA call."""
        k, v = self.k[module.layer_idx], self.v[module.layer_idx]
        start, n = self.length, query.shape[2]
        k[:, :, start : start + n] = key
        v[:, :, start : start + n] = value
        k, v = k[:, :, : start + n], v[:, :, : start + n]
        n_heads, n_kv = query.shape[1], k.shape[1]
        if n == 1:
            folded = query.view(1, n_kv, n_heads // n_kv, -1)
            out = F.scaled_dot_product_attention(folded, k, v, scale=scaling)
            out = out.view(1, n_heads, 1, -1)
        else:
            out = F.scaled_dot_product_attention(
                query, k, v, is_causal=True, scale=scaling, enable_gqa=True
            )
        return out.transpose(1, 2), None


def single_stream(quick: bool) -> dict[str, float]:
    """Measure a decode step of the bundled model, ours against hand-written."""
    loaded = load_model("demo", backend="torch")
    config = kv.make_config(loaded.params, 2 * CONTEXT)
    hand = HandWritten(loaded.params, 2 * CONTEXT)
    AttentionInterface.register("handwritten", hand.attention)
    prompt = [(7 * i) % loaded.vocab_size for i in range(CONTEXT)]
    model = loaded.network

    def hand_forward(tokens: list[int]) -> Any:
        model.config._attn_implementation = "handwritten"
        try:
            with torch.inference_mode():
                position = torch.arange(hand.length, hand.length + len(tokens))[None]
                out = model(
                    input_ids=torch.tensor([tokens]),
                    position_ids=position,
                    use_cache=False,
                    logits_to_keep=torch.tensor([len(tokens) - 1]),
                )
            hand.length += len(tokens)
            return out.logits[0].float().numpy()
        finally:
            model.config._attn_implementation = "kvcellar"

    with kv.make_decode_session("torch", config) as session:
        runner = loaded.bind(session)

        def our_forward(tokens: list[int]) -> Any:
            start = session.cache.length
            return runner.forward(tokens, range(start, start + len(tokens)))

        both = our_forward(prompt), hand_forward(prompt)
        assert abs(both[0] - both[1]).max() < 1e-2, "the two do not compute the same"
        rounds = 300 if quick else 900
        times = alternate(
            {"ours": lambda: our_forward([5]), "handwritten": lambda: hand_forward([5])},
            rounds=rounds,
            warmup=20,
        )
    ratio = median_ratio(times, "ours", "handwritten")
    ours, by_hand = median_ms(times["ours"]), median_ms(times["handwritten"])
    print(f"decode step at {CONTEXT}+ tokens, {rounds} rounds:")
    print(f"  ours {ours:.3f} ms, hand-written {by_hand:.3f} ms, ratio {ratio:.3f} (goal 1.03)")
    return {"ratio_to_handwritten": ratio, "ours_ms": ours, "handwritten_ms": by_hand}


def bookkeeping(quick: bool) -> dict[str, float]:
    """Measure a step of 8 sequences over 32k taken cells: claim, plan for 32 layers, complete."""
    results = {}
    window = kv.LayerGroup(tuple(range(0, 32, 2)), 8, 64, 64, window=512)
    full = kv.LayerGroup(tuple(range(1, 32, 2)), 8, 64, 64)
    shapes = {
        "bookkeeping_ms_per_step": kv.ModelCacheParams(32, 8, 64),
        "bookkeeping_ms_per_step_two_groups": kv.ModelCacheParams(32, 8, 64, groups=(window, full)),
    }
    for name, params in shapes.items():
        rounds = 200 if quick else 1000
        cache = Sequences(kv.make_config(params, N_CELLS + N_SEQS * (rounds + 100)))

        def step(cache: Sequences, seq_ids: list[int]) -> None:
            positions = cache.begin_step([(one, len([*same])) for one, same in groupby(seq_ids)])
            for layer in range(cache.steps.n_layers):
                cache.steps.plan(layer, len(positions), positions if layer == 0 else None)
                cache.steps.wrote(layer)

        per_seq = N_CELLS // N_SEQS
        for start in range(0, per_seq, 64):  # arrive interleaved, as agents do
            for seq_id in range(N_SEQS):
                step(cache, [seq_id] * min(64, per_seq - start))
        times = alternate({"step": lambda c=cache: step(c, list(range(N_SEQS)))}, rounds=rounds)
        results[name] = median_ms(times["step"])
        print(f"  {name}: {results[name]:.3f} ms (goal 0.3 ms)")
    return results


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure both figures."""
    result: dict[str, Any] = single_stream(quick)
    print(f"bookkeeping of a step, {N_SEQS} sequences, {N_CELLS} cells, 32 layers:")
    result.update(bookkeeping(quick))
    return {key: round(value, 4) for key, value in result.items()}


if __name__ == "__main__":
    run(__doc__ or "", measure)
