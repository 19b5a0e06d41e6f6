"""Commands by name, with what each does, and the help that lists them.

No command is imported for it, and no parser, which is what makes ``kvcellar --help`` quick.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping

ABOUT = "KV caches for local models and agents: one model, swappable caches."

COMMANDS: Mapping[str, str] = {
    "generate": "Continue a text.",
    "chat": "Talk with a model; only what is new is computed in each turn.",
    "serve": "Serve models and agents over HTTP, as OpenAI and Anthropic do, with a page to look "
    "at.",
    "deploy": "Serve models and agents from several replicas at one address, under Ray Serve.",
    "demo": "Fork one prompt into branches that share its cells, and keep the best.",
    "export": "Export a model as one ExecuTorch program, lowered to XNNPACK.",
    "inspect": "Say what fits in memory: bytes per token, per agent, and how many agents.",
    "doctor": "Say what this installation can do on this machine, and what would help.",
    "agents": "Agents that outlive the process: fork, rewind, sleep, come back.",
    "models": "Models on this machine: list, get, check them.",
    "store": "Look after the KV on disk: verify it, free room, count it.",
    "bench": "Measure a model on this machine.",
}
"""Commands, each in the module of its name, and the first paragraph of their help."""

ROOMS: Mapping[str, str] = {
    "generate": "talk",
    "chat": "talk",
    "serve": "serve",
    "deploy": "serve",
    "demo": "talk",
    "export": "models",
    "inspect": "models",
    "doctor": "models",
    "agents": "agents",
    "models": "models",
    "store": "store",
    "bench": "models",
}
"""Rooms of the command line, by the commands whose modules they have."""

OPTIONS: Mapping[str, str] = {
    "--version": "Print the version.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell, to copy it or customize the "
    "installation.",
    "--help": "Show this message and exit.",
}
"""Options of the program itself, as the parser describes them."""

EXAMPLES = (
    "kvcellar demo",
    "kvcellar generate --prompt 'def fibonacci(n):'",
    "kvcellar chat ~/models/Qwen3-0.6B",
    "kvcellar inspect ~/models/Qwen3-0.6B --memory 8GB",
)

_WIDEST = 100
"""Columns of the help at most; a terminal may have fewer."""


def overview() -> str:
    """Return the help of the program, without the end of its last line."""
    lines = ["", "Usage: kvcellar [OPTIONS] COMMAND [ARGS]...", ""]
    lines += [*textwrap.wrap(ABOUT, _width() - 2), ""]
    for heading, named in (("Options", OPTIONS), ("Commands", COMMANDS)):
        lines += [_bold(f"{heading}:"), *_columns(named), ""]
    lines += [_bold("Examples:"), *(f"  {line}" for line in EXAMPLES), ""]
    return "\n".join(f" {line}".rstrip() for line in lines)


def _width() -> int:
    """Return the columns that the help may take."""
    return min(shutil.get_terminal_size((_WIDEST, 0)).columns, _WIDEST)


def _columns(named: Mapping[str, str]) -> Iterator[str]:
    """Yield lines of names and of what they do side by side, in the width of the terminal."""
    names = max(map(len, named))
    width = _width() - names - 6
    for name, says in named.items():
        first, *others = textwrap.wrap(says, max(width, 20))
        yield f"  {name:<{names}}  {first}"
        yield from (f"  {'':<{names}}  {other}" for other in others)


def _bold(text: str) -> str:
    """Return a heading as a terminal shows it."""
    is_plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if is_plain or not sys.stdout.isatty() else f"\x1b[1m{text}\x1b[0m"
