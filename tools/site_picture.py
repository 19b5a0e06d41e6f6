"""Draws the flowcharts of the pages for the site: no library is fetched for them by a browser.

Of Mermaid's language it reads what tools/write_tour.py writes: ``a --> b`` and ``a -.-> b``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

Edge = tuple[str, str]
Rows = list[list[str]]

WIDTH, HEIGHT, GAP_X, GAP_Y = 116, 32, 20, 44
"""A box and what is between boxes, in pixels."""


def picture(text: str) -> str:
    """Return a flowchart as HTML with an SVG, every arrow pointing down."""
    found = re.findall(r"^\s*(\w+) (-->|-\.->) (\w+)$", text, flags=re.MULTILINE)
    dotted = {(a, b) for a, arrow, b in found if arrow == "-.->"}
    rows, paths = layered([(a, b) for a, _, b in found])
    at = places(rows)
    high = len(rows) * (HEIGHT + GAP_Y) - GAP_Y
    wide = max(x for x, _ in at.values()) + WIDTH / 2
    names = [name for row in rows for name in row if not is_bend(name)]
    return "\n".join(
        [
            f'<figure class="rooms"><svg viewBox="-2 -2 {wide + 4:g} {high + 4}" width="{wide:g}" '
            'role="img" aria-label="Which room imports which">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>',
            *(line([at[name] for name in path], (path[0], path[-1]) in dotted) for path in paths),
            *(box(name, *at[name]) for name in names),
            "</svg></figure>",
        ]
    )


def layered(edges: list[Edge]) -> tuple[Rows, list[list[str]]]:
    """Return names in rows, each below all that point at it, and each edge as a path of names.

    An edge over several rows has a bend in each row between, which is a name of its own.
    """
    depth = {name: 0 for edge in edges for name in edge}
    for _ in depth:
        for above, below in edges:
            depth[below] = max(depth[below], depth[above] + 1)
    rows: Rows = [[] for _ in range(max(depth.values()) + 1)]
    for name in sorted(depth):
        rows[depth[name]].append(name)
    paths = []
    for above, below in edges:
        bends = {row: f"{above}/{below}/{row}" for row in range(depth[above] + 1, depth[below])}
        for row, bend in bends.items():
            rows[row].append(bend)
        paths.append([above, *bends.values(), below])
    return ordered(rows, paths), paths


def ordered(rows: Rows, paths: list[list[str]]) -> Rows:
    """Return the rows, each name near the middle of its neighbours, so that few lines cross."""
    links = [pair for path in paths for pair in pairwise(path)]
    for turn in range(24):
        place = {name: i - len(row) / 2 for row in rows for i, name in enumerate(row)}
        middle = {
            name: sum(place[other] for other in near) / len(near)
            for name in place
            for near in [list(neighbours(name, links, is_down=turn % 2 == 0)) or [name]]
        }
        rows = [sorted(row, key=middle.__getitem__) for row in rows]
    return rows


def neighbours(name: str, links: list[Edge], *, is_down: bool) -> Iterator[str]:
    """Yield who is above a name, or below it."""
    for above, below in links:
        if name == (below if is_down else above):
            yield above if is_down else below


def places(rows: Rows) -> dict[str, tuple[float, float]]:
    """Return the middle of each name's upper edge; rows are centred."""

    def width(name: str) -> float:
        return GAP_X if is_bend(name) else WIDTH

    widths = [sum(map(width, row)) + GAP_X * (len(row) - 1) for row in rows]
    at = {}
    for i, row in enumerate(rows):
        x = (max(widths) - widths[i]) / 2
        for name in row:
            at[name] = (x + width(name) / 2, i * (HEIGHT + GAP_Y))
            x += width(name) + GAP_X
    return at


def is_bend(name: str) -> bool:
    """Return True for a name that is a bend of an edge."""
    return "/" in name


def line(points: list[tuple[float, float]], is_dotted: bool) -> str:
    """Return an arrow through bends, from the lower edge of a box to the upper edge of another."""
    (x, y), *rest = points
    steps = [f"M{x:g} {y + HEIGHT}"]
    y += HEIGHT
    for to_x, to_y in rest:
        half = (y + to_y) / 2
        steps.append(f"C{x:g} {half:g} {to_x:g} {half:g} {to_x:g} {to_y}")
        x, y = to_x, to_y
        if (to_x, to_y) != points[-1]:
            steps.append(f"V{y + HEIGHT}")
            y += HEIGHT
    dots = ' stroke-dasharray="4 4"' if is_dotted else ""
    return f'<path class="edge" d="{"".join(steps)}" marker-end="url(#tip)"{dots}/>'


def box(name: str, x: float, y: float) -> str:
    """Return a box with a name in it."""
    return (
        f'<rect x="{x - WIDTH / 2:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x:g}" y="{y + HEIGHT / 2 + 5:g}" text-anchor="middle">{name}</text>'
    )
