#!/usr/bin/env python3
"""Write what docs say of the rooms of the source: a picture, a line for each, and its decisions.

A room is a folder of the package. Its line is what its ``__init__`` says: what it is for, what may
come in, where to start. A decision's third line names the rooms that it is about.

python tools/write_tour.py           write docs/tour.md and docs/decisions/README.md
python tools/write_tour.py --check   fail where they are not what would be written
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from house_numbers import imports, module_of, reach

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "kvcellar"
TOUR = ROOT / "docs" / "tour.md"
DECISIONS = ROOT / "docs" / "decisions"

BEGIN = "<!-- Written by tools/write_tour.py from the code; do not edit. -->"
END = "<!-- The end of what is written. -->"

BESIDE = ("tests", "tools")
"""Folders beside the package that decisions are about."""

LEFT_OUT = {"testing"}
"""Rooms that the picture leaves out: tests of other people's backends."""

MODULES = {"cache", "registry"}
"""Single files that are rooms all the same; the others are words that every room uses."""


Graph = dict[str, set[str]]
Trees = dict[str, ast.Module]


class StaleError(Exception):
    """A room or a decision does not say what its line needs."""


def parsed(source: Path) -> Trees:
    """Return the modules of the package in a folder, parsed."""
    return {
        module_of(path.relative_to(source.parent)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(source.rglob("*.py"))
    }


def rooms(trees: Trees, source: Path) -> tuple[Graph, Graph]:
    """Return which top rooms import which others when they are loaded, and which at any time.

    Args:
        trees: the package's modules.
        source: the package's folder.
    """
    modules = set(trees)
    packages = {path.parent.name for path in source.glob("*/__init__.py")} - LEFT_OUT
    names = sorted(packages | MODULES)
    graphs: tuple[Graph, Graph] = ({name: set() for name in names}, {name: set() for name in names})
    for module, tree in trees.items():
        room = room_of(module)
        for is_lazy, graph in enumerate(graphs):
            if room in graph:
                others = {room_of(name) for name in imports(tree, modules, is_lazy=bool(is_lazy))}
                graph[room] |= (others & graph.keys()) - {room}
    return graphs


def room_of(module: str) -> str:
    """Return the room of a module, "" for the package itself."""
    return ([*module.split("."), ""])[1]


def reduced(graph: Graph) -> dict[str, list[str]]:
    """Return the imports without those that others say already: a -> c beside a -> b -> c."""
    return {
        room: sorted(
            other
            for other in others
            if not any(other in reach(graph, between) for between in others - {other})
        )
        for room, others in graph.items()
    }


def picture(loaded: Graph, late: Graph) -> str:
    """Return the picture: an arrow goes from a room to one that it imports.

    It is dotted where that happens late, when a command or a backend is chosen. Late imports of a
    room that imports this one are left out: such as of backends, which register themselves.
    """
    arrows = [f"{room} --> {other}" for room, others in reduced(loaded).items() for other in others]
    for room, others in late.items():
        down = {other for other in others if room not in reach(loaded, other)}
        said = reach(loaded, room).union(*(reach(loaded, between) for between in down))
        arrows += [f"{room} -.-> {other}" for other in sorted(down - said)]
    return "\n".join(["```mermaid", "flowchart TD", *(f"    {a}" for a in arrows), "```"])


def folders(trees: Trees, source: Path) -> tuple[list[str], Graph]:
    """Return all rooms in an order in which each needs earlier ones alone, and their imports.

    A room is followed by the rooms in it. Rooms are paths below the package: ``agents/text``.

    Args:
        trees: the package's modules.
        source: the package's folder.
    """
    names = {path.parent.relative_to(source).as_posix() for path in source.rglob("__init__.py")} - {
        "."
    }
    graph: Graph = {name: set() for name in names}
    for module, tree in trees.items():
        home = folder_of(module, names)
        if home:
            others = {folder_of(other, names) for other in imports(tree, set(trees), is_lazy=False)}
            graph[home] |= others - {home, ""}
    return list(ordered("", graph)), graph


def folder_of(module: str, names: set[str]) -> str:
    """Return the innermost room that a module lies in, "" for none."""
    parts = module.split(".")[1:]
    while parts and "/".join(parts) not in names:
        parts.pop()
    return "/".join(parts)


def ordered(parent: str, graph: Graph) -> Iterator[str]:
    """Yield the rooms in a room, from the bottom up, each with those in it behind it."""
    prefix = f"{parent}/" if parent else ""
    inside = {name for name in graph if name.startswith(prefix) and "/" not in name[len(prefix) :]}
    whole = {
        name: {
            other
            for room, others in graph.items()
            if room == name or room.startswith(f"{name}/")
            for other in (ancestor(found, inside) for found in others)
        }
        - {name, ""}
        for name in inside
    }
    done: list[str] = []
    while len(done) < len(inside):
        left = inside - set(done)
        ready = [name for name in left if not (whole[name] & left)]
        done.append(min(ready or left))  # of rooms that import each other, the first by name
        yield done[-1]
        yield from ordered(done[-1], graph)


def ancestor(room: str, among: set[str]) -> str:
    """Return that of some rooms in which a room lies, itself included; "" for none."""
    return next((name for name in among if room == name or room.startswith(f"{name}/")), "")


def says(room: str, tree: ast.Module) -> tuple[str, str, str]:
    """Return what a room's ``__init__`` says: what it is for, what may come in, where to start.

    Raises:
        StaleError: its docstring's second paragraph does not begin with "Imports".
    """
    purpose, *rest = (ast.get_docstring(tree) or "").split("\n\n")
    if not rest or not rest[0].startswith("Imports "):
        raise StaleError(
            f"src/kvcellar/{room}/__init__.py: the second paragraph of its docstring has to say "
            'what comes in and what does not: "Imports ...; no ... comes in."'
        )
    start = next((part for part in rest if part.startswith("Start ")), "")
    return plain(purpose), plain(rest[0]), plain(start).partition(". ")[0].rstrip(".")


def plain(text: str) -> str:
    """Return a paragraph of a docstring as Markdown on one line."""
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def decisions(known: set[str]) -> dict[str, list[tuple[int, str, str]]]:
    """Return number, title and file of the decisions about each room, in their order.

    Args:
        known: all rooms.

    Raises:
        StaleError: a decision's third line does not name rooms that exist.
    """
    found: dict[str, list[tuple[int, str, str]]] = {}
    for path in sorted(DECISIONS.glob("[0-9]*.md")):
        title, _, line, *_ = [*path.read_text(encoding="utf-8").splitlines(), "", "", ""]
        named = re.findall(r"`([\w/]+)`", line) if line.startswith("Rooms: ") else []
        heading = re.fullmatch(r"# (\d+)\. (.+)", title)
        if not named or not heading or not known.issuperset(named):
            raise StaleError(
                f"{path.relative_to(ROOT)}: has to begin with '# NUMBER. TITLE', an empty line and "
                f"'Rooms: `ROOM`.', of {', '.join(sorted(known))}"
            )
        for room in named:
            found.setdefault(room, []).append((int(heading[1]), heading[2], path.name))
    return found


def tour(trees: Trees) -> str:
    """Return what is written into docs/tour.md."""
    names, _ = folders(trees, SOURCE)
    about = decisions({*names, *BESIDE})
    lines = [picture(*rooms(trees, SOURCE)), "", "| room | what it is for | decisions |"]
    lines.append("| --- | --- | --- |")
    for room in names:
        module = ".".join(["kvcellar", *room.split("/")])
        links = ", ".join(f"[{n}](decisions/{file})" for n, _, file in about.get(room, ()))
        told = " ".join(
            part if part.endswith(".") else f"{part}." for part in says(room, trees[module]) if part
        )
        lines.append(f"| `{room}/` | {told} | {links} |")
    lines += ["", "What passes between rooms are modules of their own:", ""]
    for path in sorted(SOURCE.glob("[a-z]*.py")):
        said = ast.get_docstring(trees[f"kvcellar.{path.stem}"]) or ""
        lines.append(f"- `{path.name}`: {plain(said.split(chr(10) * 2)[0])}")
    return "\n".join(lines)


def index(trees: Trees) -> str:
    """Return what is written into docs/decisions/README.md: the decisions by room."""
    names, _ = folders(trees, SOURCE)
    about = decisions({*names, *BESIDE})
    lines: list[str] = []
    for room in (*names, *BESIDE):
        if room in about:
            lines += [f"## `{room}/`", ""]
            lines += [f"- {n}: [{title}]({file})" for n, title, file in about[room]]
            lines.append("")
    return "\n".join(lines).rstrip()


def main() -> int:
    """Write the pages, or check them; return 1 where one is stale or cannot be written."""
    trees = parsed(SOURCE)
    try:
        wanted = {TOUR: tour(trees), DECISIONS / "README.md": index(trees)}
    except StaleError as error:
        print(error, file=sys.stderr)
        return 1
    for path, text in wanted.items():
        page = path.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, behind = rest.partition(END)
        want = f"{before}{BEGIN}\n{text}\n{END}{behind}"
        if page != want and "--check" in sys.argv[1:]:
            print(
                f"{path.relative_to(ROOT)} is stale; run: python tools/write_tour.py",
                file=sys.stderr,
            )
            return 1
        path.write_text(want, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
