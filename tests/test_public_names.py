"""The names that a program may import are those that docs/public-names.md lists, and no others."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from kvcellar.moved import MOVED
from tests.agents.fakes import manager

PAGE = (Path(__file__).parents[1] / "docs" / "public-names.md").read_text()
SECTIONS = dict(re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def listed(section: str) -> set[str]:
    """The names in the lists of a section, each of which may be several lines long."""
    lists = re.findall(r"^- (.*?)(?=\n\n|\Z)", section, re.DOTALL | re.MULTILINE)
    return {name for names in lists for name in re.findall(r"`(\w+)`", names)}


def public(name: str) -> set[str]:
    """What a module says to be public; of one that says nothing, the classes that it defines.

    The package itself shows two names, and has what its parts are made with besides.
    """
    module = importlib.import_module(name)
    own = {n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == name}
    if name == "kvcellar":
        text = Path(module.__file__).read_text()
        more = set(re.findall(r"^ *from .* import \w+ as (\w+)$", text, re.MULTILINE))
        return set(module.__all__) | more | {"__version__"}
    return set(getattr(module, "__all__", own))


def test_looking_into_the_package_shows_its_public_names_and_nothing_they_were_made_with():
    assert set(dir(importlib.import_module("kvcellar"))) == listed(SECTIONS["kvcellar"])


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_lists_what_is_public_and_nothing_else(name: str):
    needed = {"transformers": "torch", "mlx_lm": "mlx_lm", "executorch": "executorch"}
    pytest.importorskip(needed.get(name.rpartition(".")[2], "kvcellar"))
    module = importlib.import_module(name)
    assert public(name) == listed(SECTIONS[name])
    assert all(hasattr(module, found) for found in listed(SECTIONS[name]))


def test_who_asks_for_a_name_that_moved_is_told_where_it_is(tmp_path):
    with manager(tmp_path, lambda name: None) as agents:
        for old, new in MOVED.items():
            name = old.removeprefix("kvcellar.agents.AgentManager.")
            with pytest.raises(AttributeError, match=rf"it is {re.escape(new)} now"):
                getattr(agents, name)
            found = agents
            for part in new.split("."):
                found = getattr(found, part)
            assert callable(found)
        with pytest.raises(AttributeError, match=r"has no 'nothing'$"):
            agents.nothing  # noqa: B018
