"""Commands beside a running server of their store: they ask it, and load nothing."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.cli.store.attached import RunningServer
from kvcellar.home import SERVER_LOCK
from kvcellar.server.commands.presence import Presence, find_server, held_store
from kvcellar.version import __version__
from tests.server.live import Live, serving
from tests.server.scripted import scripted_host

TOKEN = "of-the-folder"
GREEDY = ("--temperature", "0", "--max-tokens", "6")


@contextmanager
def served(folder: Path, **more: Any) -> Iterator[Live]:
    with (
        serving(folder / "store", folder_token=TOKEN, **more) as live,
        held_store(folder / "store", live.url, TOKEN),
    ):
        yield live


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    before = os.environ.get("KVCELLAR_HOME")
    os.environ["KVCELLAR_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["KVCELLAR_HOME"]
    else:
        os.environ["KVCELLAR_HOME"] = before


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Live]:
    loading = {"kv_dtype": "float32", "memory": None, "shared": None}
    with served(home, models={"loading": loading}) as live:
        yield live


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's log does not come to the standard error of commands of the same process."""
    monkeypatch.setattr(logging.getLogger("kvcellar.server"), "handlers", [])


def run(*args: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def value_of(*args: str, stdin: str | None = None) -> Any:
    code, out, err = run(*args, "--json", stdin=stdin)
    assert (code, err) == (0, ""), err
    return json.loads(out)


@pytest.fixture
def asks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when the command opens a model or a store itself in place of asking the server."""

    def refuse(*args: Any, **more: Any) -> Any:
        raise AssertionError("this is the server's to do")

    for where in (
        "talk.generate.bound_model",
        "talk.chat.bound_model",
        "agents.agent_store.opened_agents",
    ):
        monkeypatch.setattr(f"kvcellar.cli.{where}", refuse)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "stdin"),
    [
        (("generate", "-p", "import os", *GREEDY), ""),
        (("generate", "-p", "import os", "--json", *GREEDY), ""),
        (("chat", *GREEDY), "Hello!\nThanks!\n"),
        (("agents", "generate", "quick", "x = ", "--create", *GREEDY), ""),
        (("agents", "chat", "quick", *GREEDY), "Hello!\n"),
        (("agents", "list"), ""),
        (("agents", "fork", "quick"), ""),
    ],
)
def test_a_command_beside_a_server_imports_no_runtime(
    server: Live, args: tuple[str, ...], stdin: str
) -> None:
    program = (
        "import sys; from kvcellar.cli import app; "
        "app(sys.argv[1:], standalone_mode=False); "
        "print('loaded', sorted({'torch', 'transformers', 'fastapi'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", program, *args]
    if args[:2] == ("agents", "fork"):
        run("agents", "generate", "quick", "x = ", "--create", *GREEDY)
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("loaded []\n"), done.stdout


@pytest.mark.usefixtures("server", "asks_only")
def test_every_verb_of_agents_goes_to_the_server() -> None:
    assert value_of("agents", "create", "all", "--system", "Be brief.")["state"] == "idle"
    first = value_of("agents", "generate", "all", "x = ", *GREEDY)
    assert first["id"] == "all" and first["usage"]["prompt_tokens"]
    assert value_of("agents", "generate", "all", "y = ", *GREEDY)["usage"]["cached_tokens"] > 10
    assert value_of("agents", "why", "all") is None
    assert value_of("agents", "fork", "all", "twin", "--turn", "1")["parent"] == "all"
    assert "forked from all" in run("agents", "list")[1]
    assert value_of("agents", "rewind", "all")["n_turns"] == 1
    assert value_of("agents", "undo", "all")[0]["n_turns"] == 2
    assert value_of("agents", "pause", "all")["state"] == "paused"
    back = value_of("agents", "resume", "all")
    assert back["restored_tokens"] <= back["n_tokens"]
    assert value_of("agents", "keep", "all")["deleted"] == []
    assert value_of("agents", "show", "all")["messages"][0]["role"] == "system"
    assert value_of("agents", "delete", "twin") == {"deleted": ["twin"]}
    assert {one["agent_id"] for one in value_of("agents", "dropped")} >= {"twin"}
    assert value_of("agents", "dropped", "--empty")["deleted"] >= 1
    (line,) = run("agents", "chat", "all", "--json", *GREEDY, stdin="Hello!\n")[1].splitlines()
    assert json.loads(line)["id"] == "all"


def test_agents_of_the_command_line_are_those_of_the_server(server: Live) -> None:
    value_of("agents", "create", "both")
    said = server.post("/v1/agents/both/generate", {"text": "x = ", "max_tokens": 4})
    assert value_of("agents", "show", "both")["messages"][-1]["content"] == said["text"]
    value_of("agents", "generate", "both", "y = ", *GREEDY)
    assert len(server.get("/v1/agents/both")["turns"]) == 2


@pytest.mark.usefixtures("server")
def test_answers_and_what_json_has_are_the_same_as_alone() -> None:
    for args in (
        ("generate", "-p", "import os\n", "--stop", "zzz", *GREEDY),
        ("generate", "-p", "import os\n", "--chat", "--system", "Be brief.", *GREEDY),
        ("chat", *GREEDY),
    ):
        stdin = "Hello!\n" if args[0] == "chat" else None
        there = value_of(*args, stdin=stdin)
        here = value_of(*args, "--alone", "--dtype", "float32", stdin=stdin)
        assert here.keys() == there.keys() and here["usage"].keys() == there["usage"].keys()
        for name in here.keys() - {"usage"}:
            assert here[name] == there[name], name
        assert here["usage"]["prompt_tokens"] == there["usage"]["prompt_tokens"]
        assert run(*args, stdin=stdin)[1] == here["text"] + "\n"


@pytest.mark.usefixtures("server")
def test_errors_and_exit_codes_are_the_same_as_alone() -> None:
    for args in (
        ("agents", "generate", "nobody", "Hello!"),
        ("agents", "show", "nobody"),
        ("agents", "create", "no/name"),
        ("generate", "-p", "x", "--temperature", "-1"),
        ("generate", "-p", ""),
        ("chat", "--top-p", "7"),
    ):
        there = run(*args, stdin="")
        assert there == run(*args, "--alone", stdin=""), args
        assert there[0] == 2 and there[2].startswith("error: ")


@pytest.mark.usefixtures("server")
def test_what_the_server_lacks_is_named_and_the_command_does_it_alone() -> None:
    args = ("generate", "-p", "import os", *GREEDY, "--json")
    code, out, err = run(*args, "--kv-dtype", "int8")
    assert code == 0 and json.loads(out)["text"]
    assert "was started without --kv-dtype int8; this is done without it" in err
    code, out, err = run(*args, "--memory", "2GB", "--cache", "tree")
    assert "without --cache tree, --memory 2GB; this is done without it" in err
    code, out, err = run(*args, "--kv-dtype", "float32")  # as the server has it
    assert (code, err) == (0, "")
    code, out, err = run("generate", "no-such-model", "-p", "x")
    assert "does not serve no-such-model (but demo)" in err and code == 2


@pytest.mark.usefixtures("server", "asks_only")
def test_a_chat_with_the_server_goes_on_goes_back_and_begins_anew() -> None:
    stdin = "one\ntwo\n/undo\ntwo\n/reset\none\n"
    code, out, err = run("chat", "--json", *GREEDY, stdin=stdin)
    assert (code, err) == (0, "")
    first, second, again, anew = map(json.loads, out.splitlines())
    assert second["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert again["token_ids"] == second["token_ids"]
    assert anew["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]


def test_who_is_interrupted_ends_the_answer_on_the_server_too(server: Live, home: Path) -> None:
    presence = find_server(home / "store")
    assert presence is not None
    asked = RunningServer(home / "store", presence)

    def interrupt(event: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    sampling = {"usual": {}, "named": {"max_tokens": 100_000, "ignore_eos": True}}
    with pytest.raises(KeyboardInterrupt):
        asked.ask("complete", interrupt, model="demo", prompt="import os", sampling=sampling)
    server.until(server.is_still, "the end of the answer")


# Who is asked -------------------------------------------------------------------------------------


def test_a_server_is_found_while_it_lives_and_its_file_is_its_owners(tmp_path: Path) -> None:
    assert find_server(tmp_path) is None
    with held_store(tmp_path, "http://0.0.0.0:1", "secret"):
        found = find_server(tmp_path)
        assert found is not None and found.reached_at == "http://127.0.0.1:1"
        assert "secret" not in repr(found)
        assert stat.S_IMODE((tmp_path / SERVER_LOCK).stat().st_mode) == 0o600
    assert find_server(tmp_path) is None
    assert (tmp_path / SERVER_LOCK).read_bytes() == b""


def written(folder: Path, **other: Any) -> None:
    with held_store(folder, "http://127.0.0.1:1", "secret"):
        lines = (folder / SERVER_LOCK).read_text()
    value = json.loads(lines) | other
    (folder / SERVER_LOCK).write_text("\n" + json.dumps(value))


def test_what_a_killed_server_left_behind_is_known_by_its_lock(tmp_path: Path) -> None:
    written(tmp_path)  # its process lives, and holds no lock
    assert find_server(tmp_path) is None
    with held_store(tmp_path, "http://127.0.0.1:2", "secret"):
        pass


def test_a_server_of_another_machine_or_a_process_that_is_gone_is_not_asked(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with held_store(tmp_path, "http://127.0.0.1:1", "secret"):
        for other in ({"node": "elsewhere"}, {"pid": ended.pid}, {"token": ""}):
            own = (tmp_path / SERVER_LOCK).read_text()
            (tmp_path / SERVER_LOCK).write_text("\n" + json.dumps(json.loads(own) | other))
            assert find_server(tmp_path) is None, other
            (tmp_path / SERVER_LOCK).write_text(own)
        assert find_server(tmp_path) is not None
        (tmp_path / SERVER_LOCK).write_text("\nno JSON")
        assert find_server(tmp_path) is None


def test_a_server_of_another_version_or_that_does_not_answer_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    args = ("agents", "list", "--json")
    assert run(*args) == (0, "[]\n", "")
    with held_store(tmp_path / "store", "http://127.0.0.1:1", "secret"):
        code, out, err = run(*args)
        assert (code, out) == (0, "[]\n") and "does not answer" in err
        assert run(*args, "--alone") == (0, "[]\n", "")
        monkeypatch.setattr("kvcellar.cli.store.attached.__version__", "9")
        assert f"is of version {__version__}, and this is 9" in run(*args)[2]


def test_a_server_that_has_gone_in_the_middle_is_an_error_that_says_the_way_out(
    tmp_path: Path,
) -> None:
    from kvcellar.errors import EngineClosedError

    gone = Presence("http://127.0.0.1:1", 1, "", __version__, "secret")
    with pytest.raises(EngineClosedError, match=r"does not answer .* by --alone"):
        RunningServer(tmp_path, gone).ask("list")


# Thoughts -----------------------------------------------------------------------------------------

THOUGHT = "<think>\nRain is wet.\n</think>\n\nIt rains."


@pytest.fixture
def thinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A server of a model that thinks, and what a command prints that asks it."""
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    with served(
        tmp_path,
        load=lambda path, progress: scripted_host(lambda n: THOUGHT),
        offered={"scripted": "scripted"},
    ):
        yield run


@pytest.mark.parametrize(
    ("args", "stdin"),
    [
        (("generate", "scripted", "-p", "Hello"), None),
        (("chat", "scripted"), "Hello\n"),
        (("agents", "generate", "a", "Hello", "--create", "--model", "scripted"), None),
        (("agents", "chat", "a", "--model", "scripted"), "Hello\n"),
    ],
)
def test_what_a_model_thinks_is_apart_and_not_in_a_pipe(
    thinks: Callable[..., Any], args: tuple[str, ...], stdin: str | None
) -> None:
    assert thinks(*args, stdin=stdin) == (0, "It rains.\n", "")
    code, out, _ = thinks(*args, "--json", stdin=stdin)
    value = json.loads(out)
    assert code == 0
    assert (value["text"], value["reasoning"]) == ("It rains.", "Rain is wet.")


@pytest.mark.parametrize(
    ("args", "stdin"),
    [
        (("generate", "-p", "Hello"), None),
        (("chat",), "Hello\n"),
        (("agents", "generate", "new", "Hello", "--create"), None),
        (("agents", "chat", "newer"), "Hello\n"),
    ],
)
def test_who_names_no_model_is_answered_by_the_servers_first(
    thinks: Callable[..., Any], args: tuple[str, ...], stdin: str | None
) -> None:
    assert thinks(*args, stdin=stdin) == (0, "It rains.\n", "")
    thinks("agents", "create", "made")
    assert {one["model"] for one in value_of("agents", "list")} == {"scripted"}


def test_an_agents_thought_is_kept_apart_as_other_clients_send_it_back(
    thinks: Callable[..., Any],
) -> None:
    thinks("agents", "generate", "a", "Hello", "--create", "--model", "scripted")
    answer = value_of("agents", "show", "a")["messages"][-1]
    assert (answer["content"], answer["reasoning_content"]) == ("It rains.", "Rain is wet.")
    assert value_of("agents", "generate", "a", "Again")["text"] == "It rains."
