"""The pages become a site in which links lead on, and which loads nothing from elsewhere."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import site_hooks  # noqa: E402
import site_picture  # noqa: E402

PAGES = [*ROOT.glob("docs/**/*.md"), *(ROOT / page for page in site_hooks.ELSEWHERE)]


@pytest.mark.parametrize(
    ("source", "written", "in_the_site"),
    [
        ("README.md", "[a](docs/http.md#text)", "[a](http.md#text)"),
        ("README.md", "![a](docs/page.png)", "![a](page.png)"),
        ("README.md", "[a](docs/clients/README.md)", "[a](clients/README.md)"),
        ("CONTRIBUTING.md", "[a](docs/decisions/)", "[a](decisions/README.md)"),
        ("docs/decisions/009-one-cpu-kernel.md", "[a](../tour.md)", "[a](../tour.md)"),
        (
            "docs/decisions/009-one-cpu-kernel.md",
            "[a](../../src/kvcellar/kernel/README.md)",
            "[a](../kernel.md)",
        ),
        ("docs/tour.md", "[a](../CONTRIBUTING.md)", "[a](contributing.md)"),
        ("docs/tour.md", "[the build](../Makefile)", "the build"),  # no page of the site
        ("docs/tour.md", "[a](#here)", "[a](#here)"),
        ("docs/tour.md", "[a](https://example.org/x)", "[a](https://example.org/x)"),
    ],
)
def test_a_link_leads_to_where_its_page_went(source: str, written: str, in_the_site: str):
    uri = site_hooks.ELSEWHERE.get(source, source.removeprefix("docs/"))
    assert site_hooks.linked(written, source, uri) == in_the_site


def test_every_page_is_in_the_navigation():
    """MkDocs says the same, for those who build the site."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    entries = re.findall(r"^ +- (\S+\.md)$", text, flags=re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if not any(page.match(entry) for entry in entries)] == []


def test_every_public_name_has_its_place_in_the_reference():
    page = site_hooks.linked_names((ROOT / "docs" / "public-names.md").read_text())
    for module, section in site_hooks.sections().items():
        for name in re.findall(r"(?<=[, ])`(\w+)`(?=[,\n])", section):
            assert f"[`{name}`][{module}.{name}]" in page
            assert f"::: {module}.{name}\n" in site_hooks.reference(module, section) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example.org/a.js"></script>',
        "<link rel=stylesheet href=//fonts.example.org/css>",
        "@import 'https://example.org/a.css';",
        "body { background: url(https://example.org/a.png) }",
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(text: str):
    assert len(site_hooks.loads(text)) == 1


def test_a_link_that_a_reader_may_follow_loads_nothing():
    assert site_hooks.loads('<a href="https://example.org">there</a> <img src="page.png">') == []


def test_in_a_picture_every_arrow_points_down_and_no_name_is_missing():
    drawn = re.search(r"```mermaid\n(.*?)```", (ROOT / "docs/tour.md").read_text(), re.DOTALL)[1]
    names = set(re.findall(r"\w+", drawn)) - {"flowchart", "TD"}
    arrows = re.findall(r"(\w+) -\.?-> (\w+)", drawn)
    rows, paths = site_picture.layered(arrows)
    row_of = {name: i for i, row in enumerate(rows) for name in row}
    assert all(row_of[b] == row_of[a] + 1 for path in paths for a, b in pairwise(path))
    assert [(path[0], path[-1]) for path in paths] == arrows
    shown = re.findall(r">(\w+)</text>", site_picture.picture(drawn))
    assert sorted(shown) == sorted(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_list_stands_apart_and_what_is_in_it_is_indented_by_four(page: Path):
    """Python-Markdown takes it for text otherwise, where a repository shows a list."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    wrong = re.findall(r"^(?! |[-*] |\d+\. |\n).*\n(?=[-*] |1\. )", text, flags=re.MULTILINE)
    in_a_list = re.findall(r"^ {1,3}(?:[-*] |\d+\. |```).*", text, flags=re.MULTILINE)
    assert wrong + in_a_list == []
