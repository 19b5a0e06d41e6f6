"""Code that pages show: which there is, and how it runs.

A page's blocks of Python run in one namespace and its commands in one home, from its first block to
its last, with the bundled model where a page names another, and a server where it speaks to one.
What answers say is not compared. A block that cannot run says why in a comment before it: ``<!--
not run: needs a Mac -->``; a page that another test or a make target runs says so, ``<!-- run by
tests/test_reachable.py -->``, and one of which only the options of commands are held to them is
``<!-- options checked by tests/test_docs.py -->``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.server import run as server_run
from tests.models.gguf.families import CASES
from tests.server.live import serving

HERE = "http://127.0.0.1:8642"

STANDS_FOR = {
    "path/to/a/checkpoint": str(DEMO_FOLDER),
    "path/to/another": str(DEMO_FOLDER),
    "path/to/large": str(DEMO_FOLDER),
    "path/to/small": str(DEMO_FOLDER),
    "smollm2": "demo",
    "--context 32768": "--context 4096",
}
"""What runs in place of what a reader has."""

SHELL = ("curl", "openssl")
"""Commands that a shell runs; all but kvcellar's own."""

FENCE = re.compile(
    r"(?:<!-- not run: (?P<why>.+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code of a page; ``why_not`` says why it does not run."""

    place: str
    language: str
    text: str
    why_not: str | None


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in their order."""
    text = page.read_text()
    return [
        Block(f"{page.name}:{text.count(chr(10), 0, found.start('text'))}", *found.group(3, 4, 1))
        for found in FENCE.finditer(text)
    ]


def run_elsewhere(page: Path) -> str | None:
    """Return the test or the make target by which a page says that it is run."""
    found = re.search(
        r"^<!-- (?:run|options checked) by (.+?) -->$", page.read_text(), re.MULTILINE
    )
    return found[1] if found else None


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a shell, as written and as words; a quoted text may have many lines."""
    line = ""
    for part in text.replace("\\\n", " ").splitlines():
        line = f"{line}\n{part}" if line else part
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation that goes on
            continue
        if words:
            yield line, words
        line = ""


class World:
    """A home, a folder and a server, in which the blocks of one page run one after another."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("KVCELLAR_HOME", str(folder / "home"))
        patch.chdir(folder)
        patch.setattr(server_run, "log_to_stderr", lambda: None)
        patch.setattr(server_run, "serve", lambda *made, **_: made[2]().registry.close())
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._open = ExitStack()
        self._url: str | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def run(self, block: Block) -> None:
        """Run a block; the test fails where it does, and says where that is."""
        if block.language == "python":
            exec(compile(self.ours(block.text), block.place, "exec"), self._names)
            return
        for line, words in commands(self.ours(block.text)):
            assert words[0] in ("kvcellar", *SHELL), f"{block.place}: {words[0]} is not run here"
            done = self.kvcellar(words[1:]) if words[0] == "kvcellar" else self.shell(line)
            assert done is None, f"{block.place}: {line}\n{done}"

    def ours(self, text: str) -> str:
        """Return a text with what is here in place of what a reader has."""
        for theirs, here in STANDS_FOR.items():
            text = re.sub(rf"(?<![\w/-]){re.escape(theirs)}(?![\w/-])", here, text)
        if "model.gguf" in text:
            CASES["llama"].write(self._folder / "model.gguf")
        return text.replace(HERE, self.url()) if HERE in text else text

    def url(self) -> str:
        """Return the address of a server, which is started when it is first asked for."""
        if self._url is None:
            self._url = self._open.enter_context(serving(self._folder / "served")).url
        return self._url

    def kvcellar(self, words: list[str]) -> str | None:
        """Run a command in this process; return what is wrong with it."""
        done = CliRunner().invoke(app, words, input="Hello.\n/quit\n")
        return None if done.exit_code == 0 else f"{done.output}\n{done.exception!r}"

    def shell(self, line: str) -> str | None:
        """Run a line in a shell; return what is wrong with it."""
        line = re.sub("^curl ", "curl --fail-with-body --silent --show-error ", line)
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)
        return None if done.returncode == 0 else done.stdout + done.stderr
