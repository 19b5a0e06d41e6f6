"""Costs of models are worked out once, and again when anything that they depend on has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvcellar.home import default_home
from kvcellar.models.options import LoadOptions
from kvcellar.models.sizes import known_specs
from kvcellar.models.sizes.known_specs import known_spec
from kvcellar.models.sizes.sizing import size_model

pytest.importorskip("torch")
pytest.importorskip("transformers")

CONFIGS = {
    "windows": {"model_type": "gemma2", "head_dim": 32, "sliding_window": 16},
    "states": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "latents": {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(COMMON | CONFIGS["windows"]))
    return file


@pytest.fixture
def worked_out(monkeypatch):
    """The options of which costs were worked out."""
    seen = []
    monkeypatch.setattr(known_specs, "size_model", lambda it: (seen.append(it), size_model(it))[1])
    return seen


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_kept_is_what_was_worked_out(tmp_path, worked_out, kind):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(COMMON | CONFIGS[kind]))
    options = LoadOptions(file, dtype="bfloat16")
    first, again = known_spec(options, "avx2"), known_spec(options, "avx2")
    assert len(worked_out) == 1
    assert first == again == size_model(options)
    assert again.params.state == first.params.state and again.kv_dtype == "bfloat16"
    assert (first.params.state is not None) == (kind == "states")


def test_costs_are_worked_out_again_when_something_they_depend_on_is_another(config, worked_out):
    options = LoadOptions(config)
    known_spec(options, "avx2")
    for other, kernel in (
        (options, "vnni"),
        (LoadOptions(config, dtype="float16"), "avx2"),
        (LoadOptions(config, weights="int8"), "avx2"),
    ):
        known_spec(other, kernel)
    assert len(worked_out) == 4
    config.write_text(json.dumps(COMMON | CONFIGS["windows"] | {"vocab_size": 128}))
    assert known_spec(options, "avx2").vocab_size == 128
    (config.parent / "model.safetensors.index.json").write_text("{}")
    known_spec(options, "avx2")
    assert len(worked_out) == 6, "weights came to lie beside it"


def test_a_damaged_file_costs_the_time_again_and_nothing_else(config, worked_out):
    options = LoadOptions(config)
    want = known_spec(options, "avx2")
    (kept,) = (default_home() / "models").glob("*.spec.json")
    for damage in ("", "[]", "{}", '{"params": 3}', kept.read_text().replace('"groups"', '"g"')):
        kept.write_text(damage)
        assert known_spec(options, "avx2") == want
    assert len(worked_out) == 6


def test_inspect_imports_no_torch_the_second_time():
    program = (
        "import sys\n"
        "from kvcellar.cli import app\n"
        "try:\n"
        "    app(['inspect', 'demo', '--json'])\n"
        "finally:\n"
        "    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    for is_imported in ("True", "False"):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ
        )
        assert json.loads(done.stdout)["model"] == "demo"
        assert done.stderr.splitlines()[-1] == is_imported
