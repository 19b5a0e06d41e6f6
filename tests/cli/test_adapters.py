"""`--adapter` of the commands: used by those that say something, offered by those that serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcellar.backends.torch.learn.shrink.checkpoints import make_tokenizer, write_tiny
from kvcellar.cli import app
from kvcellar.cli.common.options import one_adapter, read_adapters
from kvcellar.cli.serve.offering import adapters_of, with_adapters
from kvcellar.errors import ConfigError
from tests.models.adapters import logits_of, merged, write_adapter

TEXT = "abcdefghijklmnop"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and an adapter of it."""
    root = tmp_path_factory.mktemp("made")
    base = write_tiny("llama", root / "llama")
    return base, write_adapter(root / "tone", base)


def run(*args: str) -> Any:
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.card
def test_a_text_is_gone_on_with_by_the_adapter(made):
    base, adapter = made
    said = ["generate", str(base), "--raw", "-p", TEXT, "--json", "--max-tokens", "5"]
    with_it, without = (
        json.loads(run(*said, "--temperature", "0", "--dtype", "float32", *more).stdout)
        for more in (["--adapter", str(adapter)], [])
    )
    for found, model in ((with_it, merged(base, adapter)), (without, merged(base, None))):
        prompt = tokens = make_tokenizer().encode(TEXT)
        for _ in found["token_ids"]:
            tokens = [*tokens, int(logits_of(model, tokens)[-1].argmax())]
        assert found["token_ids"] == tokens[len(prompt) :]
    assert with_it["token_ids"] != without["token_ids"]


@pytest.mark.card
@pytest.mark.usefixtures("eager")
def test_an_agent_is_of_the_model_with_its_adapter(made, tmp_path):
    base, adapter = made
    store = ["--store", str(tmp_path / "store"), "--capacity", "256"]
    more = ["--max-tokens", "3", "--json", "--adapter", f"tone={adapter}", *store]
    first = run(
        "agents", "generate", "poet", 9 * "Hello. ", "--create", "--model", str(base), *more
    )
    assert first.exit_code == 0, first.output
    again = run("agents", "generate", "poet", "And now?", *more)
    assert json.loads(again.stdout)["usage"]["cached_tokens"] > 0
    listed = json.loads(run("agents", "list", "--json", *store[:2]).stdout)
    assert [one["model"] for one in listed] == [f"{base.resolve()}+tone"]
    lost = run("agents", "generate", "poet", "Hm?", "--max-tokens", "3", *store)
    assert lost.exit_code != 0
    assert "--adapter tone=FOLDER" in lost.stderr


def test_what_is_no_adapter_is_refused_before_anything_is_loaded(made, tmp_path):
    base, adapter = made
    refused = run("serve", str(base), "--adapter", f"x={tmp_path}", "--port", "0")
    assert refused.exit_code != 0 and "has no adapter_config.json" in refused.stderr
    refused = run("generate", str(base), "-p", "x", "--adapter", "=x")
    assert refused.exit_code != 0 and "give NAME=FOLDER" in refused.stderr
    both = ["--adapter", str(adapter), "--adapter", f"b={adapter}"]
    refused = run("generate", str(base), "-p", "x", *both)
    assert refused.exit_code != 0 and "uses one adapter, and tone, b were given" in refused.stderr


def test_adapters_have_the_names_that_they_are_given():
    folder = str(Path("tone").resolve())
    assert read_adapters(["tone", "b=tone"]) == {"tone": folder, "b": folder}
    assert read_adapters(None) == {} and one_adapter({}) == ""
    with pytest.raises(ConfigError, match="two adapters are called 'tone'"):
        read_adapters(["tone", "x/tone"])


def test_adapters_of_several_models_say_whose_they_are():
    offered = {"small": "/s", "large": "/l"}
    folder = str(Path("x").resolve())
    found = adapters_of(["large:sql=x"], offered)
    assert found == {"/s": {}, "/l": {"sql": folder}}
    assert with_adapters(offered, found) == {**offered, "sql": "/l+sql"}
    assert adapters_of(["sql=x"], {"small": "/s"}) == {"/s": {"sql": folder}}
    for given in ("sql=x", "other:sql=x"):
        with pytest.raises(ConfigError, match="say which, as MODEL:sql=FOLDER"):
            adapters_of([given], offered)
    for taken in (["small:large=x"], ["small:a=x", "large:a=x"]):
        with pytest.raises(ConfigError, match="has the name of another model"):
            adapters_of(taken, offered)
