"""Base of all scenarios: the adapter, and the cases that each of them runs in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import pytest

from kvcellar.testing.adapter import BackendAdapter
from kvcellar.testing.cases import Case

Scenario = TypeVar("Scenario", bound=Callable[..., Any])


def once_per_bookkeeping(scenario: Scenario) -> Scenario:
    """Mark a scenario whose outcome no storage type and no shape of rows decides.

    It runs in one case of each kind of bookkeeping: see :func:`chosen`.
    """
    scenario.is_once_per_bookkeeping = True  # type: ignore[attr-defined]
    return scenario


def is_once_per_bookkeeping(scenario: object) -> bool:
    """Return true if a scenario is marked by :func:`once_per_bookkeeping`."""
    return getattr(scenario, "is_once_per_bookkeeping", False)


def chosen(cases: Sequence[Case], scenario: object) -> list[Case]:
    """Return the cases in which a scenario runs: all, or the first of each kind of bookkeeping."""
    if not is_once_per_bookkeeping(scenario):
        return list(cases)
    return list({case.bookkeeping: case for case in reversed(cases)}.values())[::-1]


class Scenarios:
    """Tests of one backend.

    A test that takes ``case`` runs in every case of the adapter, one that takes ``windowed`` in
    those with a sliding window, one that takes ``walked`` in those that random walks go through,
    one that takes ``recurrent`` in those with recurrent layers.
    ``kind`` is the session that it opens: with trees in every second case, without in all.
    """

    adapter: ClassVar[BackendAdapter]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give a test its cases and kinds of session, by the names of its arguments."""
        wanted = set(metafunc.fixturenames)
        of_name = {
            "walked": self.adapter.walked,
            "recurrent": self.adapter.state_cases,
            "windowed": self.adapter.cases,
        }
        case = next((name for name in of_name if name in wanted), "case")
        cases = chosen(of_name.get(case, self.adapter.cases), metafunc.function)
        if case == "windowed":
            cases = [c for c in cases if c.has_window]
        if {case, "kind"} <= wanted and case == "recurrent":
            pairs = [(c, kind) for c in cases for kind in ("seq", "tree")]
            metafunc.parametrize((case, "kind"), pairs, ids=[f"{c.name}-{k}" for c, k in pairs])
        elif {case, "kind"} <= wanted:
            every = 1 if is_once_per_bookkeeping(metafunc.function) else 2
            pairs = [(c, "seq") for c in cases] + [(c, "tree") for c in cases[::every]]
            ids = [f"{c.name}-{kind}" for c, kind in pairs]
            metafunc.parametrize((case, "kind"), pairs, ids=ids)
        elif case in wanted:
            metafunc.parametrize(case, cases, ids=[c.name for c in cases])
        elif "kind" in wanted:
            metafunc.parametrize("kind", ["seq", "tree"])

    @pytest.fixture(autouse=True)
    def _settings(self) -> Iterator[None]:
        with self.adapter.settings():
            yield
