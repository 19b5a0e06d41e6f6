"""Ask what our caches cost and save on MLX beside mlx-lm's own: one stream, a ragged batch, a fork.

Both run the same model of mlx-lm, in float32 (the wheel for Linux is slow in half precision). K and
V of the histories are random: what is measured reads them, and a prefill would take most of the
time. What both answer is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).parent))  # or this file would be found in place of MLX
import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as theirs
from mlx_lm.models import llama

sys.path.append(str(Path(__file__).parent))
from harness import alternate, median_ms, median_ratio, run

import kvcellar as kv
from kvcellar.backends.mlx.learn.learning import Learnt, learn
from kvcellar.backends.mlx.runner import MlxRunner

VOCAB, N_KV_HEADS, DIM = 1024, 4, 64
LENGTHS = (64, 300, 900, 2500, 8000)
"""Tokens of five agents."""

TRUNK, BRANCHES = 3000, 4


def make_model(n_layers: int, hidden: int) -> tuple[Any, Learnt]:
    """Make a Llama with random weights, bound; mlx-lm's caches run it as ever."""
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            "llama", hidden, n_layers, 2 * hidden, 8, 1e-5, VOCAB, DIM, 32_768, N_KV_HEADS,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    mx.eval(model.parameters())
    return model, learn(model, "llama")


def rows(params: Any, n: int, seed: int) -> list[tuple[Any, Any]]:
    """Return random K and V of n tokens for each layer."""
    keys = mx.random.split(mx.random.key(seed), 2 * params.n_layers)
    made = [mx.random.normal((1, N_KV_HEADS, n, DIM), key=key) for key in keys]
    mx.eval(made)
    return list(zip(made[::2], made[1::2], strict=True))


def fill_theirs(given: list[tuple[Any, Any]]) -> list[Any]:
    """Fill mlx-lm's caches with one history."""
    caches = [theirs.KVCache() for _ in given]
    for cache, (k, v) in zip(caches, given, strict=True):
        cache.update_and_fetch(k, v)
    mx.eval([cache.state for cache in caches])
    return caches


def fill_ours(cache: Any, given: list[tuple[Any, Any]], seq_id: int | None = None) -> None:
    """Fill one of our caches with a history."""
    n = given[0][0].shape[2]
    if seq_id is not None:
        cache.begin_step([(seq_id, n)])
    for layer, (k, v) in enumerate(given):
        cache.update_and_fetch(layer, range(n), k, v)
    cache.settle()
    cache.end_step()


def one_stream(model: Any, learnt: Learnt, n: int, rounds: int) -> float:
    """Return decoded tokens per second over mlx-lm's; a token's logits come to the host."""
    given = rows(learnt.params, 512, 1)
    said: dict[str, list[int]] = {}
    with kv.make_decode_session("mlx", kv.make_config(learnt.params, 4096)) as session:
        cache, runner = session.cache, MlxRunner(model, learnt, session)
        fill_ours(cache, given)
        caches = fill_theirs(given)

        def decode(name: str, step: Callable[[int], np.ndarray]) -> None:
            token, said[name] = 5, []
            for _ in range(n):
                token = int(step(token).argmax())
                said[name].append(token)

        def ours() -> None:
            cache.rewind(512)
            decode("ours", lambda token: runner.forward([token], [cache.length])[0])

        def mlx_lm() -> None:
            theirs.trim_prompt_cache(caches, caches[0].offset - 512)
            decode("mlx-lm", lambda token: np.array(model(mx.array([[token]]), cache=caches)[0, 0]))

        times = alternate({"ours": ours, "mlx-lm": mlx_lm}, rounds=rounds, warmup=1)
    ratio = median_ratio(times, "mlx-lm", "ours")
    both = " and ".join(f"{median_ms(times[k]) / n:.2f} ms ({k})" for k in times)
    same = said["ours"] == said["mlx-lm"]
    print(f"one stream, a token: {both}; speed {ratio:.3f} of mlx-lm's (goal 0.97), same {same}")
    return ratio


def ragged(model: Any, learnt: Learnt, rounds: int) -> tuple[float, float]:
    """Decode for five agents of different lengths: (speed, memory) against the padded batch."""
    given = [rows(learnt.params, n, i) for i, n in enumerate(LENGTHS)]
    tokens = list(range(5, 5 + len(LENGTHS)))
    n_cells = sum(LENGTHS) + 64 * len(LENGTHS)
    said: dict[str, Any] = {}
    with kv.make_seq_session(
        "mlx", kv.make_config(learnt.params, n_cells, min_chunk=n_cells)
    ) as session:
        cache, runner = session.cache, MlxRunner(model, learnt, session)
        for seq_id, one in enumerate(given):
            fill_ours(cache, one, seq_id)
        singles = [fill_theirs(one) for one in given]
        batch = [theirs.BatchKVCache.merge(layer) for layer in zip(*singles, strict=True)]
        del singles, given
        mx.eval([layer.state for layer in batch])
        ids = mx.array(tokens)[:, None]

        def ours() -> None:
            at = cache.begin_step([(seq_id, 1) for seq_id in range(len(tokens))])
            said["ours"] = runner.forward(tokens, at, range(len(tokens)))
            for seq_id, length in enumerate(LENGTHS):
                cache.seq_rm(seq_id, length)

        def mlx_lm() -> None:
            said["mlx-lm"] = np.array(model(ids, cache=batch)[:, 0])
            theirs.trim_prompt_cache(batch, 1)

        times = alternate({"ours": ours, "padded batch": mlx_lm}, rounds=rounds, warmup=2)
        memory = cache.usage().size_bytes / sum(layer.nbytes for layer in batch)
    speedup = median_ratio(times, "padded batch", "ours")
    worst = float(np.abs(said["ours"] - said["mlx-lm"]).max())
    both = " and ".join(f"{median_ms(times[k]):.1f} ms ({k})" for k in times)
    print(
        f"five agents of {', '.join(map(str, LENGTHS))} tokens, one more each: {both}; "
        f"{speedup:.2f} times as fast (goal 2), {memory:.2f} of the memory (goal 0.7); "
        f"logits differ by {worst:.1e}"
    )
    return speedup, memory


def fork(model: Any, learnt: Learnt, rounds: int) -> tuple[float, float]:
    """Fork a trunk, to the first tokens: (speed, memory) against copies in a batch."""
    given = rows(learnt.params, TRUNK, 9)
    tokens = list(range(7, 7 + BRANCHES))
    held: dict[str, int] = {}
    with kv.make_seq_session("mlx", kv.make_config(learnt.params, TRUNK + 512)) as session:
        cache, runner = session.cache, MlxRunner(model, learnt, session)
        fill_ours(cache, given, 0)
        trunk = fill_theirs(given)
        ids = mx.array(tokens)[:, None]

        def ours() -> None:
            for branch in range(1, BRANCHES):
                cache.seq_cp(0, branch)
            runner.forward(
                tokens,
                cache.begin_step([(seq_id, 1) for seq_id in range(BRANCHES)]),
                range(BRANCHES),
            )
            held["ours"] = cache.usage().size_bytes
            for branch in range(1, BRANCHES):
                cache.seq_rm(branch)
            cache.seq_rm(0, TRUNK)

        def mlx_lm() -> None:
            batch = [theirs.BatchKVCache.merge([layer] * BRANCHES) for layer in trunk]
            np.array(model(ids, cache=batch)[:, 0])
            held["copies"] = sum(layer.nbytes for layer in batch)

        times = alternate({"ours": ours, "copies": mlx_lm}, rounds=rounds, warmup=1)
    speedup = median_ratio(times, "copies", "ours")
    memory = held["ours"] / held["copies"]
    both = " and ".join(f"{median_ms(times[k]):.1f} ms ({k})" for k in times)
    print(
        f"{BRANCHES} branches of {TRUNK} tokens and their first token: {both}; "
        f"{speedup:.2f} times as fast, {memory:.2f} of the memory"
    )
    return speedup, memory


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure one stream on a model that is mostly weights, the others on mostly history."""
    stream = one_stream(*make_model(6, 512), 16 if quick else 64, 9 if quick else 21)
    model, learnt = make_model(4, 256)
    speedup, memory = ragged(model, learnt, 5 if quick else 15)
    fork_speedup, fork_memory = fork(model, learnt, 3 if quick else 9)
    return {
        "single_stream_ratio_to_mlx_lm": round(stream, 3),
        "ragged_batch_speedup": round(speedup, 2),
        "ragged_batch_memory_ratio": round(memory, 3),
        "fork_speedup": round(fork_speedup, 2),
        "fork_memory_ratio": round(fork_memory, 3),
    }


if __name__ == "__main__":
    run(__doc__ or "", measure)
