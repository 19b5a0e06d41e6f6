"""Which test has a public function raise which of the errors that it documents.

``pytest -p tests.raised`` notes each error that leaves a public function, with the test that runs
then, in ``tests/raised.json``: what it says of tests that were run is made anew. The file is
committed, and ``tests/test_raised.py`` holds it to the docstrings and to the tests that there are.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "raised.json"

_PAGE = (ROOT / "docs" / "public-names.md").read_text()
_RAISES = re.compile(r"^Raises:\n((?:    .*\n|\n)*)", re.MULTILINE)
_ERRORS = re.compile(r"^    ([A-Z]\w+(?:, [A-Z]\w+)*):", re.MULTILINE)

Found = dict[str, dict[str, str]]
"""By public function, by error: a test."""


def errors_of(docstring: str | None) -> list[str]:
    """Return the errors that a docstring says are raised."""
    section = _RAISES.search(inspect.cleandoc(docstring or "") + "\n")
    return (
        [e for names in _ERRORS.findall(section[1]) for e in names.split(", ")] if section else []
    )


def public() -> Iterator[tuple[str, Any, str]]:
    """Yield where each public function is: its name, what it is an attribute of, and which.

    Those of protocols are left out: they are what somebody else promises.
    """
    for section in re.findall(r"^## `([\w.]+)`$", _PAGE, re.MULTILINE):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(section)
            for name in sorted(getattr(module, "__all__", ())):
                thing = getattr(module, name)
                if not inspect.isclass(thing):
                    home = sys.modules.get(getattr(thing, "__module__", ""), module)
                    yield f"{section}.{name}", home, name
                elif not getattr(thing, "_is_protocol", False):
                    for attribute in vars(thing):
                        if not attribute.startswith("_") or attribute in ("__init__", "__call__"):
                            yield f"{section}.{name}.{attribute}", thing, attribute


def function_of(owner: Any, name: str) -> Any:
    """Return what is called or read under a name, without what a class puts around it."""
    value = inspect.getattr_static(owner, name, None)
    return getattr(value, "fget", None) or getattr(value, "__func__", value)


def documented() -> dict[str, list[str]]:
    """Return the errors of each public function that documents some."""
    found = {}
    for name, owner, attribute in public():
        doc = getattr(function_of(owner, attribute), "__doc__", None)
        if attribute == "__init__" and not errors_of(doc):
            doc = owner.__doc__
        if errors := errors_of(doc):
            found[name] = errors
    return found


def known() -> Found:
    """Return what the file says."""
    found: Found = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def functions_of(file: str) -> set[str]:
    """Return the names of all functions of a file."""
    tree = ast.parse((ROOT / file).read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


class Recorder:
    """Notes errors that leave public functions, once it is installed."""

    def __init__(self) -> None:
        self.wanted = documented()
        self.found: Found = {}
        self.ran: set[str] = set()

    def note(self, name: str, error: BaseException) -> None:
        """Note an error, if its function documents it, and a test runs."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("[")[0].partition(" (")[0]
        kinds = {kind.__name__ for kind in type(error).__mro__}
        for kind in kinds.intersection(self.wanted[name]) if test else ():
            self.found.setdefault(name, {}).setdefault(kind, test)

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Note what is raised in a block."""
        try:
            yield
        except BaseException as error:
            self.note(name, error)
            raise

    def around(self, name: str, call: Any) -> Callable[..., Any]:
        """Return a function that does the same, and whose errors are noted."""
        made_by = inspect.unwrap(call)
        if inspect.isgeneratorfunction(made_by) or inspect.isasyncgenfunction(made_by):

            def noted(*given: Any, **more: Any) -> Any:
                with self.noting(name):
                    made = call(*given, **more)
                return made if made_by is call else Entering(made, lambda: self.noting(name))

        elif inspect.iscoroutinefunction(call):

            async def noted(*given: Any, **more: Any) -> Any:
                with self.noting(name):
                    return await call(*given, **more)

        else:

            def noted(*given: Any, **more: Any) -> Any:
                with self.noting(name):
                    return call(*given, **more)

        return functools.wraps(call)(noted)

    def install(self) -> None:
        """Put itself around all public functions that document errors."""
        for name, owner, attribute in list(public()):
            if name not in self.wanted:
                continue
            value = inspect.getattr_static(owner, attribute)
            noted = self.around(name, function_of(owner, attribute))
            if isinstance(value, property):
                put: Any = property(noted, value.fset, value.fdel, value.__doc__)
            elif isinstance(value, classmethod | staticmethod):
                put = type(value)(noted)
            else:
                put = noted
            setattr(owner, attribute, put)
            if not inspect.isclass(owner):  # whoever has it by its name already
                for module in list(sys.modules.values()):
                    for own, held in list(vars(module).items()) if module else ():
                        if held is value:
                            setattr(module, own, put)

    def save(self) -> None:
        """Write what was found, beside what is known of tests that did not run."""
        kept = {
            name: {error: test for error, test in tests.items() if test not in self.ran}
            for name, tests in known().items()
        }
        merged = {
            name: dict(sorted({**self.found.get(name, {}), **kept.get(name, {})}.items()))
            for name in sorted({*kept, *self.found})
        }
        FILE.write_text(json.dumps({k: v for k, v in merged.items() if v}, indent=1) + "\n")


class Entering:
    """A context manager; what is raised while its block is entered is noted."""

    def __init__(self, block: Any, noting: Callable[[], Any]) -> None:
        self._block, self._noting = block, noting

    def __enter__(self) -> Any:
        with self._noting():
            return self._block.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._block.__exit__(*error)

    async def __aenter__(self) -> Any:
        with self._noting():
            return await self._block.__aenter__()

    async def __aexit__(self, *error: Any) -> Any:
        return await self._block.__aexit__(*error)


_recorder: Recorder | None = None


def pytest_configure() -> None:
    """Begin to note."""
    global _recorder
    _recorder = Recorder()
    _recorder.install()


def pytest_runtest_logreport(report: Any) -> None:
    """Take note of a test that has run."""
    assert _recorder is not None
    _recorder.ran.add(report.nodeid.partition("[")[0])


def pytest_sessionfinish() -> None:
    """Write what was noted."""
    assert _recorder is not None
    _recorder.save()
