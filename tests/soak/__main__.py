"""Run the soak: rounds of work, after each of which every invariant is looked at.

Prints one line of JSON at the end. At the first invariant that does not hold it ends with exit
status 1, the seed and the last operations.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcellar.version import __version__
from tests.soak.fleet import Report
from tests.soak.served import BrokenError
from tests.soak.worlds import worlds

MOST_GROWTH = 0.05
"""How much more the first world's server may have in memory at the end than when it was warm."""

MORE_THREADS, MORE_FILES = 16, 24
"""Pools of threads, and connections, that come after the first round."""

N_WARM = 2
"""Rounds of a world until its server is warm."""

LEAST_MEASURED_S = 30.0
"""Rounds shorter than this are no warm-up: what they leave in memory is told and not judged."""


class Soak:
    """The worlds, and what was found in them."""

    def __init__(self, folder: Path, seed: int, round_s: float, only: Sequence[str]) -> None:
        self.seed = seed
        self.round_s = round_s
        self.report = Report()
        every = worlds(folder, self.report)
        self.first = every[0]
        self.worlds = [one for one in every if not only or one.name in only]
        self.warm: dict[str, int] | None = None
        self.now: dict[str, int] = {}
        self.n_rounds = self.n_compared = 0

    def run(self, ends_s: float) -> None:
        """Go from world to world until a time, to one at least.

        Raises:
            BrokenError: an invariant does not hold.
        """
        while self.n_rounds == 0 or time.monotonic() < ends_s:
            world = self.worlds[self.n_rounds % len(self.worlds)]
            seed = f"{self.seed}/{self.n_rounds}"
            print(f"round {self.n_rounds}, seed {seed}: {world.name}", file=sys.stderr, flush=True)
            until_s = min(time.monotonic() + self.round_s, max(ends_s, time.monotonic() + 1))
            world.round(seed, until_s)
            if world is self.first:
                self.measure()
            if not world.stays:
                world.end(seed)
            self.n_rounds += 1
        for world in self.worlds:
            if world.served.is_running:
                world.served.stop()

    def measure(self) -> None:
        """Compare what the first world's server holds with what it held when it was warm."""
        served = self.first.served
        (one,) = served.get("/v1/cache")["models"]
        store = served.get("/v1/cache")["store"]
        self.now = {
            "resident_bytes": served.resident_bytes(),
            "accounted_bytes": one["pool_bytes"] + store["warm"]["size_bytes"],
            "threads": served.n_threads(),
            "files": served.n_files(),
        }
        print(json.dumps(self.now), file=sys.stderr, flush=True)
        for name in ("evicted_tokens", "preemptions"):
            self.report.operations[name] = max(self.report.operations[name], one[name])
        if self.warm is None or self.first.n_rounds <= N_WARM:
            self.warm = self.now
        elif self.round_s >= LEAST_MEASURED_S:
            self.n_compared += 1
        more = {name: self.now[name] - self.warm[name] for name in self.now}
        if more["threads"] > MORE_THREADS or more["files"] > MORE_FILES:
            raise BrokenError(f"threads or files were left: {self.warm}, then {self.now}")
        growth = more["resident_bytes"] - max(0, more["accounted_bytes"])
        if self.round_s >= LEAST_MEASURED_S and growth > MOST_GROWTH * self.warm["resident_bytes"]:
            raise BrokenError(
                f"resident memory grew by {growth / 1e6:.1f} MB beside what is accounted, of "
                f"{self.warm['resident_bytes'] / 1e6:.1f} MB"
            )

    def told(self, broken: str | None, took_s: float) -> dict[str, Any]:
        """Return the result as it is printed."""
        report = self.report
        return {
            "version": __version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
            "seed": self.seed,
            "minutes": round(took_s / 60, 2),
            "rounds": {one.name: one.n_rounds for one in self.worlds},
            "memory_compared": self.n_compared,
            "requests": report.requests,
            "turns": report.turns,
            "refused": report.refused,
            "failed": report.failed,
            "operations": dict(sorted(report.operations.items())),
            "faults": dict(sorted(report.faults.items())),
            "wrong_tokens": report.wrong_tokens,
            "bytes_lost": report.bytes_lost,
            "warm": self.warm,
            "end": self.now,
            "bounded": {
                one.name: {"limit_bytes": one.limit_bytes, "most_bytes": one.most_bytes}
                for one in self.worlds
                if one.limit_bytes is not None
            },
            "broken": broken,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak as the command line says, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--round", type=float, metavar="SECONDS", help="default: 30, or a tenth of all, if less"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--world", action="append", default=[], help="no other; default: all")
    options = parser.parse_args(arguments)
    began_s, broken = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["KVCELLAR_HOME"] = f"{folder}/home"
        round_s = options.round or min(30.0, options.minutes * 60 / 10)
        soak = Soak(Path(folder), options.seed, min(round_s, options.minutes * 60), options.world)
        try:
            soak.run(began_s + options.minutes * 60)
        except BrokenError as error:
            broken = str(error)
            print(f"broken with --seed {options.seed}: {broken}", file=sys.stderr)
            print("the last operations:", *soak.report.last, sep="\n  ", file=sys.stderr)
        finally:
            for world in soak.worlds:
                world.served.kill()
    print(json.dumps(soak.told(broken, time.monotonic() - began_s)), flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
