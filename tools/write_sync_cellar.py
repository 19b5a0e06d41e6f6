#!/usr/bin/env python3
"""Write the cellar that waits, ``kvcellar.cellar.sync``, from the one for asyncio.

Each public verb of ``aio.py`` that ``waiting.py`` does not have by hand becomes one that runs it
on the cellar's loop and waits: the same name, arguments and docstring, and agents in place of
asynchronous ones.

python tools/write_sync_cellar.py           write src/kvcellar/cellar/sync.py
python tools/write_sync_cellar.py --check   fail where it is not what would be written
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CELLAR = ROOT / "src" / "kvcellar" / "cellar"

HEAD = '''\
"""The cellar for programs without an event loop: the same verbs, which wait.

Written by tools/write_sync_cellar.py from ``aio.py``; do not edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack, overload

from kvcellar.agents import AgentInfo, Message
from kvcellar.cellar.aio import Prompt
from kvcellar.cellar.answers import Answer, Asking, Why
from kvcellar.cellar.asking import Said
from kvcellar.cellar.waiting import Stream, WaitingAgent, WaitingBranches, WaitingCellar
from kvcellar.engine import EngineStats

__all__ = ["Agent", "Branches", "Cellar", "Stream"]
'''

DOCS = {
    "Cellar": "A model, its engine and its store. ``kvcellar.open`` makes one; close it, or use "
    "``with``.\n\n    Attributes:\n        model: name of the model that answers.\n    ",
}
"""Docstrings of classes that are not their counterpart's."""

BASES = {"Cellar": "WaitingCellar", "Agent": "WaitingAgent", "Branches": "WaitingBranches[Agent]"}

IN_A_TURN = {"keep", "rename", "rewind", "undo", "pause", "resume", "export", "delete"}
"""Verbs of an agent that wait for its turn: what this thread left in its middle is ended."""

NOT_OF_THREADS = {"aclose", "close_now", "manager", "host", "grammars"}
"""Public names of the cellar for asyncio that are nothing to a program without a loop."""


def written() -> str:
    """Return the text of ``sync.py``."""
    source = (CELLAR / "aio.py").read_text(encoding="utf-8")
    theirs = {node.name: node for node in classes(source)}
    ours = {node.name: node for node in classes((CELLAR / "waiting.py").read_text("utf-8"))}
    parts = [HEAD]
    for name, base in BASES.items():
        node = theirs[f"Async{name}"]
        by_hand = {item.name for item in functions(ours[base.partition("[")[0]])}
        doc = DOCS.get(name) or first_line(node)
        lines = [f"class {name}({base}):", f'    """{doc}"""']
        for item in functions(node):
            if item.name.startswith("_") or item.name in by_hand | NOT_OF_THREADS:
                continue
            lines += ["", *verb(item, source, name)]
        parts.append("\n".join(lines) + "\n")
    return "\n\n".join(parts)


def classes(source: str) -> list[ast.ClassDef]:
    """Return the classes of a module."""
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the methods of a class, overloads and properties among them."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            yield item


def first_line(node: ast.ClassDef) -> str:
    """Return what a class is, without its attributes."""
    return (ast.get_docstring(node) or "").partition("\n\n")[0]


def verb(item: ast.FunctionDef | ast.AsyncFunctionDef, source: str, owner: str) -> list[str]:
    """Return the lines of a method that waits for one of a class for asyncio."""
    lines = source.splitlines()
    first = min([item.lineno, *(mark.lineno for mark in item.decorator_list)])
    body = item.body[0]
    if is_overload(item):  # with its comment, which may tell a checker something
        text = "\n".join(lines[first - 1 : item.end_lineno])
        return sync_names(text).splitlines()
    signature = sync_names("\n".join(lines[first - 1 : body.lineno - 1]))
    doc = "\n".join(lines[body.lineno - 1 : body.end_lineno])
    return [
        *signature.splitlines(),
        *doc.splitlines(),
        *(f"        {line}" for line in call(item, owner)),
    ]


def is_overload(item: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return true if a method is a signature alone."""
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in item.decorator_list)


def sync_names(text: str) -> str:
    """Return a signature without what makes it asynchronous."""
    return re.sub(r"\bAsync(Agent|Branches)\b", r"\1", text.replace("async def", "def"))


def call(item: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> list[str]:
    """Return the statements that ask the object behind and wrap what comes of it."""
    asked = f"self._behind.{item.name}"
    if not any(
        isinstance(mark, ast.Name) and mark.id == "property" for mark in item.decorator_list
    ):
        asked += f"({arguments(item.args)})"
    if isinstance(item, ast.AsyncFunctionDef):
        wait = "_wait_in_turn" if owner == "Agent" and item.name in IN_A_TURN else "_wait"
        asked = f"self.{wait}({asked})"
    cellar = "self" if owner == "Cellar" else "self._cellar"
    returned = ast.unparse(item.returns) if item.returns else "None"
    if returned == "AsyncAgent":
        return [f"made = {asked}", f"return Agent(made, {cellar})"]
    if returned == "list[AsyncAgent]":
        return [f"return [Agent(one, {cellar}) for one in {asked}]"]
    if returned == "AsyncBranches":
        return [
            f"branches = {asked}",
            f"return Branches(branches, [Agent(one, {cellar}) for one in branches], {cellar})",
        ]
    return [asked if returned == "None" else f"return {asked}"]


def arguments(args: ast.arguments) -> str:
    """Return the arguments of a method as a call of its counterpart hands them on."""
    handed = [arg.arg for arg in args.args[1:]]
    handed += [f"{arg.arg}={arg.arg}" for arg in args.kwonlyargs]
    if args.kwarg:
        handed.append(f"**{args.kwarg.arg}")
    return ", ".join(handed)


def main() -> int:
    """Write the module, or check it; return 1 where it is stale."""
    path = CELLAR / "sync.py"
    text = written()
    if "--check" not in sys.argv[1:]:
        path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        stale = path.relative_to(ROOT)
        print(f"{stale} is stale; run: python tools/write_sync_cellar.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
