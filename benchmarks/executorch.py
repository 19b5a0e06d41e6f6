"""Ask how fast an exported program decodes and reads prompts, against torch eager in bfloat16.

One random model of 1B shape (Llama 3.2 1B: 16 layers, 32 heads over 8, hidden 2048, vocabulary of
128256) is exported with 4-bit weights (8da4w), and loaded by torch in bfloat16. Both decode on our
caches, in alternation, and read prompts of 512 tokens. Then what our op takes of a step, and what a
call of it costs beside the attention itself. With --quick the model is a small one, whose ratio
says little; the JSON names the shape.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from harness import alternate, median_ms, median_ratio, run
from random_models import LLAMA_1B, random_llama

import kvcellar as kv

sys.path.remove(str(Path(__file__).parent))  # there, "executorch" is this file
sys.path.append(str(Path(__file__).parent.parent))  # the tests call the op alone, too

from kvcellar.backends.executorch import export_program
from kvcellar.models import LoadedModel, load_model
from tests.backends.executorch.single_op import SingleOp

QUICK = LLAMA_1B | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
CONTEXT = 512
OP_CALLS = 20_000


class Decoder:
    """One model on a contiguous cache: prompts of ``CONTEXT`` tokens, then one at a time."""

    def __init__(self, model: LoadedModel) -> None:
        """Open a session that stays open."""
        config = kv.make_config(model.params, 4 * CONTEXT, "float32")
        self.session: Any = kv.make_decode_session(model.backend, config)
        self.session.__enter__()
        self.runner: Any = model.bind(self.session)
        self.prompt = [(7 * i) % model.vocab_size for i in range(CONTEXT)]
        self.shares: list[float] = []

    def read_prompt(self) -> None:
        """Go from nothing to ``CONTEXT`` tokens."""
        self.session.cache.clear()
        self.runner.forward(self.prompt, range(CONTEXT))

    def decode(self) -> None:
        """Decode one more token; with ExecuTorch, note what our op took of it."""
        cache = self.session.cache
        if cache.length >= 2 * CONTEXT:
            cache.rewind(CONTEXT)
        self.runner.forward([5], [cache.length])
        method = getattr(self.runner, "method", None)
        if method is not None:
            self.shares.append(method.times.op_ns / method.times.run_ns)


def op_overhead_us(params: kv.ModelCacheParams, n_heads: int) -> tuple[float, float]:
    """Return microseconds of a call of the op at context 1, with and without attention itself."""
    group = params.groups[0]
    q = torch.randn(1, n_heads, 1, group.head_dim)
    k, v = (torch.randn(1, group.n_kv_heads, 1, group.head_dim) for _ in range(2))
    calls, kernels = [], []
    for _ in range(15):
        for times, n_kernel in ((calls, 1), (kernels, OP_CALLS)):
            with kv.make_decode_session("executorch", kv.make_config(params, 64)) as session:
                op = SingleOp(session.cache)
                n = OP_CALLS if n_kernel == 1 else 1
                spent = op.time_ns(q, k, v, torch.tensor([0]), 0, n, n_kernel)
                times.append(spent / n_kernel / 1e3)
    call = statistics.median(calls)
    return call, call - statistics.median(kernels)


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure both engines in turns, then the op alone."""
    shape = QUICK if quick else LLAMA_1B
    with tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as temporary:
        folder = random_llama(shape, Path(temporary) / "model")
        path = Path(temporary) / "model.pte"
        report = export_program(folder, path, quantize="8da4w", max_tokens_per_step=CONTEXT)
        print(
            f"{shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}, vocabulary "
            f"{shape['vocab_size']}; program {report.size_bytes / 1e6:.0f} MB, "
            f"{report.n_delegates} XNNPACK parts, {report.n_op_calls} calls of the op"
        )
        ours = Decoder(load_model(path, backend="executorch"))
        eager = Decoder(load_model(folder, backend="torch", dtype="bfloat16", weights="none"))
        both = {"ours": ours, "eager": eager}
        prefill = alternate(
            {name: one.read_prompt for name, one in both.items()},
            rounds=3 if quick else 5,
            warmup=1,
        )
        decode = alternate(
            {name: one.decode for name, one in both.items()}, rounds=20 if quick else 60, warmup=3
        )
        params = ours.session.cache.config.params
        for one in both.values():
            one.session.__exit__(None, None, None)
    call, overhead = op_overhead_us(params, shape["num_attention_heads"])
    share = statistics.median(ours.shares)
    speedup = median_ratio(decode, "eager", "ours")
    for name, times in (("prefill", prefill), ("decode", decode)):
        n = CONTEXT if name == "prefill" else 1
        rates = {who: n * 1e3 / median_ms(times[who]) for who in both}
        print(f"  {name}: ours {rates['ours']:.1f} tokens/s, eager bf16 {rates['eager']:.1f}")
    print(f"  decode is {speedup:.2f} times as fast; our op takes {share:.1%} of a step")
    print(f"  a call of the op at context 1: {call:.2f} us, {overhead:.2f} us beside the attention")
    return {
        "shape": "small" if quick else "1B",
        "decode_speedup_over_eager_bf16": round(speedup, 3),
        "prefill_speedup_over_eager_bf16": round(median_ratio(prefill, "eager", "ours"), 3),
        "decode_tokens_per_s": round(1e3 / median_ms(decode["ours"]), 2),
        "decode_tokens_per_s_eager_bf16": round(1e3 / median_ms(decode["eager"]), 2),
        "prefill_tokens_per_s": round(CONTEXT * 1e3 / median_ms(prefill["ours"]), 1),
        "prefill_tokens_per_s_eager_bf16": round(CONTEXT * 1e3 / median_ms(prefill["eager"]), 1),
        "op_share_of_step": round(share, 4),
        "op_call_us": round(call, 3),
        "op_overhead_us": round(overhead, 3),
        "program_bytes": report.size_bytes,
    }


if __name__ == "__main__":
    run(__doc__ or "", measure)
