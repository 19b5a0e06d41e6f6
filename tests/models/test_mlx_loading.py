"""Models of mlx-lm: what is loaded, what it says beside mlx-lm alone, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvcellar as kv
from kvcellar.cli import app
from kvcellar.errors import BackendError, ConfigError, ModelError, PromptError, StepError
from kvcellar.installed import pip_command
from kvcellar.models import load_model
from kvcellar.models.sizes.sizing import size_model
from tests.models.players import Player, text
from tests.models.quantised import mlx_folder
from tests.models.test_features import inputs_of
from tests.models.tiny_checkpoints import COMMON, WINDOW, make_model, save

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'kvcellar[mlx]'")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'kvcellar[mlx]'")

from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

SIX = ["llama", "mistral_full", "qwen2", "qwen3", "gemma3", "gpt_oss"]


def mlx_lm_says(model: Any, prompt: Any, n: int) -> list[int]:
    """mlx-lm's own loop, its own caches, its own attention."""
    steps = generate_step(
        mx.array(list(prompt)), model, max_tokens=n, prompt_cache=make_prompt_cache(model)
    )
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("family", SIX)
def test_greedy_tokens_are_mlx_lms_own(loaded: Any, family: str) -> None:
    model, prompt = loaded(family, "mlx"), text(30)
    want = mlx_lm_says(model.network, prompt, 32)
    for kind in ("contiguous", "seq"):
        with Player(model, kind) as player:
            tokens, _ = player.greedy(player.feed(prompt), 32)
            assert tokens == want


@pytest.mark.parametrize("family", SIX)
def test_a_flat_batch_of_forks_says_what_each_would_alone(loaded: Any, family: str) -> None:
    model, trunk = loaded(family, "mlx"), text(25)
    tails = [text(n, seed=n) for n in (1, 4, 2)]
    wants = [mlx_lm_says(model.network, trunk + tail, 8) for tail in tails]
    with Player(model, "seq") as player:
        player.feed(trunk)
        for seq_id in (1, 2):
            player.cache.seq_cp(0, seq_id)
        flat = [(s, t) for s, tail in enumerate(tails) for t in tail]
        ends = np.cumsum([len(tail) for tail in tails]) - 1
        rows = player.batch(flat, rows=ends)
        got: list[list[int]] = [[], [], []]
        for _ in range(8):
            for seq_id, row in enumerate(rows):
                got[seq_id].append(int(row.argmax()))
            rows = player.batch([(s, got[s][-1]) for s in range(3)], rows="all")
    assert got == wants


@pytest.mark.parametrize("bits", [4, 8])
def test_a_folder_quantised_for_mlx_is_loaded_as_it_is(
    checkpoint: Any, tmp_path: Path, bits: int
) -> None:
    folder = mlx_folder(tmp_path / "q", checkpoint("llama"), group_size=32, bits=bits)
    assert json.loads((folder / "config.json").read_text())["quantization"]["bits"] == bits
    model, full = load_model(folder, backend="mlx"), load_model(checkpoint("llama"), backend="mlx")
    assert model.dtype == "float32" and model.vocab_size == full.vocab_size
    assert model.touch_weights() < 0.5 * full.touch_weights()
    prompt = text(30)
    with Player(model, "seq") as player:
        tokens, _ = player.greedy(player.feed(prompt), 16)
    assert tokens == mlx_lm_says(model.network, prompt, 16)
    spec = size_model(folder, backend="mlx")
    assert (
        spec.weight_bytes == spec.stored_bytes < 0.5 * size_model(checkpoint("llama")).weight_bytes
    )
    assert "quantised for MLX" in spec.counted and spec.params == full.params
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="only its weights say"):
        size_model(folder, backend="mlx")


def test_weights_that_mlx_lm_reads_by_a_quantization_config_are_sized_by_their_files(
    checkpoint: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "q")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(raw))
    spec = size_model(folder, backend="mlx")
    assert spec.weight_bytes == spec.stored_bytes
    assert "sizes from its files" in spec.counted


def test_a_folder_quantised_for_mlx_is_checked_with_mlx(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    folder = mlx_folder(tmp_path / "q", checkpoint("llama"), group_size=32, bits=4)
    result = CliRunner().invoke(app, ["models", "check", str(folder), "--json"])
    (found,) = json.loads(result.stdout)["models"]
    assert result.exit_code == 0 and found["is_exact"]
    assert "mlx-lm" in found["subject"]
    result = CliRunner().invoke(app, ["models", "check", str(folder), "-b", "torch", "--json"])
    (found,) = json.loads(result.stdout)["models"]
    assert result.exit_code == 0 and found["is_exact"]
    assert "mlx-lm" not in found["subject"]


def test_a_multimodal_gemma_3_is_loaded_without_its_eyes(
    checkpoint: Any, loaded: Any, tmp_path: Path
) -> None:
    source, folder = checkpoint("gemma3"), tmp_path / "eyes"
    shutil.copytree(source, folder)
    weights = mx.load(str(source / "model.safetensors"))
    found = {f"model.language_model.{k.removeprefix('model.')}": v for k, v in weights.items()}
    found["model.vision_tower.x.weight"] = mx.zeros((2, 2))
    found["model.multi_modal_projector.y"] = mx.zeros((2, 2))
    mx.save_safetensors(str(folder / "model.safetensors"), found, {"format": "pt"})
    text_config = json.loads((source / "config.json").read_text())
    raw = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text_config,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    tokens = text(30)
    results = []
    for model in (load_model(folder, backend="mlx"), loaded("gemma3", "mlx")):
        with Player(model, "seq") as player:
            results.append(player.feed(tokens, rows="all"))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_come_in_the_type_that_was_asked(checkpoint: Any, dtype: str) -> None:
    model = load_model(checkpoint("qwen2"), backend="mlx", dtype=dtype)
    assert model.dtype == dtype
    with Player(model, "seq", kv_dtype=dtype) as player:
        logits = player.feed(text(12))
    assert logits.dtype == np.float32 and np.isfinite(logits).all()


def test_a_model_is_loaded_with_progress_that_never_goes_back(checkpoint: Any) -> None:
    seen: list[float] = []
    load_model(checkpoint("qwen3"), backend="mlx", progress=lambda part, what: seen.append(part))
    assert seen == sorted(seen) and seen[-1] == 1.0


def test_wrong_calls_are_refused_and_leave_no_cell_claimed(loaded: Any) -> None:
    model = loaded("llama", "mlx")
    with Player(model, "seq") as player:
        player.feed(text(5))
        for tokens, rows, error in (([], None, PromptError), ([9999], None, PromptError),
                                    ([3], [7], StepError)):  # fmt: skip
            at = player.cache.begin_step([(1, max(1, len(tokens)))])
            with pytest.raises(error):
                player.runner.forward(tokens, at[: len(tokens)], rows)
            assert not player.cache.has_seq(1)
    with (
        kv.make_seq_session("torch", kv.make_config(model.params, 64)) as session,
        pytest.raises(BackendError, match="make the session with 'mlx'"),
    ):
        model.bind(session)


def test_settings_that_do_not_exist_are_refused(checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="float64"):
        load_model(checkpoint("llama"), backend="mlx", dtype="float64")
    with pytest.raises(ConfigError, match="choose 'cpu' or 'gpu'"):
        load_model(checkpoint("llama"), backend="mlx", device="cuda")
    if not mx.metal.is_available():
        with pytest.raises(BackendError, match="no GPU"):
            load_model(checkpoint("llama"), backend="mlx", device="gpu")
    with Player(load_model(checkpoint("llama"), backend="mlx", device="cpu"), "seq") as player:
        assert player.feed(text(5)).shape == (1, 272)


def test_what_mlx_lm_has_no_model_for_is_refused(tmp_path: Path, checkpoint: Any) -> None:
    import transformers

    config = transformers.Gemma3TextConfig(
        **COMMON, num_hidden_layers=3, head_dim=32, sliding_window=8,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    save(transformers.Gemma3ForCausalLM(config), tmp_path / "odd")
    with pytest.raises(ModelError, match="load it with the backend torch"):
        load_model(tmp_path / "odd", backend="mlx")
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint("llama"), broken)
    weights = mx.load(str(broken / "model.safetensors"))
    weights.pop("model.layers.1.mlp.up_proj.weight")
    mx.save_safetensors(str(broken / "model.safetensors"), weights)
    with pytest.raises(ModelError, match=r"(?s)cannot be loaded by mlx-lm.*up_proj"):
        load_model(broken, backend="mlx")


def test_a_memory_budget_bounds_what_mlx_takes_and_keeps(checkpoint: Any) -> None:
    from kvcellar.backends.mlx.loading import limit_memory
    from kvcellar.budget import MemoryBudget

    model = load_model(checkpoint("llama"), backend="mlx")
    before = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 40)
    try:
        budget = MemoryBudget(500_000_000, base_bytes=1000, reserve_bytes=7_000_000)
        with Player(model, "seq", budget=budget) as player:
            player.feed(text(20))
        assert mx.set_memory_limit(1 << 40) == 500_000_000
        assert mx.set_cache_limit(1 << 40) == 7_000_000
    finally:
        limit_memory(*before)


def test_models_and_their_tokens_need_no_torch(checkpoint: Any) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
import kvcellar as kv
from kvcellar.models import load_model
from kvcellar.models.sizes.sizing import size_model
model = load_model({str(checkpoint("gemma3"))!r}, backend="mlx")
with kv.make_seq_session("mlx", kv.make_config(model.params, 64)) as session:
    runner = model.bind(session)
    ids = model.tokenizer("hello")["input_ids"]
    print(runner.forward(ids, session.cache.begin_step([(0, len(ids))])).shape)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "(1, 272)", out.stderr


def test_the_package_and_its_commands_need_no_mlx() -> None:
    code = """
import sys
sys.modules["mlx"] = None
import kvcellar as kv
from kvcellar.errors import BackendError
from kvcellar.models import load_model
from kvcellar.models.sizes.sizing import size_model
import kvcellar.cli
for call in (lambda: load_model("demo", backend="mlx"),
             lambda: kv.make_seq_session("mlx", kv.make_config(kv.ModelCacheParams(1, 1, 8), 8))):
    try:
        call()
    except BackendError as error:
        print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.count(pip_command("mlx")) == 2, out.stdout + out.stderr


def test_yarn_without_truncation_is_the_configs_own(loaded: Any) -> None:
    torch = pytest.importorskip("torch")
    rope = loaded("gpt_oss", "mlx").network.model.layers[0].self_attn.rope
    want = make_model("gpt_oss").model.rotary_emb.inv_freq
    torch.testing.assert_close(torch.tensor(1 / np.array(rope._freqs)), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_features_are_those_of_transformers(loaded: Any, oracle: Any, family: str) -> None:
    model, prompt = loaded(family, "mlx"), text(12)
    middle, last = model.params.n_layers // 2, model.params.n_layers
    own = oracle(family).model
    modules = [own.model.layers[0], own.model.layers[middle], own.model.norm]
    want = inputs_of(modules, lambda: own(torch.tensor([prompt])))
    with Player(model, "seq") as player:
        runner = model.bind(player.session, feature_layers=(0, middle, last))
        found = []
        for part in (prompt[:8], prompt[8:]):
            positions = player.cache.begin_step([(0, len(part))])
            logits, features = runner.forward_with_features(part, positions, [1])
            found.append(features)
        assert features.dtype == np.float32
        np.testing.assert_allclose(np.concatenate(found), want, atol=1e-3)
        np.testing.assert_allclose(logits, oracle(family).logits(prompt)[[9]], atol=1e-3)
        assert player.feed(prompt, 1).shape == logits.shape, "and without"


def test_a_model_that_is_not_what_mlx_lm_says_is_refused_unless_a_person_goes_on(
    checkpoint: Any, monkeypatch: Any
) -> None:
    from kvcellar.backends.mlx import loading
    from kvcellar.models.check import CACHES, CheckVerdict, InexactModelWarning

    asked: list[str] = []

    def inexact(network: Any, learnt: Any, family: str, device: Any) -> CheckVerdict:
        asked.append(family)
        found = {kind: {"decode": 0.5} for kind in CACHES}
        return CheckVerdict(family, (), "a test", found, 0.0, None, loading.versions("x"), 1.0)

    monkeypatch.setattr(loading, "check_network", inexact)
    monkeypatch.setattr(loading, "versions", lambda dtype: {"mlx-lm": "of a test"})
    with pytest.raises(ModelError, match=r"differ from the model's own by 5.0e-01 \(decode"):
        load_model(checkpoint("llama"), backend="mlx")
    with pytest.warns(InexactModelWarning, match=r"5.0e-01"):
        load_model(checkpoint("llama"), backend="mlx", is_unchecked=True)
    assert asked == ["llama"], "a verdict that was kept is enough to go on unchecked"
    assert load_model(checkpoint("mistral"), backend="mlx").learnt.added_window == WINDOW
    assert asked == ["llama"], "mlx-lm's own code knows no window"


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_words_that_mlx_lm_demands_are_found_in_the_config(family: str, tmp_path: Path) -> None:
    from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny

    model = load_model(write_tiny(family, tmp_path), backend="mlx")
    prompt = text(30)
    with Player(model, "seq") as player:
        tokens, _ = player.greedy(player.feed(prompt), 4)
    assert tokens == mlx_lm_says(model.network, prompt, 4)
