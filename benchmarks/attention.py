"""Ask how close the CPU attention kernel comes to the memory's bandwidth.

One layer of 32 query heads over 8 KV heads of 64, 8,192 cells, one query token: a decode step's
read. Each figure is a ratio within one run: against a loop that only reads as many bytes, or
against the plain case. Pools take turns, so that no core's own cache holds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from harness import alternate, median_ms, median_ratio, run

from kvcellar.backends.torch.cache import memory
from kvcellar.kernel import attend, levels
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.types import AttendKind, AttendSpec, Run, StepPlan, Write, runs_of

N_HEADS = 32
N_KV_HEADS = 8
DIM = 64
LENGTH = 8192
N_CELLS = LENGTH + 64
ROTATED_BYTES = 256 << 20
GOALS = {
    "bf16_fraction_of_bandwidth": (">=", 0.8),
    "int8_time_over_bf16": ("<=", 0.65),
    "int4_time_over_bf16": ("<=", 0.5),
    "ragged4_over_single": ("<=", 1.1),
    "blocks16_over_contiguous": ("<=", 1.4),
    "shared_trunk4_over_single": ("<=", 1.3),
}

rng = np.random.default_rng(0)
torch.manual_seed(0)


class Pools:
    """Some layers' bytes of one storage type, enough of them that caches do not hold them all."""

    def __init__(self, kv_dtype: str) -> None:
        """Create pools of random rows, the same in each."""
        side = parse_kv_dtype(kv_dtype).k
        self.size_bytes = 2 * N_KV_HEADS * LENGTH * side.row_bytes(DIM)
        shape = (N_KV_HEADS, N_CELLS)
        if side.is_quantised:
            top = 2**side.bits - 1
            rows = torch.randint(0, 256, (*shape, side.packed_bytes(DIM)), dtype=torch.uint8)
            affine = torch.tensor([6 / top, -3]).half().repeat(*shape, side.n_groups(DIM), 1)
        else:
            rows, affine = torch.randn(*shape, DIM).to(getattr(torch, kv_dtype)), torch.empty(0)
        self.sides: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.pools = []
        for _ in range(max(2, ROTATED_BYTES // self.size_bytes)):
            sides = [(_placed(rows), _placed(affine)) for _ in "kv"]
            self.sides += sides
            layouts = [_layout(kv_dtype, *parts, side.n_groups(DIM)) for parts in sides]
            self.pools.append(attend.Pool(N_KV_HEADS, N_CELLS, *layouts))
        self.turn = itertools.cycle(range(len(self.pools)))

    def call(self, reads: Sequence[Sequence[Run]]) -> Callable[[], None]:
        """Attend one query token for each read, on the next pool each time."""
        n = len(reads)
        writes = tuple(Write(i, Run(LENGTH + i, 1)) for i in range(n))
        plan = StepPlan(
            n,
            writes,
            tuple(
                AttendSpec(i, 1, (*runs, writes[i].run), AttendKind.NONE)
                for i, runs in enumerate(reads)
            ),
            N_CELLS,
        )
        compiled = attend.Plan(plan)
        q, k, v = (
            torch.randn(1, n, heads, DIM).bfloat16() for heads in (N_HEADS, N_KV_HEADS, N_KV_HEADS)
        )
        out = torch.empty(1, n, N_HEADS, DIM, dtype=torch.bfloat16)
        dtype = attend.Dtype.bfloat16
        wide, narrow = (DIM, N_HEADS * DIM), (DIM, N_KV_HEADS * DIM)
        layout = attend.Layout(N_HEADS, dtype, dtype, wide, narrow, narrow, wide)

        def step() -> None:
            compiled.step(
                self.pools[next(self.turn)],
                layout,
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                out.data_ptr(),
                DIM**-0.5,
                0.0,
                0,
            )

        return step

    def stream(self) -> Callable[[], None]:
        """Read as many bytes and nothing else, from the next pool's memory each time."""

        def read() -> None:
            turn = 2 * next(self.turn)
            for rows, _ in self.sides[turn : turn + 2]:
                levels.stream_read(rows.data_ptr(), self.size_bytes // 2)

        return read


def _placed(rows: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to where a pool's rows would lie."""
    return memory.empty(tuple(rows.shape), rows.dtype, rows.device).copy_(rows)


def _layout(kv_dtype: str, rows: torch.Tensor, affine: torch.Tensor, n_groups: int) -> attend.Side:
    """Describe where one side's rows lie."""

    def strides(part: torch.Tensor) -> tuple[int, int]:
        return part.stride(0) * part.itemsize, part.stride(1) * part.itemsize

    where = (attend.Dtype[kv_dtype], DIM, rows.data_ptr(), *strides(rows))
    if not n_groups:
        return attend.Side(*where)
    return attend.Side(*where, 0, affine.data_ptr(), *strides(affine), 0, DIM // n_groups)


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure all ratios, against the goals."""
    if not levels.is_available():
        raise SystemExit(levels.why_not())
    rounds = 600 if quick else 2000
    whole = [[Run(0, LENGTH)]]
    starts = rng.permutation(LENGTH // 16) * 16
    blocks16 = [[Run(int(start), 16) for start in starts]]
    cells = [runs_of(rng.permutation(LENGTH))]
    ragged4, at = [], 0
    for length in (4096, 2304, 1280, 512):
        ragged4.append([Run(at, length)])
        at += length
    results: dict[str, Any] = {}
    pools = {name: Pools(name) for name in ("bfloat16", "int8", "int4", "float32", "float16")}
    calls = {f"{name}": pool.call(whole) for name, pool in pools.items()}
    bf16 = pools["bfloat16"]
    calls |= {
        "stream": bf16.stream(),
        "ragged4": bf16.call(ragged4),
        "blocks16": bf16.call(blocks16),
        "cells1": bf16.call(cells),
        "shared_trunk4": bf16.call(whole * 4),
        "int8_shared_trunk4": pools["int8"].call(whole * 4),
        "int4_shared_trunk4": pools["int4"].call(whole * 4),
    }
    times = alternate(calls, rounds=rounds, warmup=8)
    # A worker that waits for a core makes every call as long as the wait: ratios without meaning.
    results["is_quiet"] = median_ms(times["stream"]) < 1.5e3 * min(times["stream"])
    if not results["is_quiet"]:
        print("  others use the cores: these figures say nothing; run again when it is quiet")
    results["level"] = levels.level().name
    results["threads"] = levels.num_threads()
    results["gb_per_s"] = round(bf16.size_bytes / median_ms(times["stream"]) / 1e6, 1)
    for name, seconds in times.items():
        results[f"{name}_ms"] = round(median_ms(seconds), 4)
        print(f"  {name:20s} {median_ms(seconds):8.3f} ms")
    ratios = {
        "bf16_fraction_of_bandwidth": median_ratio(times, "stream", "bfloat16"),
        "int8_time_over_bf16": median_ratio(times, "int8", "bfloat16"),
        "int4_time_over_bf16": median_ratio(times, "int4", "bfloat16"),
        "ragged4_over_single": median_ratio(times, "ragged4", "bfloat16"),
        "blocks16_over_contiguous": median_ratio(times, "blocks16", "bfloat16"),
        "shared_trunk4_over_single": median_ratio(times, "shared_trunk4", "bfloat16"),
    }
    for name, (sign, goal) in GOALS.items():
        print(f"  {name:28s} {ratios[name]:.2f}  (goal {sign} {goal})")
    ratios["cells1_over_contiguous"] = median_ratio(times, "cells1", "bfloat16")
    for name in ("int8", "int4"):
        ratios[f"{name}_shared_trunk4_over_single"] = median_ratio(
            times, f"{name}_shared_trunk4", name
        )
    return {**results, **{name: round(ratio, 3) for name, ratio in ratios.items()}}


if __name__ == "__main__":
    run(__doc__ or "", measure)
