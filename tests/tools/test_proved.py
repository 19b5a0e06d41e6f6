"""Tests that are not run again: until something that decides them changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import proved


@pytest.fixture
def item(tmp_path, monkeypatch) -> Any:
    """A test of a repository of its own, decided by one folder."""
    for folder in ("src", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "src" / "one.py").write_text("1")
    (tmp_path / "tests" / "test_one.py").write_text("assert True")
    monkeypatch.setattr(proved, "ROOT", tmp_path)
    monkeypatch.setattr(proved, "PROVED", tmp_path / "tests" / "proved.json")
    monkeypatch.setattr(proved, "LOCK", tmp_path / "lock")
    monkeypatch.delenv("KVCELLAR_ALL_CASES", raising=False)
    monkeypatch.setenv("KVCELLAR_PROVE", "1")
    return decided_by(tmp_path, "src", packages=("pytest",))


def decided_by(root: Any, *paths: str, packages: tuple[str, ...] = ()) -> Any:
    mark = pytest.mark.decided_by(*paths, packages=packages).mark
    return SimpleNamespace(
        get_closest_marker=lambda name: mark,
        path=root / "tests" / "test_one.py",
        nodeid="tests/test_one.py::test_one",
    )


def is_skipped(item: Any) -> bool:
    proved.digest_of_files.cache_clear()
    try:
        proved.skip_if_proved(item)
    except pytest.skip.Exception:
        return True
    return False


def test_what_has_passed_is_skipped_until_a_file_that_decides_it_changes(item):
    assert not is_skipped(item)
    proved.note_passed(item)
    assert is_skipped(item)
    for changed in (item.path, proved.ROOT / "src" / "one.py", proved.ROOT / "src" / "two.py"):
        changed.write_text("2")
        assert not is_skipped(item)
        proved.note_passed(item)
        assert is_skipped(item)


def test_it_is_noted_by_make_test_alone(item, monkeypatch):
    monkeypatch.delenv("KVCELLAR_PROVE")
    proved.note_passed(item)
    assert not is_skipped(item)


def test_another_version_of_a_package_or_the_wish_for_all_cases_runs_it(item, monkeypatch):
    proved.note_passed(item)
    with monkeypatch.context() as patch:
        patch.setattr(proved.metadata, "version", lambda package: "0.0")
        assert not is_skipped(item)
    monkeypatch.setenv("KVCELLAR_ALL_CASES", "1")
    assert not is_skipped(item)


def test_what_names_nothing_that_is_there_is_an_error(item):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        proved.note_passed(decided_by(proved.ROOT, "nowhere"))
