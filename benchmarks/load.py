"""Ask what it costs to load a model: the first time that it is seen, and every time after that.

A model of random weights in bfloat16 with Llama 3.2 1B's shape (``--quick``: of 4 layers and a
small vocabulary), each load in a process of its own, by the clock and by computing time, without
imports. ``--against FOLDER`` loads with the sources in another folder (``.../src``) in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import run
from random_models import LLAMA_1B, random_llama

OURS = Path(__file__).parent.parent / "src"

LOAD = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
from kvcellar.models import load_model
load_model("demo")  # what a process imports with its first load
clock, computing = time.perf_counter(), time.process_time()
load_model(sys.argv[1])
print(json.dumps([time.perf_counter() - clock, time.process_time() - computing]))
"""


def load(folder: Path, source: Path, home: Path) -> tuple[float, float]:
    """Load a model in a process of its own; return its seconds by the clock, and of computing."""
    where = os.environ | {"PYTHONPATH": str(source), "KVCELLAR_HOME": str(home)}
    command = [sys.executable, "-c", LOAD, str(folder)]
    said = subprocess.run(command, env=where, stdout=subprocess.PIPE, check=True).stdout
    clock, computing = json.loads(said.splitlines()[-1])
    return clock, computing


def measure(quick: bool, against: str | None) -> Mapping[str, Any]:
    """Load in turns; print medians."""
    small = {"num_hidden_layers": 4, "vocab_size": 32_000}
    shape = LLAMA_1B | (small if quick else {})
    sources = {"ours": OURS} | ({"base": Path(against)} if against else {})
    with tempfile.TemporaryDirectory() as made:
        folder = random_llama(shape, Path(made) / "model")
        load(folder, OURS, Path(made) / "other")  # the file into the system's memory
        first = load(folder, OURS, Path(made) / "ours")
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
        for i in range(3 if quick else 9):
            for name in sorted(sources, reverse=bool(i % 2)):
                times[name].append(load(folder, sources[name], Path(made) / name))
    found: dict[str, Any] = {"first_s": first[0]}
    for name, both in times.items():
        found[f"{name}_s"] = statistics.median(clock for clock, _ in both)
        found[f"{name}_computing_s"] = statistics.median(computing for _, computing in both)
    found["first_more_s"] = first[0] - found["ours_s"]
    if against:
        pairs = list(zip(times["ours"], times["base"], strict=True))
        for at, name in enumerate(("second_over_base", "second_over_base_computing")):
            found[name] = statistics.median(ours[at] / base[at] for ours, base in pairs)
    for name, value in found.items():
        print(f"{name:28} {value:8.3f}")
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the folder of other sources."""
    parser.add_argument("--against", help="the folder of other sources")


if __name__ == "__main__":
    run(__doc__ or "", measure, add_options)
