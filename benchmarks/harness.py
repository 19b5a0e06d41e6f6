"""Parts that every benchmark shares: two flags, a header, fair timing, one JSON line at the end.

A benchmark answers one question. It compares what it compares in one run, alternating, and reports
medians and ratios: machines are noisy, and a number alone says little.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def run(
    question: str,
    measure: Callable[..., Mapping[str, Any]],
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> dict[str, Any]:
    """Parse the flags, print the header, measure, print the result and return it.

    Args:
        question: what the benchmark answers; shown with ``--help`` and at the top.
        measure: takes ``quick`` and returns the result's keys and values; it prints its own table.
        add_options: for a long benchmark that can be run in parts; ``measure`` takes them by name.
    """
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--quick", action="store_true", help="under 45 seconds on 2 cores")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    if add_options is not None:
        add_options(parser)
    options = parser.parse_args()
    own = {k: v for k, v in vars(options).items() if k not in ("quick", "json")}
    where = environment()
    print(question.strip().splitlines()[0])
    print("  ".join(f"{key}: {value}" for key, value in where.items()))
    start = time.perf_counter()
    result = dict(measure(options.quick, **own))
    took = time.perf_counter() - start
    print(f"took {took:.1f} s{' (quick)' if options.quick else ''}")
    if options.json:
        print(json.dumps({**result, "quick": options.quick, "took_s": round(took, 1), **where}))
    return result


def environment() -> dict[str, str | int]:
    """Return hardware, versions and commit."""
    found: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "commit": _commit(),
    }
    for package in ("numpy", "torch", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def alternate(
    calls: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Time the calls one after the other in every round, so that noise hits them alike."""
    for _ in range(warmup):
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            names = list(calls) if i % 2 == 0 else list(reversed(calls))
            for name in names:
                start = time.perf_counter()
                calls[name]()
                times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return times


def median_ratio(times: Mapping[str, list[float]], ours: str, base: str) -> float:
    """Return the median of ours / base: each round's pair was measured side by side."""
    return statistics.median(a / b for a, b in zip(times[ours], times[base], strict=True))


def median_ms(times: list[float]) -> float:
    """Return the median in milliseconds."""
    return statistics.median(times) * 1e3


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if dirty else "")
