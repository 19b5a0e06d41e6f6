"""What cannot work is said in one line, with exit code 2, and before an address is printed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.cli.common.options import read_adapters
from kvcellar.cli.serve import offering
from kvcellar.errors import ConfigError
from kvcellar.hosting import loader
from kvcellar.models import LoadOptions
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.server import run

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture(autouse=True)
def nothing_listens(monkeypatch):
    """Whoever gets as far as an address fails the test."""

    def listen(*_):
        raise AssertionError("the server would have been started")

    monkeypatch.setattr(run, "listen", listen)


def refused(*arguments, **environment):
    """The one line that a command ends with."""
    result = CliRunner().invoke(app, list(map(str, arguments)), env=environment)
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert not result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and result.stderr.splitlines()[-1] == lines[0], result.stderr
    return lines[0]


LOADING = [
    (("/nope",), "there is no folder"),
    (("demo", "--kv-dtype", "int3"), "kv_dtype 'int3' is not known"),
    (("demo", "--dtype", "int3"), "dtype 'int3' is not known"),
    (("demo", "--weights", "int5"), "weights 'int5' are unknown"),
    (("demo", "--backend", "cuda9"), "backend 'cuda9' is unknown"),
    (("demo", "--backend", "reference"), "loads no models"),
    (("demo", "--device", "nonsense"), "device 'nonsense' cannot be used"),
    pytest.param(("demo", "--device", "cuda"), "device 'cuda' cannot be used", marks=NO_GPU),
    (("demo", "--cache", "ring"), "cache 'ring' is unknown; choose one of contiguous, cells"),
    (("demo", "--cache", "cells", "--block-size", 8), "block_size 8 is for a paged cache"),
    (
        ("demo", "--cache", "cells", "--layout", "block_first"),
        "layout 'block_first' is for a",
    ),
    (("demo", "--cache", "paged", "--layout", "sideways"), "layout 'sideways' is not known"),
    (("demo", "--cache", "paged", "--block-size", 0), "greater than or equal to 1"),
    (("demo", "--capacity", 0), "capacity"),
    (("demo", "--capacity", -5), "capacity"),
    (("demo", "--memory", "1MB"), "a memory budget of 1.00 MB"),
    (("demo", "--memory", "some"), "'some' is not a size"),
]


@pytest.mark.parametrize("text", ["{% for m in %}", "{{ m | nofilter }}", "{% if m %}"])
def test_a_file_that_is_no_chat_template_is_refused_before_an_address_is_printed(tmp_path, text):
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    said = refused("serve", "--store", tmp_path / "s", "--chat-template", file)
    assert f"{file} is no chat template" in said


@pytest.mark.parametrize(("arguments", "said"), LOADING)
def test_serve_refuses_what_no_model_can_be_loaded_with(tmp_path, arguments, said):
    assert said in refused("serve", "--store", tmp_path / "s", *arguments)


@pytest.mark.parametrize(("arguments", "said"), LOADING)
def test_generate_refuses_the_same(arguments, said):
    assert said in refused("generate", *arguments, "--prompt", "x", "--max-tokens", 1)


@pytest.mark.parametrize(("arguments", "said"), LOADING)
def test_chat_refuses_the_same(arguments, said):
    assert said in refused("chat", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "/nope"), "there is no folder /nope"),
        (("a=demo", "b=/nope"), "there is no folder /nope"),
        (("--speculate", "/nope"), "there is no folder /nope"),
        (("--speculate", "eagle3:/nope"), "there is no folder /nope"),
        (("--max-body", "x"), "'x' is not a size"),
        (("--wait", "nan"), "wait_s must be above 0"),
        (("--shutdown", "inf"), "shutdown_s must be above 0"),
        (("--remember", -1), "max_unnamed must be 0 or more"),
        (("--parallel", 0), "greater than or equal to 1"),
        (("--cache", "contiguous"), "a contiguous cache holds one sequence, and an engine runs"),
        (("--policy", "last-first"), "policy 'last-first' is unknown; there are: mixed, prefill"),
        (("--delay", 2), "delay_factor 2.0 is for the policy prefill-first, not mixed"),
        (("--index", "guessing"), "prefix index 'guessing' is not known; choose radix, hashed"),
        (("--index", "naive", "--index-block", 4), "a naive index finds nothing, so it has no"),
        (("--cache", "paged", "--index-block", 24), "block_size 24 cannot be used over blocks of"),
        (("--allow-origin", "*"), "'*' is no origin"),
        (("--api-key-file", "/nope"), "the API key in /nope cannot be read"),
        (("--api-key", "a", "--api-key-file", "/nope"), "were both given"),
    ],
)
def test_serve_refuses_what_else_cannot_work(tmp_path, arguments, said):
    assert said in refused("serve", "--store", tmp_path / "s", *arguments)


def test_serve_refuses_a_checkpoint_that_is_not_whole(tmp_path):
    for name, said in (("tokenizer.json", "tokenizer"), ("model.safetensors", "safetensors")):
        folder = tmp_path / name
        shutil.copytree(DEMO_FOLDER, folder)
        (folder / name).unlink()
        assert said in refused("serve", folder, "--store", tmp_path / "s")
    folder = tmp_path / "other"
    shutil.copytree(DEMO_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "alien"}))
    assert "architecture 'alien'" in refused("serve", folder, "--store", tmp_path / "s")


@pytest.mark.parametrize(
    ("text", "said"), [("", "API key is empty"), ("\n", "is empty"), ("ü", "printable ASCII")]
)
def test_a_file_without_a_key_is_no_key(tmp_path, text, said):
    (tmp_path / "key").write_text(text)
    key_file = ("--api-key-file", tmp_path / "key")
    assert said in refused("serve", "--store", tmp_path / "s", *key_file)


def test_a_key_is_read_from_where_nobody_else_looks(tmp_path, monkeypatch):
    """And whoever types it into the command line is told that others can read it there."""
    kept, hosts = [], set()

    def keep(config, *_, **__):
        kept.append(config.api_key)
        hosts.add(config.host)

    monkeypatch.setattr(run, "serve", keep)
    monkeypatch.setattr(run, "log_to_stderr", lambda: None)
    (tmp_path / "key").write_text("from-a-file\nnot this\n")
    store = ("--store", str(tmp_path / "s"))
    ways = [
        (["--api-key-file", str(tmp_path / "key")], {}),
        ([], {"KVCELLAR_API_KEY": "from-the-environment"}),
        (["--api-key", "typed"], {}),
        ([], {}),
    ]
    warned = []
    for arguments, environment in ways:
        result = CliRunner().invoke(app, ["serve", *store, *arguments], env=environment)
        assert result.exit_code == 0, (result.stderr, result.exception)
        warned.append("can read the command line" in result.stderr)
    assert kept == ["from-a-file", "from-the-environment", "typed", None]
    assert warned == [False, False, True, False]
    assert hosts == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ((), 32 << 20),
        (("--memory", "960MiB"), 15 << 20),
        (("--memory", "960MiB", "--max-body", "20MiB"), 20 << 20),
    ],
)
def test_bodies_take_a_small_part_of_the_memory(tmp_path, monkeypatch, arguments, most):
    kept = []
    monkeypatch.setattr(run, "serve", lambda config, *_, **__: kept.append(config.max_body_bytes))
    monkeypatch.setattr(run, "log_to_stderr", lambda: None)
    monkeypatch.setattr(loader, "resident_bytes", lambda: 1 << 20)
    command = ["serve", "--store", str(tmp_path / "s"), *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert kept == [most]


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (
            "small=cuda:0,large=cuda:1",
            "'large=cuda:1' is no NAME=DEVICE of a model",
        ),
        ("small=", "there are: small, other"),
        ("small=cpu,small=cuda:1", "gives one model two devices"),
    ],
)
def test_devices_are_those_of_models_that_are_offered(device, said):
    with pytest.raises(ConfigError, match=said):
        offering.devices_of(device, {"small": "/a", "other": "/b"}, None)


def test_each_model_runs_where_it_was_put_and_memory_is_of_one_device():
    offered = {"small": "/a", "large": "/b", "third": "/c"}
    device, devices = offering.devices_of("small=cuda:0,large=cuda:1", offered, None)
    assert device is None and devices == {"/a": "cuda:0", "/b": "cuda:1"}
    made = loader.Hosting(LoadOptions("demo"), devices=devices)
    assert [made.options_of(path).device for path in offered.values()] == ["cuda:0", "cuda:1", None]
    assert offering.devices_of("cuda:1", offered, "8GB") == ("cuda:1", {})
    with pytest.raises(ConfigError, match="--memory bounds one device"):
        offering.devices_of("small=cuda:0", offered, "8GB")


def test_a_path_that_is_there_is_one_whatever_equals_signs_it_has(tmp_path, monkeypatch):
    folder = tmp_path / "a=b=c"
    folder.mkdir()
    (tmp_path / "x=y.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert offering.offered_models(["a=b=c"]) == {"a=b=c": str(folder)}
    assert offering.offered_models([f"{folder}/"]) == {"a=b=c": str(folder)}
    assert offering.offered_models([f"small={folder}"]) == {"small": str(folder)}
    assert offering.offered_models(["small=a=b=c"]) == {"small": str(folder)}
    assert offering.offered_models(["x=y.gguf"]) == {"x=y.gguf": "x=y.gguf"}
    assert offering.offered_models(["./gone=1/m"]) == {"./gone=1/m": "./gone=1/m"}, (
        "not there, a path"
    )
    assert offering.offered_models(["Qwen/Q=a=b=c"]) == {"Qwen/Q": str(folder)}, "a client's name"
    assert read_adapters(["a=b=c"]) == {"a=b=c": str(folder)}
    assert read_adapters(["tone=a=b=c"]) == {"tone": str(folder)}
    assert offering.devices_of("a=b=c=cuda:1", {"a=b=c": str(folder)}, None) == (
        None,
        {str(folder): "cuda:1"},
    )
