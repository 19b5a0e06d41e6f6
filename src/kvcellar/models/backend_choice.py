"""Chooses who runs a model where nobody has named a backend: one rule for commands and Python."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.installed import pip_command
from kvcellar.models.files.packaged import PACKAGED, fetch_packaged
from kvcellar.models.options import LoadOptions, ProgressFn, no_progress

NATIVE, TORCH = "native", "torch"

PREFERENCE = "KVCELLAR_PREFERS"
"""Environment variable; with ``torch`` that runs what both could, as an oracle does in tests."""


class BackendChoice(NamedTuple):
    """Backend that runs a model.

    Attributes:
        backend: its name.
        why: the reason, for people.
    """

    backend: str
    why: str


def choose_backend(options: LoadOptions, report: ProgressFn = no_progress) -> BackendChoice:
    """Choose who runs a model: who is named; else native where it can; else torch.

    Native can where the model's plan is known and the backend has all that is asked for, in the
    types that torch would take. Where torch is not installed native may take types of its own.

    Args:
        options: of the model.
        report: told about a download of a packaged model; of others the config alone is read.

    Raises:
        BackendError: torch is needed and not installed, with the reason and the command.
    """
    if options.backend is not None:
        return BackendChoice(options.backend, "it was asked for")
    if isinstance(options.model, str) and options.model in PACKAGED:
        fetch_packaged(options.model, report)
    has_torch = all(map(_is_installed, (TORCH, "transformers")))
    lack = (
        "torch is preferred here"
        if has_torch and os.environ.get(PREFERENCE) == TORCH
        else _lack(options)
    )
    if not lack:
        return BackendChoice(NATIVE, "its plan is known, and the CPU kernel runs it without torch")
    if has_torch:
        return BackendChoice(TORCH, lack)
    refusal = _refusal(options)
    if not refusal:
        return BackendChoice(NATIVE, f"torch is not installed; {lack}")
    raise BackendError(
        f"{options.name!r} needs torch, which is not installed: {refusal}; install it with: "
        f"{pip_command(TORCH)}"
    )


def chosen(options: LoadOptions, report: ProgressFn = no_progress) -> tuple[LoadOptions, str]:
    """Return options whose backend is named, and its name; arguments and errors as above."""
    backend = choose_backend(options, report).backend
    return replace(options, backend=backend), backend


def _is_installed(module: str) -> bool:
    """Return true if a module is there; a folder that is called like it is none."""
    found = find_spec(module)
    return found is not None and found.origin is not None


def _lack(options: LoadOptions) -> str:
    """Say what keeps native from doing as torch does; empty: nothing."""
    try:
        return str(_native().lack_of(options))
    except (BackendError, ConfigError, ModelError) as error:  # whoever loads it says it, too
        return str(error)


def _refusal(options: LoadOptions) -> str:
    """Say why native cannot run a model at all; empty: it can, or no backend can.

    Raises:
        ModelError: there is no such model, or it is damaged.
    """
    try:
        _native().check_model(options)
    except (BackendError, ConfigError) as error:
        return str(error)
    return ""


def _native() -> Any:
    from kvcellar.models.model import loader_of  # which needs more than who is named

    return loader_of(NATIVE)
