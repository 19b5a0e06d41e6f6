"""Who runs a model where nobody has named a backend: native where it can, else torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import kvcellar as kv
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.errors import BackendError, ModelError
from kvcellar.hosting.host import open_host
from kvcellar.installed import pip_command
from kvcellar.kernel import levels
from kvcellar.models import LoadedModel, LoadOptions, backend_choice, load_model
from kvcellar.models.backend_choice import choose_backend
from kvcellar.models.sizes.sizing import size_model
from tests.models.gguf.families import CASES
from tests.models.test_native import IDS, SHAPE, logits

pytestmark = pytest.mark.skipif(not levels.is_available(), reason="needs the CPU kernel")


@pytest.fixture(autouse=True)
def as_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prefer native, as outside of tests, and know no plan but by rules."""
    monkeypatch.delenv(backend_choice.PREFERENCE, raising=False)
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = backend_choice.find_spec
    monkeypatch.setattr(
        backend_choice, "find_spec", lambda name: None if name == "torch" else found(name)
    )


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny checkpoint of a family whose plan is known by rules."""
    return write_tiny("llama", tmp_path / "llama", **SHAPE)


def test_native_runs_what_it_has_a_plan_for_and_a_named_backend_wins(llama: Path) -> None:
    options = LoadOptions(llama, weights="int8")
    assert choose_backend(options).backend == "native"
    assert "plan is known" in choose_backend(options).why
    assert load_model(options).backend == "native"
    assert load_model(options, backend="torch").backend == "torch"
    assert size_model(options).weight_bytes == load_model(options).size_bytes


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe", "lfm2"])
def test_native_runs_families_that_torch_has_never_seen(tmp_path: Path, family: str) -> None:
    options = LoadOptions(write_tiny(family, tmp_path / family, **SHAPE), weights="int8")
    assert choose_backend(options).backend == "native"
    model = load_model(options)
    assert model.backend == "native" and size_model(options).weight_bytes == model.size_bytes


def test_latents_whose_rows_are_stored_in_two_ways_are_torchs(tmp_path: Path) -> None:
    folder = write_tiny("minicpm3", tmp_path / "latents")
    assert choose_backend(LoadOptions(folder)).backend == "native"
    for kv_dtype in ("int8", "k8v4", "k16v8"):
        choice = choose_backend(LoadOptions(folder, kv_dtype=kv_dtype))
        assert choice.backend == "torch" and "each in its own way" in choice.why


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_native_runs_gguf_files_on_their_blocks_and_torch_packs_them_anew(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "model.gguf"
    CASES[name].write(path, kind=gguf.GGMLQuantizationType.Q8_0)
    assert load_model(path).backend == "native"
    for weights in ("int8", "bf16"):
        options = LoadOptions(path, weights=weights)
        assert "which are not packed anew" in choose_backend(options).why
        assert load_model(options).backend == "torch"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"device": "cuda"}, "device 'cuda'"),
        ({"tp": 2, "weights": None}, "tp 2"),
        ({"adapters": {"rhymes": "folder"}}, r"adapters \(rhymes\)"),
        ({"speculate": "eagle3:folder"}, "speculate 'eagle3:folder'"),
        ({"kv_dtype": "fp8"}, "K and V in fp8"),
        ({"kv_dtype": "int8:rot"}, "stores K rotated"),
        ({"weights": "none", "dtype": "bfloat16"}, "would compute in bfloat16 with plain weights"),
        ({"weights": None, "dtype": "float16"}, "would compute in float16 with plain weights"),
    ],
)
def test_torch_runs_what_native_has_not(llama: Path, asked: Any, why: str) -> None:
    options = LoadOptions(llama, **{"weights": "int8", **asked})
    choice = choose_backend(options)
    assert choice.backend == "torch" and re.search(why, choice.why), choice


def test_a_family_without_a_plan_is_torchs(tmp_path: Path) -> None:
    cohere = write_tiny("cohere", tmp_path / "cohere", **SHAPE)
    choice = choose_backend(LoadOptions(cohere, weights="bf16"))
    assert choice.backend == "torch" and "has no plan yet" in choice.why


def test_the_bundled_model_and_others_in_float32_are_natives_and_say_what_torch_says(
    llama: Path,
) -> None:
    for model in ("demo", llama):
        options = LoadOptions(model)
        assert choose_backend(options).backend == "native"
        ours, by_torch = load_model(options), load_model(options, backend="torch")
        assert (ours.dtype, ours.weights, ours.backend) == ("float32", None, "native")
        assert (ours.fingerprint(), ours.dtype) == (by_torch.fingerprint(), by_torch.dtype)
        want, got = logits(by_torch), logits(ours)
        assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()
        assert greedy(ours, 64) == greedy(by_torch, 64)
        assert size_model(options).weight_bytes == pytest.approx(ours.size_bytes, rel=0.01)


def greedy(model: LoadedModel, n_tokens: int) -> list[int]:
    """Return what a model says behind a text, the likeliest token each time."""
    with kv.make_seq_session(model.backend, kv.make_config(model.params, 256)) as session:
        runner, tokens = model.bind(session), list(IDS)
        at = 0
        for _ in range(n_tokens):
            more = tokens[at:]
            at = len(tokens)
            row = runner.forward(more, session.cache.begin_step([(0, len(more))]))[0]
            tokens.append(int(row.argmax()))
    return tokens


def test_a_file_of_blocks_is_natives_and_one_in_16_bits_is_torchs(tmp_path: Path) -> None:
    for kind, backend in (("Q8_0", "native"), ("F16", "torch")):
        path = tmp_path / f"{kind}.gguf"
        CASES["llama"].write(path, kind=gguf.GGMLQuantizationType[kind])
        assert choose_backend(LoadOptions(path)).backend == backend, kind


def test_hybrids_of_gguf_are_natives_but_for_tensors_in_forms_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    whys = {"qwen35": "", "qwen3next": "", "granitehybrid": "as plain numbers"}
    for name, why in whys.items():
        CASES[name].write(path, kind=gguf.GGMLQuantizationType.Q8_0)
        choice = choose_backend(LoadOptions(path))
        assert choice.backend == ("torch" if why else "native") and why in choice.why


@pytest.mark.usefixtures("without_torch")
def test_without_torch_one_sentence_says_what_needs_it_and_how_it_is_had(llama: Path) -> None:
    assert choose_backend(LoadOptions("demo")).backend == "native"
    assert load_model(llama).dtype == "float32" and load_model(llama).backend == "native"
    with pytest.raises(BackendError) as refused:
        load_model(LoadOptions(llama, weights="int8", kv_dtype="fp8"))
    said = str(refused.value)
    assert "needs torch, which is not installed: K and V in fp8" in said
    assert said.endswith(f"install it with: {pip_command('torch')}")
    with pytest.raises(ModelError, match="there is no folder"):  # whoever would run it
        load_model(llama.parent / "nothing")


def test_whoever_guesses_is_chosen_for_itself(llama: Path, tmp_path: Path) -> None:
    draft = write_tiny("cohere", tmp_path / "cohere", **SHAPE)
    options = LoadOptions(llama, weights="bf16", capacity=64, speculate=str(draft))
    host = open_host(options)
    try:
        assert host.engine.runner.__class__.__module__.startswith("kvcellar.backends.native")
    finally:
        host.close()


def test_a_command_says_nothing_of_backends_and_imports_no_torch(llama: Path) -> None:
    program = (
        "import sys\n"
        "sys.argv = ['kvcellar', *sys.argv[1:]]\n"
        "from kvcellar.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    asked = ("generate", str(llama), "--weights", "bf16", "--raw", "-p", "abc", "--max-tokens", "4")
    done = subprocess.run(
        [sys.executable, "-c", program, *asked, "--alone", "--json", "--capacity", "64"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) <= 4
