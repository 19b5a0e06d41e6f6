"""``kvcellar models check``: whether a model is exact behind our caches, with the figures."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.cli.common.commands import option
from kvcellar.cli.common.exits import ExitCode
from kvcellar.cli.common.terminal import progress_bar, write
from kvcellar.cli.store.store import AsJson
from kvcellar.errors import ConfigError
from kvcellar.models.check import PARTS, TOLERANCE
from kvcellar.models.files.checkpoint import read_config
from kvcellar.models.files.formats import is_quantised_for_mlx
from kvcellar.models.files.hub import find_checkpoint
from kvcellar.registry import load_backend, needed_packages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvcellar.models.check import CheckVerdict
    from kvcellar.models.options import ProgressFn

Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="As other commands take it. Default: demo."),
]
AllTiny = Annotated[
    bool,
    option(None, "Check a tiny random model of every family that transformers has.", "--all-tiny"),
]
Backend = Annotated[
    str | None,
    option(
        "NAME",
        "torch or mlx. Default: mlx, where it is installed, for a folder that is quantised for "
        "MLX; else torch.",
        "--backend",
        "-b",
    ),
]
Export = Annotated[
    bool,
    option(
        None,
        "Also trace and lower a twin of each exact model for ExecuTorch, and say which export; "
        "some seconds each.",
        "--export",
    ),
]


@dataclass(frozen=True, slots=True)
class _Row:
    """A model of the table.

    Attributes:
        verdict: on the model.
        exports: true if it exports; None: that was not tried.
        why_not: why it does not.
        is_replaced: facts of it had been kept that were not its own.
    """

    verdict: CheckVerdict
    exports: bool | None = None
    why_not: str | None = None
    is_replaced: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        return {
            **self.verdict.to_json(),
            "exports": self.exports,
            "why_not_exported": self.why_not,
            "facts_replaced": self.is_replaced,
        }


def check_command(
    model: Model = None,
    *,
    backend: Backend = None,
    all_tiny: AllTiny = False,
    export: Export = False,
    as_json: AsJson = False,
) -> None:
    """Compare models behind caches of kvcellar with what they compute by themselves.

    Texts come in one piece, in chunks, token by token, from a fork, after a rollback and in flat
    batches, on three kinds of caches; each logit is held to that of the model's own eager
    attention over the whole text, in float32. A large model is checked on a twin: its
    own classes with few small layers of every kind, and windows and chunks that a short text meets.

    With mlx the model itself is compared with mlx-lm's own code and caches.

    The verdict is kept, for every checkpoint of the same config and until kvcellar or a package
    that computed it is another; while it is not exact, each load checks again. What was learnt of
    MODEL before is learnt anew, and replaced where it was wrong. Exit code 1: a model that was
    compared is not exact, or MODEL could not be compared.

    A model exports if the graph of a twin of it gives the model's logits in the same comparison,
    and ExecuTorch lowers it.
    """
    if model is not None and all_tiny:
        raise ConfigError(f"--all-tiny is of no model, and {model!r} was given; leave one out")
    if backend not in (None, "torch", "mlx"):
        raise ConfigError(f"models are checked with torch or mlx, and not with {backend!r}")
    if backend == "mlx" and (all_tiny or export):
        raise ConfigError("families, and whether a model exports, are checked with torch alone")
    rows = _families(export) if all_tiny else [_one(model or "demo", backend, export)]
    if as_json:
        write(json.dumps(_object(rows), ensure_ascii=False) + "\n")
    else:
        _show(rows)
    failed = (row.verdict for row in rows if not row.verdict.is_exact)
    if any(each.differences or not all_tiny for each in failed):
        raise typer.Exit(ExitCode.FOUND)


def _families(export: bool) -> list[_Row]:
    """Check every family, in order of their names."""
    with progress_bar("starting torch") as report:
        from kvcellar.models.text.tokenizer import quiet

        with quiet(lambda part: None):
            from kvcellar.backends.torch.learn.checking import check_family
            from kvcellar.backends.torch.learn.shrink.checkpoints import default_raw, zoo

        families = zoo()
        found = []
        for at, family in enumerate(families):
            report(at / len(families), f"checking {family}")
            verdict = check_family(family)
            is_tried = export and verdict.is_exact
            found.append(_exported(verdict, default_raw(family)) if is_tried else _Row(verdict))
    return found


def _exported(verdict: CheckVerdict, raw: Mapping[str, Any]) -> _Row:
    """Find out whether an exact model exports.

    Raises:
        BackendError: ExecuTorch is not installed.
    """
    load_backend("executorch")
    from kvcellar.models.text.tokenizer import quiet

    with quiet(lambda part: None):
        from kvcellar.backends.executorch.proving import why_not_exported

        why_not = why_not_exported(raw)
    return _Row(verdict, why_not is None, why_not)


def _one(model: str, backend: str | None, export: bool) -> _Row:
    """Check a checkpoint, and keep the verdict."""
    with progress_bar("reading the config") as report:
        folder = find_checkpoint(model, report)
        raw = read_config(folder)
        if backend is None:
            has_mlx = find_spec("mlx_lm") is not None
            backend = "mlx" if has_mlx and is_quantised_for_mlx(raw) else "torch"
        with needed_packages(backend, f"checking models with the backend {backend!r}"):
            prove = _prover(backend)
        verdict, is_replaced = prove(folder, report)
        row = _exported(verdict, raw) if export and verdict.is_exact else _Row(verdict)
    return replace(row, is_replaced=is_replaced)


def _prover(backend: str) -> Callable[[Path, ProgressFn], tuple[CheckVerdict, bool]]:
    """Import what checks models of a backend."""
    if backend == "mlx":
        from kvcellar.backends.mlx.loading import prove_model as prove_with_mlx

        return prove_with_mlx
    from kvcellar.backends.torch.loading import prove_model

    return prove_model


def _object(rows: list[_Row]) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    verdicts = [row.verdict for row in rows]
    return {
        "tolerance": TOLERANCE,
        "n_exact": sum(verdict.is_exact for verdict in verdicts),
        "n_inexact": sum(bool(v.differences) and not v.is_exact for v in verdicts),
        "n_refused": sum(not verdict.differences for verdict in verdicts),
        "n_exported": sum(row.exports is True for row in rows),
        "models": [row.to_json() for row in rows],
    }


def _show(rows: list[_Row]) -> None:
    """Print a table, a line for each model; what was not compared or exported says why below."""
    is_tried = any(row.exports is not None for row in rows)
    lines = [("FAMILY", "LAYERS", *(part.upper() for part in PARTS), "VERDICT")]
    lines += [_cells(row.verdict) for row in rows]
    if is_tried:
        said = {None: "-", True: "yes", False: "no"}
        exports = ["EXPORTS", *(said[row.exports] for row in rows)]
        lines = [(*line, cell) for line, cell in zip(lines, exports, strict=True)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        write("  ".join(cells).rstrip() + "\n")
    for row in rows:
        if not row.verdict.is_exact:
            write(f"\n{row.verdict.refusal(row.verdict.family)}\n")
        elif row.verdict.remark:
            ours = f"kvcellar's by {row.verdict.worst:.1e}"
            write(f"\n{row.verdict.family}: {row.verdict.remark}; {ours}\n")
        if row.verdict.is_exact and row.verdict.limit:
            write(f"\n{row.verdict.family}: {row.verdict.limit}\n")
        if row.why_not is not None:
            write(f"\n{row.verdict.family} does not export: {row.why_not}\n")
        if row.is_replaced:
            write("\nwhat was kept of it from before was wrong, and is replaced\n")
    exact = sum(row.verdict.is_exact for row in rows)
    write(f"\n{exact} of {len(rows)} exact within {TOLERANCE:.0e}\n")
    if is_tried:
        write(f"{sum(row.exports is True for row in rows)} of {exact} export\n")


def _cells(verdict: CheckVerdict) -> tuple[str, ...]:
    """Return the cells of a model's line, all but whether it exports."""
    said = "exact" if verdict.is_exact else "differs" if verdict.differences else "refused"
    if verdict.is_exact and verdict.exact_to is not None:
        said = f"exact to {verdict.exact_to:,} tokens"
    worst = [verdict.worst_of(part) for part in PARTS]
    figures = ["-" if value is None else f"{value:.0e}" for value in worst]
    return verdict.family, ", ".join(verdict.layers) or "-", *figures, said
