"""Run the soak: rounds of work, after each of which every invariant is looked at.

Prints one line of JSON at the end. At the first invariant that does not hold it ends with exit
status 1, the seed and the last operations.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcellar.version import __version__
from tests.soak.fleet import Fleet, Report, Worker
from tests.soak.oracle import CONTEXT, Oracle
from tests.soak.served import BrokenError, Served, until

OPTIONS = ("--backend", "torch", "--dtype", "float32", "--capacity", str(CONTEXT))

N_WORKERS = 3

MOST_GROWTH = 0.05
"""How much more a server may have in memory at the end than after its first round."""

MORE_THREADS, MORE_FILES = 16, 24
"""Pools of threads, and connections, that come after the first round."""

QUANTISED_AT = 1
"""Which of four rounds has K and V in int8. The first one ends with a kill, so the third is the
warm-up of the process whose memory the fourth is the first to compare: four rounds have it all."""

LEAST_MEASURED_S = 30.0
"""Rounds shorter than this are no warm-up: what they leave in memory is told and not judged."""


class Soak:
    """The servers, their fleets, and what was found."""

    def __init__(self, folder: Path, seed: int, round_s: float) -> None:
        self.seed = seed
        self.round_s = round_s
        self.report = Report()
        self.place = folder / "place"
        self.place.mkdir()
        self.oracle = Oracle()
        self.exact = Served(
            folder / "exact", *OPTIONS, "--speculate", "ngram", "--shared", self.place.as_uri()
        )
        self.quantised = Served(
            folder / "quantised", *OPTIONS, "--kv-dtype", "int8", "--cache", "paged"
        )
        self.fleet = self.made(self.exact, "exact", is_exact=True)
        self.warm: dict[str, int] | None = None
        self.now: dict[str, int] = {}
        self.n_rounds = self.n_quantised = self.n_compared = 0

    def made(self, served: Served, name: str, is_exact: bool) -> Fleet:
        """Return a fleet for a server."""
        return Fleet(
            [
                Worker(f"{name}{i}", served, self.oracle, is_exact, self.report)
                for i in range(N_WORKERS)
            ]
        )

    def run(self, ends_s: float) -> None:
        """Go round until a time, once at least.

        Raises:
            BrokenError: an invariant does not hold.
        """
        self.exact.start()
        while self.n_rounds == 0 or time.monotonic() < ends_s:
            seed = f"{self.seed}/{self.n_rounds}"
            print(f"round {self.n_rounds}, seed {seed}", file=sys.stderr, flush=True)
            until_s = min(time.monotonic() + self.round_s, max(ends_s, time.monotonic() + 1))
            if self.n_rounds % 4 == QUANTISED_AT:
                self.quantised_round(seed, until_s)
                self.n_quantised += 1
            else:
                self.fleet.run(seed, until_s, self.place_goes_away)
                self.look(self.exact, self.fleet)
                self.measure()
                if self.n_rounds % 12 == 0:
                    self.kill(seed)
            self.n_rounds += 1
        self.exact.stop()

    def quantised_round(self, seed: str, until_s: float) -> None:
        """Have K and V in int8 and blocks for one round: what is told is what is kept."""
        self.quantised.start()
        fleet = self.made(self.quantised, f"int8-{self.n_rounds}-", is_exact=False)
        fleet.run(seed, until_s)
        self.look(self.quantised, fleet)
        self.quantised.stop()

    def place_goes_away(self) -> None:
        """Take the shared place away in the middle of a round, and give it back."""
        away = self.place.with_name("away")
        time.sleep(self.round_s / 3)
        self.place.rename(away)
        self.place.write_text("no folder")
        self.report.faults["place_away"] += 1
        self.report.last.append("the shared place is away")
        time.sleep(self.round_s / 6)
        self.place.unlink()
        away.rename(self.place)
        self.report.last.append("the shared place is back")

    def kill(self, seed: str) -> None:
        """Kill the server while it answers, start it again, and ask for all that it has told."""
        rng = random.Random(seed)
        self.report.faults["kill"] += 1
        under_way = []
        for worker in self.fleet.workers:
            worker.rng = random.Random(rng.random())
            under_way.append((worker, *worker.begin()))
        self.report.last.append("kill -9")
        self.exact.kill()
        self.exact.start()
        for worker, agent, text, wanted, _ in under_way:
            worker.settle(agent, text, wanted, 0)  # what no end was told of may be gone
            worker.check_all()
        self.exact.verify()
        self.warm = None

    def look(self, served: Served, fleet: Fleet) -> None:
        """Wait until nothing is asked of a server, and look at everything that has to hold."""

        def model() -> Any:
            (one,) = served.get("/v1/cache")["models"]
            return one

        def is_still() -> bool:
            one, gauges = model(), served.gauges()
            return (
                one["running"] == one["waiting"] == one["live_cells"] == one["live_slots"] == 0
                and gauges["kvcellar_active"] == gauges["kvcellar_store_queued_bytes"] == 0
            )

        until(is_still, "a server that does nothing")
        one = model()
        if one["evictable_cells"] + one["free_cells"] != one["capacity"]:
            raise BrokenError(f"cells that are nobody's: {one}")
        for group in one["groups"]:
            if group["live"] != one["evictable_cells"] or group["free"] != one["free_cells"]:
                raise BrokenError(f"cells that the prefix index does not hold: {one}")
        for worker in fleet.workers:
            worker.check_all()
        busy = [a["id"] for a in served.get("/v1/agents")["data"] if a["state"] == "running"]
        if busy:
            raise BrokenError(f"agents in a turn that nobody asked for: {busy}")
        if (health := served.get("/health"))["status"] != "ok":
            raise BrokenError(f"health: {health}")
        until(lambda: not self.left_behind(served), "a store without temporary files")
        served.check_log()
        served.verify()

    def left_behind(self, served: Served) -> list[str]:
        """Return temporary files of a store."""
        temporary = served.store / "tmp"
        return [one.name for one in temporary.iterdir()] if temporary.is_dir() else []

    def measure(self) -> None:
        """Compare what the server holds with what it held after its first round."""
        (one,) = self.exact.get("/v1/cache")["models"]
        store = self.exact.get("/v1/cache")["store"]
        self.now = {
            "resident_bytes": self.exact.resident_bytes(),
            "accounted_bytes": one["pool_bytes"] + store["warm"]["size_bytes"],
            "threads": self.exact.n_threads(),
            "files": self.exact.n_files(),
        }
        print(json.dumps(self.now), file=sys.stderr, flush=True)
        for name in ("evicted_tokens", "preemptions"):
            self.report.operations[name] = max(self.report.operations[name], one[name])
        if self.warm is None:
            self.warm = self.now
        elif self.round_s >= LEAST_MEASURED_S:
            self.n_compared += 1
        more = {name: self.now[name] - self.warm[name] for name in self.now}
        if more["threads"] > MORE_THREADS or more["files"] > MORE_FILES:
            raise BrokenError(f"threads or files were left: {self.warm}, then {self.now}")
        growth = more["resident_bytes"] - max(0, more["accounted_bytes"])
        if self.round_s >= LEAST_MEASURED_S and growth > MOST_GROWTH * self.warm["resident_bytes"]:
            raise BrokenError(f"memory grows: {self.warm}, then {self.now}")

    def told(self, broken: str | None, took_s: float) -> dict[str, Any]:
        """Return the result as it is printed."""
        report = self.report
        return {
            "version": __version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
            "seed": self.seed,
            "minutes": round(took_s / 60, 2),
            "rounds": self.n_rounds,
            "quantised_rounds": self.n_quantised,
            "memory_compared": self.n_compared,
            "requests": report.requests,
            "turns": report.turns,
            "refused": report.refused,
            "operations": dict(sorted(report.operations.items())),
            "faults": dict(sorted(report.faults.items())),
            "wrong_tokens": report.wrong_tokens,
            "bytes_lost": report.bytes_lost,
            "warm": self.warm,
            "end": self.now,
            "broken": broken,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak as the command line says, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--round", type=float, metavar="SECONDS", help="default: 60, or a fifth of all, if less"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    began_s, broken = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        round_s = options.round or min(60.0, options.minutes * 60 / 5)
        soak = Soak(Path(folder), options.seed, min(round_s, options.minutes * 60))
        try:
            soak.run(began_s + options.minutes * 60)
        except BrokenError as error:
            broken = str(error)
            print(f"broken with --seed {options.seed}: {broken}", file=sys.stderr)
            print("the last operations:", *soak.report.last, sep="\n  ", file=sys.stderr)
        finally:
            soak.exact.kill()
            soak.quantised.kill()
    print(json.dumps(soak.told(broken, time.monotonic() - began_s)), flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
