"""Packages import names when they are asked for: their table is what type checkers see."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

PACKAGES = tuple(
    f"kvcellar{one}" for one in ("", ".agents", ".cli", ".engine", ".models", ".store")
)


def told(tree: ast.Module) -> set[tuple[str, str]]:
    """Module and name of all of ours that a package imports for type checkers."""
    blocks = [
        one for one in tree.body if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.dump(one)
    ]
    found = [one for block in blocks for one in ast.walk(block) if isinstance(one, ast.ImportFrom)]
    return {(str(one.module), alias.name) for one in found for alias in one.names}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_gives_at_run_time_what_type_checkers_see(name: str) -> None:
    module = importlib.import_module(name)
    seen = told(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")))
    given = {(where, one) for where, names in module._MODULES.items() for one in names.split()}
    others = {(where, one) for where, one in seen if not where.startswith("kvcellar.")}
    assert seen - others - {("kvcellar.cellar.settings", "CellarSettings")} == given
    for where, one in given:
        assert getattr(module, one) is getattr(importlib.import_module(where), one)


def test_a_name_that_a_package_has_not_is_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match=r"module 'kvcellar' has no attribute 'nothing'"):
        importlib.import_module("kvcellar").nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from kvcellar.models import nothing")
