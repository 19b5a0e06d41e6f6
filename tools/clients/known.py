"""Clients that people use: their packages, the settings of each, and how a session of it is run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.session import FILE, REQUESTS, Hands, Patches

PATIENCE_S = 300.0
"""For one process of a client."""

PROGRAMS = Path(__file__).with_name("programs")
PAGES = Path(__file__).parents[2] / "docs" / "clients"
SHOWN_URL = "http://127.0.0.1:8642"
"""Address of the server in the pages."""

_FILE = re.compile(r"^`~/([^`]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def files_of(name: str, url: str) -> dict[str, str]:
    """Return the settings that a client's page shows: path in a user's home -> text.

    Args:
        name: the client's, and its page's.
        url: of the server, which the page has as ``SHOWN_URL``.
    """
    text = (PAGES / f"{name}.md").read_text()
    return {path: shown.replace(SHOWN_URL, url) for path, shown in _FILE.findall(text)}


@dataclass(frozen=True)
class Place:
    """Place for a client: with a home of its own, and no other server in reach.

    Attributes:
        folder: its own.
        installed: where its packages are.
        url: of the server.
    """

    folder: Path
    installed: Path
    url: str

    @property
    def home(self) -> Path:
        """Return the folder that it takes for its user's home."""
        return self.folder / "home"

    @property
    def project(self) -> Path:
        """The folder that it works in."""
        return self.folder / "project"

    def write(self, path: str, text: str) -> None:
        """Put a file into its home."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, command: list[str], typed: str = "") -> str:
        """Run a process of it in the project, and type something; return what it printed."""
        nowhere = "http://127.0.0.1:9"
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TERM": "dumb",
            "CI": "1",
            "LANG": "C.UTF-8",
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1,localhost",
            "DO_NOT_TRACK": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            done = subprocess.run(
                command,
                cwd=self.project,
                env=variables,
                input=typed,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PATIENCE_S,
            )
        except subprocess.TimeoutExpired as error:
            return f"it did not end within {PATIENCE_S:g} s: {str(error.stdout or '')[-500:]}"
        return done.stdout + done.stderr


CommandFn = Callable[[Place, str, bool], list[str]]
"""Makes the command for one request of the user's; the last says whether it goes on."""


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        packages: name -> version, all from one registry.
        hands: how the model works with it.
        command: runs one request of the user's; or all of them, where it ``takes_all``.
        prepare: does what is not done by files.
        takes_all: a process plays the whole session, and is given its requests as JSON.
        is_npm: from npm; else from PyPI.
    """

    packages: dict[str, str]
    hands: Hands | Patches
    command: CommandFn
    prepare: Callable[[Place], object] = lambda place: None
    takes_all: bool = False
    is_npm: bool = True

    @property
    def version(self) -> str:
        """The first of its packages, with its version."""
        package, version = next(iter(self.packages.items()))
        return f"{package} {version}"

    def play(self, place: Place) -> list[str]:
        """Play the session; return what was printed for each request, or for all of them."""
        self.prepare(place)
        if isinstance(self.hands, Patches):
            typed = "".join(f"{line}\n" for line in self.hands.lines())
            return [place.run(self.command(place, "", False), typed)]
        if self.takes_all:
            asked = json.dumps([request.text for request in REQUESTS])
            return [place.run(self.command(place, asked, False))]
        return [
            place.run(self.command(place, request.text, request.number > 0)) for request in REQUESTS
        ]


def _hands(
    read: tuple[str, str],
    edit: tuple[str, str, str, str],
    run: tuple[str, str],
    *,
    is_absolute: bool = False,
    **more: Any,
) -> Hands:
    """Make hands of the names of tools and of their arguments."""

    def path(project: Path) -> str:
        return str(project / FILE) if is_absolute else FILE

    return Hands(
        lambda project, _: (read[0], {read[1]: path(project)}),
        lambda project, asked: (
            edit[0],
            {edit[1]: path(project), edit[2]: asked.old, edit[3]: asked.new},
        ),
        lambda _, asked: (run[0], {run[1]: asked.command, **more}),
    )


def _bin(place: Place, package: str, path: str) -> str:
    return str(place.installed / "node_modules" / package / path)


# Claude Code --------------------------------------------------------------------------------------

CLAUDE_HANDS = _hands(
    ("Read", "file_path"),
    ("Edit", "file_path", "old_string", "new_string"),
    ("Bash", "command"),
    is_absolute=True,
    description="Run the program",
)


def _claude(place: Place, says: str, goes_on: bool) -> list[str]:
    binary = _bin(place, "@anthropic-ai/claude-code", "bin/claude.exe")
    allowed = ["--permission-mode", "acceptEdits", "--allowedTools", "Read,Edit,Bash"]
    return [binary, *(["--continue"] if goes_on else []), *allowed, "-p", says]


# Codex --------------------------------------------------------------------------------------------


def _replace(old: str, new: str) -> str:
    """Write a command that replaces a line."""
    code = f"import pathlib; p = pathlib.Path({FILE!r}); "
    code += f"p.write_text(p.read_text().replace({old!r}, {new!r}))"
    return f'python3 -c "{code}"'


CODEX_HANDS = Hands(
    lambda *_: ("exec_command", {"cmd": f"cat {FILE}"}),
    lambda _, asked: ("exec_command", {"cmd": _replace(asked.old, asked.new)}),
    lambda _, asked: ("exec_command", {"cmd": asked.command}),
)


def _codex(place: Place, says: str, goes_on: bool) -> list[str]:
    binary = _bin(place, "@openai/codex", "bin/codex.js")
    free = "--dangerously-bypass-approvals-and-sandbox"
    resume = ["resume", "--last"] if goes_on else []
    return ["node", binary, "exec", "--skip-git-repo-check", free, *resume, says]


# OpenCode -----------------------------------------------------------------------------------------


OPENCODE_HANDS = _hands(
    ("read", "filePath"),
    ("edit", "filePath", "oldString", "newString"),
    ("bash", "command"),
    is_absolute=True,
    description="Run the program",
)


def _opencode(place: Place, says: str, goes_on: bool) -> list[str]:
    binary = _bin(place, "opencode-ai", "bin/opencode.exe")
    return [binary, "run", *(["--continue"] if goes_on else []), says]


# Pi -----------------------------------------------------------------------------------------------


PI_HANDS = Hands(
    lambda *_: ("read", {"path": FILE}),
    lambda _, asked: (
        "edit",
        {"path": FILE, "edits": [{"oldText": asked.old, "newText": asked.new}]},
    ),
    lambda _, asked: ("bash", {"command": asked.command}),
)


def _pi(place: Place, says: str, goes_on: bool) -> list[str]:
    binary = _bin(place, "@mariozechner/pi-coding-agent", "dist/cli.js")
    chosen = ["--offline", "--provider", "kvcellar", "--model", "local"]
    return ["node", binary, *chosen, *(["--continue"] if goes_on else []), "-p", says]


# Continue -----------------------------------------------------------------------------------------


CONTINUE_HANDS = _hands(
    ("Read", "filepath"),
    ("Edit", "file_path", "old_string", "new_string"),
    ("Bash", "command"),
    is_absolute=True,
)


def _continue(place: Place, says: str, goes_on: bool) -> list[str]:
    binary = _bin(place, "@continuedev/cli", "dist/cn.js")
    config = ["--config", str(place.home / ".continue" / "config.yaml"), "--auto"]
    return ["node", binary, *config, *(["--resume"] if goes_on else []), "-p", says]


# Cline --------------------------------------------------------------------------------------------


CLINE_HANDS = Hands(
    lambda project, _: ("read_files", {"files": [{"path": str(project / FILE)}]}),
    lambda project, asked: (
        "editor",
        {"path": str(project / FILE), "old_text": asked.old, "new_text": asked.new},
    ),
    lambda _, asked: ("run_commands", {"commands": [asked.command]}),
)


def _cline(place: Place, says: str, goes_on: bool) -> list[str]:
    binary = ["node", _bin(place, "cline", "bin/cline")]
    data = str(place.home / "cline")
    return [*binary, "--data-dir", data, "--auto-approve", "true", says]


def cline_account(place: Place) -> list[str]:
    """Return how Cline is told of the server."""
    return ["auth", *["-p", "openai", "-k", "none", "-m", "local", "-b"], f"{place.url}/v1"]


def _cline_prepare(place: Place) -> None:
    command = ["node", _bin(place, "cline", "bin/cline"), *cline_account(place)]
    place.run([*command, "--data-dir", str(place.home / "cline")])


# Qwen Code ----------------------------------------------------------------------------------------


QWEN_HANDS = _hands(
    ("read_file", "file_path"),
    ("edit", "file_path", "old_string", "new_string"),
    ("run_shell_command", "command"),
    is_absolute=True,
    is_background=False,
)


def _qwen(place: Place, says: str, goes_on: bool) -> list[str]:
    binary = _bin(place, "@qwen-code/qwen-code", "cli-entry.js")
    return ["node", binary, "--yolo", *(["--continue"] if goes_on else []), says]


# Programs -----------------------------------------------------------------------------------------

PROGRAM_HANDS = _hands(
    ("read_file", "path"), ("edit_file", "path", "old", "new"), ("run_command", "command")
)


def _program(name: str) -> CommandFn:
    """Run one of the programs beside this file, which plays the whole session."""

    def command(place: Place, says: str, goes_on: bool) -> list[str]:
        if name.endswith(".py"):
            return [str(place.installed / "bin" / "python"), str(PROGRAMS / name), place.url, says]
        beside = shutil.copy(PROGRAMS / name, place.installed)  # of its packages, or none is found
        return ["node", str(beside), place.url, says]

    return command


def _llm(place: Place, says: str, goes_on: bool) -> list[str]:
    tools = ["--functions", str(PROGRAMS / "llm_tools.py"), "--chain-limit", "8"]
    binary = str(place.installed / "bin" / "llm")
    return [binary, "-m", "local", *tools, *(["--continue"] if goes_on else []), says]


def _aider(place: Place, says: str, goes_on: bool) -> list[str]:
    options = ["--no-git", "--yes-always", "--no-pretty", "--no-fancy-input"]
    return [str(place.installed / "bin" / "aider"), *options, "--no-show-release-notes", FILE]


def _llm_key(place: Place) -> None:
    place.run([str(place.installed / "bin" / "llm"), "keys", "set", "kvcellar", "--value", "none"])


CLIENTS: dict[str, Client] = {
    "claude-code": Client({"@anthropic-ai/claude-code": "2.1.332"}, CLAUDE_HANDS, _claude),
    "codex": Client({"@openai/codex": "0.171.0"}, CODEX_HANDS, _codex),
    "opencode": Client({"opencode-ai": "1.18.33"}, OPENCODE_HANDS, _opencode),
    "pi": Client({"@mariozechner/pi-coding-agent": "0.73.1"}, PI_HANDS, _pi),
    "continue": Client({"@continuedev/cli": "1.5.47"}, CONTINUE_HANDS, _continue),
    "cline": Client({"cline": "3.0.65"}, CLINE_HANDS, _cline, _cline_prepare),
    "qwen-code": Client({"@qwen-code/qwen-code": "0.24.4"}, QWEN_HANDS, _qwen),
    "aider": Client({"aider-chat": "0.86.2"}, Patches(), _aider, is_npm=False),
    "llm": Client({"llm": "0.36"}, PROGRAM_HANDS, _llm, _llm_key, is_npm=False),
    "claude-sdk": Client(
        {"claude-agent-sdk": "0.2.189"},
        CLAUDE_HANDS,
        _program("claude_sdk.py"),
        takes_all=True,
        is_npm=False,
    ),
    "langchain": Client(
        {"langchain": "1.5.2", "langchain-openai": "1.7.4"},
        PROGRAM_HANDS,
        _program("langchain_agent.py"),
        takes_all=True,
        is_npm=False,
    ),
    "llamaindex": Client(
        {"llama-index-core": "0.14.25", "llama-index-llms-openai-like": "0.8.1"},
        PROGRAM_HANDS,
        _program("llamaindex_agent.py"),
        takes_all=True,
        is_npm=False,
    ),
    "anthropic": Client(
        {"anthropic": "2.12.0"},
        PROGRAM_HANDS,
        _program("anthropic_runner.py"),
        takes_all=True,
        is_npm=False,
    ),
    "openai-agents": Client(
        {"openai-agents": "0.24.0", "openai": "3.57.0"},
        PROGRAM_HANDS,
        _program("openai_agent.py"),
        takes_all=True,
        is_npm=False,
    ),
    "litellm": Client(
        {"litellm": "1.110.2"},
        PROGRAM_HANDS,
        _program("litellm_agent.py"),
        takes_all=True,
        is_npm=False,
    ),
    "ai-sdk": Client(
        {"ai": "7.0.173", "@ai-sdk/openai-compatible": "3.0.92", "zod": "4.6.7"},
        PROGRAM_HANDS,
        _program("ai_sdk.mjs"),
        takes_all=True,
    ),
    "ollama": Client(
        {"ollama": "0.6.3"},
        PROGRAM_HANDS,
        _program("ollama_agent.py"),
        takes_all=True,
        is_npm=False,
    ),
}
"""All that are run, by the names of their pages in docs/clients/."""
