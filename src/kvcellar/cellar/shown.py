"""Progress of what a person at a terminal waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcellar.models.options import ProgressFn


@contextmanager
def shown(what: str, progress: ProgressFn | None) -> Iterator[ProgressFn]:
    """Show how far something is on a line of the terminal that is gone when it is done.

    Args:
        what: what is done.
        progress: whom to tell in place of the terminal. Without a terminal nobody is told.
    """
    if progress is not None:
        yield progress
        return
    is_shown = sys.stderr.isatty()

    def report(fraction: float, stage: str) -> None:
        if is_shown:
            sys.stderr.write(f"\r\x1b[K{what}: {stage} ({fraction:.0%})")
            sys.stderr.flush()

    try:
        yield report
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
