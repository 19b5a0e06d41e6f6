#!/usr/bin/env python3
"""Draw the rooms of the source and who imports whom into docs/request.md, as a Mermaid picture.

python tools/draw_rooms.py           draw it
python tools/draw_rooms.py --check   fail where the picture is not what would be drawn
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from house_numbers import imports, module_of, reach

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "request.md"

BEGIN = "<!-- Drawn by tools/draw_rooms.py from the imports; do not edit. -->"
END = "<!-- The end of what is drawn. -->"

LEFT_OUT = {"testing"}
"""Rooms on nobody's way: tests of other people's backends."""

MODULES = {"cache", "registry"}
"""Single files that are rooms all the same; the others are words that every room uses."""


Graph = dict[str, set[str]]


def rooms(source: Path) -> tuple[Graph, Graph]:
    """Return which rooms import which others when they are loaded, and which at any time.

    Args:
        source: the folder of the package.
    """
    trees = {
        module_of(path.relative_to(source.parent)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(source.rglob("*.py"))
    }
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


def main() -> int:
    """Draw the picture into the page, or check it; return 1 where it is stale."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, behind = rest.partition(END)
    drawn = picture(*rooms(ROOT / "src" / "kvcellar"))
    want = f"{before}{BEGIN}\n{drawn}\n{END}{behind}"
    if "--check" in sys.argv[1:]:
        if page == want:
            return 0
        print(f"the picture in {PAGE} is stale; run: python tools/draw_rooms.py", file=sys.stderr)
        return 1
    PAGE.write_text(want, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
