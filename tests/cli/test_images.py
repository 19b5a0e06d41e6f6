"""Pictures on the command line and in Python: files that go before a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvcellar as kv
from kvcellar.cli import app
from kvcellar.errors import ConfigError, PictureError
from tests.vision_checkpoints import make_picture, make_vision_checkpoint

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
