"""Exit codes of all commands: what each means to a script."""

from __future__ import annotations

from enum import IntEnum

from kvcellar.errors import (
    DeadlineError,
    DeviceMemoryError,
    EngineClosedError,
    KVCellarError,
    StoreError,
)


class ExitCode(IntEnum):
    """Codes that a command ends with, each with its meaning as ``says``."""

    says: str

    def __new__(cls, value: int, says: str) -> ExitCode:
        """Make a code that has its meaning with it."""
        code = int.__new__(cls, value)
        code._value_, code.says = value, says
        return code

    DONE = 0, "done"
    FOUND = (
        1,
        "`store verify`, `models check` and `doctor` looked, and found something that is not right",
    )
    WRONG_INPUT = 2, "what was asked for cannot be; nothing was done"
    FAILED = (
        3,
        "what was asked for was understood, and the store, the memory or the engine could not do "
        "it",
    )
    BUG = 70, "an error of kvcellar itself; its traceback is on stderr"
    INTERRUPTED = 130, "ended by Ctrl-C"
    CLOSED_PIPE = 141, "the reader of the pipe has left"


_FAILURES = (StoreError, DeviceMemoryError, EngineClosedError, DeadlineError)
"""Errors that say nothing against what was asked for."""


def code_of(error: KVCellarError) -> ExitCode:
    """Return the code of a command that ends with an error."""
    return ExitCode.FAILED if isinstance(error, _FAILURES) else ExitCode.WRONG_INPUT
