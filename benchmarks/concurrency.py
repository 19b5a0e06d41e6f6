"""Ask how much faster eight requests are served together, and what a step costs besides the model.

The latter is all of a step that is not the model's forward, and of the forward what the cache's op
takes around its kernel, while eight sequences decode.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

from harness import alternate, median_ms, median_ratio, run

import kvcellar as kv
from kvcellar.backends.torch.cache import kernel
from kvcellar.engine import Engine, EngineConfig, Request, SamplingParams
from kvcellar.models import LoadedModel, load_model

N_REQUESTS = 8
PROMPT = 64


def overhead_ms(model: LoadedModel, prompts: list[tuple[int, ...]], n_steps: int) -> float:
    """Return the median of what a step of them takes besides the model's arithmetic."""
    took: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took[name] += time.perf_counter() - started

        return call

    params = SamplingParams(max_tokens=n_steps, ignore_eos=True)
    around = []
    with kv.make_seq_session("torch", kv.make_config(model.params, 4096)) as session:
        cache, runner = session.cache, model.bind(session)
        engine = Engine(runner, cache, config=EngineConfig(index="naive"))
        for prompt in prompts:
            engine.submit(Request(prompt, params))
        with (
            patch.object(runner, "forward", timed("forward", runner.forward)),
            patch.object(cache, "update_and_attend", timed("op", cache.update_and_attend)),
            patch.object(kernel, "attend", timed("kernel", kernel.attend)),
        ):
            while not engine.is_idle:
                took.clear()
                started = time.perf_counter()
                n_events = len(engine.step())
                step = time.perf_counter() - started
                if n_events == len(prompts):
                    around.append(step - took["forward"] + took["op"] - took["kernel"])
    return statistics.median(around) * 1e3


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure eight prompts of 64 tokens, 48 tokens each; no prefix is shared or reused."""
    model = load_model("demo", backend="torch")
    params = SamplingParams(max_tokens=24 if quick else 48, ignore_eos=True)
    prompts = [
        tuple((i * 977 + j * 31) % (model.vocab_size - 6) + 6 for j in range(PROMPT))
        for i in range(N_REQUESTS)
    ]
    outputs: dict[str, list[tuple[int, ...]]] = {}

    def serve(name: str, at_once: bool) -> None:
        with kv.make_seq_session("torch", kv.make_config(model.params, 4096)) as session:
            engine = Engine(model.bind(session), session.cache, config=EngineConfig(index="naive"))
            ends = []
            if at_once:
                ids = [engine.submit(Request(p, params)) for p in prompts]
                ended = {e.request_id: e for e in engine.run() if hasattr(e, "reason")}
                ends = [ended[i] for i in ids]
            else:
                ends = [engine.generate(Request(p, params)) for p in prompts]
            outputs[name] = [e.token_ids for e in ends]

    times = alternate(
        {
            "together": lambda: serve("together", True),
            "one by one": lambda: serve("one by one", False),
        },
        rounds=5 if quick else 15,
        warmup=1,
    )
    speedup = median_ratio(times, "one by one", "together")
    same = sum(a == b for a, b in zip(outputs["together"], outputs["one by one"], strict=True))
    together, alone = median_ms(times["together"]), median_ms(times["one by one"])
    print(
        f"{N_REQUESTS} requests together {together:.0f} ms, one by one {alone:.0f} ms: "
        f"{speedup:.2f} times as fast (goal 2.5), same outputs {same}/{N_REQUESTS}"
    )
    overhead = overhead_ms(model, prompts, 100 if quick else 300)
    print(f"a step of {N_REQUESTS} besides the model: {overhead:.2f} ms (goal 0.5)")
    return {
        "speedup_8_concurrent": round(speedup, 2),
        "same_outputs": f"{same}/{N_REQUESTS}",
        "step_overhead_ms": round(overhead, 3),
    }


if __name__ == "__main__":
    run(__doc__ or "", measure)
