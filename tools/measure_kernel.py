"""Measure every level of the CPU kernel that this machine has, operation by operation.

    python tools/measure_kernel.py [--write] [WORD...]

One thread; each time is the shortest of many, of the processor's time, levels by turns. Words
choose the operations whose names have one of them; others keep what was measured last. With
``--write`` the values go to ``src/kvcellar/kernel/measured.json`` and the table made of them into
the README beside it; levels that this machine lacks keep what was measured last, with the name of
the machine.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.kernel import attend, blocks, experts, layers, levels, linear, recurrent
from kvcellar.types import AttendKind, AttendSpec, Run, StepPlan, Write

FOLDER = Path(levels.__file__).parent
MEASURED = FOLDER / "measured.json"
README = FOLDER / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

N_HEADS, N_KV_HEADS, DIM, LENGTH = 32, 8, 64, 4096
N_IN, N_OUT = 2048, 4096
N_EXPERTS, N_CHOSEN, INNER = 32, 8, 768
ROUNDS, LEAST_S = 15, 0.02

Operation = Callable[[], None]


def random_bits(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Return numbers near 1 whose bits are those of bfloat16, float16 or float32."""
    rng = np.random.default_rng(0)
    if dtype is np.float32:
        return rng.standard_normal(shape, dtype=np.float32)
    return (rng.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def make_side(name: str, n_cells: int, held: list[np.ndarray]) -> attend.Side:
    """Return a side of random rows; ``held`` keeps its memory."""
    dtype, head = attend.Dtype[name], N_KV_HEADS
    if name in ("float32", "bfloat16"):
        kind = np.float32 if name == "float32" else np.uint16
        rows = random_bits((head, n_cells, DIM), kind)
        held.append(rows)
        return attend.Side(dtype, DIM, rows.ctypes.data, rows.strides[0], rows.strides[1])
    row_bytes = DIM if name == "int8" else DIM // 2
    rows = np.random.default_rng(0).integers(0, 256, (head, n_cells, row_bytes), dtype=np.uint8)
    top = 255 if name == "int8" else 15
    pairs = np.tile(np.array([6 / top, -3], np.float16), (head, n_cells, 1, 1))
    held += [rows, pairs]
    where = (rows.ctypes.data, rows.strides[0], rows.strides[1], 0)
    return attend.Side(dtype, DIM, *where, pairs.ctypes.data, *pairs.strides[:2], 0, DIM)


def attention(name: str, n_branches: int, held: list[np.ndarray]) -> Operation:
    """Return a step of branches with one token each, over a trunk that they share."""
    n_cells = LENGTH + n_branches
    pool = attend.Pool(
        N_KV_HEADS, n_cells, make_side(name, n_cells, held), make_side(name, n_cells, held)
    )
    writes = tuple(Write(i, Run(LENGTH + i, 1)) for i in range(n_branches))
    reads = tuple(
        AttendSpec(i, 1, (Run(0, LENGTH), Run(LENGTH + i, 1)), AttendKind.NONE)
        for i in range(n_branches)
    )
    plan = attend.Plan(StepPlan(n_branches, writes, reads, n_cells))
    bf16 = attend.Dtype.bfloat16
    wide, narrow = (DIM, N_HEADS * DIM), (DIM, N_KV_HEADS * DIM)
    layout = attend.Layout(N_HEADS, bf16, bf16, wide, narrow, narrow, wide)
    q = random_bits((n_branches, N_HEADS, DIM), np.uint16)
    k = random_bits((n_branches, N_KV_HEADS, DIM), np.uint16)
    out = np.empty_like(q)
    held += [q, k, out]
    at = (q.ctypes.data, k.ctypes.data, k.ctypes.data, out.ctypes.data)
    return lambda: plan.step(pool, layout, *at, DIM**-0.5, 0.0, 0)


def product(bits: int, n_tokens: int, held: list[np.ndarray]) -> Operation:
    """Return a linear layer's product for so many tokens, inputs and results in bfloat16."""
    weight = random_bits((N_OUT, N_IN), np.uint16)
    data, beside = weight, np.zeros(8, np.uint8)
    bf16, form = attend.Dtype.bfloat16, linear.format_of(bits)
    if bits == 12:
        head = 16 * 16 + 64
        data = np.empty(N_OUT // 16 * (head + 24 * N_IN), np.uint8)
        found = linear.code(weight.ctypes.data, N_IN, N_OUT, data.ctypes.data)
        beside = np.frombuffer(found or bytes(8), np.uint8).copy()
    elif bits < 12:
        shared = 128 if bits == 8 else 32
        data = np.empty(N_OUT * N_IN * bits // 8, np.uint8)
        beside = np.empty(N_OUT * N_IN // shared, np.float16)
        of_weight = (weight.ctypes.data, bf16, form, N_IN, N_OUT)
        linear.pack(*of_weight, data.ctypes.data, beside.ctypes.data)
    weights = linear.LinearWeights(form, N_IN, N_OUT, data.ctypes.data, beside.ctypes.data)
    x, out = random_bits((n_tokens, N_IN), np.uint16), np.empty((n_tokens, N_OUT), np.uint16)
    held += [data, beside, x, out]
    return lambda: weights.linear(x.ctypes.data, n_tokens, bf16, out.ctypes.data, bf16)


def random_bytes(n: int, held: list[np.ndarray], most: int = 256) -> int:
    """Return the address of random bytes."""
    numbers = np.random.default_rng(0).integers(most - 4 if most < 256 else 0, most, n, np.uint8)
    held.append(numbers)
    return int(numbers.ctypes.data)


def product_mxfp4(n_tokens: int, held: list[np.ndarray]) -> Operation:
    """Return the same product of weights in MXFP4."""
    data, exponents = (
        random_bytes(N_OUT * N_IN // 2, held),
        random_bytes(N_OUT * N_IN // 32, held, 123),
    )
    weights = linear.LinearWeights(linear.WeightFormat.mxfp4, N_IN, N_OUT, data, exponents)
    x, out = random_bits((n_tokens, N_IN), np.uint16), np.empty((n_tokens, N_OUT), np.uint16)
    held += [x, out]
    bf16 = attend.Dtype.bfloat16
    return lambda: weights.linear(x.ctypes.data, n_tokens, bf16, out.ctypes.data, bf16)


def product_of_blocks(name: str, n_tokens: int, held: list[np.ndarray]) -> Operation:
    """Return the same product of weights in the blocks of a GGUF file, all of whose bytes are 1."""
    kind = blocks.block_type(name)
    n_stored, n_data, n_beside = blocks.block_sizes(kind, N_IN, N_OUT)
    stored, data, beside = (np.ones(n, np.uint8) for n in (n_stored, n_data, n_beside))
    to = data.ctypes.data, beside.ctypes.data
    blocks.place_blocks(kind, stored.ctypes.data, N_IN, N_OUT, *to)
    weights = blocks.block_weights(kind, N_IN, N_OUT, *to)
    x, out = random_bits((n_tokens, N_IN), np.uint16), np.empty((n_tokens, N_OUT), np.uint16)
    held += [data, beside, x, out]
    bf16 = attend.Dtype.bfloat16
    return lambda: weights.linear(x.ctypes.data, n_tokens, bf16, out.ctypes.data, bf16)


def floats(n: int, held: list[np.ndarray]) -> int:
    """Return the address of so many numbers in float32."""
    held.append(np.full(n, 0.5, np.float32))
    return int(held[-1].ctypes.data)


def tokens(n_tokens: int, width: int, held: list[np.ndarray]) -> int:
    """Return the address of rows of tokens in bfloat16."""
    held.append(random_bits((n_tokens, width), np.uint16))
    return int(held[-1].ctypes.data)


def recurrence(name: str, n_tokens: int, held: list[np.ndarray]) -> Operation:
    """Return a recurrent layer's states and results for tokens of one sequence.

    The delta rule has 32 heads on 16 key heads of 128 numbers, Mamba 2 has 64 heads of 64 and
    states of 128; a convolution goes over 4 inputs of 8,192 channels.
    """
    batch = recurrent.StateBatch(n_tokens, attend.Dtype.bfloat16, [(0, n_tokens, 0, 1)])
    out = tokens(n_tokens, 8192, held)
    if name == "convolution":
        made = recurrent.Convolution(8192, 4, floats(4 * 8192, held), has_silu=True)
        states, x = floats(2 * 8192 * 4, held), tokens(n_tokens, 8192, held)
        return lambda: made.run(batch, states, 2, x, 8192, out)
    beside = tokens(n_tokens, 64, held)
    at, width = tokens(n_tokens, 8192, held), 2
    if name == "gated delta rule":
        of = floats(32, held), floats(32, held)
        rule = recurrent.DeltaRule(32, 16, 128, 128, *of, n_decays=1, beta_scale=1.0)
        states = floats(2 * 32 * 128 * 128, held)
        qkv = at, at + 2048 * width, at + 4096 * width, 8192
        ab = beside, 64, beside + 32 * width, 64
        return lambda: rule.run(batch, states, 2, *qkv, *ab, out)
    scan = recurrent.Scan(64, 8, 64, 128, *(floats(64, held) for _ in range(3)))
    states = floats(2 * 64 * 64 * 128, held)
    xbc = at, at + 4096 * width, at + 5120 * width, 8192
    return lambda: scan.run(batch, states, 2, *xbc, beside, 64, out)


def mixture(n_tokens: int, held: list[np.ndarray]) -> Operation:
    """Return a mixture in 4 bits of which each token chooses 8 experts."""

    def layer(n_in: int, n_out: int) -> experts.ExpertLayer:
        n = N_EXPERTS * n_in * n_out
        scales = np.full(n // 32, 0.01, np.float16)
        held.append(scales)
        data = random_bytes(n // 2, held)
        form = linear.WeightFormat.int4
        weights = linear.LinearWeights(form, n_in, n_out, data, scales.ctypes.data)
        return experts.ExpertLayer(weights, N_EXPERTS)

    made = experts.Experts(layer(N_IN, 2 * INNER), layer(INNER, N_IN), experts.Gate())
    rng = np.random.default_rng(0)
    rows = [rng.permutation(N_EXPERTS)[:N_CHOSEN] for _ in range(n_tokens)]
    chosen, shares = np.stack(rows).astype(np.int64), np.ones((n_tokens, N_CHOSEN), np.float32)
    x = random_bits((n_tokens, N_IN), np.uint16)
    out = np.empty_like(x)
    held += [chosen, shares, x, out]
    at = x.ctypes.data, n_tokens, chosen.ctypes.data, shares.ctypes.data, N_CHOSEN
    return lambda: made.run(*at, attend.Dtype.bfloat16, out.ctypes.data)


def passes(held: list[np.ndarray]) -> Operation:
    """Return what lies around a layer's products for one token: two norms, a rotation, a gate."""
    n, bf16 = N_IN, attend.Dtype.bfloat16
    x, both = random_bits((n,), np.uint16), random_bits((2, 4 * n), np.uint16)
    out, wide = np.empty_like(x), np.empty(4 * n, np.uint16)
    held += [x, both, out, wide]

    def run() -> None:
        for _ in range(2):
            layers.norm(x.ctypes.data, 1, 1, n, n, bf16, x.ctypes.data, 1e-5, out.ctypes.data)
        layers.rotate(out.ctypes.data, 1, n // DIM, DIM, n, bf16, x.ctypes.data, x.ctypes.data)
        layers.gate(both.ctypes.data, 1, 4 * n, bf16, wide.ctypes.data)

    return run


def operations(held: list[np.ndarray]) -> dict[str, Operation]:
    """Return what is measured, by name."""
    found: dict[str, Operation] = {}
    for name in ("float32", "bfloat16", "int8", "int4"):
        found[f"attend, one sequence, {name}"] = attention(name, 1, held)
    for name in ("bfloat16", "int8"):
        found[f"attend, four branches, {name}"] = attention(name, 4, held)
    for bits in (16, 12, 8, 4):
        found[f"linear, 1 token, {bits} bits"] = product(bits, 1, held)
    for bits in (12, 8, 4):
        found[f"linear, 64 tokens, {bits} bits"] = product(bits, 64, held)
    found["norms, rotation, gate, 1 token"] = passes(held)
    for n_tokens, said in ((1, "1 token"), (64, "64 tokens")):
        found[f"linear, {said}, MXFP4"] = product_mxfp4(n_tokens, held)
    for n_tokens, said in ((1, "1 token"), (64, "64 tokens")):
        found[f"8 of 32 experts, {said}, 4 bits"] = mixture(n_tokens, held)
    for name in ("Q4_K", "Q6_K", "F16"):
        for n_tokens, said in ((1, "1 token"), (64, "64 tokens")):
            found[f"linear, {said}, {name}"] = product_of_blocks(name, n_tokens, held)
    for name in ("convolution", "gated delta rule", "Mamba 2"):
        for n_tokens, said in ((1, "1 token"), (64, "64 tokens")):
            found[f"{name}, {said}"] = recurrence(name, n_tokens, held)
    return found


def measure(words: list[str]) -> dict[str, dict[str, float]]:
    """Return milliseconds of each level and operation, of those that have one of these words."""
    held: list[np.ndarray] = []
    levels.set_num_threads(1)
    best: dict[str, dict[str, float]] = {found.name: {} for found in levels.levels()}
    for name, operation in operations(held).items():
        if words and not any(word in name for word in words):
            continue
        for _ in range(ROUNDS):
            for level in levels.levels():
                levels.set_level(level)
                took = time_of(operation, LEAST_S / ROUNDS)
                times = best[level.name]
                times[name] = min(times.get(name, took), took)
    return best


def time_of(operation: Operation, least_s: float) -> float:
    """Return the shortest time of an operation, in ms, of as many as take so long."""
    best, began = float("inf"), time.thread_time()
    while True:
        start = time.thread_time()
        operation()
        end = time.thread_time()
        best = min(best, end - start)
        if end - began > least_s:
            return best * 1e3


def machine() -> str:
    """Return the processor's name, family and model."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    pairs = (line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in pairs}
    name = found.get("model name", platform.machine())
    return f"{name}, family {found.get('cpu family', '?')}, model {found.get('model', '?')}"


def table(measured: dict[str, Any]) -> str:
    """Return the table: times of plain C++ on the machine of each level over those of the level."""
    names = [name for name in measured if name != "scalar"]
    rows = list(dict.fromkeys(row for found in measured.values() for row in found["ms"]))
    lines = [
        "| operation | " + " | ".join(names) + " |",
        "| --- |" + " ---: |" * len(names),
    ]
    for row in rows:
        cells = []
        for name in names:
            found = measured[name]
            ms, plain = found["ms"].get(row), found["scalar_ms"].get(row)
            cells.append("-" if ms is None else f"{plain / ms:.1f} ({ms:.2f} ms)")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- `{name}`: {measured[name]['machine'] or 'not measured'}" for name in names]
    return "\n".join(lines)


def readme_with(measured: dict[str, Any]) -> str:
    """Return the README with the table of what was measured."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(measured)}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Measure, print the table, and with ``--write`` keep it."""
    words = [word for word in sys.argv[1:] if word != "--write"]
    found = measure(words)
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    for name, ms in found.items():
        rounded = {row: round(value, 4) for row, value in ms.items()}
        plain = {row: round(value, 4) for row, value in found["scalar"].items()}
        if words:
            rounded = measured[name]["ms"] | rounded
            plain = measured[name]["scalar_ms"] | plain
        measured[name] = {"machine": machine(), "ms": rounded, "scalar_ms": plain}
    print(table(measured))
    if "--write" in sys.argv[1:]:
        MEASURED.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        README.write_text(readme_with(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
