"""``kvcellar bench``: measurements of a model on this machine."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvcellar.cli import options
from kvcellar.cli.terminal import examples, help_of, print_note, progress_bar, write
from kvcellar.engine.quality import CANDIDATES, measure_kv_quality
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.models import LoadedModel, load_model
from kvcellar.models.checkpoint import read_json
from kvcellar.models.kv_quality import KvQuality, recommended, save_quality

N_TOKENS = 8192

STYLES = {"good": "green", "fair": "yellow", "bad": "red"}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Measure a model on this machine.", no_args_is_help=True)
    group.command(
        name="kv-quality",
        help=help_of(kv_quality),
        epilog=examples(
            "kvcellar bench kv-quality",
            "kvcellar bench kv-quality ~/models/Qwen3-0.6B --text novel.txt",
            "kvcellar bench kv-quality --kv-dtype int8 --kv-dtype k8v4 --json",
        ),
    )(kv_quality)
    app.add_typer(group, name="bench")


def kv_quality(
    model: options.Model = "demo",
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DTYPE",
            help=f"A type to measure; may be given often. Default: {', '.join(CANDIDATES)}.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to read. Default: modules of Python's standard library; for the bundled "
            "model those that it was not trained on.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tokens of the text to read at most.")
    ] = N_TOKENS,
    context: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tokens of a piece that is read in one go.")
    ] = 1024,
    backend: options.Backend = "torch",
    dtype: options.Dtype = None,
    device: options.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what smaller storage types of K and V cost in quality.

    The model reads a text with K and V stored in each type, side by side with float32: perplexity,
    divergence of the next token's distribution, how often the likeliest token is the same. The
    figures are remembered; a session with a type that is bad for its model then warns.
    """
    wanted = kv_dtype or list(CANDIDATES)
    for name in wanted:
        parse_kv_dtype(name)
    with progress_bar("loading") as report:
        loaded = load_model(
            model,
            backend=backend,
            dtype=dtype,
            device=device,
            progress=lambda fraction, what: report(fraction, f"{model}: {what}"),
        )
    if context > loaded.max_positions:
        raise ConfigError(
            f"context {context} is more than the {loaded.max_positions} positions that {model!r} "
            f"was made for"
        )
    token_ids, source = read_text(loaded, text, tokens)
    with progress_bar("reading") as report:
        results = measure_kv_quality(
            loaded,
            token_ids,
            wanted,
            context=context,
            progress=lambda fraction: report(fraction, f"reading {len(token_ids)} tokens"),
        )
    best = recommended(results)
    saved: str | None = None
    try:
        saved = str(save_quality(loaded.path, results, source))
    except OSError as error:
        print_note(f"the figures cannot be remembered: {error}")
    if as_json:
        found = {
            "model": model,
            "text": source,
            "context": context,
            "results": [asdict(r) | {"verdict": r.verdict} for r in results],
            "recommended": best.kv_dtype,
            "saved": saved,
        }
        write(json.dumps(found, ensure_ascii=False) + "\n")
    else:
        _show(model, results, best, source, context)


def read_text(model: LoadedModel, file: Path | None, n_tokens: int) -> tuple[list[int], str]:
    """Up to ``n_tokens`` tokens of a file, or of Python modules; and what they were called.

    Raises:
        ConfigError: the file cannot be read as text.
    """
    if file is not None:
        try:
            files, source = [file.read_text(encoding="utf-8")], file.name
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read as UTF-8 text: {error}") from error
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        training = model.path / "training.json"
        names = read_json(training)["heldout_files"] if training.is_file() else ()
        paths = [library / name for name in names if (library / name).is_file()]
        paths = paths or sorted(library.glob("*.py"))
        files, source = [path.read_text(encoding="utf-8") for path in paths], "standard library"
    start = [] if model.tokenizer.bos_token_id is None else [int(model.tokenizer.bos_token_id)]
    token_ids: list[int] = []
    for content in files:
        if len(token_ids) >= n_tokens:
            break
        encoded = model.tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
        token_ids += [*start, *(int(token) for token in encoded)]
    return token_ids[:n_tokens], source


def _show(model: str, results: list[KvQuality], best: KvQuality, source: str, context: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{model}: {results[0].n_tokens} tokens of {source} in pieces of {context}",
        title_justify="left",
        title_style="",
    )
    table.add_column("K and V")
    for title in ("bytes/token", "perplexity", "of float32", "KL, nats", "same top 1"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for r in results:
        table.add_row(
            r.kv_dtype,
            f"{r.bytes_per_token:,}",
            f"{r.perplexity:.3f}",
            f"{r.ppl_ratio:.4f}",
            f"{r.kl:.5f}",
            f"{r.same_top1:.2%}",
            r.verdict,
            style=STYLES[r.verdict] if r.verdict != "good" else None,
        )
    console = Console(highlight=False)
    console.print(table)
    share = best.bytes_per_token / results[0].bytes_per_token
    console.print(f"recommended: --kv-dtype {best.kv_dtype}, {share:.0%} of float32's bytes")
