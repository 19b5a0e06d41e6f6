"""Output for a person at a terminal, on stderr: progress, notes, errors.

A pipe sees errors, and of what takes long a line now and then.

Results go to stdout and only there, so that every command can be a part of a pipe. rich is
imported when something is shown.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


def print_none(message: str) -> None:
    """Print one dim line where a result is empty, so that nobody has to guess what silence is."""
    _print(message, "dim")


def _print(message: str, style: str) -> None:
    from rich.console import Console

    sys.stdout.flush()
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)
    console.print(message, style=style)


def write(text: str) -> None:
    """Text of the result, at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


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
