"""``kvcellar demo``: what the caches can do, with the bundled model or another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.cli.common import options
from kvcellar.cli.common.commands import add_command, option
from kvcellar.cli.common.terminal import progress_bar, write
from kvcellar.cli.store.store import AsJson
from kvcellar.cli.talk.session import Bound, bound_model
from kvcellar.models.options import DEMO, LoadOptions

if TYPE_CHECKING:
    from kvcellar.engine import BranchReport

TRUNK = '''\
"""Helpers for reading and writing text files."""

import os
import re
import sys


def read_lines(path, encoding="utf-8"):
    """Return the lines of a file, without their line ends."""
    with open(path, encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file]


def write_lines(path, lines, encoding="utf-8"):
    """Write lines to a file, each with a line end."""
    with open(path, "w", encoding=encoding) as file:
        for line in lines:
            file.write(line + "\\n")


def'''


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "demo",
        demo_command,
        "kvcellar demo",
        "kvcellar demo smollm2",
        "kvcellar demo --branches 8 --max-tokens 32 --seed 7",
        "kvcellar demo --json | jq .memory",
    )


def demo_command(
    model: options.Model = DEMO,
    *,
    branches: Annotated[int, option("N", "Continuations of the trunk.", min=1, max=64)] = 4,
    max_tokens: Annotated[int, option("N", "Tokens of each branch at most.", min=1)] = 48,
    seed: Annotated[int, option("N", "The same seed gives the same text, in float32.", min=0)] = 0,
    memory: options.Memory = None,
    backend: options.Backend = None,
    weights: options.Weights = None,
    as_json: AsJson = False,
) -> None:
    """Fork one prompt into branches that share its cells, and keep the best.

    A model reads a trunk, the beginning of a Python module, once; it is forked without copying a
    byte, all branches go on in one batched forward per token, and the likeliest is kept.
    """
    from kvcellar.engine import SamplingParams, branch

    params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=max_tokens)
    loading = LoadOptions(model, backend=backend, weights=weights)
    with bound_model(loading, memory=memory, n_sequences=branches) as bound:
        tokenizer = bound.model.tokenizer
        begins = [tokenizer.bos_token_id] if model == DEMO else []  # it was trained so
        trunk = [*begins, *tokenizer.encode(TRUNK)]
        with progress_bar("reading the trunk") as report:
            result = branch(
                bound.runner,
                bound.cache,
                tokenizer,
                trunk,
                params,
                branches,
                eos_token_ids=bound.model.eos_token_ids,
                on_step=lambda done, total: report(
                    done / total, f"{branches} branches: token {done} of {total}"
                ),
            )
        if as_json:
            write(json.dumps(_as_object(result, bound), ensure_ascii=False) + "\n")
        else:
            _show(result, bound)


def _memory(result: BranchReport, bound: Bound) -> dict[str, int]:
    """Cells and bytes: as they were shared, and as they would have been without sharing."""
    from kvcellar.engine.loop.branches import bytes_per_cell

    per_cell = bytes_per_cell(bound.cache.config)
    live = result.usage.groups[0].live
    unshared = sum(one.cells for one in result.branches)
    return {
        "live_cells": live,
        "shared_cells": result.usage.groups[0].shared,
        "kept_cells": result.usage_kept.groups[0].live,
        "unshared_cells": unshared,
        "bytes_per_cell": per_cell,
        "live_bytes": live * per_cell,
        "unshared_bytes": unshared * per_cell,
        "allocated_bytes": result.usage.size_bytes,
    }


def _as_object(result: BranchReport, bound: Bound) -> dict[str, Any]:
    return {
        "model": bound.model.name,
        "trunk": TRUNK,
        "prompt_tokens": result.prompt_tokens,
        "branches": [
            {
                "seq_id": one.seq_id,
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish.reason if one.finish else None,
                "mean_logprob": one.mean_logprob,
                "cells": one.cells,
                "shared_cells": one.shared_cells,
                "private_cells": one.private_cells,
                "is_kept": index == result.best,
            }
            for index, one in enumerate(result.branches)
        ],
        "n_forwards": result.n_forwards,
        "time": {
            "prefill_s": result.prefill_s,
            "fork_s": result.fork_s,
            "decode_s": result.decode_s,
        },
        "memory": _memory(result, bound),
    }


def _show(result: BranchReport, bound: Bound) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Panel(Text(TRUNK.rstrip(), style="dim"), title="trunk", title_align="left"))
    for index, one in enumerate(result.branches):
        is_best = index == result.best
        console.print(
            Panel(
                Text("def" + one.text.rstrip()),
                title=f"branch {one.seq_id}" + (", kept" if is_best else ""),
                title_align="left",
                border_style="green" if is_best else "dim",
            )
        )

    table = Table(caption_justify="left")
    table.add_column("branch", justify="right")
    for title in ("tokens", "cells shared", "cells private", "mean logprob"):
        table.add_column(title, justify="right")
    table.add_column("end")
    for index, one in enumerate(result.branches):
        table.add_row(
            str(one.seq_id),
            str(len(one.token_ids)),
            str(one.shared_cells),
            str(one.private_cells),
            f"{one.mean_logprob:.3f}",
            one.finish.reason if one.finish else "",
            style="green" if index == result.best else None,
        )

    memory = _memory(result, bound)
    speed = result.n_sampled / result.decode_s if result.decode_s else 0.0
    n_prompts = result.prompt_tokens * len(result.branches)
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "trunk",
        f"{result.prompt_tokens} tokens computed once in {result.prefill_s:.2f} s; without "
        f"sharing {n_prompts}",
    )
    facts.add_row("fork", f"{len(result.branches)} in {result.fork_s * 1e3:.2f} ms, 0 bytes copied")
    facts.add_row(
        "decode",
        f"{result.n_sampled} tokens in {result.n_forwards} batched forwards, "
        f"{result.decode_s:.2f} s, {speed:.0f} tokens/s",
    )
    facts.add_row(
        "memory",
        f"{_mib(memory['live_bytes'])} in {memory['live_cells']} cells; without sharing "
        f"{_mib(memory['unshared_bytes'])} in {memory['unshared_cells']}",
    )
    facts.add_row(
        "kept",
        f"branch {result.branches[result.best].seq_id} with {memory['kept_cells']} cells; "
        f"{memory['live_cells'] - memory['kept_cells']} freed",
    )
    console.print(Group(table, facts))


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2f} MiB"
