"""Chats: what is one message, commands in a pipe, and thoughts at a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.cli.common import terminal
from kvcellar.cli.common.terminal import ShownAnswer
from kvcellar.cli.talk import talking
from kvcellar.cli.talk.session import Bound
from tests.server.scripted import scripted_host

THOUGHT = "<think>\nRain is wet.\n</think>\n\nIt rains."


def run(*args: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("one\n\n  two \n", ["one", "", "two"]),
        ('"""\none\n  two\n"""\nthree\n', ["one\n  two", "three"]),
        ('"""one\ntwo"""\n', ["one\ntwo"]),
        ('"""one"""\n"""\n"""\n', ["one", ""]),
        ("one\\\ntwo\\\nthree\nfour\n", ["one\ntwo\nthree", "four"]),
        ('"""\nnobody closes it', ["nobody closes it"]),
        ("nobody goes on\\\n", ["nobody goes on\\"]),
        ("C:\\\\ \n", ["C:\\\\"]),
    ],
)
def test_a_message_is_a_line_or_what_is_held_together(
    typed: str, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert list(talking._piped()) == messages


# A model of this process that thinks --------------------------------------------------------------


@pytest.fixture
def thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def bound(*args: Any, **more: Any) -> Iterator[Bound]:
        host = scripted_host(lambda n: THOUGHT)
        model = SimpleNamespace(
            name="scripted",
            tokenizer=host.tokenizer,
            pictures=None,
            sampling={},
            eos_token_ids=host.eos_token_ids,
        )
        yield Bound(model, host.engine.cache, host.engine.runner, None)  # type: ignore[arg-type]

    for where in ("generate", "chat"):
        monkeypatch.setattr(f"kvcellar.cli.talk.{where}.bound_model", bound)


@pytest.mark.usefixtures("thinks")
def test_what_a_model_thinks_is_apart_and_not_in_a_pipe() -> None:
    for args, stdin in (
        (("generate", "scripted", "-p", "Hello"), None),
        (("chat", "scripted"), "Hello\n"),
    ):
        assert run(*args, stdin=stdin) == (0, "It rains.\n", "")
        code, out, _ = run(*args, "--json", stdin=stdin)
        value = json.loads(out)
        assert code == 0 and value["usage"]["completion_tokens"] == len(value["token_ids"])
        assert (value["text"], value["reasoning"]) == ("It rains.", "Rain is wet.")


@pytest.mark.usefixtures("thinks")
def test_what_is_continued_as_it_is_has_no_thoughts() -> None:
    code, out, err = run("generate", "scripted", "-p", "<|im_start|>assistant\n", "--raw")
    assert (code, out, err) == (0, THOUGHT + "\n", "")


@pytest.mark.usefixtures("thinks")
def test_help_is_printed_in_a_pipe_too_and_beside_the_answers() -> None:
    code, out, err = run("chat", "scripted", stdin="/help\nHello\n")
    assert (code, out) == (0, "It rains.\n")
    assert err.startswith("/image FILE a picture that goes with the next message")
    assert "\n/undo       take back the last turn\n" in err and "/help       this list\n" in err


@pytest.mark.usefixtures("thinks")
def test_several_lines_with_a_slash_in_front_are_a_message_and_no_command() -> None:
    code, out, err = run("chat", "scripted", stdin='"""/usr/bin\n/usr/lib"""\n')
    assert (code, out, err) == (0, "It rains.\n", "")


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"TERM": "xterm"}, "\x1b[2mRain is wet.\x1b[0m\n\nIt rains."),
        ({"TERM": "dumb"}, "(thinks)\nRain is wet.\n(answers)\nIt rains."),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "(thinks)\nRain is wet.\n(answers)\nIt rains."),
    ],
)
def test_at_a_terminal_thoughts_are_dim_or_marked(
    environment: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    answer = ShownAnswer(lambda share, what: None, is_quiet=False)
    for event in ({"thought": "Rain "}, {"thought": "is wet."}, {"text": "It rains."}):
        answer(event)
    assert screen.getvalue() == shown


def test_a_thought_that_is_cut_leaves_no_terminal_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", screen)
    with pytest.raises(KeyboardInterrupt), terminal.shown_answer("reading", is_quiet=False) as tell:
        tell({"thought": "Rain"})
        raise KeyboardInterrupt
    assert screen.getvalue() == "\x1b[2mRain\x1b[0m\n\n"
