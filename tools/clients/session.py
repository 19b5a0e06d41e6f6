"""A coding session that is played: a small project, what the user asks, what the model says.

A user asks five times; each time the model reads a file, edits it, runs it and says what came of
it: 15 turns with a tool, and 5 answers. What it says at some point follows from the prompt alone:
from the last request of the user's that is in it, and how many answers have come since.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ZONES = ("north", "east", "south", "west", "centre")
FILE = "rates.py"
_ASKED = re.compile(r"\[request (\d)\]")

PROJECT = (
    '"""What a parcel costs in each zone."""\n\nimport sys\n\n\n'
    + "\n\n".join(
        f"def rate_{zone}(kilos):\n"
        f'    """Return the price of a parcel to zone {zone}, in cents."""\n'
        f"    return {n} * kilos  # zone {zone}\n"
        for n, zone in enumerate(ZONES, 3)
    )
    + "\n\nzone, kilos = sys.argv[1], int(sys.argv[2])\n"
    'print(f"{zone} {kilos}:", globals()[f"rate_{zone}"](kilos))\n'
)
"""The file as it is at first."""


@dataclass(frozen=True)
class Request:
    """One request of the user's, and what there is to do for it.

    Attributes:
        number: from 0.
        old: the line that is wrong.
        new: what it has to become.
        command: shows whether it is right.
        shows: what it then prints.
    """

    number: int
    old: str
    new: str
    command: str
    shows: str

    @property
    def text(self) -> str:
        """Return the text that the user writes."""
        zone = ZONES[self.number]
        return (
            f"[request {self.number}] Parcels to zone {zone} cost {10 + self.number} cents for "
            f"each kilo and 11 cents besides. Read {FILE}, change rate_{zone}, and run it."
        )

    @property
    def answer(self) -> str:
        """Return the text that the model says in the end."""
        return f"Zone {ZONES[self.number]} is changed, and the program prints {self.shows}."


REQUESTS = [
    Request(
        n,
        f"    return {n + 3} * kilos  # zone {zone}",
        f"    return {n + 10} * kilos + 11  # zone {zone}, checked",
        f"python3 {FILE} {zone} {100 + n}",
        f"{zone} {100 + n}: {(n + 10) * (100 + n) + 11}",
    )
    for n, zone in enumerate(ZONES)
]

N_STEPS = 4
"""Answers of the model's for one request: three calls, and what it says in the end."""


def finished(project: Path) -> bool:
    """Return true if every change was made to the project's file."""
    text = (project / FILE).read_text()
    return all(request.new in text and request.old not in text for request in REQUESTS)


CallFn = Callable[[Path, Request], tuple[str, dict[str, Any]]]
"""Makes the name and the arguments of a call."""


@dataclass(frozen=True)
class Said:
    """One answer of the model's, in no dialect.

    Attributes:
        thought: what it thinks first.
        text: what it says.
        call: name and arguments of a call, if it makes one.
        needs: what has to be in the prompt by then; a client that lost it is found out.
    """

    thought: str
    text: str
    call: tuple[str, dict[str, Any]] | None = None
    needs: str = ""


ASIDE = Said("", "Coding.")
"""What the model says where a client asks for something else, such as a title."""


@dataclass(frozen=True)
class Hands:
    """Tools of one client, as the model calls them: to read, to edit and to run."""

    read: CallFn
    edit: CallFn
    run: CallFn

    def say(self, request: Request, step: int, project: Path) -> Said:
        """Return what the model says: the ``step``-th answer to a request, from 0."""
        zone, n = ZONES[request.number], request.number
        if step == 0:
            thought = f"Zone {zone} is wrong. Before I touch {FILE} I have to see what is there."
            return Said(thought, f"I read {FILE} first.", self.read(project, request))
        if step == 1:
            thought = f"One line is to be changed, {request.old.strip()!r}: {n + 10} and 11."
            return Said(thought, "", self.edit(project, request), needs=f"{n + 3} * kilos")
        if step == 2:
            thought = f"I should not believe it before I have seen it: {100 + n} kilos to {zone}."
            return Said(thought, "Now I run it.", self.run(project, request))
        thought = f"{request.shows} is {n + 10} times {100 + n} and 11. That is right."
        return Said(thought, request.answer, needs=request.shows)

    def answer(self, text: str, mark: str, project: Path) -> Said:
        """Return what the model says to a prompt.

        Args:
            text: the prompt.
            mark: what begins each answer of the model's, also the one that is wanted now.
            project: folder that the client works in.
        """
        found = list(_ASKED.finditer(text))
        is_told = f'"{self.read(project, REQUESTS[0])[0]}"' in text
        if not found or not is_told:
            return ASIDE
        step = text.count(mark, found[-1].end()) - 1
        return self.say(REQUESTS[int(found[-1][1])], step, project) if step < N_STEPS else ASIDE


class Patches:
    """An editor of a model without tools: it says edits, and the client runs the program.

    The user says three things for each request, and the model answers each.
    """

    @staticmethod
    def lines() -> list[str]:
        """Return what the user types."""
        found = []
        for n, request in enumerate(REQUESTS):
            found += [
                f"/ask {request.text} What has to be changed for step {n}.0?",
                f"/code Do that, step {n}.1.",
                f"/run {request.command}",
                f"/ask Is that right, step {n}.2?",
            ]
        return found

    def answer(self, text: str, mark: str, project: Path) -> Said:
        """Return what the model says to a prompt, as :class:`Hands` do."""
        found = re.findall(r"step (\d)\.(\d)", text)
        if not found:
            return ASIDE
        request, step = REQUESTS[int(found[-1][0])], int(found[-1][1])
        if step == 0:
            return Said("One line computes it.", f"The line {request.old.strip()}.")
        if step == 2:
            return Said(f"{request.shows} is right.", request.answer, needs=request.shows)
        edit = f"<<<<<<< SEARCH\n{request.old}\n=======\n{request.new}\n>>>>>>> REPLACE"
        return Said("I write the edit.", f"{FILE}\n```python\n{edit}\n```", needs=request.old)
