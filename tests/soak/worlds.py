"""The worlds of a soak: each a server with its models, a fleet, faults, and what has to hold."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import kvcellar.models
from tests.models.adapters import write_adapter
from tests.models.hybrid_checkpoints import write_hybrid
from tests.models.tiny_checkpoints import make_checkpoint
from tests.soak.fleet import FailedError, Fleet, Report, Worker
from tests.soak.oracle import CONTEXT, Oracle
from tests.soak.served import BrokenError, Served, until

DEMO = Path(kvcellar.models.__file__).parent / "demo"

TORCH = ("--backend", "torch", "--dtype", "float32")
NATIVE = ("--backend", "native", "--dtype", "float32")
CELLS = ("--capacity", str(CONTEXT))

CLOCK = ("clock",)
FORWARD = ("forward raise", "forward memory", "forward nan")
DISK = ("disk eio", "disk slow", "disk full", "disk torn")


class World:
    """A server, a fleet, and what happens meanwhile.

    Args:
        name: of its folder and its workers.
        folder: of all worlds.
        report: where they count.
        oracles: the models that it offers.
        options: what it is started with.
        is_exact: as ``Worker`` has it.
        n_workers: clients at a time.
        faults: what strikes it in a round; ``place`` takes the shared place away for a while.
        pause_s: how long nothing strikes between two of them, at most.
        limit_bytes: what the process may have in memory, at any time.
        stays: if its server goes on from round to round, so that it is seen what grows.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        report: Report,
        oracles: Mapping[str, Oracle],
        *options: str,
        is_exact: bool = True,
        n_workers: int = 3,
        faults: Sequence[str] = CLOCK,
        pause_s: float = 10.0,
        limit_bytes: int | None = None,
        stays: bool = False,
    ) -> None:
        self.name = name
        self.report = report
        self.faults = faults
        self.pause_s = pause_s
        self.limit_bytes = limit_bytes
        self.stays = stays
        self.most_bytes = 0
        self.n_rounds = 0
        self.place = folder / name / "place"
        self.place.mkdir(parents=True)
        if "place" in faults:
            options += ("--shared", self.place.as_uri())
        if limit_bytes is not None:
            options += ("--memory", str(limit_bytes))
        self.served = Served(folder / name, *options, struck=self.struck)
        may_fail = any(" " in fault for fault in faults)
        self.fleet = Fleet(
            [
                Worker(f"{name}{i}", self.served, oracles, is_exact, report, may_fail=may_fail)
                for i in range(n_workers)
            ]
        )

    def struck(self, fault: str) -> None:
        """Count a fault."""
        self.report.faults[fault] += 1

    def round(self, seed: str, until_s: float) -> None:
        """Have the fleet work until a time, and look at everything that has to hold.

        Raises:
            BrokenError: something does not.
        """
        if not self.served.is_running:
            self.served.start()
            for worker in self.fleet.workers:
                worker.check_all()
        rng = random.Random(f"{seed}/{self.name}")
        self.fleet.run(seed, until_s, lambda: self.meanwhile(rng, until_s))
        self.look()
        self.n_rounds += 1

    def meanwhile(self, rng: random.Random, until_s: float) -> None:
        """Have faults strike, and look at the memory, until a time."""
        is_over = threading.Event()
        watching = threading.Thread(target=self.watch_memory, args=(is_over,))
        watching.start()
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                time.sleep(min(left_s, rng.uniform(0.1, self.pause_s)))
                self.strike(rng.choice(self.faults), rng, min(left_s, self.pause_s))
        finally:
            if self.served.is_running:
                self.served.tell("disk well")
            is_over.set()
            watching.join()
        if self.limit_bytes is not None and self.most_bytes > self.limit_bytes:
            raise BrokenError(
                f"{self.name} had {self.most_bytes:,} bytes in memory, of {self.limit_bytes:,}"
            )

    def strike(self, fault: str, rng: random.Random, most_s: float) -> None:
        """Have one fault; of the disk and the place it lasts for a while."""
        self.report.last.append(f"{self.name}: {fault}")
        kind = fault.partition(" ")[0]
        if kind == "clock":
            self.served.tell(f"clock {rng.choice((-1, 1)) * 10 ** rng.uniform(0, 5.5)}")
            self.struck("clock")
        elif kind == "forward":
            self.served.tell(fault)
        elif kind == "disk":
            self.served.tell(f"{fault} {int(10 ** rng.uniform(0, 6))}")
            time.sleep(rng.uniform(0, most_s))
            self.served.tell("disk well")
        else:
            away = self.place.with_name("away")
            self.place.rename(away)
            self.place.write_text("no folder")
            self.struck("place away")
            time.sleep(rng.uniform(0, most_s))
            self.place.unlink()
            away.rename(self.place)

    def watch_memory(self, is_over: threading.Event) -> None:
        """Note the most that the process has in memory."""
        while not is_over.wait(0.2):
            self.most_bytes = max(self.most_bytes, self.served.resident_bytes())

    def end(self, seed: str) -> None:
        """End the server as its user does, or as a power cut does while it answers.

        Then all that it has told must be there when it starts again.
        """
        rng = random.Random(f"{seed}/{self.name}/end")
        if rng.random() < 0.3:
            self.served.stop()
            return
        disk = [fault for fault in self.faults if fault.startswith("disk")]
        if disk:
            self.served.tell(f"{rng.choice(disk)} {int(10 ** rng.uniform(0, 6))}")
        under_way = []
        for worker in self.fleet.workers:
            worker.rng = random.Random(rng.random())
            with suppress(FailedError):
                worker.turn()
                under_way.append((worker, *worker.begin()))
        self.report.last.append("kill -9")
        self.struck("kill")
        self.served.kill()
        self.served.start()
        for worker, agent, text, wanted, _ in under_way:
            if disk:
                worker.forget(agent)  # what it has is known to nobody
            else:
                worker.settle(agent, text, wanted, 0)  # what no end was told of may be gone
        for worker in self.fleet.workers:
            worker.recover()
        self.look()
        self.served.stop()

    def look(self) -> None:
        """Wait until nothing is asked of the server, and look at everything that has to hold."""
        served = self.served

        def models() -> list[Any]:
            return list(served.get("/v1/cache")["models"])

        def is_still() -> bool:
            gauges = served.gauges()
            return (
                all(
                    one["running"] == one["waiting"] == one["live_cells"] == one["live_slots"] == 0
                    for one in models()
                )
                and gauges["kvcellar_active"] == gauges["kvcellar_store_queued_bytes"] == 0
            )

        until(is_still, "a server that does nothing")
        for one in models():
            if one["evictable_cells"] + one["free_cells"] != one["capacity"]:
                raise BrokenError(f"cells that are nobody's: {one}")
            if one["free_slots"] + one["snapshots"] != one["n_slots"]:
                raise BrokenError(f"slots that are nobody's: {one}")
            for group in one["groups"]:
                if group["window"] is None and group["live"] != one["evictable_cells"]:
                    raise BrokenError(f"cells that the prefix index does not hold: {one}")
        for worker in self.fleet.workers:
            worker.check_all()
        busy = [a["id"] for a in served.get("/v1/agents")["data"] if a["state"] == "running"]
        if busy:
            raise BrokenError(f"agents in a turn that nobody asked for: {busy}")
        if (health := served.get("/health"))["status"] != "ok":
            raise BrokenError(f"health: {health}")
        until(lambda: not self.left_behind(), "a store without temporary files")
        served.check_log()
        served.verify()

    def left_behind(self) -> list[str]:
        """Return temporary files of the store."""
        temporary = self.served.store / "tmp"
        return [one.name for one in temporary.iterdir()] if temporary.is_dir() else []


def worlds(folder: Path, report: Report) -> list[World]:
    """Return all worlds; the first is that whose memory is compared from round to round."""
    made = folder / "models"
    window = make_checkpoint("gemma3", made / "window")
    write_hybrid("lfm2", made / "hybrid")
    adapters = {name: write_adapter(made / name, DEMO, seed=i) for i, name in enumerate("ab")}
    demo, of_window = Oracle(), Oracle(window)
    adapted = {name: Oracle(DEMO, adapters, name) for name in adapters}
    beside = [f"--adapter={name}={path}" for name, path in adapters.items()]

    def world(name: str, oracles: Mapping[str, Oracle], *options: str, **more: Any) -> World:
        return World(name, folder, report, oracles, *options, **more)

    only = {"demo": demo}
    return [
        world(
            "plain",
            only,
            "demo",
            *TORCH,
            *CELLS,
            "--speculate",
            "ngram",
            faults=("place", "clock"),
            stays=True,
        ),
        world(
            "int8", only, "demo", *TORCH, *CELLS, "--kv-dtype=int8", "--cache=paged", is_exact=False
        ),
        world("window", {"window": of_window}, f"window={window}", *TORCH, *CELLS),
        world(
            "hybrid",
            {"hybrid": Oracle(made / "hybrid")},
            f"hybrid={made / 'hybrid'}",
            *TORCH,
            *CELLS,
        ),
        world("adapters", only | adapted, "demo", *TORCH, *CELLS, *beside),
        world(
            "swaps",
            {"demo": demo, "window": of_window},
            "demo",
            f"window={window}",
            *TORCH,
            *CELLS,
            "--idle-unload=1",
            limit_bytes=900_000_000,
        ),
        world(
            "faults", only, "demo", *TORCH, *CELLS, faults=(*FORWARD, *FORWARD, *DISK), pause_s=0.5
        ),
        world("bounded", only, "demo", *NATIVE, n_workers=16, limit_bytes=310_000_000, stays=True),
        world("harmed", only, "demo", *NATIVE, *CELLS, faults=(*FORWARD, *DISK), pause_s=0.5),
        world("crowded", only, "demo", *TORCH, n_workers=16, limit_bytes=760_000_000, stays=True),
    ]
