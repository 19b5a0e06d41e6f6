"""The names that a program may import are those that docs/public-names.md lists, and no others."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "public-names.md").read_text()
SECTIONS = dict(re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def listed(section: str) -> set[str]:
    """The names in the list of a section, which may be several lines long."""
    (names,) = re.findall(r"^- (.*)", section, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`(\w+)`", names))


def public(name: str) -> set[str]:
    """What a module says to be public; of one that says nothing, the classes that it defines."""
    module = importlib.import_module(name)
    own = {n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == name}
    return set(getattr(module, "__all__", own))


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_lists_what_is_public_and_nothing_else(name: str):
    needed = {"transformers": "torch", "mlx_lm": "mlx_lm", "executorch": "executorch"}
    pytest.importorskip(needed.get(name.rpartition(".")[2], "kvcellar"))
    module = importlib.import_module(name)
    assert public(name) == listed(SECTIONS[name])
    assert all(hasattr(module, found) for found in listed(SECTIONS[name]))
