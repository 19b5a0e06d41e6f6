"""The check of docstrings refuses what has to be decoded, and takes what says what it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.scripts import load_script

script = load_script("check_docstrings")


def n_refused(source: str, *, is_test: bool = False) -> int:
    return len(list(script.refusals(source, is_test=is_test)))


def documented(kind: str, docstring: str) -> str:
    body = f'"""{docstring}"""'
    return {
        "function": f"def f():\n    {body}\n",
        "coroutine": f"async def f():\n    {body}\n",
        "method": f"class C:\n    def f(self):\n        {body}\n",
        "property": f"class C:\n    @property\n    def f(self):\n        {body}\n",
        "class": f"class C:\n    {body}\n",
        "module": f"{body}\n",
    }[kind]


EVERYWHERE = ("Of a stream.", "Whether one of the two is.", "As in an engine.", "The same, lower.")


@pytest.mark.parametrize("docstring", EVERYWHERE)
@pytest.mark.parametrize("kind", ["function", "coroutine", "method", "property", "class", "module"])
def test_riddles_are_refused_wherever_they_stand(kind: str, docstring: str):
    assert n_refused(documented(kind, docstring)) == 1
    assert n_refused(documented(kind, docstring), is_test=True) == 1


@pytest.mark.parametrize("docstring", ["What is left.", "Whose it is.", "How it is."])
def test_a_question_names_no_subject(docstring: str):
    for kind in ("function", "property", "class", "module"):
        assert n_refused(documented(kind, docstring)) == 1
        assert n_refused(documented(kind, docstring), is_test=True) == 0


@pytest.mark.parametrize("docstring", ["The cells of a row.", "A cache.", "No one."])
def test_a_function_says_what_it_does_and_a_noun_names_what_it_is(docstring: str):
    for kind in ("function", "coroutine", "method"):
        assert n_refused(documented(kind, docstring)) == 1
        assert n_refused(documented(kind, docstring), is_test=True) == 0
    for kind in ("property", "class", "module"):
        assert n_refused(documented(kind, docstring)) == 0


@pytest.mark.parametrize("docstring", ["Return the cells.", "Offer a place.", "Ask.", "Assert it."])
def test_words_that_only_begin_like_a_refused_one_are_taken(docstring: str):
    assert n_refused(documented("function", docstring)) == 0


def test_a_refusal_names_the_file_the_line_and_the_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(documented("function", "Return it."))
    bad.write_text(documented("method", "Whether it is."))
    assert script.main([str(good)]) == 0
    assert script.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out == f"{bad}:3: f: a docstring does not begin with 'Whether'\n"
