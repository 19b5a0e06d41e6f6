#!/usr/bin/env python3
"""Refuse docstrings that a newcomer has to decode.

python tools/check_docstrings.py [PATH ...]     by default src, tools, benchmarks and tests

A function's docstring begins with a verb: "Return the cache that is installed under a key." That of
a class, a property or a module may be a noun phrase: "Options of a streamed response." This tool
knows words with which neither begins. Tests tell what happens in them, so for those it refuses only
what it refuses everywhere.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

RIDDLES = ("As", "Of", "The same", "Whether")
"""What no docstring begins with: half of a sentence whose other half stands elsewhere."""

QUESTIONS = ("How", "Nobody", "What", "Where", "Which", "Who", "Whoever", "Whose")
"""What no docstring begins with outside of tests: it asks, and does not name its subject."""

NOUNS = (
    *("A", "An", "The", "This", "That", "Those", "These", "It", "If"),
    *("All", "Every", "Each", "One", "No", "Nothing", "Some", "Something"),
    *("When", "Whatever"),
)
"""What no docstring of a function begins with, since it says what the function does."""

FOLDERS = ("src", "tools", "benchmarks", "tests")

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def refusals(source: str, *, is_test: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and the reason for each docstring of a module that is refused."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            found = opener(text, RIDDLES if is_test else refused_for(node))
            if found:
                name = getattr(node, "name", "the module")
                yield node.body[0].lineno, f"{name}: a docstring does not begin with {found!r}"


def opener(docstring: str, words: Iterable[str]) -> str | None:
    """Return the first of the words that a docstring begins with; None if there is none."""
    return next((word for word in words if re.match(rf"{word}\b", docstring)), None)


def refused_for(node: Documented) -> tuple[str, ...]:
    """Return the words with which the docstring of a node may not begin."""
    decorators = getattr(node, "decorator_list", [])
    is_property = any("property" in ast.unparse(decorator) for decorator in decorators)
    if isinstance(node, ast.ClassDef | ast.Module) or is_property:
        return RIDDLES + QUESTIONS
    return RIDDLES + QUESTIONS + NOUNS


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python files under paths, in order."""
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main(arguments: list[str] | None = None) -> int:
    """Print every docstring that is refused; return 1 if there is one."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    paths = parser.parse_args(arguments).paths or [root / folder for folder in FOLDERS]
    n_refused = 0
    for path in files(paths):
        for line, reason in refusals(path.read_text(), is_test="tests" in path.parts):
            print(f"{path}:{line}: {reason}")
            n_refused += 1
    return 1 if n_refused else 0


if __name__ == "__main__":
    sys.exit(main())
