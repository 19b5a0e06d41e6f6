"""Models in Ollama's folder: read in place, with what their manifests say beside the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from kvcellar.errors import ModelError
from kvcellar.models import load_model
from kvcellar.models.files.hub import find_checkpoint
from kvcellar.models.files.ollama import named
from kvcellar.models.files.places import described, found_models
from kvcellar.models.loading import ForeignSettingsWarning
from kvcellar.models.options import no_progress
from tests.models.gguf.families import CASES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ollama's folder, in which no model is yet; other programs have none either."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hf"))
    (tmp_path / "ollama" / "blobs").mkdir(parents=True)
    return tmp_path / "ollama"


def write(folder: Path, name: str, **layers: str | bytes | dict[str, Any] | None) -> Path:
    """Write a manifest and its blobs; None: the manifest names one that is not there."""
    listed = []
    for kind, content in layers.items():
        digest = f"sha256:{name.replace(':', '')}{kind}"
        listed.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest})
        data = json.dumps(content) if isinstance(content, dict) else content
        if data is not None:
            data = data.encode() if isinstance(data, str) else data
            (folder / "blobs" / digest.replace(":", "-")).write_bytes(data)
    model, tag = name.split(":")
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / model / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"layers": listed}))
    return folder / "blobs" / f"sha256-{model}{tag}model"


def test_a_name_without_a_tag_is_latest_or_the_only_one_there_is(folder):
    blob = write(folder, "x:1b", model=b"GGUF")
    assert find_checkpoint("ollama:x", no_progress) == blob
    write(folder, "x:4b", model=b"GGUF")
    with pytest.raises(ModelError, match=r"no model 'ollama:x' .*: ollama:x:1b, ollama:x:4b$"):
        named("ollama:x")
    latest = write(folder, "x:latest", model=b"GGUF")
    assert named("ollama:x").file() == latest and named("ollama:x:4b").file() != latest


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"model": None}, r"half here: .* sha256-xlatestmodel, .*run: ollama pull x:latest"),
        ({"tensor": b"", "json": b"{}"}, "has no GGUF file: .* kinds json, tensor"),
        ({"model": b"GGUF", "adapter": b"GGUF"}, r"has an adapter \(LoRA\)"),
    ],
)
def test_what_is_no_whole_gguf_file_says_what_is_there(folder, layers, said):
    write(folder, "x:latest", **layers)
    with pytest.raises(ModelError, match=said):
        find_checkpoint("ollama:x", no_progress)


def test_a_model_whose_file_is_missing_is_listed_as_one(folder):
    blob = write(folder, "x:latest", model=None)
    (folder / "manifests" / "notes.txt").write_text("no manifest")
    (one,) = found_models()
    assert one.name == "ollama:x:latest" and one.lacks == (blob.name,)


def test_its_sampling_is_the_models_and_what_is_left_is_said(folder):
    path = write(
        folder,
        "x:latest",
        model=b"",
        params={"temperature": 0.25, "repeat_penalty": 1.1, "num_ctx": 64, "mirostat": 1}
        | {"stop": ["</s>", "User:"]},
        system="You are a pirate.",
        template="{{ .Prompt }}",
    )
    CASES["llama"].write(path, kind=gguf.GGMLQuantizationType.Q8_0)
    with pytest.warns(ForeignSettingsWarning) as told:
        model = load_model("ollama:x", is_unchecked=True)
    assert model.sampling == {"temperature": 0.25, "repetition_penalty": 1.1}
    (said,) = (str(one.message) for one in told)
    assert "system prompt" in said and "'User:'" in said and "mirostat" in said
    assert "</s>" not in said and "num_ctx" not in said and "template" not in said
    left = named("ollama:x").left_out(frozenset(), has_template=False)
    assert any("Go's language" in one for one in left)
    (found,) = found_models()
    assert (described(found).family, described(found).stored) == ("llama", "Q8_0")


def test_sampling_that_cannot_be_is_refused_with_the_file(folder):
    write(folder, "x:latest", model=b"GGUF", params={"temperature": "hot"})
    with pytest.raises(ModelError, match=r"sha256-xlatestparams has temperature='hot'"):
        named("ollama:x").sampling()
