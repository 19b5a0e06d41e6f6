#!/usr/bin/env python3
"""Write docs/cli.md from the commands themselves.

python tools/write_cli_docs.py           write it
python tools/write_cli_docs.py --check   fail where it is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from kvcellar.cli import app
from kvcellar.cli.common.exits import ExitCode

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

INTRO = """\
# The command line

<!-- Written by tools/write_cli_docs.py from the commands' own help; do not edit. -->
<!-- options checked by tests/test_docs.py -->

Results go to stdout. Progress and notes go to stderr: to a terminal all of them, elsewhere the
stages of long work alone, a line each. What is wrong with the input is said in one line on stderr.
"""


def exit_codes() -> str:
    """Return the table of exit codes."""
    rows = [f"| {code.value} | {code.says} |" for code in ExitCode]
    return "\n".join(["| exit code | means |", "| --- | --- |", *rows, ""])


def page() -> str:
    """Return the whole page."""
    root = typer.main.get_command(app)
    commands: dict[str, Any] = root.commands  # type: ignore[attr-defined]
    parts = [INTRO, exit_codes(), f"## kvcellar\n\n{root.help}\n", table(root), code(root.epilog)]
    for name, command in all_commands(commands):
        parts += [f"## kvcellar {name}\n", code(usage(name, command)), f"{command.help}\n"]
        parts += [table(command), code(command.epilog)]
    return "\n".join(part for part in parts if part)


def all_commands(commands: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command by its whole name; those of a group in the group's place."""
    for name, command in commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            yield before + name, command
        else:
            yield from all_commands(inner, f"{before}{name} ")


def usage(name: str, command: Any) -> str:
    """Return the command with its arguments; required options are spelled out."""
    words = ["kvcellar", name]
    for param in command.params:
        if param.param_type_name == "argument":
            words.append(f"[{param.metavar}]" if not param.required else str(param.metavar))
        elif param.required:
            words.append(f"{param.opts[0]} {param.metavar}")
    return " ".join([*words, "[OPTIONS]"])


def table(command: Any) -> str:
    """Return arguments and options, one per line, under the headings of the help."""
    groups: dict[str, list[str]] = {}
    for param in command.params:
        if param.hidden:
            continue
        panel = getattr(param, "rich_help_panel", None) or (
            "Arguments" if param.param_type_name == "argument" else "Options"
        )
        groups.setdefault(panel, []).append(" | ".join(cells(param)))
    lines = []
    for panel, rows in groups.items():
        lines += [f"| {panel} | what it does | default |", "| --- | --- | --- |"]
        lines += [f"| {row} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def cells(param: Any) -> Iterator[str]:
    """Yield name, help and default of an option."""
    if param.param_type_name == "argument":
        yield f"`{param.metavar}`"
    else:
        names = ", ".join(
            f"`{name}`" for name in [*reversed(param.opts), *reversed(param.secondary_opts)]
        )
        yield names if param.is_flag else f"{names} `{param.metavar}`"
    yield (param.help or "").replace("|", "\\|")
    if param.required:
        yield "required"
    elif param.is_flag if param.param_type_name == "option" else False:
        yield ""
    else:
        yield "" if param.default in (None, ()) else f"`{param.default}`"


def code(text: str | None) -> str:
    """Return a block of code; the heading of examples is left out."""
    if not text:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip() not in ("", "Examples:")]
    return "\n".join(["```sh", *lines, "```", ""])


def main() -> int:
    """Write or check the page."""
    want = page()
    if "--check" in sys.argv[1:]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == want:
            return 0
        print(f"{PAGE} is stale; run: python tools/write_cli_docs.py", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(want, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
