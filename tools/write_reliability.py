#!/usr/bin/env python3
"""Write docs/reliability.md from what a soak has printed: ``make soak`` says how one is run.

python tools/write_reliability.py FILE             write docs/reliability.md
python tools/write_reliability.py FILE --to PAGE   write another page
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"

INTRODUCTION = """\
# Reliability

<!-- Written by tools/write_reliability.py from a run of `make soak`; do not edit. -->

`make soak` has simulated agents talk with a real server for some time (20 minutes, or `MINUTES=`),
each with a model of what it must see: turns by `/v1/agents` and `/v1/chat/completions`, whole and
streamed, forks, rewinds, undo, keep, pause, deletion, strangers with a salt of their own. The cache
has 1,024 cells, so that agents give way to each other; guesses are verified (`--speculate ngram`).
Meanwhile clients leave in mid-answer, turns are stopped, a shared place (a folder) goes away and
comes back, and after the first round the server is killed (`kill -9`) and started again.

- An answer is compared with that of a plain loop, which reads its whole prompt into an empty cache:
  the digest of an agent's history is that of the loop's tokens. A turn that was cut short has a
  beginning of them. Answers of the chat route are compared as text.
- After each round: every agent has the history that it was told of; every cell is free, or held by
  the prefix index alone; nothing runs or waits; the store has no temporary file, the log no
  traceback; `/health` is well, and `kvcellar store verify` finds nothing. One of four rounds has K
  and V in int8 and a paged cache, where it is compared that what the server tells is what it keeps.
- After the kill, every turn whose end was told before is there.
- In rounds of 30 seconds or more, resident memory after each is within 5% of that after the first
  round of the process that was measured, beside what pools and stored blocks in RAM have grown by.

The first thing that does not hold ends a run with exit status 1, its seed, and the last operations.
"""


def page(told: dict[str, Any]) -> str:
    """Return the page of a run, from the JSON that it printed."""
    rows = [
        ("minutes", f"{told['minutes']:.1f}"),
        ("seed", str(told["seed"])),
        ("rounds", f"{told['rounds']:,}"),
        ("of them with K and V in int8", f"{told['quantised_rounds']:,}"),
        ("rounds after which memory was compared", f"{told['memory_compared']:,}"),
        ("requests", f"{told['requests']:,}"),
        ("turns that were compared whole", f"{told['turns']:,}"),
        ("requests that were told to come back", f"{told['refused']:,}"),
        *((f"faults: {name}", f"{n:,}") for name, n in told["faults"].items()),
        ("wrong tokens", f"{told['wrong_tokens']:,}"),
        ("bytes lost", f"{told['bytes_lost']:,}"),
        ("broken invariant", told["broken"] or "none"),
    ]
    for name, held in (("after warm-up", told["warm"]), ("at the end", told["end"])):
        if held:
            resident, accounted = held["resident_bytes"] / 1e6, held["accounted_bytes"] / 1e6
            rows.append((f"resident memory {name}", f"{resident:,.1f} MB"))
            rows.append((f"of it pools and stored blocks in RAM {name}", f"{accounted:,.1f} MB"))
    operations = ", ".join(f"{name} {n:,}" for name, n in told["operations"].items())
    return "\n".join(
        [
            INTRODUCTION,
            "## The last run that was published",
            "",
            f"Version {told['version']}, Python {told['python']}, {told['machine']}.",
            "",
            "| what | how many |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            f"Operations, and tokens that gave way: {operations}.",
            "",
            "## What this does not cover",
            "",
            "The bundled model alone, in float32 where tokens are compared; one machine, one",
            "server at a time. No model was swapped; no adapter, sliding window or recurrent layer",
            "was there; no disk failed, and no clock jumped. A run of minutes says little of what",
            "grows over days.",
            "",
        ]
    )


def main() -> None:
    """Read the run and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--to", type=Path, default=PAGE)
    options = parser.parse_args()
    last = options.file.read_text(encoding="utf-8").strip().splitlines()[-1]
    options.to.write_text(page(json.loads(last)), encoding="utf-8")


if __name__ == "__main__":
    main()
