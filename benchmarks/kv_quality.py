"""Ask what int8 and int4 K and V cost the bundled model in quality, on text it was not trained on.

Perplexity as a ratio to float32 K and V, mean divergence of the next token's distribution in nats,
and how often the likeliest next token is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import run

from kvcellar.cli.models.bench import read_text
from kvcellar.engine.quality import measure_kv_quality
from kvcellar.models import load_model

GOALS = {"int8": 1.001, "int4": 1.015}
OTHERS = ("bfloat16", "int8:g32", "k8v4", "k4v8", "int4:rot", "int4:g64", "int4:g64:rot")


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure the two types with goals; without ``--quick`` the others too, on all of the text."""
    model = load_model("demo")
    token_ids, source = read_text(model, None, 6144 if quick else 1 << 20, 1024)
    names = [*GOALS] if quick else [*GOALS, *OTHERS]
    results = measure_kv_quality(model, token_ids, names)
    print(f"{results[0].n_tokens} tokens of {source}:")
    found: dict[str, Any] = {"n_tokens": results[0].n_tokens}
    for r in results:
        goal = f" (goal {GOALS[r.kv_dtype]})" if r.kv_dtype in GOALS else ""
        print(
            f"  {r.kv_dtype:13} perplexity {r.perplexity:7.3f}, ratio {r.ppl_ratio:.5f}{goal}, "
            f"KL {r.kl:.6f}, same top 1 {r.same_top1:.4f}, {r.bytes_per_token} bytes per token"
        )
        if r.kv_dtype in GOALS or not quick:
            key = r.kv_dtype.replace(":", "_")
            found[f"{key}_ppl_ratio"] = round(r.ppl_ratio, 6)
            found[f"{key}_kl"] = round(r.kl, 6)
            found[f"{key}_same_top1"] = round(r.same_top1, 5)
    return found


if __name__ == "__main__":
    run(__doc__ or "", measure)
