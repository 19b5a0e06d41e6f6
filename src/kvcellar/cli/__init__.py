"""The command line: each command parses, calls the library, and prints.

Imports everything below, each command late what it needs; nothing imports this room.

Start in ``program.py``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvcellar.lazy import names_of

if TYPE_CHECKING:
    from kvcellar.cli.program import app

_MODULES = {"kvcellar.cli.program": "app"}
"""Names that are imported when somebody asks for them, by where they are."""

__getattr__ = names_of(__name__, _MODULES)

__all__ = ["app", "main"]


def main() -> None:
    """Run the console script ``kvcellar``; its help needs none of its commands."""
    if sys.argv[1:] == ["--help"]:
        from kvcellar.cli.overview import overview

        sys.stdout.write(f"{overview()}\n")
        return
    from kvcellar.cli import program

    program.main()
