"""A chat at a terminal or from a pipe: what is typed, commands, and answers as they come."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcellar.cli.common.images import read_images
from kvcellar.cli.common.terminal import (
    ShownAnswer,
    is_interactive,
    print_error,
    print_note,
    shown_answer,
    write,
)
from kvcellar.errors import KVCellarError, PictureError, PromptError

QUOTES = '"""'
"""Stands before and behind a message of several lines."""

_HELP_OF_ALL = (
    ("/help", "this list"),
    ("/quit", "leave, as does Ctrl-D"),
    (QUOTES, "begins a message of several lines, and ends it; so does \\ at the end of a line"),
    ("Ctrl-C", "ends an answer, or clears the line; at an empty prompt it leaves"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command that is typed in a chat.

    Attributes:
        says: its line of ``/help``.
        do: does it, and returns what is said of that.
        takes: what is typed behind it, and ``do_with`` takes; empty: nothing.
        do_with: does it in place of ``do`` with what was typed behind it.
    """

    says: str
    do: Callable[[], str]
    takes: str = ""
    do_with: Callable[[str], str] | None = None


_AGAIN = "again"


class ChosenImages:
    """Pictures that go with the next message; and those that were set aside when one was refused.

    They are kept as their files in base64.
    """

    def __init__(self) -> None:
        """None is named yet."""
        self._data: list[str] = []
        self._aside: list[str] = []

    def command(self) -> Command:
        """Return the command that names one."""
        says = "a picture that goes with the next message; without FILE: none does"
        return Command(says, self._none, "FILE", self._add)

    def give_back(self, data: Sequence[str]) -> str:
        """Choose the pictures of a turn that was taken back again; return what is said of that."""
        self._data[:0] = data
        if not data:
            return ""
        it = "its picture goes" if len(data) == 1 else f"its {len(data)} pictures go"
        return f"; {it} with the next message, /image leaves {_it(data)} out"

    def set_aside(self) -> str:
        """Have no picture go with the next message, since this one was refused; say so.

        Returns:
            A sentence; empty: none was chosen.
        """
        if not self._data:
            return ""
        self._aside, self._data = self._data, []
        n = len(self._aside)
        return (
            f"{n} picture{'s were' if n > 1 else ' was'} set aside, and what you say next goes "
            f"without {_it(self._aside)}; /image {_AGAIN} chooses {_it(self._aside)} again"
        )

    def listed(self) -> list[str]:
        """Return the files in base64."""
        return list(self._data)

    def fields(self) -> dict[str, list[str]]:
        """Return what a verb is given of them."""
        return {"images": list(self._data)} if self._data else {}

    def clear(self) -> None:
        """Take note that they were sent."""
        self._data.clear()

    def _none(self) -> str:
        self.clear()
        return "no picture goes with the next message"

    def _add(self, file: str) -> str:
        if len(file) > 1 and file[0] == file[-1] and file[0] in "\"'":  # as terminals drop one
            file = file[1:-1]
        if file == _AGAIN and self._aside:
            self._data, self._aside = self._data + self._aside, []
            return self._said()
        try:
            self._data += read_images([Path(file)])
        except PictureError as error:
            if not is_interactive():  # nobody is there to look
                raise
            return str(error)
        return self._said()

    def _said(self) -> str:
        n = len(self._data)
        return f"{n} picture{'s go' if n > 1 else ' goes'} with the next message"


def _it(pictures: Sequence[str]) -> str:
    return "it" if len(pictures) == 1 else "them"


@dataclass(frozen=True, slots=True)
class Talk:
    """Whom one talks with.

    Attributes:
        say: called with a message and whom to tell the answer; returns what ``--json`` prints of
            it.
        show_end: shows what an answer took.
        images: that go with what is said next.
        commands: by name, with the slash, what may be typed besides.
        way_back: said when one leaves.
    """

    say: Callable[[str, ShownAnswer], dict[str, Any]]
    show_end: Callable[[Mapping[str, Any]], None]
    images: ChosenImages
    commands: Mapping[str, Command]
    way_back: str


def talk(with_whom: Talk, *, as_json: bool) -> None:
    """Take messages and show their answers, until nothing more comes or somebody leaves.

    Args:
        with_whom: who answers.
        as_json: print one object for each answer, on a line.

    Raises:
        KVCellarError: as ``say``. A prompt without room ends no chat at a terminal.
    """
    for message in _typed() if is_interactive() else _piped():
        is_command = message.startswith("/") and "\n" not in message
        word = message.split()[0] if is_command else ""
        if word in ("/quit", "/exit", "/bye"):
            break
        if word:
            _obey(with_whom, word, message.removeprefix(word).strip())
        elif message:
            _answer(with_whom, message, as_json)
    if is_interactive():
        print_note(with_whom.way_back)


def _obey(with_whom: Talk, word: str, behind: str) -> None:
    """Do a command. Its help is printed in a pipe, too, beside the answers."""
    commands = {"/image": with_whom.images.command(), **with_whom.commands}
    if word == "/help":
        own = ((f"{name} {one.takes}".strip(), one.says) for name, one in commands.items())
        for name, says in (*own, *_HELP_OF_ALL):
            sys.stderr.write(f"{name:<12}{says}\n")
        sys.stderr.flush()
    elif word in commands:
        command = commands[word]
        do_with = command.do_with
        print_note(do_with(behind) if behind and do_with is not None else command.do())
    else:
        print_error(f"there is no command {word}; /help lists them")


def _answer(with_whom: Talk, message: str, as_json: bool) -> None:
    """Say a message and show its answer.

    At a terminal neither Ctrl-C nor a full cache ends the chat.
    """
    try:
        with shown_answer("reading", is_quiet=as_json) as tell:
            value = with_whom.say(message, tell)
        if as_json:
            write(json.dumps(value, ensure_ascii=False) + "\n")
        else:
            write("\n")
            with_whom.show_end(value)
    except PromptError as error:
        if not is_interactive():
            raise
        ways = [] if isinstance(error, PictureError) else with_whom.commands
        print_error(", or ".join((str(error), *ways)))
        if aside := with_whom.images.set_aside():
            print_note(aside)
    except KVCellarError as error:  # what was said before is worth more than an end
        if not is_interactive():
            raise
        print_error(str(error))
    except KeyboardInterrupt:
        if not is_interactive():
            raise
        write("\n")
        print_note("stopped here; what was said so far stays")


# What is typed ------------------------------------------------------------------------------------


def _piped() -> Iterator[str]:
    """Yield the messages of a pipe: its lines, or what is marked to be several of them."""
    yield from _messages(lambda is_first: next(sys.stdin).rstrip("\r\n"))


def _typed() -> Iterator[str]:
    """Yield what is typed at a terminal.

    Ctrl-C clears what was begun; a second one with nothing in between leaves.
    """
    with contextlib.suppress(ImportError, AttributeError):  # not on every system
        import readline

        # What is pasted is one message then, however many lines it has.
        readline.parse_and_bind("set enable-bracketed-paste on")
    is_leaving = False

    def line(is_first: bool) -> str:
        nonlocal is_leaving
        typed = input("> " if is_first else "... ")
        is_leaving = False
        return typed

    while True:
        try:
            yield from _messages(line)
            print_note("")
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            if is_leaving:
                return
            is_leaving = True
            print_note("Ctrl-C again leaves, as do Ctrl-D and /quit")


def _messages(line: Callable[[bool], str]) -> Iterator[str]:
    """Yield messages of lines until these end. What is open then is a message, too.

    Args:
        line: returns the next line, whether it is the first of a message or not; ``EOFError`` or
            ``StopIteration``: there is none.
    """
    ends = (EOFError, StopIteration)
    while True:
        try:
            first = line(True)
        except ends:
            return
        lines = [first]
        is_quoted = first.lstrip().startswith(QUOTES)
        if is_quoted:
            lines[0] = first.lstrip().removeprefix(QUOTES)
        with contextlib.suppress(*ends):
            while not _is_whole(lines, is_quoted):
                lines.append(line(False))
        if is_quoted:
            text = "\n".join(lines).rstrip()
            yield text.removesuffix(QUOTES).strip("\n")
        else:
            whole = [one.removesuffix("\\") for one in lines[:-1]] + lines[-1:]
            yield "\n".join(whole).strip()


def _is_whole(lines: list[str], is_quoted: bool) -> bool:
    if is_quoted:
        return lines[-1].rstrip().endswith(QUOTES)
    return not lines[-1].endswith("\\")
