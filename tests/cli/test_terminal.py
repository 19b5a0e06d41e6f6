"""What a person sees: the same commands in a pseudo-terminal, and in a pipe whose reader leaves."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcellar.cli.common import terminal as cli_terminal
from kvcellar.cli.common.terminal import progress_bar, progress_lines

pty = pytest.importorskip("pty")
pytest.importorskip("torch")

KVCELLAR = [sys.executable, "-m", "kvcellar"]
TIMEOUT_S = 300.0


class Terminal:
    """A command in a terminal: what it wrote so far, and keys for it."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._raw = b""

    @property
    def text(self) -> str:
        """All output without colours and cursor movements."""
        text = self._raw.decode(errors="replace").replace("\r\n", "\n")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while words not in self.text:
            assert time.monotonic() < deadline, f"no {words!r} in {self.text!r}"
            self._read(0.2)

    def wait_until(self, is_so: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so(self.text):
            assert time.monotonic() < deadline, f"it did not come: {self.text!r}"
            self._read(0.2)

    def wait_for_prompt(self) -> None:
        self.wait_until(lambda text: text.endswith("> "))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """Send what Ctrl-C sends, once the command has done what it does about its own output.

        CPython's readline shows a prompt or a key before it waits for the next key, and a signal
        in between is seen with that key.
        """
        self._read(0.0)
        time.sleep(0.5)
        self.process.send_signal(signal.SIGINT)

    def ends_with(self) -> int:
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running: {self.text!r}"
            self._read(0.2)
        self._read(0.2)
        return self.process.returncode

    def _read(self, timeout_s: float) -> None:
        if select.select([self._master], [], [], timeout_s)[0]:
            try:
                self._raw += os.read(self._master, 65536)
            except OSError:  # the other end is closed
                time.sleep(0.05)


@contextmanager
def terminal(*args: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*KVCELLAR, *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        # As a terminal starts it: where the tests run in the background, Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.slow
def test_a_terminal_sees_progress_reuse_and_commands() -> None:
    with terminal("chat", "--seed", "1", "--max-tokens", "12") as screen:
        screen.wait_for("starting")
        screen.wait_for("contiguous cache of 4096 tokens")
        screen.type("Hello\n")
        screen.wait_for(" tokens/s")
        screen.type("And more\n")
        screen.wait_for("reused ")
        screen.type("/undo\n")
        screen.wait_for("took back: And more")
        screen.type("/help\n")
        screen.wait_for("/undo       take back the last turn")
        screen.wait_for("at an empty prompt it leaves")
        screen.type("/quit\n")
        assert screen.ends_with() == 0
        assert "Traceback" not in screen.text


@pytest.mark.slow
def test_what_is_pasted_is_one_turn_and_so_is_what_quotes_or_backslashes_hold_together() -> None:
    typed = (
        "\x1b[200~one\rtwo\rthree\x1b[201~\n",
        '"""one\ntwo\nthree"""\n',
        "one\\\ntwo\\\nthree\n",
    )
    with terminal("chat", "--seed", "1", "--max-tokens", "4") as screen:
        screen.wait_for("/help")
        for n, keys in enumerate(typed, 1):
            screen.wait_for_prompt()
            screen.type(keys)
            screen.wait_until(lambda text, n=n: text.count("max_tokens 4 reached") == n)
            screen.wait_for_prompt()
            screen.type("/undo\n")
            screen.wait_until(lambda text, n=n: text.count("took back: one\ntwo\nthree") == n)
        screen.wait_for_prompt()
        screen.type("\x04")
        assert screen.ends_with() == 0
        assert "this chat is not kept; `kvcellar agents chat NAME --model demo`" in screen.text


@pytest.mark.slow
def test_ctrl_c_clears_the_line_then_leaves_and_ends_no_chat_in_an_answer(tmp_path: Path) -> None:
    args = ("agents", "chat", "friend", "--store", str(tmp_path), "--max-tokens", "4000")
    endless = ("--temperature", "0", "--repetition-penalty", "0.5")  # what was said is said again
    with terminal(*args, *endless) as screen:
        screen.wait_for("> ")
        screen.wait_for_prompt()
        screen.type("Hello\n")
        screen.wait_for("> Hello\n")
        screen.wait_until(lambda text: len(text.partition("> Hello\n")[2]) > 1000)
        screen.interrupt()
        screen.wait_for("stopped here")
        screen.wait_for_prompt()
        screen.type("never mind")
        screen.wait_for("never mind")
        screen.interrupt()
        screen.wait_for("Ctrl-C again leaves")
        screen.wait_for_prompt()
        screen.type("/help\n")
        screen.wait_for("/undo       take back the last turn")
        screen.wait_for_prompt()
        screen.interrupt()
        screen.wait_until(lambda text: text.count("Ctrl-C again leaves") == 2)
        screen.wait_for_prompt()
        screen.interrupt()
        assert screen.ends_with() == 0
        assert "`kvcellar agents chat friend` goes on with it" in screen.text
        assert "Traceback" not in screen.text


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_ends_without_a_traceback() -> None:
    with terminal("generate", "-p", "import os", "--max-tokens", "4000") as screen:
        screen.wait_for("import")
        screen.interrupt()
        assert screen.ends_with() == 130
        assert "Traceback" not in screen.text


@pytest.mark.slow
def test_a_closed_pipe_is_silent() -> None:
    command = [*KVCELLAR, "generate", "-p", "import os", "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read().decode().splitlines()
        assert not [
            line for line in said if not re.match(r" *\d+% ", line)
        ]  # a slow load may say so
        assert process.wait(timeout=TIMEOUT_S) == 141


@pytest.mark.slow
def test_a_terminal_sees_long_saves_and_loads_go_on_and_a_pipe_no_bar_of_them(
    tmp_path: Path,
) -> None:
    store = ("--store", str(tmp_path / "store"))
    text = "def first(items):\n    return items[0]\n" * 60
    said = subprocess.run(
        [*KVCELLAR, "agents", "generate", "a", "-", "--create", "--max-tokens", "4", *store],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\r" not in said.stderr and "\x1b" not in said.stderr
    for verb, words in (
        (("pause", "a"), "saving"),
        (("resume", "a"), "loading"),
        (("export", "a", str(tmp_path / "a.kv")), "exporting"),
        (("import", str(tmp_path / "a.kv"), "b"), "verifying"),
    ):
        with terminal("agents", *verb, *store) as screen:
            screen.wait_for(words)
            assert screen.ends_with() == 0
            assert "Traceback" not in screen.text


def test_a_pipe_is_told_in_lines_what_takes_long_and_each_stage_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_terminal, "LINES_S", 0.02)
    with progress_bar("starting") as report:
        told = wait_for_lines(capsys, 1)
        report(0.4, "lowering")
        told += wait_for_lines(capsys, 1)
        report(0.5, "lowering")  # the same stage: told already
        time.sleep(0.1)
    assert (told + capsys.readouterr().err).splitlines() == ["  0% starting", " 40% lowering"]


def test_work_goes_on_where_nobody_can_be_told_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli_terminal, "LINES_S", 0.01)
    tried = threading.Event()

    def tell(fraction: float, stage: str) -> None:
        tried.set()
        raise BrokenPipeError

    with progress_lines("starting", tell=tell) as report:
        assert tried.wait(TIMEOUT_S)
        report(1.0, "ready")


def wait_for_lines(capsys: pytest.CaptureFixture[str], n: int) -> str:
    deadline, text = time.monotonic() + TIMEOUT_S, ""
    while text.count("\n") < n:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        text += capsys.readouterr().err
    return text
