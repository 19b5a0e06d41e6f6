"""Names of a package that are imported when somebody asks for them (PEP 562).

Such a package imports them for type checkers alone, and says where they are in a table beside that;
a test holds the two together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_of(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: its name.
        modules: the names that it gives, with spaces between, by the module that has them.
    """
    where = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        """Return what the package gives by that name; it is imported once."""
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(where[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
