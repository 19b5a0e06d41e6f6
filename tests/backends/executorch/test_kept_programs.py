"""A checkpoint is exported once for a runtime and a way to hold weights, and kept."""

from __future__ import annotations

import shutil
import threading

import pytest

from kvcellar.backends.executorch import exporting, loading
from kvcellar.errors import ConfigError
from kvcellar.models import LoadOptions, load_model


@pytest.fixture
def fake_export(monkeypatch, tmp_path):
    """Exports are counted and write their options; a home of their own."""
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    calls = []

    def export(name_or_path, to, *, quantize, dtype, is_unchecked, progress):
        calls.append((quantize, dtype))
        progress(0.5, "lowering")
        to.write_text(f"{quantize} {dtype}")

    monkeypatch.setattr(exporting, "export_program", export)
    return calls


def kept(weights="none", dtype=None, report=lambda part, what: None):
    return loading._exported(LoadOptions(dtype=dtype, weights=weights), report)


def test_it_is_exported_once_for_each_set_of_options(fake_export):
    assert kept() == kept("none", "float32")
    paths = {kept(), kept("8da4w"), kept("8da8w"), kept(dtype="float16")}
    assert len(paths) == 4
    assert fake_export == [
        ("none", "float32"),
        ("8da4w", "float32"),
        ("8da8w", "float32"),
        ("none", "float16"),
    ]


def test_what_nobody_checked_is_kept_apart(fake_export):
    unchecked = LoadOptions(weights="none", is_unchecked=True)
    assert loading._exported(unchecked, lambda part, what: None) != kept()


def test_another_version_exports_again(fake_export, monkeypatch):
    first = kept()
    monkeypatch.setattr(loading, "executorch_version", lambda: "9.9")
    assert kept() != first
    assert len(fake_export) == 2


def test_two_at_once_export_once(fake_export):
    found = []
    threads = [threading.Thread(target=lambda: found.append(kept())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 4
    assert len(fake_export) == 1


def test_an_export_that_fails_leaves_no_program(fake_export, monkeypatch):
    path = kept()
    path.unlink()

    def fail(*args, **kwargs):
        raise ConfigError("no")

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "export_program", fail)
        with pytest.raises(ConfigError):
            kept()
    assert not path.exists()
    half = path.with_name(f".{path.name}.12345")  # of a process that was killed
    half.write_bytes(b"half")
    assert kept() == path
    assert not half.exists()


def test_progress_says_that_it_exports(fake_export):
    said = []
    kept("8da4w", report=lambda part, what: said.append((part, what)))
    assert "exporting: lowering" in [what for _, what in said]
    assert [part for part, _ in said] == sorted(part for part, _ in said)


def test_a_program_with_other_weights_is_refused(exported):
    path = exported("llama", "8da4w")
    model = load_model(path, backend="executorch", weights="8da4w")
    assert model.weights == "8da4w"
    with pytest.raises(ConfigError, match=r"8da4w.*--quantize 8da8w"):
        load_model(path, backend="executorch", weights="8da8w")


def test_a_checkpoint_runs_as_the_program_that_was_made_of_it(exported, monkeypatch, tmp_path):
    program = exported("llama", "8da4w")
    made = []

    def export(name_or_path, to, *, quantize, **options):
        made.append(quantize)
        shutil.copyfile(program, to)

    monkeypatch.setattr(exporting, "export_program", export)
    monkeypatch.setattr(loading, "default_home", lambda: tmp_path)
    for _ in range(2):
        model = load_model("demo", backend="executorch", weights="8da4w")
        assert model.weights == "8da4w"
        assert model.path.parent == tmp_path / "executorch" / "programs"
    assert made == ["8da4w"]
