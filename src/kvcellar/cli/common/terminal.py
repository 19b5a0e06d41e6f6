"""Output for a person at a terminal, on stderr: progress, notes, errors.

A pipe sees errors, and of what takes long a line now and then.

Results go to stdout and only there, so that every command can be a part of a pipe. rich is
imported when something is shown.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ProgressFn = Callable[[float, str], None]

LINES_S = 5.0
"""How often a pipe is told what is under way, in seconds."""


def print_error(message: str) -> None:
    """Print one red line."""
    _print(" ".join(f"error: {message}".split()), "red")


def print_warning(message: str) -> None:
    """Print one yellow line that also a pipe's user should see: the output is not what it seems."""
    _print(f"warning: {message}", "yellow")


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Show what is warned of inside of the block as lines of this program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        print_warning(str(warning.message))


def print_note(message: str) -> None:
    """Print one dim line, for a terminal alone."""
    if sys.stderr.isatty():
        _print(message, "dim")


def print_line(message: str) -> None:
    """Print one dim line that also a pipe's user should see: how something is done, or none is."""
    _print(message, "dim")


def _print(message: str, style: str) -> None:
    from rich.console import Console

    sys.stdout.flush()
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)
    console.print(message, style=style)


def counted(n: int, what: str) -> str:
    """Write how many there are of something: ``1 turn``, ``2 turns``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def is_interactive() -> bool:
    """Return true where a person types and reads at a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def write(text: str) -> None:
    """Text of the result, at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


class ShownAnswer:
    """Shows an answer as it comes: its text, and at a terminal its thoughts before it, dim.

    In a pipe there is the text alone. Call it with the pieces of
    :mod:`kvcellar.server.commands.thoughts`, or with ``{"report": [share, what]}``.
    """

    def __init__(self, report: ProgressFn, *, is_quiet: bool) -> None:
        """Show an answer of which nothing has come.

        Args:
            report: of the progress that is shown until it begins.
            is_quiet: show nothing but progress.
        """
        self._report = report
        self._is_quiet = is_quiet
        self._thinks = False
        self._is_dim = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show the next piece."""
        if "report" in event:
            self._report(*event["report"])
        elif event.get("thought"):
            self._think(event["thought"])
        elif said := event.get("text") or event.get("call"):
            self.end_thought()
            self._write(said)

    def _think(self, text: str) -> None:
        if self._is_quiet or not sys.stdout.isatty():
            return
        if not self._thinks:
            self._write("\x1b[2m" if self._is_dim else "(thinks)\n")
        self._thinks = True
        self._write(text)

    def end_thought(self) -> None:
        """Leave a thought, where one is shown: at the text behind it, or where it is cut."""
        if self._thinks:
            self._thinks = False
            write("\x1b[0m\n\n" if self._is_dim else "\n(answers)\n")

    def _write(self, text: str) -> None:
        if not self._is_quiet:
            self._report(1.0, "")
            write(text)


@contextmanager
def shown_answer(what: str, *, is_quiet: bool) -> Iterator[ShownAnswer]:
    """Show progress until an answer comes, then the answer; what is open of it is closed.

    Args:
        what: what is done first.
        is_quiet: show nothing but progress.
    """
    with progress_bar(what) as report:
        answer = ShownAnswer(report, is_quiet=is_quiet)
        try:
            yield answer
        finally:
            answer.end_thought()


@contextmanager
def progress_bar(what: str, *, tell: ProgressFn | None = None) -> Iterator[ProgressFn]:
    """Show a spinner, and a bar from the first report on; gone when the work is done or failed.

    In a pipe, a line for each stage that is under way after every ``LINES_S`` seconds.

    Args:
        what: what is done first.
        tell: what takes a line in a pipe; None: it is written to stderr.

    Yields:
        A function that takes how much is done, 0 to 1, and what comes now.
    """
    if not sys.stderr.isatty():
        with progress_lines(what, tell=tell) as report_line:
            yield report_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    bar = Progress(
        SpinnerColumn(),
        TextColumn("[dim]{task.description}"),
        BarColumn(bar_width=24),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task(what, total=None)

    def report(fraction: float, what: str) -> None:
        bar.update(task, completed=fraction, total=1.0, description=what)
        if fraction >= 1.0:
            bar.stop()

    with bar:
        yield report


@contextmanager
def progress_lines(what: str, *, tell: ProgressFn | None = None) -> Iterator[ProgressFn]:
    """Tell the stage that is under way every ``LINES_S`` seconds, once for each stage.

    Args:
        what: what is done first.
        tell: what takes how much is done and the stage; None: a line is written to stderr.

    Yields:
        A function that takes how much is done, 0 to 1, and what comes now.
    """
    now = (0.0, what)
    said = tell or _write_stage
    is_done = threading.Event()

    def report(fraction: float, what: str) -> None:
        nonlocal now
        now = fraction, what

    def watch() -> None:
        told = None
        while not is_done.wait(LINES_S):
            fraction, stage = now
            if stage != told:
                try:
                    said(fraction, stage)
                except Exception:  # such as a pipe that nobody reads any more: the work goes on
                    return
                told = stage

    teller = threading.Thread(target=watch, name="progress", daemon=True)
    teller.start()
    try:
        yield report
    finally:
        is_done.set()
        teller.join()


def _write_stage(fraction: float, stage: str) -> None:
    sys.stderr.write(f"{fraction:4.0%} {stage}\n")
    sys.stderr.flush()
