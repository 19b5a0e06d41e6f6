"""What the pages say of the tree is so: links lead somewhere, and files that are named exist."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest
import typer

from kvcellar.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/README.md")]
FILES = [
    str(path.relative_to(ROOT))
    for folder in ("src", "tests", "tools", "benchmarks", "docs")
    for path in (ROOT / folder).rglob("*")
]

NAMED = ("tour", "request", "python", "backends", "add-a-model-family", "add-a-kernel-level")
THEIRS = ("asyncio.", "http.disconnect", "EventSource")

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


@functools.cache
def words_of_the_code() -> frozenset[str]:
    """Return every name that Python code of the tree has, and every word of its other files."""
    words: set[str] = set()
    for path in (*ROOT.glob("src/**/*.py"), *ROOT.glob("tools/*.py")):
        words.update(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            for part in ("name", "id", "attr", "arg", "value"):
                word = getattr(node, part, None)
                if isinstance(word, str) and word.replace(".", "_").isidentifier():
                    words.update(word.split("."))
    for end in ("cpp", "h", "cmake", "html", "js", "pyi"):
        for path in ROOT.glob(f"src/**/*.{end}"):
            words.update(re.findall(r"\w+", path.read_text()))
    return frozenset(words)


NAMED_PAGES = [*ROOT.glob("docs/decisions/*.md"), *(ROOT / "docs" / f"{n}.md" for n in NAMED)]


@pytest.mark.parametrize("page", NAMED_PAGES, ids=lambda page: page.stem)
def test_every_class_and_method_of_ours_that_is_named_exists(page: Path):
    """Names have a capital inside (``StoreConfig``), or a point (``Store.save``)."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    spans = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`\n]*\))?`", text)
    spans = [span for span in spans if not span.endswith((".py", ".cmake", ".h", ".cpp"))]
    named = [span for span in spans if re.search(r"[a-z][A-Z]|\w\.\w", span)]
    words = words_of_the_code()
    assert [
        n for n in named if not n.startswith(THEIRS) and not words.issuperset(n.split("."))
    ] == []


SHOWN = [page for page in PAGES if re.search(r"^kvcellar ", page.read_text(), flags=re.MULTILINE)]


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_every_command_that_is_shown_has_the_options_that_it_is_shown_with(page: Path):
    wrong = []
    for line in re.findall(r"^(kvcellar .*)$", page.read_text(), flags=re.MULTILINE):
        command = typer.main.get_command(app)
        _, *words = shlex.split(line.split(" | ")[0], comments=True)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {option for param in command.params for option in (*param.opts, "--help")}
        is_group = hasattr(command, "commands") and not (words and words[0] in known)
        named = [word for word in words if re.match(r"-[^\d]", word)]
        if is_group or not known.issuperset(named):
            wrong.append(line)
    assert wrong == []
