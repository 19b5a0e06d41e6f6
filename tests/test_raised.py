"""Every error that a public function documents is raised by some test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.raised import Recorder, documented, errors_of, functions_of, known

ELSEWHERE = dict.fromkeys(
    (
        f"kvcellar.cellar.AsyncAgent.stream {e}"
        for e in ("GrammarError", "ModelError", "PictureError")
    ),
    "it comes when the stream is first asked: tests/cellar/test_asking.py, tests/pictures",
)
"""By public function and error: where it is raised, if not in the function itself."""


def test_each_documented_error_of_a_public_function_has_a_test_that_raises_it():
    found = known()
    wanted = {(name, error) for name, errors in documented().items() for error in errors}
    has = {(name, error) for name, errors in found.items() for error in errors}
    missing = {" ".join(pair) for pair in wanted - has} - ELSEWHERE.keys()
    assert not missing, (
        f"write a test for each, and run it with `pytest -p tests.raised`: {sorted(missing)}"
    )


def test_the_tests_that_are_said_to_raise_are_there():
    tests = {test for errors in known().values() for test in errors.values()}
    gone = [t for t in tests if t.rpartition("::")[2] not in functions_of(t.partition("::")[0])]
    assert not gone, f"run those that took their place with `pytest -p tests.raised`: {gone}"


def test_errors_are_read_from_a_docstring():
    assert errors_of("""Do it.

        Raises:
            ConfigError, ModelError: of the first
                and KeyError: no more.
            StoreError: another.

        Returns:
            ValueError: is none.
        """) == ["ConfigError", "ModelError", "StoreError"]


def test_only_what_leaves_a_public_function_is_noted(monkeypatch):
    recorder = Recorder()
    recorder.wanted = {"parse": ["ValueError"]}

    def parse(text: Any) -> int:
        return int(text)

    noted = recorder.around("parse", parse)
    assert noted("3") == 3 and not recorder.found
    with pytest.raises(TypeError):
        noted(None)
    assert not recorder.found, "it documents no such error"
    with monkeypatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")
        with pytest.raises(ValueError, match="x"):
            noted("x")
    assert not recorder.found, "no test ran"
    with pytest.raises(ValueError, match="x"):
        noted("x")
    assert list(recorder.found) == ["parse"]
    assert recorder.found["parse"]["ValueError"].endswith(
        "::test_only_what_leaves_a_public_function_is_noted"
    )
