"""``kvcellar models check``: whether a model is exact behind our caches, with the figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.cli.commands import option
from kvcellar.cli.store import AsJson
from kvcellar.cli.terminal import progress_bar, write
from kvcellar.errors import ConfigError
from kvcellar.models.check import PARTS, TOLERANCE

if TYPE_CHECKING:
    from kvcellar.models.check import Verdict

EXIT_INEXACT = 1

Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="As other commands take it. Default: demo."),
]
AllTiny = Annotated[
    bool,
    option(None, "Check a tiny random model of every family that transformers has.", "--all-tiny"),
]


def check_command(
    model: Model = None, *, all_tiny: AllTiny = False, as_json: AsJson = False
) -> None:
    """Compare models behind caches of kvcellar with what they compute by themselves.

    Texts come in one piece, in chunks, token by token, from a fork, after a rollback and in flat
    batches, on three kinds of caches; each logit is held to that of the model's own eager
    attention over the whole text, in float32, with torch. A large model is checked on a twin: its
    own classes with few small layers of every kind, and windows and chunks that a short text meets.

    The verdict on MODEL is kept until kvcellar, torch or transformers is another; while it is not
    exact, each load checks again. Exit code 1: a model that was compared is not exact, or MODEL
    could not be compared.
    """
    if model is not None and all_tiny:
        raise ConfigError(f"--all-tiny is of no model, and {model!r} was given; leave one out")
    verdicts = _families() if all_tiny else [_one(model or "demo")]
    if as_json:
        write(json.dumps(_object(verdicts), ensure_ascii=False) + "\n")
    else:
        _show(verdicts)
    failed = (each for each in verdicts if not each.is_exact)
    if any(each.differences or not all_tiny for each in failed):
        raise typer.Exit(EXIT_INEXACT)


def _families() -> list[Verdict]:
    """Check every family, in order of their names."""
    with progress_bar("starting torch") as report:
        from kvcellar.backends.torch.checking import check_family
        from kvcellar.backends.torch.tiny import zoo

        families = zoo()
        found = []
        for at, family in enumerate(families):
            report(at / len(families), f"checking {family}")
            found.append(check_family(family))
    return found


def _one(model: str) -> Verdict:
    """Check a checkpoint, and keep the verdict."""
    with progress_bar("starting torch") as report:
        from kvcellar.backends.torch.checking import check_checkpoint, versions
        from kvcellar.models.check import keep_verdict
        from kvcellar.models.checkpoint import read_config
        from kvcellar.models.hub import find_checkpoint

        folder = find_checkpoint(model, report)
        raw = read_config(folder)
        verdict = check_checkpoint(folder, raw, lambda part: report(part, f"checking {model}"))
        keep_verdict(raw, versions(), verdict)
    return verdict


def _object(verdicts: list[Verdict]) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        "tolerance": TOLERANCE,
        "n_exact": sum(verdict.is_exact for verdict in verdicts),
        "n_inexact": sum(bool(v.differences) and not v.is_exact for v in verdicts),
        "n_refused": sum(not verdict.differences for verdict in verdicts),
        "models": [verdict.to_json() for verdict in verdicts],
    }


def _show(verdicts: list[Verdict]) -> None:
    """Print a table, a line for each model; what was not compared says why below."""
    lines = [("FAMILY", "LAYERS", *(part.upper() for part in PARTS), "VERDICT")]
    for verdict in verdicts:
        said = "exact" if verdict.is_exact else "differs" if verdict.differences else "refused"
        worst = [verdict.worst_of(part) for part in PARTS]
        figures = ["-" if value is None else f"{value:.0e}" for value in worst]
        lines.append((verdict.family, ", ".join(verdict.layers) or "-", *figures, said))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        write("  ".join(cells).rstrip() + "\n")
    for verdict in verdicts:
        if not verdict.is_exact:
            write(f"\n{verdict.refusal(verdict.family)}\n")
    exact = sum(verdict.is_exact for verdict in verdicts)
    write(f"\n{exact} of {len(verdicts)} exact within {TOLERANCE:.0e}\n")
