"""What `kvcellar generate` and its like do with chat models, and with settings of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcellar import registry
from kvcellar.cli import app
from kvcellar.registry import load_backend, register_backend
from tests.models.tiny_checkpoints import make_checkpoint, make_tokenizer

SAID = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9}
SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.0}
SAMPLING |= {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
FRAME = len(["<s>", "<|user|>", "<|end|>", "<|assistant|>"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A chat model with one token per byte that says how it wants to be sampled."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("tiny"))
    (folder / "generation_config.json").write_text(json.dumps(SAID))
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a chat template, and without a word on sampling."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("base"))
    (folder / "chat_template.jinja").unlink()
    make_tokenizer(chat_template=None).save_pretrained(folder)
    return str(folder)


def run(*args: str, stdin: str | None = None) -> Any:
    result = CliRunner().invoke(app, list(args), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def generated(*args: str) -> Any:
    result = run("generate", *args, "--json", "--max-tokens", "4")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def n_prompt(*args: str) -> int:
    return int(generated(*args)["usage"]["prompt_tokens"])


@pytest.mark.card(first=True)
def test_a_chat_model_gets_its_template_unless_raw(tiny):
    assert n_prompt(tiny, "-p", "hello") == 5 + FRAME
    assert n_prompt(tiny, "-p", "hello", "--chat") == 5 + FRAME
    assert n_prompt(tiny, "-p", "hello", "--raw") == 5
    assert n_prompt(tiny, "-p", "hello", "--system", "be brief") == 5 + FRAME + 8 + 2
    refused = run("generate", tiny, "-p", "hello", "--raw", "--system", "be brief")
    assert refused.exit_code == 2 and "leave --raw out" in refused.stderr


@pytest.mark.card
def test_a_base_model_and_the_bundled_one_continue_the_text(base):
    assert n_prompt(base, "-p", "hello") == 5
    raw = generated("demo", "-p", "import os")
    assert raw == generated("demo", "-p", "import os", "--raw") | {"usage": raw["usage"]}
    assert n_prompt("demo", "-p", "import os", "--chat") > raw["usage"]["prompt_tokens"]


@pytest.mark.card
def test_the_models_own_settings_are_the_default_and_are_said(tiny, base):
    assert generated(tiny, "-p", "hello", "--seed", "1")["sampling"] == SAMPLING
    asked = generated(tiny, "-p", "hello", "--temperature", "0", "--top-p", "1")
    assert asked["sampling"] == SAMPLING | {"temperature": 0.0, "top_p": 1.0}
    again = generated(tiny, "-p", "hello", "--temperature", "0", "--top-p", "1")
    assert again["token_ids"] == asked["token_ids"]
    assert generated(base, "-p", "hello")["sampling"]["temperature"] == 0.0


@pytest.mark.card
def test_a_chat_takes_them_too_and_else_what_is_usual(tiny):
    def said(*args: str) -> Any:
        result = run("chat", *args, "--json", "--max-tokens", "3", stdin="hi\n")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)["sampling"]

    assert said(tiny) == SAMPLING
    assert said(tiny, "--temperature", "1.5") == SAMPLING | {"temperature": 1.5}
    usual = said("demo")
    assert (usual["temperature"], usual["top_p"]) == (0.7, 0.95)


@pytest.mark.card
def test_an_agents_turn_takes_them_too(tiny, tmp_path, monkeypatch):
    from kvcellar.engine import EngineService

    seen = []
    before = EngineService.submit

    async def submit(self: Any, request: Any, *args: Any, **more: Any) -> Any:
        seen.append(request.params)
        return await before(self, request, *args, **more)

    monkeypatch.setattr(EngineService, "submit", submit)
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    where = ("--store", str(tmp_path / "store"), "--model", tiny, "--max-tokens", "3")
    for args in (("a", "hi", "--create"), ("a", "hi", "--top-k", "3")):
        assert run("agents", "generate", *args, *where).exit_code == 0
    assert run("agents", "chat", "a", *where, stdin="hi\n").exit_code == 0
    assert [p.top_k for p in seen] == [20, 3, 20]
    assert {p.temperature for p in seen} == {0.6} and {p.top_p for p in seen} == {0.9}


@pytest.mark.card
def test_a_template_from_a_file_replaces_the_models_own(tiny, base, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    for model in (tiny, base):  # one that had none becomes a chat model
        assert n_prompt(model, "-p", "hello", "--chat-template", str(file)) == len("[user] hello\n")
    refused = run("generate", tiny, "-p", "x", "--chat-template", str(tmp_path / "no.jinja"))
    assert refused.exit_code == 2 and "cannot be read as text" in refused.stderr
    two = run("serve", tiny, f"b={base}", "--chat-template", str(file), "--port", "0")
    assert two.exit_code == 2 and "for one model" in two.stderr
    file.write_text("{% for m in %}")
    broken = run("generate", tiny, "-p", "x", "--chat-template", str(file))
    assert broken.exit_code == 2 and len(broken.stderr.splitlines()) == 1
    raw = run("generate", tiny, "-p", "x", "--raw", "--chat-template", str(file))
    assert raw.exit_code == 2 and "--raw uses no chat template" in raw.stderr


def test_a_setting_that_cannot_be_is_named_with_its_file(tmp_path: Path) -> None:
    """The file that says how to sample is named where it says what cannot be."""
    folder = make_checkpoint("llama", tmp_path)
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    refused = run("generate", str(folder), "-p", "x")
    assert refused.exit_code == 2 and "generation_config.json has top_p=7" in refused.stderr


def test_a_backend_that_is_registered_is_one_of_the_choices(tiny, monkeypatch):
    """A name from outside loads, sizes and runs a model; one that is unknown is told all names."""
    monkeypatch.setattr(registry, "_registered", {})
    register_backend("elsewhere", lambda: load_backend("torch"))
    asked = ("--prompt", "hello", "--temperature", "0")
    own = generated(tiny, *asked)["token_ids"]
    assert generated(tiny, *asked, "--backend", "elsewhere")["token_ids"] == own
    bounded = generated(tiny, *asked, "--backend", "elsewhere", "--memory", "8GB")
    assert bounded["token_ids"] == own
    refused = run("generate", tiny, *asked, "--backend", "nowhere")
    assert refused.exit_code == 2
    assert "there are: elsewhere, executorch, mlx, native, reference, torch" in refused.stderr
