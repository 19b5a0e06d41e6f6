"""The script that runs clients against the server: it plays a session, and sees what fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tools.scripts import load_script

script: Any = load_script("run_clients")
session: Any = load_script("clients.session")
known: Any = load_script("clients.known")
scripted: Any = load_script("clients.scripted")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"} for argument in arguments},
                "required": list(arguments),
                "additionalProperties": False,
            },
        },
    }
    for name, arguments in (
        ("read_file", ("path",)),
        ("edit_file", ("path", "old", "new")),
        ("run_command", ("command",)),
    )
]


def play(url: str, project: Path, requests: list[Any]) -> str:
    """Work as a client does that keeps all it was told; return the last answer's text."""
    messages: list[dict[str, Any]] = []
    for request in requests:
        messages.append({"role": "user", "content": request.text})
        while messages[-1]["role"] != "assistant":
            body = {"messages": messages, "tools": TOOLS, "max_tokens": 400}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
            messages.append(answer.json()["choices"][0]["message"])
            for call in messages[-1].get("tool_calls") or ():
                name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
                result = use(project, name, given)
                said = {"role": "tool", "tool_call_id": call["id"], "content": result}
                messages.append(said)
    return messages[-1]["content"]


def use(project: Path, name: str, given: dict[str, str]) -> str:
    """Use a tool; return what the model is told."""
    if name == "run_command":
        command = given["command"].replace("python3", sys.executable)
        return subprocess.check_output(command, shell=True, cwd=project, text=True)
    file = project / given["path"]
    if name == "edit_file":
        file.write_text(file.read_text().replace(given["old"], given["new"]))
    return file.read_text()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session of two of its requests, which are enough to see that it works."""
    folder = tmp_path_factory.mktemp("session")
    model = scripted.make_model(folder / "model", keeps_thoughts=False)
    (folder / session.FILE).write_text(session.PROJECT)
    client = known.CLIENTS["langchain"]

    def says(text: str) -> Any:
        return client.hands.answer(text, scripted.ASSISTANT, folder)

    with pytest.MonkeyPatch.context() as patch:
        for module in (session, script):
            patch.setattr(module, "REQUESTS", session.REQUESTS[:2])
        with scripted.serving(model, folder / "store", says) as server:
            said = play(server.url, folder, session.REQUESTS)
            done = session.finished(folder)
            n_computed = script.counted(server, "kvcellar_engine_computed_tokens_total")
        yield script.Session("x", client, "dropped", server, said, done, n_computed, 1.0)


def test_a_session_is_played_to_its_end(played: Any) -> None:
    assert played.is_finished and len(played.turns) == 8 and played.problems == []
    assert [bool(asked.said.call) for asked in played.turns] == [True, True, True, False] * 2
    assert "langchain 1.5.2 | dropped | 8 " in played.row()
    assert played.server.recorder.heard[0].path == "/v1/chat/completions"


def test_what_goes_wrong_in_a_session_is_said(played: Any) -> None:
    assert "not changed" in replace(played, is_finished=False).problems[0]
    assert "does not show the last answer" in replace(played, printed="?").problems[0]
    assert "are told" in replace(played, n_computed=10**6).problems[0]
    few = scripted.Scripted("", scripted.Recorder(None), [])
    assert "0 answers of 8" in replace(played, server=few).problems[0]
    few.recorder.heard.append(scripted.Heard("POST", "/v1/x", {}, status=404))
    assert "POST /v1/x was answered 404" in replace(played, server=few).problems[0]


def test_what_is_computed_again_fails_a_session(played: Any) -> None:
    before = [asked.cached for asked in played.turns]
    for asked in played.turns[1:]:
        asked.cached //= 2
    try:
        said = " ".join(replace(played, thoughts="kept").problems)
        assert "of what could be came from the cache" in said
        assert "of the turn before came from the cache" in said
    finally:
        for asked, cached in zip(played.turns, before, strict=True):
            asked.cached = cached


def test_a_call_that_the_grammar_refuses_is_said() -> None:
    class Nothing:
        is_complete = False

        def allowed(self) -> list[bool]:
            return [False] * 9

    troubles: list[str] = []
    guide = scripted.Says([3, 4, 5], 9, Nothing(), troubles)
    assert guide.allowed().nonzero()[0].tolist() == [3]
    guide.accept(3)
    assert troubles == ["the answer's grammar refuses its token 0"] and guide.inner is None
    guide.accept(4)
    assert not guide.is_complete and len(troubles) == 1


def test_an_aside_of_a_client_is_no_turn() -> None:
    hands = known.CLIENTS["pi"].hands
    title = f"Make a title of: {session.REQUESTS[0].text}<|assistant|>"
    assert hands.answer(title, scripted.ASSISTANT, Path()) is session.ASIDE
    told = f'{{"name": "read"}} {session.REQUESTS[1].text}<|assistant|>'
    said = hands.answer(told, scripted.ASSISTANT, Path())
    assert said.call == ("read", {"path": session.FILE})


@pytest.mark.parametrize("name", known.CLIENTS)
def test_the_page_of_a_client_is_what_is_run(name: str, tmp_path: Path) -> None:
    page, client = (known.PAGES / f"{name}.md").read_text(), known.CLIENTS[name]
    assert all(f"`{package}` {version}" in page for package, version in client.packages.items())
    assert f"[{name}]({name}.md)" in (known.PAGES / "README.md").read_text()
    if client.takes_all:
        (shown,) = re.findall(r"```(?:python|js)\n(.*?)```", page, re.DOTALL)
        (path,) = re.findall(r"`tools/clients/programs/(\w+\.\w+)`", page)
        place = known.Place(Path("/x"), tmp_path, known.SHOWN_URL)
        assert Path(client.command(place, "[]", False)[1]).name == path
        program = (known.PROGRAMS / path).read_text().splitlines()
        lines = [line.strip() for line in program]
        assert not {line.strip() for line in shown.splitlines()}.difference(lines)
    elif name == "cline":
        place = known.Place(Path("/x"), Path("/y"), known.SHOWN_URL)
        (command,) = re.findall(r"```sh\ncline (.*)\n```", page)
        assert command.split() == known.cline_account(place)
    else:
        files = known.files_of(name, "http://127.0.0.1:1234")
        text = "".join(files.values())
        assert files and known.SHOWN_URL not in text and "http://127.0.0.1:1234" in text
