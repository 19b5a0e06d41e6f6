"""A fingerprint differs wherever the same tokens may give other K and V, and says where."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvcellar.errors import StoreError
from kvcellar.store import default_store, fingerprint_checkpoint, fingerprint_of
from tests.models.fingerprints import differences


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"hidden_size": 8, "rope_theta": 1e4, "transformers_version": "5.0"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    tokenizer_config = {"chat_template": "{{ x }}", "model_max_length": 8}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    save_file({"w": np.arange(3_000_000, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_every_part_is_told_apart(checkpoint: Path) -> None:
    first = fingerprint_checkpoint(checkpoint)
    assert fingerprint_checkpoint(checkpoint) == first
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[7_654_321] ^= 1  # one bit of one weight
    for part, change in (
        ("weights", lambda: (checkpoint / "model.safetensors").write_bytes(data)),
        ("tokenizer", lambda: (checkpoint / "tokenizer.json").write_text("{ }")),
        ("rope", lambda: change_json(checkpoint / "config.json", rope_theta=1e6)),
        ("config", lambda: change_json(checkpoint / "config.json", hidden_size=9)),
        (
            "chat_template",
            lambda: change_json(checkpoint / "tokenizer_config.json", chat_template="{{ y }}"),
        ),
        ("chat_template", lambda: (checkpoint / "chat_template.jinja").write_text("x")),
    ):
        before = fingerprint_checkpoint(checkpoint)
        change()
        after = fingerprint_checkpoint(checkpoint)
        assert differences(after, before) == [part]
        assert after.value != before.value
        assert (after.of_kv == before.of_kv) == (part == "chat_template"), "tokens are compared"


def test_what_changes_nothing_changes_nothing(checkpoint: Path) -> None:
    first = fingerprint_checkpoint(checkpoint)
    change_json(checkpoint / "config.json", transformers_version="6", _name_or_path="elsewhere")
    (checkpoint / "README.md").write_text("x")
    assert fingerprint_checkpoint(checkpoint).value == first.value


def test_large_files_are_read_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "digests.json"
    first = fingerprint_checkpoint(checkpoint, cache_file=cache)
    assert cache.stat().st_mode & 0o777 == 0o600
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr("xxhash.xxh3_128", None)  # hashing a file needs it
        again = fingerprint_checkpoint(
            checkpoint, cache_file=cache, on_progress=lambda _, what: told.append(what)
        )
    assert again == first
    assert told[-1] == "hashed"
    weights = checkpoint / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    stat = weights.stat()
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a change that hides
    assert differences(fingerprint_checkpoint(checkpoint, cache_file=cache), first) == ["weights"]
    cache.write_text("no json")
    assert fingerprint_checkpoint(checkpoint, cache_file=cache).parts.keys() == first.parts.keys()


def test_parts_can_be_given(checkpoint: Path) -> None:
    plain = fingerprint_checkpoint(checkpoint)
    adapted = fingerprint_checkpoint(checkpoint, adapter=b"lora")
    assert differences(adapted, plain) == ["adapter"]
    assert fingerprint_of(weights="a").value != fingerprint_of(weights="b").value


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read as a checkpoint"):
        fingerprint_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StoreError, match="has no safetensors files"):
        fingerprint_checkpoint(tmp_path)


def test_the_default_store_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("KVCELLAR_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert default_store() == Path("/home/me/.local/share/kvcellar/store")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_store() == Path("/data/kvcellar/store")
    monkeypatch.setenv("KVCELLAR_HOME", "~/cellar")
    assert default_store() == Path("/home/me/cellar/store")
