"""Pictures on the command line and in Python: files that go before a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import kvcellar as kv
from kvcellar.cli import app
from kvcellar.cli.common.terminal import print_line
from kvcellar.cli.talk import chat, talking
from kvcellar.errors import ConfigError, KVCellarError, PictureError, PromptError
from kvcellar.hosting.given_pictures import reads_text_alone
from kvcellar.hosting.pictures import HostLooks
from kvcellar.models.picture_facts import text_alone
from tests.mmproj_files import make_gguf, write_mmproj
from tests.vision_checkpoints import make_picture, make_vision_checkpoint, make_vision_model

SHORT = ("--max-tokens", "4", "--temperature", "0", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_vision_checkpoint(tmp_path_factory.mktemp("seeing") / "model"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    names = []
    for seed in (1, 2):
        (tmp_path / f"{seed}.png").write_bytes(make_picture(seed=seed).data)
        names.append(str(tmp_path / f"{seed}.png"))
    return names


def run(*args: str, stdin: str | None = None, is_refused: bool = False) -> str:
    result = CliRunner().invoke(app, args, input=stdin)
    assert (result.exit_code == 0) != is_refused, result.output
    return result.stderr if is_refused else result.stdout


def test_a_picture_goes_with_a_prompt(model: str, files: list[str]) -> None:
    def generate(*images: str) -> dict:
        given = [part for image in images for part in ("--image", image)]
        return json.loads(run("generate", model, "-p", "What?", *given, *SHORT, "--json"))

    none, one, other, both = generate(), generate(files[0]), generate(files[1]), generate(*files)
    n, n_both = (value["usage"]["prompt_tokens"] for value in (one, both))
    assert none["usage"]["prompt_tokens"] < n < n_both
    assert other["usage"]["prompt_tokens"] == n
    assert len({tuple(value["token_ids"]) for value in (none, one, other, both)}) > 1


def test_a_picture_goes_with_what_is_said_in_a_chat(model: str, files: list[str]) -> None:
    typed = f"/image '{files[0]}'\nWhat?\nAnd?\n/image {files[1]}\n/image\nSo?\n"
    result = CliRunner().invoke(app, ["chat", model, *SHORT, "--json"], input=typed)
    assert result.exit_code == 0, result.output
    first, second, third = map(json.loads, result.stdout.splitlines())
    counts = [one["usage"]["prompt_tokens"] for one in (first, second, third)]
    assert counts[0] > 12 and counts == sorted(counts)
    assert second["usage"]["cached_tokens"] >= counts[0]


def test_a_pipe_that_names_no_picture_ends_before_it_is_answered_without(model: str) -> None:
    typed = "/image none.png\nWhat?\n"
    said = run("chat", model, *SHORT, "--json", stdin=typed, is_refused=True)
    assert "none.png" in said and "cannot be read" in said


def test_undo_gives_the_pictures_of_a_turn_back(model: str, files: list[str]) -> None:
    typed = f"/image {files[0]}\nWhat?\n/undo\n/image {files[1]}\nWhat?\n/undo\n/image\nWhat?\n"
    agents = ("agents", "chat", "viewer", "--model", model)
    for args in (("chat", model), agents):
        result = CliRunner().invoke(app, [*args, *SHORT, "--json"], input=typed)
        assert result.exit_code == 0, result.output
        one, both, none = map(json.loads, result.stdout.splitlines())
        n_one, n_both, n_none = (o["usage"]["prompt_tokens"] for o in (one, both, none))
        assert n_none + 12 < n_one and n_one + 12 < n_both
    message = json.loads(run("agents", "show", "viewer", "--json"))["messages"][0]
    assert "pictures" not in message
    last = CliRunner().invoke(app, [*agents, *SHORT], input="/undo\n/undo\n")
    assert last.exit_code == 0
    assert json.loads(run("agents", "show", "viewer", "--json"))["messages"] == []


class _Server:
    """A server that has a model, and keeps what was asked of it."""

    url = "http://127.0.0.1:1"

    def __init__(self, refuses: KVCellarError | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refuses = refuses

    def ask(self, verb: str, tell: Any = None, **given: Any) -> Any:
        if verb == "model":
            return {"name": "seeing", "has_template": True, "resumes": "", "weights": "none"} | {
                "sampling": {}
            }
        self.asked.append(given["messages"][-1])
        if self.refuses is not None and "images" in given["messages"][-1]:
            raise self.refuses
        return {"text": "yes", "reasoning": ""}


def _at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (talking, chat):
        monkeypatch.setattr(module, "is_interactive", lambda: True)
        monkeypatch.setattr(module, "print_note", print_line)


def _talked(server: Any, typed: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Type into a chat with a server as at a terminal."""
    _at_a_terminal(monkeypatch)
    monkeypatch.setattr(chat, "running_server", lambda *args, **more: (server, "seeing"))
    monkeypatch.setattr(chat, "show_end", lambda value: None)
    result = CliRunner().invoke(app, ["chat"], input=typed)
    assert result.exit_code == 0, result.output
    return result


def test_undo_says_which_pictures_go_with_the_next_message(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _Server()
    typed = f"/image {files[0]}\n/image {files[1]}\nWhat?\n/undo\nAnd so?\n/undo\n/image\nNo.\n"
    said = _talked(server, typed, monkeypatch).stderr
    assert "took back: What?; its 2 pictures go with the next message, /image leaves" in said
    assert [one["content"] for one in server.asked] == ["What?", "And so?", "No."]
    assert (
        server.asked[0]["images"] == server.asked[1]["images"] and "images" not in server.asked[2]
    )


@pytest.mark.parametrize(
    "refusal", [PictureError("it cannot be read"), PromptError("there is no room")]
)
def test_a_picture_that_is_refused_is_set_aside_and_text_goes_on(
    refusal: KVCellarError, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _Server(refusal)
    typed = f"/image {files[0]}\nWhat?\nThen text.\n/image again\nWhat?\n/image again\n"
    said = _talked(server, typed, monkeypatch).stderr
    assert "1 picture was set aside, and what you say next goes without it; /image again " in said
    assert ["images" in one for one in server.asked] == [True, False, True]
    assert said.count("1 picture goes with the next message") == 3


def test_a_picture_that_the_model_cannot_encode_leaves_no_turn_behind_it(
    model: str, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: HostLooks, name: str) -> Any:
        raise PictureError("the model cannot read it")

    monkeypatch.setattr(HostLooks, "encode", refuse)
    _at_a_terminal(monkeypatch)
    typed = f"/image {files[0]}\nWhat?\nThen text.\n"
    result = CliRunner().invoke(app, ["chat", model, *SHORT, "--json"], input=typed)
    assert result.exit_code == 0, result.output
    assert "the model cannot read it" in result.stderr and "was set aside" in result.stderr
    (answer,) = [json.loads(one.lstrip("> ")) for one in result.stdout.splitlines() if "ids" in one]
    assert answer["usage"]["prompt_tokens"] < 40


def test_an_address_is_no_file(model: str) -> None:
    said = run("generate", model, "-p", "?", "--image", "https://e.com/a.png", is_refused=True)
    assert "is an address" in said


def test_a_picture_goes_with_what_is_said_to_an_agent(model: str, files: list[str]) -> None:
    run("agents", "create", "viewer", "--model", model)
    args = ("agents", "generate", "viewer", "What?", *SHORT, "--json")
    value = json.loads(run(*args, "--image", files[0], "--image", files[1]))
    assert value["usage"]["prompt_tokens"] > 24
    message = json.loads(run("agents", "show", "viewer", "--json"))["messages"][0]
    names = [make_picture(seed=seed).name for seed in (1, 2)]
    assert message["content"] == "What?"
    assert message["pictures"] == [{"name": name, "at": 0} for name in names]
    typed = f"/image {files[0]}\nAnd this?\n"  # after a restart the first ones are there still
    args = ("agents", "chat", "viewer", *SHORT, "--json")
    value = json.loads(run(*args, stdin=typed))
    assert value["usage"]["cached_tokens"] > 24
    messages = json.loads(run("agents", "show", "viewer", "--json"))["messages"]
    assert messages[2]["pictures"] == [{"name": names[0], "at": 0}]


@pytest.mark.parametrize("command", [("generate", "-p", "What?"), ("agents", "generate", "a", "b")])
def test_what_is_no_picture_is_refused_by_name(
    command: tuple[str, ...], model: str, files: list[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.png").write_text("no picture")
    of = (model,) if command[0] == "generate" else ("--model", model, "--create")
    asked = (*command, *of) if command[0] == "agents" else (command[0], *of, *command[1:])
    said = run(*asked, *SHORT, "--image", str(tmp_path / "none.png"), is_refused=True)
    assert "none.png" in said
    said = run(*asked, *SHORT, "--image", str(tmp_path / "bad.png"), is_refused=True)
    assert "no PNG" in said
    blind = [part if part != model else "demo" for part in asked]
    said = run(*blind, "--image", files[0], is_refused=True)
    assert "text alone" in said or "template" in said


@pytest.mark.parametrize("command", [("generate", "-p", "What?"), ("agents", "generate", "a", "b")])
def test_a_backend_that_reads_none_is_refused_with_the_one_that_does(
    command: tuple[str, ...], model: str, files: list[str]
) -> None:
    given = ("--image", files[0], "--backend", "native")
    name = ("--model", model, "--create") if command[0] == "agents" else (model,)
    for installed in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not installed:
                patch.setattr("kvcellar.cli.common.images.find_spec", lambda name: None)
            said = run(*command, *name, *given, is_refused=True)
        assert "pictures are read on torch" in said and "leave --backend native out" in said
        assert ("install" in said) != installed and "plan" not in said


def test_a_model_that_could_read_pictures_says_why_it_does_not() -> None:
    said = str(reads_text_alone("m", 2, text_alone_of("native")))
    assert said == (
        "model 'm' reads no pictures here: the backend native reads text alone; choose the backend "
        "torch for pictures, or leave the 2 pictures out"
    )


def text_alone_of(backend: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcellar.models.picture_facts.has_pictures", lambda folder, raw: True)
        return text_alone(Path(), {}, backend)


def test_a_model_whose_vision_part_is_not_read_says_why(files: list[str], tmp_path: Path) -> None:
    path = str(make_gguf(tmp_path / "model", "gemma3"))
    mmproj = tmp_path / "model" / "mmproj-model-F32.gguf"
    mmproj.unlink()
    write_mmproj(mmproj, "gemma3", make_vision_model("gemma3"), projector="glm4v")
    typed = f"/image {files[0]}\nWhat?\n"
    for said in (
        run("generate", path, "-p", "What?", "--image", files[0], *SHORT, is_refused=True),
        run("chat", path, *SHORT, stdin=typed, is_refused=True),
        run("agents", "chat", "eye", "--model", path, *SHORT, stdin=typed, is_refused=True),
    ):
        assert "type 'glm4v', which is not read here" in " ".join(said.split())


def test_pictures_are_said_in_python(model: str, files: list[str], tmp_path: Path) -> None:
    picture = make_picture(seed=1)
    how = {"max_tokens": 4, "temperature": 0.0}
    with kv.open(model, store=tmp_path / "store", dtype="float32") as cellar:
        counts = set()
        for number, given in enumerate((files[0], Path(files[0]), picture.data, picture)):
            agent = cellar.agent(f"a{number}")
            answer = agent.say("What?", images=[given], **how)
            counts.add((answer.usage.prompt_tokens, answer.text))
            assert agent.messages[0]["pictures"] == [{"name": picture.name, "at": 0}]
        assert len(counts) == 1
        one = cellar.agent("one").say("What?", images=picture, **how)
        assert (one.usage.prompt_tokens, one.text) in counts
        messages = [{"role": "user", "content": "What?"}]
        (told,) = cellar.complete([messages], images=[picture], **how)
        assert (told.usage.prompt_tokens, told.text) in counts
        answers = cellar.agent("trunk").branch(2).say("What?", images=[picture], **how)
        assert {answer.usage.prompt_tokens for answer in answers} == {one.usage.prompt_tokens}
        agent = cellar.agent("none")
        for bad in (b"x", str(tmp_path / "none.png"), 5):
            with pytest.raises(PictureError):
                agent.say("What?", images=[bad], **how)
        assert agent.messages == ()
        with pytest.raises(ConfigError, match="no pictures"):
            cellar.complete("What", images=[picture])


def test_a_model_that_reads_text_alone_says_so_in_python(tmp_path: Path) -> None:
    with kv.open("demo", store=tmp_path) as cellar:
        agent = cellar.agent("blind")
        with pytest.raises(PictureError, match="text alone"):
            agent.say("What?", images=[make_picture()])
        assert agent.messages == ()
