"""The benchmark of cards runs whole where there is none: no time of a card is lost to it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: it comes with torch for CUDA"
)

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"
FEW = {
    "decode": ("decode_8_fraction_of_bandwidth", "graphs_recorded"),
    "restore": ("recompute_over_restore",),
    "shortage": ("shortage_is_survived",),
    "compiled": ("decode_over_compiled",),
}
ALL = {
    **FEW,
    "batches": ("eight_over_one", "branches8_over_one"),
    "quantised": ("int8_kv_over_bf16",),
    "prompts": ("prefill_20_over_transformers",),
    "first_tokens": ("first_tokens_of_4_forks_over_one",),
    "agreement": ("float32_apart_qwen3", "bfloat16_error_over_transformers"),
    "second_card": ("second_card_is_equal",),
    "conformance": ("is_correct",),
}
"""Keys of what is to be proved on a card, by part; lengths are those of the tiny shapes."""


def dry(*words: str) -> dict[str, object]:
    command = [sys.executable, str(SCRIPT), "--dry", "--json", "--seconds", "800", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert found["broken"] == {} and found["left_out"] == [] and not found["measured"]
    return found


@needs_triton
@pytest.mark.slow
def test_parts_run_on_a_cpu_and_tell_what_is_to_be_proved() -> None:
    is_whole = "KVCELLAR_ALL_CASES" in os.environ
    found = dry() if is_whole else dry(*(word for part in FEW for word in ("--part", part)))
    wanted = ALL if is_whole else FEW
    assert {key for keys in wanted.values() for key in keys} <= found.keys()
    assert found["restore_is_exact"] and found["shortage_is_survived"] and found["graphs_recorded"]
    assert not is_whole or (found["is_correct"] and found["second_card_is_equal"])
