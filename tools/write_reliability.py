#!/usr/bin/env python3
"""Write docs/reliability.md from what soaks have printed: ``make soak`` says how one is run.

python tools/write_reliability.py FILE...             write docs/reliability.md
python tools/write_reliability.py FILE... --to PAGE   write another page
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"

INTRODUCTION = """\
# Reliability

<!-- Written by tools/write_reliability.py from runs of `make soak`; do not edit. -->

`make soak` has simulated agents talk with real servers for some time (20 minutes, or `MINUTES=`),
each with a model of what it must see: turns by `/v1/agents` and `/v1/chat/completions`, whole and
streamed, forks, rewinds, undo, keep, pause, deletion, strangers with a salt or a key of their own;
and reads of histories, lists and counts, each compared with what is known. Clients leave in
mid-answer, and turns are stopped. It goes from one world to the next, half a minute in each:

- **plain**: 1,024 cells, so that agents give way to each other; guesses (`--speculate ngram`); a
  shared place (a folder) that goes away and comes back; one process for the whole run.
- **int8**: K and V in int8, in blocks; what the server tells is compared with what it keeps.
- **window**, **hybrid**: models with sliding windows (Gemma 3's), and with recurrent layers
  (LFM2's), of random weights.
- **adapters**: two LoRA adapters beside the model.
- **swaps**: two models inside `--memory`, each let go of when nobody used it for a second.
- **faults**, **harmed**: forwards that raise, find no memory, or give NaN; a disk that is full,
  slow, fails, or cuts what is written at any byte; with torch, and with our kernel alone.
- **bounded**, **crowded**: sixteen clients inside `--memory`, with little more than the least that
  is taken; one process for the whole run; with our kernel alone, and with torch.

In all of them the clock is set, by up to three days, forwards and backwards. A server that does not
go on ends as its user ends it, or with `kill -9` while it answers, and starts again.

- An answer is compared with that of a plain loop, which reads its whole prompt into an empty cache:
  the digest of an agent's history is that of the loop's tokens. A turn that was cut short has a
  beginning of them. Answers of the chat route are compared as text. An answer is asked for as far
  as its tokens are the best by more than what float32 rounds away.
- After each round: every agent has the history that it was told of; every cell is free, or held by
  the prefix index alone; nothing runs or waits; the store has no temporary file, the log no
  traceback but of what was injected; `/health` is well, and `kvcellar store verify` finds nothing.
- A request that a fault ends says so with a status of 500, 503 or 507, and its agent is as it was,
  or has a beginning of the answer. An answer that the disk did not take says so.
- After a kill, every turn whose end was told is there, but those of which that was said.
- Resident memory of the first world's process, after each of its rounds but the first two, is
  within 5% of that after the second, beside what pools and stored blocks in RAM have grown by. That
  of processes with `--memory` is never above it; it is looked at five times a second.

The first thing that does not hold ends a run with exit status 1, its seed, and the last operations.
"""

BEHIND = """\
## What this does not cover

Small models, in float32 where tokens are compared; one machine, one server at a time. Faults of the
disk are those of writing: what is read is damaged in `tests/store/test_faults.py`. A run of an hour
says little of what grows over days.
"""


def total(told: Sequence[dict[str, Any]], name: str) -> Counter[str]:
    """Return the sums of a mapping from names to numbers that each run has."""
    return sum((Counter(one[name]) for one in told), Counter())


def listed(numbers: Counter[str]) -> str:
    """Return numbers with their names, in one line."""
    return ", ".join(f"{name} {n:,}" for name, n in sorted(numbers.items()))


def megabytes(held: dict[str, int] | None, name: str) -> str:
    """Return a size of a run as a cell of the table; empty where it was not measured."""
    return f"{held[name] / 1e6:,.1f}" if held else ""


def page(told: Sequence[dict[str, Any]]) -> str:
    """Return the page of some runs, from the JSON that each printed."""
    faults = total(told, "faults")
    rows = [
        ("runs", f"{len(told):,}"),
        ("minutes", f"{sum(one['minutes'] for one in told):,.1f}"),
        ("requests", f"{sum(one['requests'] for one in told):,}"),
        ("turns that were compared whole", f"{sum(one['turns'] for one in told):,}"),
        ("faults", f"{faults.total():,}"),
        *((f"faults: {name}", f"{n:,}") for name, n in sorted(faults.items())),
        ("requests that a fault ended", f"{sum(one['failed'] for one in told):,}"),
        ("requests that were told to come back", f"{sum(one['refused'] for one in told):,}"),
        ("wrong tokens", f"{sum(one['wrong_tokens'] for one in told):,}"),
        ("bytes lost", f"{sum(one['bytes_lost'] for one in told):,}"),
        ("broken invariants", "; ".join(one["broken"] for one in told if one["broken"]) or "none"),
    ]
    worlds = sorted({name for one in told for name in one["bounded"]})
    runs = [
        (
            str(one["seed"]),
            f"{one['minutes']:.1f}",
            f"{sum(one['rounds'].values()):,}",
            f"{one['requests']:,}",
            f"{sum(one['faults'].values()):,}",
            *(
                megabytes(one[when], what)
                for when in ("warm", "end")
                for what in ("resident_bytes", "accounted_bytes")
            ),
            *(
                f"{held['most_bytes'] / 1e6:,.1f} of {held['limit_bytes'] / 1e6:,.1f}"
                if (held := one["bounded"].get(name))
                else "-"
                for name in worlds
            ),
        )
        for one in told
    ]
    bounded = [f"most in {name}" for name in worlds]
    head = ["seed", "minutes", "rounds", "requests", "faults", "warm", "of it known", "at the end"]
    machines = sorted({f"Python {one['python']}, {one['machine']}" for one in told})
    versions = sorted({one["version"] for one in told})
    return "\n".join(
        [
            INTRODUCTION,
            "## The runs that were published last",
            "",
            f"Version {', '.join(versions)}; {'; '.join(machines)}.",
            "",
            "| what | how many |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "Of each run, in MB: resident memory of the first world's process after its second",
            "round and after its last, and what of it pools and stored blocks in RAM are; the most",
            "that processes inside `--memory` had.",
            "",
            f"| {' | '.join([*head, 'of it known', *bounded])} |",
            f"|{' --- |' * (len(head) + 1 + len(bounded))}",
            *(f"| {' | '.join(run)} |" for run in runs),
            "",
            f"Rounds: {listed(total(told, 'rounds'))}.",
            "",
            f"Operations: {listed(total(told, 'operations'))}.",
            "",
            BEHIND,
        ]
    )


def main() -> None:
    """Read the runs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, default=PAGE)
    options = parser.parse_args()
    lasts = [file.read_text(encoding="utf-8").strip().splitlines()[-1] for file in options.files]
    options.to.write_text(page([json.loads(last) for last in lasts]), encoding="utf-8")


if __name__ == "__main__":
    main()
