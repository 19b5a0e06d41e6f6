"""Ask how near the torch backend comes to a GPU's bandwidth, and whether it computes the same.

A Llama of 1B shape with random weights in bfloat16 decodes, prefills, forks, reads cells and
weights in few bits, answers requests through the engine and over HTTP, and moves rows to main
memory; a model with recurrent layers and mixtures do as much; transformers' own caches beside them.

Parts run in the order of their worth, in a process that is started again where one takes it along,
each within its time. A part in which anything fails, a request that ends early too, has no figures:
it is named with its error, and the exit status is 1. Behind the figures is what is wanted of them,
and whether it is met. ``--dry`` runs all parts in small on a CPU, where Triton interprets and a
stand-in records graphs: it says whether the script works, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness import run

WORKER = [sys.executable, str(Path(__file__).resolve().parent / "gpu_parts.py")]

PARTS = {
    "engine": 150, "decode": 60, "branches": 60, "kv": 60, "transfers": 40, "hybrid": 150,
    "serve": 240, "mixture": 120, "compiled": 90, "sampling": 60, "weights": 180,
    "agreement": 90, "pictures": 60, "prompts": 40, "shortage": 30, "first_tokens": 30,
    "second_card": 40, "checks": 240,
}  # fmt: skip
"""Parts in the order of their worth -> the seconds that each may take at most on a card.

Whichever comes first has 60 more, in which a process starts. The parts are described where
``gpu_parts.py`` has them from.
"""

QUICK = ("decode", "sampling", "agreement")
START_S = 60.0
DRY_S = 900.0
"""Seconds of a part on a CPU."""


class Goal(NamedTuple):
    """A bound that a figure is to keep.

    Attributes:
        part: that measures it.
        figure: its name.
        sign: how it stands to ``bound``: ``<=``, ``>=`` or ``==``.
        bound: a number, or true.
    """

    part: str
    figure: str
    sign: str
    bound: float | bool

    def verdict(self, figure: Any) -> dict[str, Any]:
        """Return a figure beside its goal; None: it was not found, so the goal is not met."""
        said = "true" if self.bound is True else f"{self.bound:g}"
        is_met = figure is not None and bool(_SIGNS[self.sign](figure, self.bound))
        return {"figure": figure, "goal": f"{self.sign} {said}", "met": is_met}


_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
}

_EXACT = ("llama", "gemma2", "gpt_oss", "lfm2", "qwen3")

GOALS = (
    Goal("engine", "engine_1_at_2048_step_ms", "<=", 1.15),
    Goal("engine", "engine_is_recorded", "==", True),
    Goal("decode", "decode_2048_fraction_of_bandwidth", ">=", 0.6),
    Goal("decode", "decode_32768_fraction_of_bandwidth", ">=", 0.7),
    Goal("decode", "decode_is_recorded", "==", True),
    Goal("branches", "eight_over_one", "<=", 1.35),
    Goal("branches", "branches8_over_one", "<=", 1.25),
    Goal("kv", "int8_kv_over_bf16", "<=", 0.8),
    Goal("kv", "fp8_kv_over_bf16", "<=", 0.8),
    Goal("hybrid", "hybrid_first_prompt_s", "<=", 5.0),
    Goal("hybrid", "hybrid_prompt_over_transformers", "<=", 1.0),
    Goal("hybrid", "hybrid_decode_over_bytes", "<=", 4.0),
    Goal("hybrid", "hybrid_is_recorded", "==", True),
    Goal("mixture", "gpt_oss_is_recorded", "==", True),
    Goal("mixture", "qwen3_moe_is_recorded", "==", True),
    Goal("transfers", "recompute_over_restore", ">=", 10.0),
    Goal("transfers", "save_over_restore", "<=", 3.0),
    Goal("transfers", "restore_is_exact", "==", True),
    Goal("sampling", "sample_8_slowest_ms", "<=", 0.25),
    Goal("compiled", "decode_over_compiled", ">=", 2.0),
    Goal("weights", "weights_int8_1_over_bf16", "<=", 0.6),
    Goal("weights", "weights_Q6_K_1_over_bf16", "<=", 0.6),
    Goal("weights", "weights_int4_1_over_bf16", "<=", 0.4),
    Goal("weights", "weights_Q4_K_1_over_bf16", "<=", 0.4),
    *(
        Goal("weights", f"weights_{name}_{what}_over_bf16", "<=", bound)
        for name in ("int8", "int4", "Q4_K", "Q6_K")
        for what, bound in (("8", 1.0), ("prompt", 1.15))
    ),
    *(Goal("agreement", f"float32_apart_{family}", "<=", 1e-4) for family in _EXACT),
    Goal("agreement", "bfloat16_error_over_transformers", "<=", 1.1),
    Goal("pictures", "pictures_are_equal", "==", True),
    Goal("pictures", "beside_encoding_over_alone", "<=", 1.5),
    Goal("prompts", "prefill_8192_over_transformers", ">=", 1.0),
    Goal("shortage", "shortage_is_survived", "==", True),
    Goal("checks", "is_correct", "==", True),
)


def verdicts(found: Mapping[str, Any], parts: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the figures of parts beside their goals, by name."""
    return {
        goal.figure: goal.verdict(found.get(goal.figure)) for goal in GOALS if goal.part in parts
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the device, and for what is done there."""
    parser.add_argument("--device", default="cuda", help="as torch names it")
    parser.add_argument("--dry", action="store_true", help="try all parts on a CPU, tiny")
    parser.add_argument("--seconds", type=float, default=480.0, help="within which all is done")
    parser.add_argument("--part", action="append", choices=PARTS, help="these alone")


def measure(
    quick: bool, device: str, dry: bool, seconds: float, part: Sequence[str] | None
) -> dict[str, Any]:
    """Measure everything on the card; say so where there is none."""
    asked = [name for name in PARTS if name in (part or (QUICK if quick else PARTS))]
    with tempfile.TemporaryDirectory(prefix="kvcellar-gpu-") as folder:
        course = Course([*asked], device, dry, folder, time.monotonic() + seconds)
        course.run()
    if course.no_device:
        return {"measured": False}
    goals = verdicts(course.found, asked)
    for name, one in goals.items():
        met = "met" if one["met"] else "not measured" if one["figure"] is None else "NOT MET"
        print(f"{name:45} {one['figure']!s:>10}  {one['goal']:>8}  {met}")
    for name, error in course.failed.items():
        print(f"FAILED {name}: {error}")
    return {
        "measured": not dry,
        **course.card,
        **course.found,
        "seconds": course.seconds,
        "goals": goals,
        "left_out": course.left,
        "failed": course.failed,
    }


@dataclass
class Course:
    """Parts that processes run one after the other.

    Attributes:
        left: parts that have not been run, in their order.
        device: as torch names it.
        is_dry: a CPU stands in for the card.
        folder: of models.
        ends_s: when all has to be done, by ``time.monotonic``.
        found: figures of the parts that went well.
        failed: errors of the others, by name.
        seconds: of each part.
        card: what it is called, and versions of what runs there.
        no_device: true where there is no card.
    """

    left: list[str]
    device: str
    is_dry: bool
    folder: str
    ends_s: float
    found: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    no_device: bool = False

    def run(self) -> None:
        """Run the parts until all are run, or the time is over."""
        while self.left and not self.no_device and time.monotonic() < self.ends_s:
            self._run_process()

    def _run_process(self) -> None:
        """Run what is left in one process, until it ends or a part has taken too long."""
        given = {
            "device": self.device,
            "is_dry": self.is_dry,
            "folder": self.folder,
            "seconds": self.ends_s - time.monotonic(),
            "parts": self.left,
        }
        process = subprocess.Popen(
            [*WORKER, json.dumps(given)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        until, first = self._end_of_part(START_S), self.left[0]
        try:
            while self.left and not self.no_device:
                line = lines.get(timeout=max(0.0, until - time.monotonic()))
                if line is None:
                    status = process.wait()
                    if status or self.left[0] == first:
                        self._fail(f"the process ended with status {status}")
                    return
                if self._took(line):
                    until = self._end_of_part()
        except queue.Empty:
            self._fail("it was not done within its time")
        finally:
            if self.left or self.no_device or not _ends(process):
                _kill(process)
            process.wait()
            reader.join()

    def _end_of_part(self, more_s: float = 0.0) -> float:
        """Return when the next part has to be done."""
        if not self.left:
            return self.ends_s
        most = DRY_S if self.is_dry else PARTS[self.left[0]] + more_s
        return min(self.ends_s, time.monotonic() + most)

    def _took(self, line: str) -> bool:
        """Take what a process says; true where a part is done. Other lines are printed."""
        try:
            said = json.loads(line)
            kind = next(key for key in ("part", "card", "no_device") if key in said)
        except (ValueError, TypeError, StopIteration):
            print(line, end="", flush=True)
            return False
        if kind == "card":
            self.card = said["card"]
        elif kind == "no_device":
            print(said["no_device"])
            self.no_device = True
        elif "error" in said:
            self._fail(said["error"], said["seconds"])
        else:
            self.found |= said["found"]
            name = self._done(said["seconds"])
            print(f"{name} ({said['seconds']} s): {json.dumps(said['found'])}", flush=True)
        return kind == "part"

    def _done(self, seconds: float) -> str:
        name = self.left.pop(0)
        self.seconds[name] = seconds
        return name

    def _fail(self, error: str, seconds: float = 0.0) -> None:
        """Have the part that runs be one that failed."""
        name = self._done(seconds)
        self.failed[name] = error
        print(f"{name} ({seconds} s) FAILED: {error}", flush=True)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Hand on what a process writes, and None behind it."""
    assert process.stdout is not None
    with process.stdout as said:
        for line in said:
            lines.put(line)
    lines.put(None)


def _ends(process: subprocess.Popen[str]) -> bool:
    """Wait for a process that has nothing left to do; False: it does not end."""
    try:
        process.wait(START_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process with all that it has started, where they have not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Measure; exit with 1 where a part failed. What is told to end takes its processes along."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result = run(__doc__ or "", measure, options)
    sys.exit(1 if result.get("failed") else 0)


if __name__ == "__main__":
    main()
