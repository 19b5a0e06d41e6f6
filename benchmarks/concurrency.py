"""Ask how much faster eight requests are served together than one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import alternate, median_ms, median_ratio, run

import kvcellar as kv
from kvcellar.engine import Engine, EngineConfig, Request, SamplingParams
from kvcellar.models import load_model

N_REQUESTS = 8
PROMPT = 64


def measure(quick: bool) -> Mapping[str, Any]:
    """Eight prompts of 64 tokens, 48 tokens each; no prefix is shared or reused."""
    model = load_model("demo")
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
    return {"speedup_8_concurrent": round(speedup, 2), "same_outputs": f"{same}/{N_REQUESTS}"}


if __name__ == "__main__":
    run(__doc__ or "", measure)
