"""A limit of memory that is advised works at once, and one that is refused anywhere is everywhere.

Each kind of model asks with too little, takes the number that it is told, and runs.
"""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

import kvcellar as kv
from kvcellar.agents import Hosting
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.budget import format_size, parse_size, round_up
from kvcellar.cli import app
from kvcellar.errors import ConfigError
from kvcellar.hosting import loader
from kvcellar.hosting.memory import MemoryPlan, choose_capacity, least_cells
from kvcellar.models import LoadOptions
from kvcellar.models.sizes.sizing import size_model
from kvcellar.spec import PROCESS_BYTES

KINDS = ("demo", "lfm2", "qwen3_moe", "gemma3_text")
"""Attention alone; with recurrent layers; a mixture of experts; with windows."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Have a process as a command is: this one holds what many tests have loaded."""
    monkeypatch.setattr(loader, "resident_bytes", lambda: 100_000_000)
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return a model of a kind, with few random weights."""

    def made(kind: str) -> str:
        if kind == "demo":
            return kind
        folder = tmp_path_factory.getbasetemp() / f"advice-{kind}"
        return str(folder if folder.is_dir() else write_tiny(kind, folder))

    return made


def run(*args: str):
    return CliRunner().invoke(app, list(args))


def advised(text: str) -> str:
    """Return the size that a refusal advises, as it is typed."""
    found = re.search(r"give at least ([\d.]+ [KMGT]?B), or", text)
    assert found, text
    return found[1].replace(" ", "")


def inspected(model: str, *more: str):
    done = run("inspect", model, "--json", *more)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, ()) for kind in KINDS),
        ("demo", ("--capacity", "300")),
        ("lfm2", ("--kv-dtype", "int8")),
    ],
    ids=str,
)
def test_what_is_advised_works_at_first_try_and_inspect_says_the_same(kind, more, model_of):
    model = model_of(kind)
    asked = ("generate", model, "--raw", "-p", "def f", "--max-tokens", "2", "--json", *more)
    refused = run(*asked, "--memory", "100MB")
    assert refused.exit_code == 2 and refused.stdout == ""
    enough = advised(refused.stderr)
    done = run(*asked, "--memory", enough)
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 2
    if "--capacity" not in more:
        fitting = inspected(model, "--memory", enough, *more)
        assert fitting["fits"] and fitting["why_not"] == ""
        assert max(row["longest_context"] for row in fitting["kv_dtypes"]) > 0
        short = f"{parse_size(enough) - 10_000_000}"
        assert advised(inspected(model, "--memory", short, *more)["why_not"]) == enough
        again = run(*asked, "--memory", short)
        assert again.exit_code == 2 and advised(again.stderr) == enough


@pytest.mark.parametrize("kind", ["demo", "lfm2"])
def test_agents_chats_and_python_take_the_same_advice(kind, model_of, tmp_path):
    model = model_of(kind)
    enough = advised(inspected(model, "--memory", "100MB")["why_not"])
    lines = "Hello.\n"
    for asked in (
        ("chat", model, "--max-tokens", "2"),
        ("agents", "chat", "poet", "--model", model, "--max-tokens", "2"),
    ):
        if kind != "demo" and asked[0] == "chat":
            continue  # it has no template
        done = CliRunner().invoke(app, [*asked, "--memory", "100MB"], input=lines)
        assert advised(done.stderr) == enough, done.stderr
    with pytest.raises(ConfigError) as refused, kv.open(model, memory="100MB"):
        pass
    assert advised(str(refused.value)) == enough
    with kv.open(model, memory=enough, store=tmp_path / "store") as cellar:
        assert cellar.agent("one") is not None
    options = LoadOptions(model)
    hosted = Hosting.within(parse_size(enough), options, models=[options])
    hosted.check(model)  # as serve does before it listens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", ["64", "100000"])
def test_inspect_with_a_context_and_agents_counts_the_model_the_same(kind, context, model_of):
    model = model_of(kind)
    context = str(min(int(context), size_model(model).max_positions))
    more = ("--context", context, "--agents", "3")
    enough = advised(inspected(model, "--memory", "100MB")["why_not"])
    assert advised(inspected(model, "--memory", "100MB", *more)["why_not"]) == enough
    assert inspected(model, "--memory", enough, *more)["fits"]


def test_a_limit_between_what_fits_and_the_whole_context_has_fewer_cells_and_runs(model_of):
    asked = LoadOptions(model_of("demo"))
    for capacity in (None, 100, 4000, 100_000):
        options = LoadOptions(asked.model, capacity=capacity)
        with pytest.raises(ConfigError) as refused:
            MemoryPlan.divide(100_000_000, PROCESS_BYTES).size_of(options)
        for more in (0, 1_000_000, 20_000_000, 500_000_000):
            plan = MemoryPlan.divide(parse_size(advised(str(refused.value))) + more, PROCESS_BYTES)
            inside = LoadOptions(asked.model, capacity=capacity, memory_bytes=plan.size_of(options))
            cells = choose_capacity(inside).cells
            assert least_cells(capacity or 4096) <= cells <= (capacity or 4096)


def test_a_process_that_holds_more_is_advised_more_than_it_holds(monkeypatch, model_of):
    held = 2_000_000_000
    monkeypatch.setattr(loader, "resident_bytes", lambda: held)
    options = LoadOptions(model_of("demo"))

    def size(limit: int) -> int:
        plan = Hosting.within(limit, options).plan
        assert plan is not None
        return plan.size_of(options)

    with pytest.raises(ConfigError) as refused:
        size(1_000_000_000)
    held += 50_000_000  # it goes on to load this and that
    assert size(parse_size(advised(str(refused.value)))) > 0


@pytest.mark.parametrize("size", [1, 999, 1000, 953_600_001, 953_600_000, 12_345_678_901, 10**13])
def test_a_size_that_is_advised_is_never_less_than_what_is_needed(size):
    assert size <= parse_size(round_up(size)) <= size * 1.01 + 1
    assert round_up(size).split()[1] == format_size(size).split()[1] or size == 999
