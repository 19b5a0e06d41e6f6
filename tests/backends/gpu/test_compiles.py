"""Every kernel compiles for GPUs that are not there, and fits them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: it comes with torch for CUDA"
)

QUICK = ("bf16", "fp8", "int4-window-sinks-cap")
WEIGHTS = ("weights-q4_k", "weights-bf16")
LARGE, SMALL = 232_448, 101_376
"""Bytes of shared memory that a program may have on an H100, and on a card for desktops."""


def compiled(*words: str) -> list[dict[str, object]]:
    """Compile in a process that does not interpret; Triton keeps what it has compiled."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.backends.gpu.compiling", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


pytestmark = [
    needs_triton,
    pytest.mark.slow,
]

OF_WEIGHTS = ("multiply_tiles", "take_rows", "norm_rows", "turn_heads", "gate_rows")
OF_FEW_BITS = ("multiply_packed", "sum_parts")
SAMPLING = ("take_likeliest", "adjust_tiles", "weigh_tiles", "choose_rows")


def test_kernels_compile_for_nvidia() -> None:
    found = compiled("cuda", "90", "large", *QUICK, *WEIGHTS, "sampling")
    names = {(one["kernel"], one["case"]) for one in found}
    assert names == {
        (kernel, case)
        for kernel in ("attend_lists", "merge_parts", "write_rows", "move_rows", "copy_planes")
        for case in QUICK
    } | {(kernel, case) for kernel in OF_WEIGHTS for case in WEIGHTS} | {
        ("multiply_few", "weights-bf16"),
        *((kernel, "weights-q4_k") for kernel in OF_FEW_BITS),
    } | {(kernel, "sampling") for kernel in SAMPLING}
    assert all(int(str(one["shared"])) <= LARGE for one in found)
    assert all(one["wide"] for one in found if one["kernel"] == "multiply_packed")


CARDS = [("cuda", "89", "small")]
if "KVCELLAR_ALL_CASES" in os.environ:
    CARDS += [("cuda", "90", "large"), ("cuda", "80", "large"), ("hip", "gfx942", "small")]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "arch", "size"), CARDS)
def test_every_variant_compiles_and_fits(backend: str, arch: str, size: str) -> None:
    most = LARGE if size == "large" else SMALL
    found = compiled(backend, arch, size)
    too_large = [one for one in found if int(str(one["shared"])) > most]
    assert not too_large
    assert not [one for one in found if one["spilled"]]
