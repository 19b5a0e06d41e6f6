#!/usr/bin/env python3
"""Print what the house measures: lines, lengths, circles of imports, names that are defined twice.

python tools/house_numbers.py               the tree as it is
python tools/house_numbers.py --base REV    beside it, the tree at a revision
python tools/house_numbers.py --all         every long function and file by name

The numbers are to be looked at. A test fails on one alone: names of classes that are two things.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG_FUNCTION = 100
LONG_FILE = 500

LANGUAGES = {
    "Python": (".py", ".pyi"),
    "C++": (".cpp", ".h", ".cc"),
    "JavaScript, HTML, CSS": (".js", ".html", ".css"),
}


@dataclass
class House:
    """Measures of one tree.

    Attributes:
        lines: lines by kind ("src: Python", "tests: Python").
        functions: lengths in lines, signature and docstring included, of the functions in src.
        files: lengths of the files in src that are not native code.
        circles: modules that import each other while they are loaded.
        lazy_circles: those that come by imports inside functions, or for types alone.
        twice: class names in src -> the modules that define one.
    """

    lines: dict[str, int] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    circles: list[list[str]] = field(default_factory=list)
    lazy_circles: list[list[str]] = field(default_factory=list)
    twice: dict[str, list[str]] = field(default_factory=dict)

    @property
    def rows(self) -> list[tuple[str, int]]:
        """Names and numbers, in the order in which they are shown."""
        lengths = sorted(self.functions.values())
        return [
            *((f"lines of {kind}", count) for kind, count in self.lines.items()),
            ("functions in src", len(lengths)),
            ("their median length", int(statistics.median(lengths))),
            ("their 90th percentile", lengths[len(lengths) * 9 // 10]),
            (f"longer than {LONG_FUNCTION} lines", sum(n > LONG_FUNCTION for n in lengths)),
            (f"files in src over {LONG_FILE} lines", len(self.long_files)),
            ("circles of imports", len(self.circles)),
            ("more by late imports and types", len(self.lazy_circles)),
            ("class names defined twice", len(self.twice)),
            ("those that are two things", len(unlike_twins(self.twice))),
        ]

    @property
    def long_files(self) -> dict[str, int]:
        """Files with more than ``LONG_FILE`` lines."""
        return {name: count for name, count in self.files.items() if count > LONG_FILE}


def unlike_twins(twice: Mapping[str, list[str]]) -> set[str]:
    """Return the class names that stand for two things, by the modules that define each.

    One and the same part of several backends is one thing: a name that each of some backends
    defines once, and nobody else, is not in the result.
    """
    found = set()
    for name, modules in twice.items():
        places = [tuple(module.split(".")[1:3]) for module in modules]
        if any(place[0] != "backends" for place in places) or len(set(places)) < len(places):
            found.add(name)
    return found


def measure(root: Path) -> House:
    """Measure the tree in a folder."""
    house = House(lines=lines(root))
    classes: dict[str, list[str]] = defaultdict(list)
    eager: dict[str, set[str]] = {}
    lazy: dict[str, set[str]] = {}
    trees = {}
    for path in sorted((root / "src").rglob("*.py")):
        text = path.read_text()
        trees[module_of(path.relative_to(root / "src"))] = ast.parse(text)
        house.files[str(path.relative_to(root))] = len(text.splitlines())
    for module, tree in trees.items():
        for name, node in definitions(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(module)
            else:
                first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
                house.functions[f"{module}.{name}"] = (node.end_lineno or 0) - first + 1
        eager[module] = set(imports(tree, set(trees), is_lazy=False)) - {module}
        lazy[module] = set(imports(tree, set(trees), is_lazy=True)) - {module}
    house.twice = {name: where for name, where in sorted(classes.items()) if len(where) > 1}
    house.circles = circles(eager)
    house.lazy_circles = [circle for circle in circles(lazy) if circle not in house.circles]
    return house


def lines(root: Path) -> dict[str, int]:
    """Count the lines of each language in each folder that has some."""
    counts = {}
    for folder in ("src", "tests", "benchmarks", "tools"):
        for language, suffixes in LANGUAGES.items():
            paths = [path for path in (root / folder).rglob("*") if path.suffix in suffixes]
            if paths:
                count = sum(len(path.read_text().splitlines()) for path in paths)
                counts[f"{folder}: {language}"] = count
    return counts


def module_of(path: Path) -> str:
    """Return the dotted name of a file below src; a package has the name of its folder."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def definitions(
    tree: ast.AST, before: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Yield all functions and classes of a module by their names inside of it."""
    for node in ast.iter_child_nodes(tree):
        name = before
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{before}.{node.name}" if before else node.name
            yield name, node
        yield from definitions(node, name)


def imports(tree: ast.AST, modules: set[str], *, is_lazy: bool) -> Iterator[str]:
    """Yield the modules of ours that a module imports when it is loaded.

    Args:
        tree: the module.
        modules: all names of modules of ours.
        is_lazy: imports inside functions, and those for types alone, count as well.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inner & modules
            if node.module in modules and inner - modules:
                yield node.module
        elif is_lazy or not _is_late(node):
            yield from imports(node, modules, is_lazy=is_lazy)


def _is_late(node: ast.AST) -> bool:
    """Return true for what does not run when its module is loaded."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules in which each reaches each other, sorted."""
    reached = {module: reach(graph, module) for module in graph}
    found: list[list[str]] = []
    for module in sorted(graph):
        circle = sorted(other for other in reached[module] if module in reached[other])
        if circle and circle not in found:
            found.append(circle)
    return found


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return what can be reached from a node over at least one edge."""
    found: set[str] = set()
    todo = [start]
    while todo:
        fresh = graph[todo.pop()] - found
        found |= fresh
        todo += fresh
    return found


def checked_out(revision: str, folder: Path) -> Path:
    """Write the tree of a revision into a folder, and return that.

    Raises:
        CalledProcessError: git knows no such revision; its message is on stderr.
    """
    command = ["git", "-C", str(ROOT), "archive", revision, "src", "tests", "benchmarks", "tools"]
    packed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def show(now: House, base: House | None, *, is_all: bool) -> Iterator[str]:
    """Yield the lines of a report."""
    before = dict(base.rows) if base else {}
    names = dict.fromkeys([*dict(now.rows), *before])
    for name in names:
        count = dict(now.rows).get(name, 0)
        old = before.get(name, 0)
        yield f"{name:<40}{count:>8}" + (f"{old:>8}{count - old:>+8}" if base else "")
    lengths = sorted(now.functions.items(), key=lambda item: -item[1])
    named = [
        ("function", [f"{name} ({n})" for name, n in lengths if n > LONG_FUNCTION]),
        ("file", [f"{name} ({n})" for name, n in sorted(now.long_files.items())]),
        ("circle", [" <-> ".join(circle) for circle in now.circles]),
        ("late circle", [" <-> ".join(circle) for circle in now.lazy_circles]),
        ("class", [f"{name}: {', '.join(where)}" for name, where in now.twice.items()]),
    ]
    for kind, items in named:
        yield from (f"{kind}: {item}" for item in (items if is_all else items[:10]))
        if len(items) > 10 and not is_all:
            yield f"{kind}: {len(items) - 10} more (--all)"


def main() -> None:
    """Measure the tree, and another revision where one is named, and print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", metavar="REV", help="a git revision to compare with")
    parser.add_argument("--all", action="store_true", help="name all that is long or double")
    options = parser.parse_args()
    base = None
    if options.base:
        with tempfile.TemporaryDirectory() as folder:
            base = measure(checked_out(options.base, Path(folder)))
        print(f"{'':<40}{'now':>8}{options.base[:7]:>8}{'change':>8}")
    print("\n".join(show(measure(ROOT), base, is_all=options.all)))


if __name__ == "__main__":
    main()
