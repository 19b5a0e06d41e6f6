"""``kvcellar bench``: measurements of a model on this machine."""

from __future__ import annotations

import json
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.budget import format_size
from kvcellar.cli.common import options
from kvcellar.cli.common.commands import add_command, examples, option
from kvcellar.cli.common.terminal import print_note, progress_bar, write
from kvcellar.cli.store.store import AsJson
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.models.files.checkpoint import read_json
from kvcellar.models.kv_quality import (
    CANDIDATES,
    KvQuality,
    WeightsQuality,
    WeightsQualityWarning,
    recommended,
    save_quality,
    save_weights_quality,
    worst_of_texts,
)
from kvcellar.models.options import LoadOptions
from kvcellar.models.weights import FILE, PLAIN, WEIGHTS, parse_weights

if TYPE_CHECKING:
    from kvcellar.models import LoadedModel

N_TOKENS = 2048

PROGRAMS = ("argparse.py", "statistics.py")
"""Modules of Python's standard library that are read beside prose."""

TRAINING = "training.json"
"""File of the bundled model: what it was trained on."""

STYLES = {"good": "green", "fair": "yellow", "bad": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """Options of what a model reads while it is measured."""

    text: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "Text to read; may be given often. Default: the first chapters of Northanger Abbey and "
            f"{' and '.join(PROGRAMS)} of Python's standard library; for the bundled model modules "
            "of that library that it was not trained on.",
        ),
    ] = None
    tokens: Annotated[int, option("N", "Tokens of each text to read at most.", min=2)] = N_TOKENS
    context: Annotated[int, option("N", "Tokens of a piece that is read in one go.", min=2)] = 1024

    def of(self, model: LoadedModel, name: str) -> dict[str, list[int]]:
        """Return the tokens of each text that a model reads, by what the text is called.

        Raises:
            ConfigError: a piece is longer than the model's context, or the file is no text.
        """
        if self.context > model.max_positions:
            raise ConfigError(
                f"context {self.context} is more than the {model.max_positions} positions that "
                f"{name!r} was made for; give --context at most as much"
            )
        files: list[Path | None] = [*self.text] if self.text else [None]
        if not self.text and not (model.path / TRAINING).is_file():
            library = Path(sysconfig.get_paths()["stdlib"])
            files += [path for path in (library / name for name in PROGRAMS) if path.is_file()]
        read = (read_text(model, file, self.tokens, self.context) for file in files)
        return {source: token_ids for token_ids, source in read}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        help="Measure a model on this machine.",
        no_args_is_help=True,
        epilog=examples("kvcellar bench kv-quality", "kvcellar bench weights-quality"),
    )
    add_command(
        group,
        "kv-quality",
        kv_quality,
        "kvcellar bench kv-quality",
        "kvcellar bench kv-quality ~/models/Qwen3-0.6B --text novel.txt",
        "kvcellar bench kv-quality --kv-dtype int8 --kv-dtype k8v4 --json",
    )
    add_command(
        group,
        "weights-quality",
        weights_quality,
        "kvcellar bench weights-quality ~/models/Qwen3-0.6B",
        "kvcellar bench weights-quality ~/models/Qwen3-0.6B --text novel.txt",
        "kvcellar bench weights-quality --weights int4 --tokens 2048 --json",
    )
    app.add_typer(group, name="bench")


def kv_quality(
    model: options.Model = "demo",
    *,
    kv_dtype: Annotated[
        list[str] | None,
        option(
            "DTYPE", f"A type to measure; may be given often. Default: {', '.join(CANDIDATES)}."
        ),
    ] = None,
    reading: ReadingOptions,
    backend: options.Backend = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    is_unchecked: options.Unchecked = False,
    as_json: AsJson = False,
) -> None:
    """Measure what smaller storage types of K and V cost in quality.

    The model reads a text with K and V stored in each type, side by side with float32: perplexity,
    divergence of the next token's distribution, how often the likeliest token is the same. What a
    model in bfloat16 rounds itself is told apart: its own type is measured too, and the others'
    verdicts are beyond that. What a type costs depends on the text, so several are read, and a
    verdict is that of the worst. The figures are remembered; a session with a type that is bad for
    its model then warns.
    """
    from kvcellar.engine.quality import measure_kv_quality

    wanted = kv_dtype or list(CANDIDATES)
    for name in wanted:
        parse_kv_dtype(name)
    loaded = _load(
        LoadOptions(model, backend=backend, dtype=dtype, device=device, is_unchecked=is_unchecked)
    )
    texts = reading.of(loaded, model)
    of_texts: dict[str, list[KvQuality]] = {}
    for source, token_ids in texts.items():
        with _bar(token_ids, source) as report:
            of_texts[source] = measure_kv_quality(
                loaded, token_ids, wanted, context=reading.context, progress=report
            )
    results, source = worst_of_texts(of_texts), ", ".join(texts)
    best = recommended(results, loaded.dtype)
    saved = _remembered(lambda: save_quality(loaded.path, results, source))
    if as_json:
        more = {"recommended": best.kv_dtype, "saved": saved}
        _print_json(model, source, reading, results, more)
        return
    rows = [(r.kv_dtype, f"{r.bytes_per_token:,}", r) for r in results]
    _show_table(_title(model, source, reading, results), "K and V", "bytes/token", rows)
    share = best.bytes_per_token / results[0].bytes_per_token
    write(f"recommended: --kv-dtype {best.kv_dtype}, {share:.0%} of float32's bytes\n")


def weights_quality(
    model: options.Model = "demo",
    *,
    weights: Annotated[
        list[str] | None,
        option(
            "FORMAT",
            f"A format to measure; may be given often. Default: {PLAIN}, {', '.join(WEIGHTS)}, and "
            f"of a GGUF file {FILE}.",
        ),
    ] = None,
    reading: ReadingOptions,
    is_unchecked: options.Unchecked = False,
    as_json: AsJson = False,
) -> None:
    """Measure what smaller formats of a model's weights cost in quality, with torch on a CPU.

    The model reads a text with its weights in each format, side by side with the model in float32,
    K and V in float32 throughout: perplexity, divergence of the next token's distribution, how
    often the likeliest token is the same. Two models are in memory at a time. The figures are
    remembered, and loading the model in a format that harms it then says how much.
    """
    from kvcellar.engine.quality import measure_weights_quality

    for name in weights or ():
        parse_weights(name, None)

    def load(name: str | None) -> LoadedModel:
        dtype = "float32" if name is None else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeightsQualityWarning)  # it is what is measured
            how = LoadOptions(model, dtype=dtype, weights=name or "none", is_unchecked=is_unchecked)
            return _load(how)

    base = load(None)
    all_of_it = (PLAIN, *WEIGHTS, *((FILE,) if base.path.is_file() else ()))
    wanted = list(dict.fromkeys(weights or all_of_it))
    texts = reading.of(base, model)
    token_ids, source = [token for ids in texts.values() for token in ids], ", ".join(texts)
    with _bar(token_ids, source) as report:
        results = measure_weights_quality(
            base, load, token_ids, wanted, context=reading.context, progress=report
        )
    saved = _remembered(lambda: save_weights_quality(base.path, results, source))
    if as_json:
        _print_json(model, source, reading, results, {"saved": saved})
        return
    rows = [(r.weights, format_size(r.size_bytes), r) for r in results]
    _show_table(_title(model, source, reading, results), "weights", "in memory", rows)


def _load(how: LoadOptions) -> LoadedModel:
    from kvcellar.models import load_model

    with progress_bar("loading") as report:
        return load_model(how, progress=lambda part, what: report(part, f"{how.name}: {what}"))


@contextmanager
def _bar(token_ids: Sequence[int], source: str) -> Iterator[Callable[[float], None]]:
    """Show how much of a text is read."""
    with progress_bar("reading") as report:
        yield lambda fraction: report(fraction, f"reading {len(token_ids)} tokens of {source}")


def _remembered(save: Callable[[], Path]) -> str | None:
    """Save figures and return where; None where that fails, which is told."""
    try:
        return str(save())
    except OSError as error:
        print_note(f"the figures cannot be remembered: {error}")
        return None


def read_text(
    model: LoadedModel, file: Path | None, n_tokens: int, context: int
) -> tuple[list[int], str]:
    """Return up to ``n_tokens`` tokens of a file, or of a novel, and what they were called.

    A model that was trained on modules of Python's standard library reads those that it was not.

    Args:
        model: whose tokens they are.
        file: what to read; None: a text that is here.
        n_tokens: the most tokens.
        context: tokens of a piece, each of which begins as a text of its own does.

    Raises:
        ConfigError: the file cannot be read as text.
    """
    from kvcellar.engine.quality import PROSE

    training = model.path / TRAINING
    if file is None and training.is_file():
        library = Path(sysconfig.get_paths()["stdlib"])
        named = [library / name for name in read_json(training)["heldout_files"]]
        paths, source = [path for path in named if path.is_file()], "Python's standard library"
    else:
        paths = [PROSE if file is None else file]
        source = "Northanger Abbey" if file is None else file.name
    try:
        text = "".join(path.read_text(encoding="utf-8") for path in paths)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as UTF-8 text: {error}") from error
    return _in_pieces(model, text, n_tokens, context), source


def _in_pieces(model: LoadedModel, text: str, n_tokens: int, context: int) -> list[int]:
    """Return tokens of a text with those that open one in front of each piece."""
    from kvcellar.models.text.tokenizer import opening_tokens

    start = opening_tokens(model.tokenizer)
    encoded = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    token_ids: list[int] = []
    own = max(1, context - len(start))  # tokens of the text in a piece
    for at in range(0, min(len(encoded), n_tokens), own):
        token_ids += [*start, *(int(token) for token in encoded[at : at + own])]
    return token_ids[:n_tokens]


def _title(
    model: str, source: str, reading: ReadingOptions, results: Sequence[KvQuality | WeightsQuality]
) -> str:
    n_tokens = max(r.n_tokens for r in results)
    each = "up to " if ", " in source else ""
    return f"{model}: {each}{n_tokens} tokens of {source} in pieces of {reading.context}"


def _print_json(
    model: str,
    source: str,
    reading: ReadingOptions,
    results: Sequence[KvQuality | WeightsQuality],
    more: Mapping[str, str | None],
) -> None:
    """Print the figures, and what they were measured on, as one JSON object."""
    figures = [asdict(one) | {"verdict": one.verdict} for one in results]
    found = {"model": model, "text": source, "context": reading.context, "results": figures}
    write(json.dumps(found | dict(more), ensure_ascii=False) + "\n")


def _range(value: float, ends: tuple[float, float] | None, how: str) -> str:
    """Return a figure, or the least and the most where several texts have it."""
    least, most = (format(end, how) for end in ends or (value, value))
    return least if least == most else f"{least} to {most}"


def _show_table(
    title: str, what: str, size: str, rows: Sequence[tuple[str, str, KvQuality | WeightsQuality]]
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="")
    table.add_column(what)
    for column in (size, "perplexity", "of float32", "KL, nats", "same top 1"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for name, bytes_text, r in rows:
        table.add_row(
            name,
            bytes_text,
            f"{r.perplexity:.3f}",
            _range(r.ppl_ratio, r.ppl_ratios, ".4f"),
            f"{r.kl:.5f}",
            _range(r.same_top1, r.same_top1s, ".2%"),
            r.verdict,
            style=STYLES[r.verdict] if r.verdict != "good" else None,
        )
    Console(highlight=False).print(table)
