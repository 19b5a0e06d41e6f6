"""The command ``kvcellar``: its commands, and how every one of them ends."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvcellar.cli.common.commands import examples
from kvcellar.cli.common.exits import ExitCode, code_of
from kvcellar.cli.common.terminal import print_error
from kvcellar.cli.config_file import defaults_of
from kvcellar.cli.overview import ABOUT, COMMANDS, EXAMPLES, ROOMS, overview
from kvcellar.cli.start import show_start
from kvcellar.errors import ConfigError, KVCellarError
from kvcellar.version import __version__

HABITS = {
    "run": "chat",
    "list": "models list",
    "ls": "models list",
    "pull": "models pull",
    "get": "models pull",
    "rm": "models rm",
    "show": "inspect",
    "ps": "agents list",
    "help": "--help",
    "version": "--version",
}
"""Commands of other programs for local models, by their names there, and ours for the same."""


class LazyCommands(Mapping[str, Any]):
    """Commands by name; the module of one is imported when the command is asked for."""

    def __init__(self) -> None:
        """Know the names alone."""
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return a command."""
        if name not in self._made:
            if name not in COMMANDS:
                raise KeyError(name)
            own = typer.Typer(rich_markup_mode="rich")
            import_module(f"kvcellar.cli.{ROOMS[name]}.{name}").register(own)
            self._made |= typer.main.get_group(own).commands
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, which imports nothing."""
        return iter(COMMANDS)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(COMMANDS)


class Commands(TyperGroup):
    """Ends every command alike: one line for what is wrong, never a traceback for it.

    Options have the user's own defaults, where the config file has some. Exit codes are those of
    :class:`~kvcellar.cli.common.exits.ExitCode`.
    """

    def __init__(self, **attrs: Any) -> None:
        """Have all commands; those that are not used are not imported."""
        super().__init__(**attrs)
        self.commands = LazyCommands()  # type: ignore[assignment]  # none is added or taken away

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(self.commands)

    def get_help(self, ctx: Any) -> str:
        """Return what ``kvcellar --help`` prints."""
        return overview()

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KVCellarError as error:
            print_error(str(error))
            raise typer.Exit(code_of(error)) from error
        except KeyboardInterrupt as error:
            if sys.stderr.isatty():
                sys.stderr.write("\n")
            raise typer.Exit(ExitCode.INTERRUPTED) from error
        except BrokenPipeError as error:
            _abandon_stdout()
            raise typer.Exit(ExitCode.CLOSED_PIPE) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is named; of another program's, name ours, word for word."""
        if args and self.get_command(ctx, args[0]) is None:
            ours = _ours(args[0], args[1:]) if args[0] in HABITS else self._of_a_group(args)
            if ours:
                raise ConfigError(f"there is no command {args[0]!r}; here it is: {ours}")
        return super().resolve_command(ctx, args)

    def _of_a_group(self, args: Sequence[str]) -> str | None:
        """Return the line of a command that was named without its group; None: no group has it."""
        for name, group in self.commands.items():
            if args[0] in getattr(group, "commands", {}):
                return shlex.join(["kvcellar", name, *args])
        return None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Parse and run; the entry point of ``app`` and of test runners."""
        try:
            if extra.get("default_map") is None:
                extra["default_map"] = defaults_of(self)
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except KVCellarError as error:  # of the config file
            print_error(str(error))
            code = code_of(error)
        except typer.exceptions.TyperException as error:  # of the parser
            if not standalone_mode:
                raise
            code = _explain(error, list(sys.argv[1:] if args is None else args))
        if standalone_mode:
            sys.exit(code or 0)
        return code


def _ours(name: str, given: list[str]) -> str:
    """Say what to type in place of a command as another program calls it."""
    if name == "run" and len(given) > 1 and not given[1].startswith("-"):
        return _with_prompt(given)
    if name == "ps":
        line = f"kvcellar {HABITS[name]}"
        return f"{line}; what a server holds in memory: curl http://127.0.0.1:8642/api/ps"
    if name in ("help", "version"):  # an option here, of a command where one is named
        return shlex.join(["kvcellar", *given, HABITS[name]])
    return f"kvcellar {HABITS[name]} {shlex.join(given)}".rstrip()


def _with_prompt(given: Sequence[str]) -> str:
    """Return the line for a model, a prompt in words of the line, and options."""
    n_words = next((i for i, word in enumerate(given) if word.startswith("-")), len(given))
    prompt = " ".join(given[1:n_words])
    return shlex.join(["kvcellar", "generate", given[0], "--prompt", prompt, *given[n_words:]])


def _explain(error: typer.exceptions.TyperException, given: list[str]) -> int:
    """Say in one line what the parser did not like; return the exit code."""
    from pydantic import ValidationError

    message = " ".join(error.format_message().split())
    if isinstance(error.__cause__, ValidationError):
        message = f"{message.rstrip('.')}; got {error.__cause__.errors()[0]['input']!r}"
    context = getattr(error, "ctx", None)
    is_without_prompt = message.startswith("Missing option '--prompt'")
    if is_without_prompt and len(given) > 2 and not any(w.startswith("-") for w in given[1:3]):
        message = f"the prompt has an option of its own; here it is: {_with_prompt(given[1:])}"
    elif context is not None and message:
        message = f"{message.rstrip('.')}; see {context.command_path} --help"
    if message:
        print_error(message[0].lower() + message[1:])
    return ExitCode.WRONG_INPUT


def _abandon_stdout() -> None:
    """Let the flush at exit go nowhere instead of raising again: there is no reader any more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    name="kvcellar",
    cls=Commands,
    help=ABOUT,
    epilog=examples(*EXAMPLES),
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcellar {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        show_start()


def main() -> None:
    """Run the console script ``kvcellar``; an error of our own has a code that nothing else has."""
    try:
        app(prog_name="kvcellar")
    except Exception:
        traceback.print_exc()
        sys.exit(ExitCode.BUG)
