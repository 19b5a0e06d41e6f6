"""Names of adapters, and of models with one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvcellar.errors import ConfigError

MARK = "+"
"""Character between the name of a model and that of its adapter."""

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


def check_names(adapters: Mapping[str, Any]) -> None:
    """Make sure that adapters can be asked for by their names.

    Raises:
        ConfigError: one of them is no name.
    """
    for name in adapters:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(
                f"{str(name)[:80]!r} cannot be the name of an adapter; take up to 64 letters, "
                f"digits, dots, - and _, beginning with a letter or digit"
            )


def adapted(model: str, adapter: str) -> str:
    """Return what a model with an adapter is called; without one, the model."""
    return f"{model}{MARK}{adapter}" if adapter else model
