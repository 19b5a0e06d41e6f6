"""``kvcellar`` without a command: where one begins, and what is here already."""

from __future__ import annotations

from kvcellar.cli.common.terminal import write
from kvcellar.home import default_config
from kvcellar.version import __version__

_LINES = (
    ("kvcellar chat smollm2", "talk with a small model{fetch}"),
    ("kvcellar chat model.gguf", "or with a file, a folder, ollama:NAME, a name on the hub"),
    (
        "kvcellar serve smollm2",
        "a page at http://127.0.0.1:8642, and what other programs ask",
    ),
    ("kvcellar agents chat poet --model smollm2", "an agent that is there again tomorrow"),
    ("kvcellar models list", "which models are on this machine"),
    ("kvcellar inspect MODEL", "what fits into memory, before it is loaded"),
    ("kvcellar doctor", "what this installation can do, and what would help"),
    ("kvcellar --help", "all commands; each has --help with examples"),
)


def show_start() -> None:
    """Print what to do next."""
    from kvcellar.models.files.packaged import PACKAGED  # other commands need it not

    fetch = "" if PACKAGED["smollm2"].file.is_file() else " (93 MB, fetched once)"
    width = max(len(command) for command, _ in _LINES)
    write(f"kvcellar {__version__}: KV caches for local models and agents\n\n")
    for command, says in _LINES:
        write(f"  {command:<{width}}  {says.format(fetch=fetch)}\n")
    config = default_config()
    if config.is_file():
        write(f"\ndefaults of options come from {config}\n")
