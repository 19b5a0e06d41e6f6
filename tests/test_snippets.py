"""What the README and the manual show runs: their Python, their commands, their requests."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.snippets import Block, World, blocks_of, commands, run_elsewhere

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""docs/clients is run by make clients; decisions show no code to run."""

RUN = ("python", "sh")
READ = {"json": json.loads, "toml": tomllib.loads}
SHOWN = ("text", "cpp", "diff", "mermaid", "nginx", "ini", "yaml")
"""Languages: what runs, what is only read, and what is only looked at."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def runnable(page: Path) -> list[Block]:
    return [b for b in blocks_of(page) if b.language in RUN and not b.why_not]


RUN_HERE = [page for page in PAGES if not run_elsewhere(page) and runnable(page)]


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.stem)
def test_what_a_page_shows_runs(page: Path, tmp_path, monkeypatch):
    with World(tmp_path, monkeypatch) as world:
        if "kvcellar agents create poet" not in page.read_text():  # who is there since the tour
            world.kvcellar(["agents", "create", "poet", "--model", "demo"])
        for block in runnable(page):
            world.run(block)


@every_page
def test_every_block_says_what_language_it_is(page: Path):
    known = (*RUN, *READ, *SHOWN)
    assert [b.place for b in blocks_of(page) if b.language not in known] == []
    assert len(re.findall(r"^ *```", page.read_text(), re.M)) == 2 * len(blocks_of(page))


@every_page
def test_what_is_data_can_be_read(page: Path):
    for block in blocks_of(page):
        if block.language in READ:
            READ[block.language](block.text)


@every_page
def test_who_is_said_to_run_a_page_is_there(page: Path):
    who = run_elsewhere(page)
    if who and who.startswith("make "):
        assert re.search(rf"^{who.removeprefix('make ')}:", (ROOT / "Makefile").read_text(), re.M)
    else:
        assert who is None or (ROOT / who).is_file()


def test_a_quoted_text_may_be_several_lines_long():
    text = "one -d '{\n  \"a\": 1}' # why\n\ntwo \\\n  three\n"
    words = [words for _, words in commands(text)]
    assert words == [["one", "-d", '{\n  "a": 1}'], ["two", "three"]]


def test_a_block_says_why_it_does_not_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text\n\n<!-- not run: needs a Mac -->\n```sh\na\n```\n\n```sh\nb\n```\n")
    assert [(b.text, b.why_not) for b in blocks_of(page)] == [("a\n", "needs a Mac"), ("b\n", None)]
