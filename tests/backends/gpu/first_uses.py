"""Counts what Triton would compile for steps on a card that is not there, and prints it as JSON.

    python -m tests.backends.gpu.first_uses FOLDER

Nothing is compiled and kernels do nothing; which of them are asked for is Triton's own account.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget

import kvcellar as kv
from kvcellar.backends.torch.gpu import choice
from kvcellar.backends.torch.gpu.record import recording
from kvcellar.backends.torch.gpu.record.graphs import StepGraphs
from kvcellar.backends.torch.gpu.sampler import sampling
from kvcellar.backends.torch.run.runner import SamplingTorchRunner
from kvcellar.engine import Engine, EngineConfig
from kvcellar.models import load_model
from tests.backends.gpu.fake_device import FakeDevice
from tests.stretches import stretches

MOST_TOKENS, MOST_ROWS = 64, 8


class NoDriver:
    """A driver of a card that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _zero_what_it_tells(module: Any, name: str) -> None:
    told = getattr(module, name)
    setattr(module, name, lambda *args: told(*args).zero_())


def main() -> None:
    for module, name in ((sampling, "_chosen"), (recording, "likeliest")):
        _zero_what_it_tells(module, name)  # results of kernels that do nothing are no numbers
    seen: set[str] = set()
    triton.runtime.driver.set_active(NoDriver())

    def asked(key: Any, fn: Any, **facts: Any) -> bool:
        seen.add(f"{fn.name} {key}")
        return True  # it need not be compiled

    triton.knobs.runtime.jit_cache_hook = asked
    choice.ON_CPU = True
    weights = sys.argv[2] if len(sys.argv) > 2 else None
    model = load_model(Path(sys.argv[1]), weights=weights, is_unchecked=True)
    network: Any = model.network  # type: ignore[attr-defined]
    config = kv.make_config(model.params, 1024, min_chunk=1024)
    device = FakeDevice()
    stages: list[str] = []
    with kv.make_seq_session("torch", config) as session:
        runner = SamplingTorchRunner(network, None, model.params, model.vocab_size, session)
        runner.graphs = StepGraphs(network, device)
        cache: Any = session.cache

        def counts() -> tuple[int, int]:
            return len(seen), device.n_captured

        def forward(seq_ids: Any, rows: Any) -> None:
            runner.forward_kept([1] * len(seq_ids), cache.begin_step(stretches(seq_ids)), rows)
            cache.end_step()

        bounds = EngineConfig(max_num_batched_tokens=MOST_TOKENS, max_num_seqs=MOST_ROWS)
        Engine(runner, cache, config=bounds).prepare(lambda _, what: stages.append(what))
        before, known = counts(), set(seen)
        forward([0] * 5, range(4, 5))
        for seq_id in range(1, MOST_ROWS):
            cache.seq_cp(0, seq_id)
        for n in range(1, MOST_ROWS + 1):
            forward(range(n), range(n))
        decoded = counts()
        for n in range(1, MOST_TOKENS + 1):
            cache.clear()
            forward([0] * n, range(n - 1, n))
        found = {
            "stages": stages, "prepared": before, "decoded": decoded, "new": sorted(seen - known)
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
