"""What a whole process takes under load, measured by the system: inside its budget."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvcellar.budget import parse_size
from kvcellar.models import load_model
from tests.models.tiny_checkpoints import COMMON, randomize, save

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

ROOT = Path(__file__).parent.parent.parent
SIZES = COMMON | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_hidden_layers=6, head_dim=128),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, num_hidden_layers=6, head_dim=128, query_pre_attn_scalar=128, sliding_window=256
    ),
    "heavy": lambda: transformers.LlamaConfig(
        **SIZES | {"intermediate_size": 32_768}, num_hidden_layers=2, head_dim=16
    ),
}
"""Small weights and large KV: 49,152 bytes a token in float32."""

FOR_KV = parse_size("480MB")
"""Beyond the least: for K and V, and for forwards over longer histories."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            model = transformers.AutoModelForCausalLM.from_config(
                CONFIGS[name](), dtype=torch.float32
            )
            randomize(model)
            folders[name] = tmp_path_factory.mktemp(name)
            save(model, folders[name])
            load_model(folders[name])  # which checks it: no process that is measured has to
        return folders[name]

    return make


def loaded(*args: Any) -> dict[str, Any]:
    """What ``tests.engine.loaded`` prints."""
    done = run(*args)
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


def least_bytes(*args: Any) -> int:
    """The limit that is advised where one is far too low."""
    folder, kind, *more = args
    found = re.search(r"give at least ([\d.]+ \wB)", run(folder, kind, "1MB", *more).stderr)
    assert found is not None
    return parse_size(found[1])


def run(*args: Any) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.engine.loaded", *map(str, args)],
        cwd=ROOT,
        env={**env, "KVCELLAR_HOME": os.environ["KVCELLAR_HOME"]},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def idle(folder: Any) -> dict[str, Any]:
    """A process with a budget that it never feels."""
    return loaded(folder("llama"), "cells", "100GB", "float32", 1, 4)


@pytest.mark.parametrize(
    ("name", "kind", "kv_dtype", "n_requests", "n_tokens"),
    [
        ("llama", "cells", "float32", 8, 1000),  # 393 MB in all, more than reserve and KV together
        ("gemma3", "paged", "bfloat16", 10, 1000),
    ],
)
@pytest.mark.slow
def test_the_whole_process_stays_inside_its_budget_under_load(
    name, kind, kv_dtype, n_requests, n_tokens, folder
):
    more = kv_dtype, n_requests, n_tokens
    limit = least_bytes(folder(name), kind, *more) + FOR_KV
    seen = loaded(folder(name), kind, limit, *more)
    assert seen["errors"] == []
    assert seen["tokens"] == [8] * n_requests
    assert seen["peak"] <= limit, seen
    assert seen["limit"] < limit  # of the model alone; the process and the store have the rest
    assert seen["pools"] <= seen["most_held"] <= seen["kv"]
    # It was under load: the memory for KV was used, and still did not hold everybody.
    assert seen["most_held"] > 0.75 * seen["kv"]
    assert seen["peak"] > seen["base"] + 0.7 * seen["kv"]
    assert seen["evicted"] + seen["preempted"] > 0


@pytest.mark.slow
def test_weights_count_from_the_start_though_they_are_mapped_from_their_file(folder, idle):
    heavy = loaded(folder("heavy"), "cells", "100GB", "float32", 1, 4)
    weights = 2 * 3 * 128 * 32_768 * 4  # gate, up, down of two layers: 101 MB; the other has 15
    assert heavy["base"] - idle["base"] > 0.8 * weights
    grown, grown_idle = (seen["peak"] - seen["base"] for seen in (heavy, idle))
    # A matrix product may copy one of its weights, which are 17 MB each, in another order.
    assert grown - grown_idle < 0.5 * weights
