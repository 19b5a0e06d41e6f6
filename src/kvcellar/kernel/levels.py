"""Availability of the kernel, the instruction set that it uses, and whose threads.

The extension is built with the package. Where it is not there ``is_available()`` is false,
backends attend by their runtime's own means, and ``why_not()`` says what would help. The
environment variable ``KVCELLAR_KERNEL`` names an instruction set to use in place of the best, or
``off``.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvcellar.errors import ConfigError
from kvcellar.installed import rebuild_command

VARIABLE = "KVCELLAR_KERNEL"

_forced = os.environ.get(VARIABLE, "")
_reason = f"{VARIABLE}=off" if _forced == "off" else ""


def _describe(error: ImportError) -> str:
    """Return what is missing, what that costs, and the way out, in one sentence for people."""
    is_built = any(Path(__file__).parent.glob("_native*.so"))
    state = f"cannot be loaded ({error})" if is_built else "was not built when it was installed"
    return (
        f"the compiled CPU kernel of kvcellar {state}, so models run several times slower, on the "
        f"runtime's own operations; install a C++17 compiler (Debian and Ubuntu: apt install g++; "
        f"macOS: xcode-select --install), then: {rebuild_command()}"
    )


if not _reason:
    try:
        importlib.import_module("kvcellar.kernel._native")
    except ImportError as error:
        _reason = _describe(error)

if TYPE_CHECKING or not _reason:
    from kvcellar.kernel._native import (
        Level,
        Threads,
        level,
        levels,
        num_threads,
        set_level,
        set_num_threads,
        set_parallel_for,
        stream_read,
        threads_of,
    )

__all__ = [
    "VARIABLE",
    "Level",
    "Threads",
    "is_available",
    "level",
    "levels",
    "num_threads",
    "set_level",
    "set_num_threads",
    "set_parallel_for",
    "stream_read",
    "threads_of",
    "warn_if_missing",
    "why_not",
]


def is_available() -> bool:
    """Return true if the extension is there."""
    return not _reason


def why_not() -> str:
    """Return why the kernel is not available and what to do; empty where it is."""
    return _reason


@functools.cache
def warn_if_missing() -> None:
    """Say once, in the log, that the kernel is missing; nothing where somebody switched it off."""
    if _reason and _forced != "off":
        logging.getLogger(__name__).warning(_reason)


def _use_forced() -> None:
    """Use the level that the environment names.

    Raises:
        ConfigError: no such level, or this machine or this build does not have it.
    """
    if _forced not in Level.__members__:
        names = ", ".join(found.name for found in levels())
        raise ConfigError(f"{VARIABLE}={_forced} is no instruction set; choose {names}, or off")
    set_level(Level[_forced])


if _forced and not _reason:
    _use_forced()
