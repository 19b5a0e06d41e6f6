"""``kvcellar inspect`` and ``--memory``: tables, JSON, and every kind of wrong input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvcellar.agents import Hosting
from kvcellar.cache_config import make_config
from kvcellar.cli import app
from kvcellar.hosting import loader
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.models import LoadOptions
from kvcellar.models.sizes.sizing import size_model
from kvcellar.models.sizes.spec_file import spec_from_file
from kvcellar.registry import make_seq_session
from kvcellar.spec import NATIVE_PROCESS_BYTES, PROCESS_BYTES
from tests.real_models import SMOLLM2

CONFIGS = Path(__file__).parent.parent / "models" / "configs"
GEMMA = str(CONFIGS / "gemma-3-12b-it.json")


def run(*args: str) -> Any:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "120"})


def inspected(*args: str) -> Any:
    result = run("inspect", *args, "--json")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def error_of(*args: str) -> str:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    return str(result.stderr)


def test_the_object_has_every_figure_that_the_answer_comes_from():
    asked = ("--memory", "36GB", "--context", "32768", "--agents", "4", "--weights", "none")
    value = inspected(GEMMA, *asked)
    spec = size_model(GEMMA)
    assert value["memory_bytes"] == 36 * 10**9
    assert value["weights"]["loaded_bytes"] == 23_532_068_352
    assert value["process_bytes"] == PROCESS_BYTES
    assert value["scratch_bytes"] >= spec.scratch_bytes(32768)
    taken = value["process_bytes"] + value["store_bytes"] + value["scratch_bytes"]
    assert value["kv_bytes"] == 36 * 10**9 - 23_532_068_352 - taken
    assert [(g["window"], len(g["layers"]), g["agent_tokens"]) for g in value["groups"]] == [
        (1024, 40, 1088),
        (None, 8, 32768),
    ]
    rows = {row["kv_dtype"]: row for row in value["kv_dtypes"]}
    assert list(rows) == ["float32", "bfloat16", "fp8", "int8", "k8v4", "int4"]
    row = rows["bfloat16"]
    assert row["bytes_per_token"] == 393_216
    assert row["group_bytes_per_token"] == [327_680, 65_536]
    assert row["agent_bytes"] == 2_503_999_488
    # One layer's old copy while pools grow: 32,768 * 8,192 bytes of a full layer = 268,435,456.
    assert row["growth_bytes"] == 268_435_456
    assert row["agents_fit"] == value["kv_bytes"] // (2_503_999_488 + 268_435_456) == 2
    assert row["fits"] is False and rows["int8"]["fits"] is True


def test_what_fits_fits_and_one_more_does_not():
    value = inspected(GEMMA, "--memory", "64GB", "--agents", "5", "--kv-dtype", "int8")
    spec, kv = size_model(GEMMA), parse_kv_dtype("int8")
    (row,) = value["kv_dtypes"]
    one = row["agent_bytes"] + row["growth_bytes"]
    assert row["agents_fit"] * one <= value["kv_bytes"] < (row["agents_fit"] + 1) * one
    longest = row["longest_context"]
    assert spec.n_agents(value["kv_bytes"], longest, kv) >= 5
    if longest < spec.max_positions:
        assert spec.n_agents(value["kv_bytes"], longest + 1, kv) < 5


def test_a_window_caps_what_a_long_context_costs():
    short, long = (
        inspected(GEMMA, "--memory", "64GB", "--context", str(n), "--kv-dtype", "bfloat16")
        for n in (2048, 4096)
    )
    more = long["kv_dtypes"][0]["agent_bytes"] - short["kv_dtypes"][0]["agent_bytes"]
    assert more == 2048 * 65_536  # the full group's alone


@pytest.mark.parametrize(("kind", "longest"), [("dynamic", 8192), ("linear", None)])
def test_the_length_up_to_which_a_model_is_exact_is_said(tmp_path, kind, longest):
    raw = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    raw["max_position_embeddings"] = 8192
    raw["rope_scaling"] = {"rope_type": kind, "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert inspected(str(tmp_path))["exact_to"] == longest
    said = "tokens at most: dynamic RoPE" in run("inspect", str(tmp_path)).stdout
    assert said == (longest is not None)


def test_chunks_and_layers_that_share_rows_are_said_and_sized(tmp_path):
    path = tmp_path / "spec.json"
    group = {"n_kv_heads": 2, "head_dim": 16, "v_head_dim": 8}
    groups = [group | {"layers": 2, "chunk": 64}, group | {"layers": 1, "head_dim": 32}]
    fields = {"n_layers": 5, "max_positions": 8192, "weight_bytes": 10**6}
    fields |= {"groups": groups, "shared": [[3, 2], [4, 1]]}
    path.write_text(json.dumps(fields))
    value = inspected("--spec", str(path), "--context", "1000", "--kv-dtype", "bfloat16")
    assert [group["chunk"] for group in value["groups"]] == [64, None]
    assert [group["agent_tokens"] for group in value["groups"]] == [128, 1000]
    assert value["shared"] == [[3, 2], [4, 1]]
    assert value["kv_dtypes"][0]["bytes_per_token"] == 2 * (2 * 2 * (16 + 8) + 2 * (32 + 8))
    text = re.sub(r"\s+", " ", run("inspect", "--spec", str(path), "--context", "1000").stdout)
    assert "2 layers 2 KV heads of 16 (V 8), chunk 64: at most 128 tokens an agent" in text
    assert "2 layers share the rows of others" in text


def test_a_model_that_runs_without_torch_has_less_set_aside_for_the_process(monkeypatch):
    monkeypatch.setattr(loader, "resident_bytes", lambda: 100_000_000)
    model = str(SMOLLM2.found())
    asked = ("--memory", "700MB", "--context", "512")
    value = inspected(model, *asked)
    assert value["backend"]["backend"] == "native"
    assert value["process_bytes"] == NATIVE_PROCESS_BYTES and value["fits"]
    text = re.sub(r"\s+", " ", run("inspect", model, *asked).stdout)
    assert "- process 150.0 MB Python and the kernel: an estimate" in text
    options = LoadOptions(model)
    for models, set_aside in (
        ([options], NATIVE_PROCESS_BYTES),
        ([options, replace(options, backend="torch")], PROCESS_BYTES),
        ([LoadOptions("nowhere/at-all")], PROCESS_BYTES),
        ([], PROCESS_BYTES),
    ):
        plan = Hosting.within(700_000_000, options, models=models).plan
        assert plan is not None and plan.process_bytes == set_aside and not plan.is_measured
    Hosting.within(700_000_000, options, models=[options]).check(model)


def test_latents_are_said_and_sized(tmp_path):
    path = tmp_path / "spec.json"
    rows = {"n_kv_heads": 1, "head_dim": 64, "v_head_dim": 512}
    fields = {"n_layers": 61, "max_positions": 163_840, "weight_bytes": 10**6}
    path.write_text(json.dumps(fields | {"groups": [rows | {"layers": 61, "is_latent": True}]}))
    value = inspected("--spec", str(path), "--context", "1000", "--kv-dtype", "bfloat16")
    assert value["kv_dtypes"][0]["bytes_per_token"] == 61 * 2 * 576
    text = re.sub(r"\s+", " ", run("inspect", "--spec", str(path), "--context", "1000").stdout)
    assert "61 layers latents of 512 and 64 rotary numbers, full history" in text


def test_the_table_says_where_the_memory_goes_and_what_fits():
    asked = ("--memory", "36GB", "--context", "32768", "--agents", "4", "--weights", "none")
    result = run("inspect", GEMMA, *asked)
    assert result.exit_code == 0, result.stderr
    text = re.sub(r"\s+", " ", result.stdout)
    for words in (
        "memory 36.00 GB what the process may hold",
        "- weights 23.53 GB bfloat16; 11,766,034,176 parameters of the text model alone",
        "- process 600.0 MB Python and torch: an estimate",
        "set aside for activations and logits",
        "40 layers 8 KV heads of 256, window 1024: at most 1088 tokens an agent",
        "8 layers 8 KV heads of 256, full history",
        "= KV ",
        "agents that fit",
        "393,216 B",
        "do not fit",
    ):
        assert words in text, words


def test_the_bundled_model_and_this_machines_memory_are_enough_to_ask():
    value = inspected("demo")
    assert value["memory_bytes"] > 10**9
    assert value["kv_dtypes"][0]["bytes_per_token"] == 6 * 2 * 2 * 64 * 4


def test_a_spec_file_stands_alone_or_over_a_model(tmp_path):
    path = tmp_path / "mine.json"
    fields = {"n_layers": 2, "n_kv_heads": 1, "head_dim": 64, "max_positions": 9000}
    path.write_text(json.dumps(fields | {"weight_bytes": 10**8}))
    value = inspected("--spec", str(path), "--memory", "2GB", "--kv-dtype", "bfloat16")
    assert value["kv_dtypes"][0]["bytes_per_token"] == 2 * 2 * 64 * 2
    path.write_text(json.dumps({"weight_bytes": 7_000_000_000}))
    value = inspected(GEMMA, "--spec", str(path), "--memory", "16GB")
    assert value["weights"]["loaded_bytes"] == 7_000_000_000
    assert value["n_layers"] == 48


GPT_OSS = str(CONFIGS / "gpt-oss-20b.json")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((GEMMA, "--memory", "16GB"), "a memory budget of 16.00 GB does not hold the model: its "),
        ((GEMMA, "--memory", "16GB", "--weights", "none"), "weights are 23.53 GB in bfloat16"),
        ((GPT_OSS, "--memory", "24GB", "--weights", "none"), "weights are 41.83 GB in bfloat16"),
    ],
)
def test_what_exceeds_the_memory_has_all_figures_too(args, words):
    value = inspected(*args)
    assert value["fits"] is False and words in value["why_not"]
    assert value["kv_bytes"] < 0 < value["weights"]["loaded_bytes"]
    for row in value["kv_dtypes"]:
        assert row["fits"] is False and row["agents_fit"] == row["longest_context"] == 0
        assert row["agent_bytes"] > row["bytes_per_token"] > 0
    result = run("inspect", *args)
    assert result.exit_code == 0
    assert words in result.stderr and "the model itself does not fit" in result.stdout
    roomy = inspected(args[0], "--memory", "900GB", *args[3:])
    assert roomy["fits"] is True and roomy["why_not"] == ""
    both = zip(value["kv_dtypes"], roomy["kv_dtypes"], strict=True)
    assert all(less["agent_bytes"] == more["agent_bytes"] for less, more in both)


def test_an_agent_that_is_too_long_is_told_with_its_figures():
    value = inspected(GEMMA, "--memory", "25GB", "--context", "131072", "--kv-dtype", "float32")
    (row,) = value["kv_dtypes"]
    assert value["fits"] is True and row["fits"] is False
    assert 0 < row["longest_context"] < 131072


@pytest.mark.parametrize(
    "seen", [{}, {"window": 100}, {"window": 128}, {"window": 1024}, {"chunk": 128}], ids=str
)
@pytest.mark.parametrize(("context", "n_agents"), [(300, 1), (700, 1), (3000, 1), (1500, 3)])
def test_without_a_budget_an_agent_takes_what_pools_allocate(tmp_path, seen, context, n_agents):
    """Pools double, and a window has room for a step besides what it keeps; a fifth layer shares
    the rows of the first."""
    groups = [{"layers": 2}, {"layers": 2} | seen]
    fields = {"n_layers": 5, "n_kv_heads": 2, "head_dim": 16, "max_positions": 8192}
    fields |= {"weight_bytes": 10**6, "groups": groups, "shared": [[4, 0]]}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(fields))
    spec, kv = spec_from_file(path), parse_kv_dtype("bfloat16")
    with make_seq_session("torch", make_config(spec.params, 8192, "bfloat16")) as session:
        cache = session.cache
        for agent in range(n_agents):
            for at in range(0, context, 512):
                n = min(512, context - at)
                positions, rows = torch.arange(at, at + n), torch.zeros(1, 2, n, 16)
                cache.begin_step([(agent, n)])
                for layer in range(5):
                    cache.update_and_fetch(layer, positions, rows.bfloat16(), rows.bfloat16())
                cache.end_step()
        allocated = cache.usage().size_bytes
    if n_agents > 1 or "chunk" in seen:  # each with room behind its tail; a chunk is rarely full
        assert allocated <= spec.pool_bytes(context, kv, n_agents) <= 2 * allocated
        return
    assert spec.pool_bytes(context, kv) == allocated
    asked = ("--spec", str(path), "--context", str(context), "--kv-dtype", "bfloat16")
    (row,) = inspected(*asked)["kv_dtypes"]
    assert row["agent_bytes"] == allocated and row["agents_fit"] > 1
    with_budget = inspected(*asked, "--memory", "8GB")["kv_dtypes"][0]
    assert with_budget["agent_bytes"] <= allocated, "a budget grants what is needed"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "inspect what? name a model, or give --spec"),
        (("demo", "--memory", "lots"), "'lots' is not a size; write bytes"),
        (("demo", "--memory", "0GB"), "no memory at all"),
        (("demo", "--kv-dtype", "int3"), "kv_dtype 'int3' is not known"),
        (("demo", "--kv-dtype", "int8:g128"), "groups of 128 do not divide a row of 64"),
        (("demo", "--dtype", "int3"), "dtype 'int3' is not known"),
        (("demo", "--context", "0"), "a context of 0 tokens is asked for and 'demo' was made for"),
        (("demo", "--context", "5000"), "was made for 1 to 4096"),
        (("demo", "--agents", "0"), "--agents"),
        (("nowhere/at/all",), "there is no folder and no config"),
        (("demo", "--spec", "nothing.json"), "cannot be read"),
    ],
)
def test_wrong_input_is_said_in_one_line(args, words):
    assert words in error_of("inspect", *args)


def test_a_model_of_a_short_context_is_shown_with_that_where_none_is_asked_for(tmp_path):
    raw = json.loads((CONFIGS / "qwen2.5-14b.json").read_text())
    path = tmp_path / "config.json"
    for positions, shown in ((512, 512), (32768, 4096)):
        path.write_text(json.dumps(raw | {"max_position_embeddings": positions}))
        assert inspected(str(path))["context"] == shown
    path.write_text(json.dumps(raw | {"max_position_embeddings": 512}))
    assert "was made for 1 to 512" in error_of("inspect", str(path), "--context", "4096")


def test_a_contradictory_config_is_named_with_its_field(tmp_path):
    raw = json.loads((CONFIGS / "qwen2.5-14b.json").read_text()) | {"num_key_value_heads": 7}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    said = error_of("inspect", str(path), "--memory", "64GB")
    assert "num_key_value_heads must divide num_attention_heads" in said
    assert str(path) in said


# --memory of the commands that run a model ---------------------------------------------------


def test_generate_runs_inside_a_budget_with_the_same_tokens():
    args = ("generate", "--prompt", "import os", "--max-tokens", "6", "--json")
    plain, inside = run(*args), run(*args, "--memory", "8GB")
    assert (plain.exit_code, inside.exit_code) == (0, 0), inside.stderr
    assert json.loads(plain.stdout)["token_ids"] == json.loads(inside.stdout)["token_ids"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--memory", "12 parsecs"), "is not a size"),
        (("--memory", "100MB"), "a memory budget of 100.0 MB does not hold the model: its weights"),
        (("--memory", "2GB", "--device", "cuda"), "leave one of the two out"),
    ],
)
@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("chat",)])
def test_a_budget_that_cannot_work_is_refused_before_anything_is_loaded(
    command, args, words, monkeypatch
):
    import kvcellar.models

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(kvcellar.models, "load_model", load)
    assert words in error_of(*command, *args)


def test_the_demo_takes_a_budget_too():
    result = run("demo", "--memory", "8GB", "--branches", "2", "--max-tokens", "3", "--json")
    assert result.exit_code == 0, result.stderr
    assert "100.0 MB does not hold" in error_of("demo", "--memory", "100MB")


def hybrid(tmp_path, **more):
    """A spec of a model with recurrent layers, whose slots have a million bytes."""
    path = tmp_path / "spec.json"
    fields = {"n_layers": 2, "n_kv_heads": 1, "head_dim": 64, "max_positions": 8192}
    path.write_text(json.dumps(fields | {"weight_bytes": 10**6, "state_bytes": 10**6} | more))
    return path


def test_slots_of_states_are_sized_beside_rows_and_snapshots_have_their_share(tmp_path):
    asked = ("--spec", str(hybrid(tmp_path)), "--memory", "2GB", "--kv-dtype", "bfloat16")
    value = inspected(*asked, "--context", "1000")
    states, (row,) = value["states"], value["kv_dtypes"]
    assert states["bytes_per_slot"] == 10**6
    assert row["agent_bytes"] == 1000 * row["bytes_per_token"] + 2 * 10**6
    n_bytes = value["kv_bytes"] + states["snapshot_bytes"]
    assert states["snapshots_fit"] == n_bytes // 4 // 10**6
    assert row["agents_fit"] == value["kv_bytes"] // (row["agent_bytes"] + row["growth_bytes"])

    fewer = inspected(*asked, "--snapshots", "10MB")
    assert fewer["states"]["snapshots_fit"] == 10
    assert fewer["kv_bytes"] + fewer["states"]["snapshot_bytes"] > value["kv_bytes"]


def test_snapshots_that_leave_no_room_for_agents_are_said_to(tmp_path):
    path = hybrid(tmp_path)
    value = inspected("--spec", str(path), "--memory", "2GB", "--snapshots", "1.9GB")
    assert "1,900 snapshots of 1.00 MB leave nothing" in value["why_not"]
    assert not value["fits"] and all(not row["fits"] for row in value["kv_dtypes"])


def test_a_table_says_what_recurrent_layers_keep(tmp_path):
    result = CliRunner().invoke(app, ["inspect", "--spec", str(hybrid(tmp_path))])
    shown = " ".join(result.output.split())
    assert "recurrent: a slot of states takes 1.00 MB" in shown
    assert "slots, from which conversations go on" in shown


def test_a_spec_over_a_config_keeps_its_states(tmp_path):
    path = hybrid(tmp_path)
    base = spec_from_file(path)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"head_dim": 32}))
    assert spec_from_file(other, base).params.state == base.params.state
    other.write_text(json.dumps({"state_bytes": 400}))
    assert spec_from_file(other, base).slot_bytes == 400
