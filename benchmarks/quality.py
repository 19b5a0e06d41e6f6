"""Ask what formats of weights and types of K and V cost real models on real text.

SmolLM2 135M (Q4_1) and Gemma 3 270M (Q4_K_M) read a novel: perplexity with each --weights and each
--kv-dtype beside float32 of the dequantised weights, and llama.cpp's on the same file and tokens
where the package xllamacpp is there.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import warnings
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import run

from kvcellar.cli.models.bench import read_text
from kvcellar.engine.quality import measure_kv_quality, measure_weights_quality
from kvcellar.models import LoadedModel, LoadOptions, load_model
from kvcellar.models.kv_quality import CANDIDATES

FOLDER = Path("~/.cache/kvcellar-test-models").expanduser()
MODELS = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
}
WEIGHTS = ("none", "bf16", "int8", "int4", "file")
CONTEXT = 1024


def add_options(parser: ArgumentParser) -> None:
    """Add which models, and how much they read."""
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are")
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--weights", nargs="*", default=[*WEIGHTS], choices=WEIGHTS)
    parser.add_argument("--kv-dtypes", nargs="*", default=[*CANDIDATES])


def measure(
    quick: bool,
    folder: Path,
    models: Sequence[str],
    tokens: int,
    weights: Sequence[str],
    kv_dtypes: Sequence[str],
) -> Mapping[str, Any]:
    """Measure the models; with ``--quick`` SmolLM2 alone, few formats and 256 tokens."""
    found: dict[str, Any] = {}
    if quick:
        models, tokens, weights, kv_dtypes = ["smollm2"], 256, ["int4", "file"], []
    for name in models:
        one = _of_model(folder / MODELS[name], tokens, weights, kv_dtypes)
        found |= {f"{name}_{key}": value for key, value in one.items()}
    return found


def _of_model(
    file: Path, n_tokens: int, formats: Sequence[str], kv_dtypes: Sequence[str]
) -> dict[str, Any]:
    """Measure one file: figures by what they are of."""

    def load(weights: str) -> LoadedModel:
        dtype = "bfloat16" if weights == "none" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load_model(LoadOptions(file, backend="torch", weights=weights, dtype=dtype))

    base = load_model(LoadOptions(file, backend="torch", weights="none", dtype="float32"))
    token_ids, source = read_text(base, None, n_tokens, CONTEXT)
    print(f"\n{file.name}: {len(token_ids)} tokens of {source}", flush=True)
    found: dict[str, Any] = {"n_tokens": len(token_ids)}
    of_weights = measure_weights_quality(base, load, token_ids, formats, context=CONTEXT)
    measured = measure_kv_quality(base, token_ids, kv_dtypes, context=CONTEXT) if kv_dtypes else []
    of_kv = [r for r in measured if r.kv_dtype in kv_dtypes]
    of_weights_named = [(r.weights, r, f"{r.size_bytes / 1e6:.0f} MB") for r in of_weights]
    of_kv_named = [(f"kv {r.kv_dtype}", r, f"{r.bytes_per_token} B/token") for r in of_kv]
    for name, r, size in [*of_weights_named, *of_kv_named]:
        print(
            f"  {name:20} perplexity {r.perplexity:7.3f}, ratio {r.ppl_ratio:.4f}, "
            f"KL {r.kl:.5f}, same top 1 {r.same_top1:.2%}, {size}, {r.verdict}",
            flush=True,
        )
        key = name.replace(" ", "_").replace(":", "_")
        found[f"{key}_perplexity"] = round(r.perplexity, 4)
        found[f"{key}_same_top1"] = round(r.same_top1, 4)
    by_format = {r.weights: r.perplexity for r in of_weights}
    if "file" not in by_format:
        return found
    found["file_over_plain"] = round(by_format["file"] / by_format["float32"], 5)
    if "int4" in by_format:
        found["int4_over_q4_k_m"] = round(by_format["int4"] / by_format["file"], 5)
    if find_spec("xllamacpp") is None:
        print("  llama.cpp: pip install xllamacpp")
        return found
    theirs = _llama_cpp(file, token_ids)
    found["llamacpp_perplexity"] = round(theirs, 4)
    found["over_llamacpp"] = round(by_format["file"] / theirs, 5)
    print(f"  llama.cpp            perplexity {theirs:7.3f}; file over it {found['over_llamacpp']}")
    return found


def _llama_cpp(file: Path, token_ids: Sequence[int]) -> float:
    """Return llama.cpp's perplexity, in a process of its own: its threads would take the cores."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_perplexity, (str(file), list(token_ids)))


def _perplexity(file: str, token_ids: list[int]) -> float:
    """Return the perplexity by llama.cpp's server, which is asked for each token by itself.

    It tells how likely the token was that it chose, and a bias makes that the text's; what it
    tells is without the bias. Of a prompt it reads what the one before did not have.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel = CONTEXT + 64, 1
    # One thread: several wait by spinning, and a token at a time leaves them little to do.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity = -1
    server = xllamacpp.Server(params)
    total, n = 0.0, 0
    for at in range(0, len(token_ids), CONTEXT):
        piece = token_ids[at : at + CONTEXT]
        for i in range(1, len(piece)):
            ask = {
                "prompt": piece[:i], "n_predict": 1, "n_probs": 1, "temperature": 0.0,
                "logit_bias": [[piece[i], 1e6]], "cache_prompt": True,
            }  # fmt: skip
            answer = server.handle_completions(ask)
            answer = json.loads(answer) if isinstance(answer, str) else answer
            (chosen,) = answer["choices"][0]["logprobs"]["content"]
            assert chosen["id"] == piece[i], chosen
            total -= chosen["logprob"]
            n += 1
    return math.exp(total / n)


if __name__ == "__main__":
    run(__doc__ or "", measure, add_options)
