"""What the pages say of the tree is so: links lead somewhere, and files that are named exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/README.md")]
FILES = [
    str(path.relative_to(ROOT))
    for folder in ("src", "tests", "tools", "benchmarks", "docs")
    for path in (ROOT / folder).rglob("*")
]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_every_link_leads_somewhere(page: Path):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@every_page
def test_every_file_of_ours_that_is_named_exists(page: Path):
    named = re.findall(r"`([\w/]+\.(?:py|cpp|h|cmake))`", page.read_text())
    ends = {"/" + path for path in FILES}
    named = [name for name in named if "NAME" not in name]  # which is for the reader to fill in
    assert [name for name in named if not any(end.endswith("/" + name) for end in ends)] == []
