"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcellar.errors import ConfigError, ModelError
from kvcellar.kv_dtype import KV_DTYPES
from kvcellar.models.options import CACHES

LOADING = "Model and cache"
SAMPLING = "Sampling"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="`demo` (the bundled model), a folder with a Hugging Face checkpoint, a name on the "
        "Hugging Face hub, or a .pte file for the backend executorch.",
    ),
]
Cache = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help="Which cache: cells, which are taken one by one, or paged: in blocks.",
        rich_help_panel=LOADING,
    ),
]
AnyCache = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help=f"Which cache: {', '.join([*CACHES][:-1])} or {[*CACHES][-1]}.",
        rich_help_panel=LOADING,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Cells that a paged cache takes and shares together. Default: 16.",
        rich_help_panel=LOADING,
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How a paged cache lays out its bytes: layer_first, or block_first: all layers of a "
        "block side by side. Default: layer_first, which is read faster.",
        rich_help_panel=LOADING,
    ),
]
Capacity = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens that the cache may hold, of all conversations together. Default: the model's "
        "context where memory (--memory, or this machine's) allows, else what it allows.",
        rich_help_panel=LOADING,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="What the whole process may hold, such as 24GB or 8GiB: weights, KV, everything. The "
        "cache grows inside it.",
        rich_help_panel=LOADING,
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help=f"How K and V are stored: {', '.join(KV_DTYPES)}, or each by itself, as k8v4; :g32, "
        ":g64 and :g128 set a group size, :rot rotates K. Default: as the weights.",
        rich_help_panel=LOADING,
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Who runs the model: torch, or another backend that is installed and loads models; of "
        "an unknown one it is said which there are.",
        rich_help_panel=LOADING,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Type of the weights in memory. Default: the checkpoint's own.",
        rich_help_panel=LOADING,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        "--quantize",
        metavar="FORMAT",
        help="How linear layers hold their weights. With torch, on a CPU: bf16, int8 or int4, read "
        "by the kernel of this package, or none: as torch does; with executorch: 8da8w or 8da4w, "
        "exported once and kept. Default: bf16 where the weights are bfloat16 and the kernel is "
        "built, since nothing is lost.",
        rich_help_panel=LOADING,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="Where the model runs, such as cpu or cuda. Default: cpu; with mlx the GPU of a Mac.",
        rich_help_panel=LOADING,
    ),
]

Speculate = Annotated[
    str | None,
    typer.Option(
        metavar="WHO",
        help="Who guesses tokens, to be verified several at once where that saves time: ngram "
        "(what followed the last few tokens before), eagle3:PATH (a head that reads the model's "
        "own layers; eagle3 alone for demo's), or a smaller model of the same vocabulary. What is "
        "said does not depend on it.",
        rich_help_panel=LOADING,
    ),
]
Verify = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="What is asked of stored KV before it is used: checksum, or canary: besides, that a "
        "few rows are what the model computes.",
        rich_help_panel=LOADING,
    ),
]

MaxTokens = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Tokens to generate at most.", rich_help_panel=SAMPLING),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="0 takes the likeliest token; higher is more varied. Default, as for the next four: "
        "what the model's generation_config.json says.",
        rich_help_panel=SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Sample from the fewest tokens with this probability together.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        metavar="K", help="Sample from the K likeliest tokens; 0 for all.", rich_help_panel=SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Sample from tokens at least P times as likely as the likeliest.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Above 1 makes tokens that are there already less likely.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="The same seed gives the same text, in float32.", rich_help_panel=SAMPLING
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="End before this text; may be given several times.",
        rich_help_panel=SAMPLING,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A chat template (Jinja) in place of the model's own.",
        rich_help_panel=LOADING,
    ),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message of the chat.")]


def read_template(file: Path | None) -> str | None:
    """The text of ``--chat-template``.

    Raises:
        ConfigError: it cannot be read as text, or is no template.
    """
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {file} cannot be read as text: {error}") from error
    from kvcellar.models.rendering import ask_renderer  # starts a process; most need none

    try:
        ask_renderer({"literals": text})
    except ModelError as error:
        raise ConfigError(f"{file} is no chat template: {error}") from error
    return text
