"""Models in the folders of other programs: found, named, resolved and deleted."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.errors import ModelError
from kvcellar.models.files import hub
from kvcellar.models.files.hub import DEMO_FOLDER, find_checkpoint, is_local
from kvcellar.models.files.places import find_in_place, found_models, quant_of, say_near
from kvcellar.models.options import no_progress
from kvcellar.models.sizes.sizing import find_config


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home in which no program has a model yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "own"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path


def write_checkpoint(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    return folder


def write_gguf(file: Path, size: int = 50) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"GGUF".ljust(size, b"\0"))
    return file


def write_cached(home: Path, repo: str) -> Path:
    """An empty snapshot of a repository, as the hub's library keeps them."""
    folder = home / "hf" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    return snapshot


def link(snapshot: Path, name: str, content: bytes) -> Path:
    blob = snapshot.parent.parent / "blobs" / name.replace("/", "_")
    blob.write_bytes(content)
    file = snapshot / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(blob)
    return file


def write_ollama(
    home: Path, name: str, tag: str, place: str = "registry.ollama.ai/library"
) -> Path:
    models = home / ".ollama" / "models"
    blob = write_gguf(models / "blobs" / f"sha256-{name}{tag}")
    manifest = models / "manifests" / place / name / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:none"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{name}{tag}"},
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    return blob


def test_nothing_is_found_where_no_program_has_a_model(home):
    assert found_models() == []


def test_every_programs_models_are_found_under_the_names_that_commands_take(home):
    snapshot = write_cached(home, "Qwen/Qwen3-0.6B")
    link(snapshot, "config.json", b'{"model_type": "qwen3"}')
    link(snapshot, "model.safetensors", b"x" * 70)
    ggufs = write_cached(home, "some/Model-GGUF")
    link(ggufs, "Model-Q4_K_M.gguf", b"GGUF" + bytes(30))
    link(ggufs, "mmproj-Model-F16.gguf", b"GGUF" + bytes(30))
    mlx = home / ".lmstudio" / "models" / "mlx-community" / "Qwen3-4bit"
    write_checkpoint(mlx, quantization={"bits": 4, "group_size": 64})
    write_gguf(home / ".lmstudio" / "models" / "lmstudio-community" / "Y-GGUF" / "Y-IQ4_XS.gguf")
    write_ollama(home, "llama3.2", "latest")
    write_ollama(home, "mine", "v1", "registry.ollama.ai/me")
    own = write_checkpoint(home / "own" / "models" / "tiny")
    found = [
        (one.name, one.place, one.format, one.family, one.size_bytes) for one in found_models()
    ]
    assert found == [
        ("Qwen/Qwen3-0.6B", "hugging face", "safetensors", "qwen3", 70),
        ("some/Model-GGUF:Q4_K_M", "hugging face", "gguf", None, 34),
        (str(own), "kvcellar", "safetensors", "qwen3", 100),
        ("lmstudio:lmstudio-community/Y-GGUF:IQ4_XS", "lm studio", "gguf", None, 50),
        ("lmstudio:mlx-community/Qwen3-4bit", "lm studio", "mlx", "qwen3", 100),
        ("ollama:llama3.2:latest", "ollama", "gguf", None, 50),
        ("ollama:registry.ollama.ai/me/mine:v1", "ollama", "gguf", None, 50),
    ]


def test_a_split_file_is_one_model_and_says_which_parts_are_missing(home):
    folder = home / "own" / "models" / "big"
    for n in (1, 3):
        write_gguf(folder / f"Big-Q8_0-0000{n}-of-00003.gguf")
    (one,) = found_models()
    assert one.path.name == "Big-Q8_0-00001-of-00003.gguf" and one.size_bytes == 100
    assert one.lacks == ("Big-Q8_0-00002-of-00003.gguf",)


def test_a_checkpoint_that_is_half_here_says_which_files_are_missing(home):
    folder = write_checkpoint(home / "own" / "models" / "half")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert found_models()[0].lacks == ("model-00002-of-00002.safetensors",)


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("Model-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "Q8_0"),
        ("M-IQ2_XXS-00001-of-00002.gguf", "IQ2_XXS"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("M-bf16.gguf", "BF16"),
        ("strange.gguf", "strange"),
    ],
)
def test_the_quantisation_is_read_from_the_end_of_a_files_name(file, quant):
    assert quant_of(Path(file)) == quant


def test_another_programs_name_leads_to_its_file(home):
    blob = write_ollama(home, "llama3.2", "latest")
    file = home / ".lmstudio" / "models" / "a" / "B" / "B-Q4_0.gguf"
    write_gguf(file)
    for name in ("ollama:llama3.2", "ollama:llama3.2:latest"):
        assert find_in_place(name) == blob
        assert is_local(name)
    for name in ("lmstudio:a/B", "lmstudio:a/B:Q4_0"):
        assert find_in_place(name) == file
    assert find_in_place("a/B") is None
    write_gguf(file.with_name("B-Q8_0.gguf"))
    with pytest.raises(
        ModelError, match=r"LM Studio has no model 'lmstudio:a/B' .*B:Q4_0, .*B:Q8_0"
    ):
        find_in_place("lmstudio:a/B")
    with pytest.raises(ModelError, match=r"Ollama has no model 'ollama:qwen3' .*llama3.2:latest"):
        find_in_place("ollama:qwen3")
    assert find_checkpoint("ollama:llama3.2", no_progress) == blob


def test_a_checkpoint_in_lm_studios_folder_is_loaded_where_it_lies(home):
    folder = write_checkpoint(home / ".lmstudio" / "models" / "a" / "B")
    assert find_checkpoint("lmstudio:a/B", no_progress) == folder


def test_one_quantisation_of_a_repository_is_downloaded_and_no_other(home, monkeypatch):
    asked: list[Any] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options["allow_patterns"], options["ignore_patterns"]))
        write_gguf(home / "repo" / "Q4_K_M" / "Some-Q4_K_M.gguf")
        return str(home / "repo")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    file = hub.pull("some/Model-GGUF:q4_k_m", no_progress)
    assert file == home / "repo" / "Q4_K_M" / "Some-Q4_K_M.gguf"
    wanted = ["*q4_k_m*.gguf", "*Q4_K_M*.gguf", hub.VISION_FILE]
    assert asked == [("some/Model-GGUF", wanted, [])]
    assert find_config("some/Model-GGUF:Q4_K_M") == file
    with pytest.raises(ModelError, match=r"no whole GGUF file of Q8_0; .*some/Model-GGUF:Q4_K_M"):
        hub.pull("some/Model-GGUF:Q8_0", no_progress)


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        ("mmproj-F16.gguf", True),
        ("mmproj-model-f16.gguf", True),
        ("Model.mmproj-f16.gguf", True),
        ("mmproj-model-f16-4B.gguf", True),
        ("MMPROJ-F16.gguf", True),
        ("mmproj-BF16.gguf", False),
        ("mmproj-Model-Q8_0.gguf", False),
        ("Model-F16.gguf", False),
    ],
)
def test_the_vision_part_in_16_bits_is_downloaded_beside_a_model(name, is_taken):
    assert fnmatch(name, hub.VISION_FILE) is is_taken


def test_names_of_the_hub_have_dots_and_names_of_gguf_files_are_not_looked_for(home, monkeypatch):
    asked: list[str] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append(name)
        return str(home / "repo")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert find_config("some/Model2.5-0.5B") == home / "repo" / "config.json"
    with pytest.raises(ModelError, match=r"there is no file nowhere\.gguf; give .* a GGUF file"):
        find_checkpoint("nowhere.gguf", no_progress)
    assert asked == ["some/Model2.5-0.5B"]


# The commands -------------------------------------------------------------------------------------


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["models", *args], env={"COLUMNS": "200"})


def test_the_list_says_what_each_would_take_and_why_one_would_not_load(home):
    write_gguf(home / "own" / "models" / "x" / "X-Q4_0.gguf")
    shown = run("list")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.splitlines()[0].split()[:3] == ["MODEL", "FAMILY", "FORMAT"]
    assert "X-Q4_0.gguf would not load: " in shown.stdout
    rows = {row["name"]: row for row in json.loads(run("list", "--json").stdout)}
    demo = rows["demo"]
    assert demo["path"] == str(DEMO_FOLDER) and demo["memory_bytes"] > demo["size_bytes"] > 0
    gguf = rows[str(home / "own" / "models" / "x" / "X-Q4_0.gguf")]
    assert gguf["memory_bytes"] is None and gguf["reason"]
    assert demo["is_exact"] is gguf["is_exact"] is None
    assert run("check", "demo").exit_code == 0
    (exact,) = (row for row in json.loads(run("list", "--json").stdout) if row["name"] == "demo")
    assert exact["is_exact"] is True


def test_a_name_that_is_not_on_the_hub_is_not_pulled(home, monkeypatch):
    for name in ("demo", "ollama:x", "./folder", "a/b/c"):
        result = run("pull", name)
        assert result.exit_code == 2 and "is no name on the Hugging Face hub" in result.stderr
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = run("pull", "some/model")
    assert result.exit_code == 2 and "hub cannot be reached" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_model_is_deleted_only_when_that_is_agreed(home):
    snapshot = write_cached(home, "Qwen/Q")
    link(snapshot, "config.json", b'{"model_type": "qwen3"}')
    link(snapshot, "model.safetensors", b"x" * 70)
    result = run("rm", "Qwen/Q")
    assert result.exit_code == 2 and "--yes" in result.stderr and snapshot.is_dir()
    assert run("rm", "Qwen/Q", "--yes").exit_code == 0
    assert not snapshot.exists() and found_models() == []


def test_one_quantisation_is_deleted_and_its_neighbour_stays(home):
    snapshot = write_cached(home, "a/B")
    link(snapshot, "B-Q4_0.gguf", b"GGUF" + bytes(10))
    link(snapshot, "B-Q8_0.gguf", b"GGUF" + bytes(10))
    assert run("rm", "a/B:Q4_0", "-y").stdout == "14 B freed\n"
    assert [one.name for one in found_models()] == ["a/B:Q8_0"]
    assert [blob.name for blob in (snapshot.parent.parent / "blobs").iterdir()] == ["B-Q8_0.gguf"]


def test_what_another_program_keeps_is_not_deleted(home):
    blob = write_ollama(home, "x", "latest")
    result = run("rm", "ollama:x:latest", "--yes")
    assert result.exit_code == 2 and "kept by ollama" in result.stderr and blob.exists()
    result = run("rm", "nobody/none", "--yes")
    assert result.exit_code == 2 and "there are: ollama:x:latest" in result.stderr


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("smolm2", "'smollm2'"),
        ("dmeo", "'demo'"),
        ("llama3", "'ollama:llama3:latest'"),
        ("ollama:lama3", "'ollama:llama3:latest'"),
        ("gema-3-4b", "'lmstudio:some/gemma-3-4b:Q4_K_M'"),
        ("Qwen/Qwen3-0.6", "'Qwen/Qwen3-0.6B'"),
        ("qwen3-0.6b", "'Qwen/Qwen3-0.6B'"),
    ],
)
def test_a_name_that_is_none_is_answered_with_those_of_all_programs_that_come_near(
    said, meant, home, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    link(write_cached(home, "Qwen/Qwen3-0.6B"), "config.json", b'{"model_type": "qwen3"}')
    link(home / "hf/models--Qwen--Qwen3-0.6B/snapshots" / ("a" * 40), "x.safetensors", b"x")
    write_ollama(home, "llama3", "latest")
    write_gguf(home / ".lmstudio/models/some/gemma-3-4b/gemma-3-4b-Q4_K_M.gguf")
    assert meant in say_near(said, "nothing")
    assert say_near("xyzzy", "nothing") == "nothing"
    if not said.lower().startswith("qwen"):  # that one is looked for, and is here in part
        for look in (lambda: find_checkpoint(said, no_progress), lambda: find_config(said)):
            with pytest.raises(ModelError, match=meant.strip("'")):
                look()


def test_where_a_program_has_no_model_it_is_said_where_was_looked_and_what_to_do(home):
    with pytest.raises(ModelError) as refused:
        find_in_place("ollama:llama3")
    said = str(refused.value)
    assert f"there is no folder {home}/.ollama/models" in said and "ollama pull llama3" in said
    (home / ".ollama" / "models").mkdir(parents=True)
    with pytest.raises(ModelError, match=f"nothing is in {home}/.ollama/models; "):
        find_in_place("ollama:llama3")
    with pytest.raises(ModelError, match=f"nothing is in {home}/.lmstudio/models, "):
        find_in_place("lmstudio:some/model")
