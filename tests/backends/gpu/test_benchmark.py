"""The benchmark of cards runs whole where there is none: no time of a card is lost to it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: it comes with torch for CUDA"
)

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"
PROOF = (
    "decode_8_fraction_of_bandwidth",
    "decode_over_compiled",
    "eight_over_one",
    "branches8_over_one",
    "int8_kv_over_bf16",
    "prefill_20_over_transformers",
    "first_tokens_of_4_forks_over_one",
    "recompute_over_restore",
    "float32_apart_qwen3",
    "bfloat16_error_over_transformers",
    "graphs_recorded",
)
"""Keys of what is to be proved on a card; lengths are those of the tiny shapes."""


@needs_triton
@pytest.mark.slow
def test_every_part_runs_on_a_cpu_and_tells_what_is_to_be_proved() -> None:
    command = [sys.executable, str(SCRIPT), "--dry", "--json", "--seconds", "800"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["broken"] == {} and found["left_out"] == []
    assert not found["measured"]
    assert set(PROOF) <= found.keys()
    assert (
        found["shortage_is_survived"]
        and found["restore_is_exact"]
        and found["is_correct"]
        and found["second_card_is_equal"]
    )
    assert found["float32_apart_qwen3"] < 1e-4 and found["graphs_recorded"] > 0
