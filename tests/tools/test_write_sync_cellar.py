"""The cellar that waits is written from the one for asyncio, and has each of its verbs."""

from __future__ import annotations

import inspect

import pytest

from kvcellar.cellar import aio, sync
from tests.tools.scripts import load_script

script = load_script("write_sync_cellar")


def public(kind: type) -> dict[str, object]:
    """Return the public members of a class and its bases, but for what every sequence has."""
    of_sequences = dir(sync.Sequence)
    return {
        name: member
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and name not in of_sequences
    }


def test_it_is_what_would_be_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script.sys, "argv", ["write_sync_cellar.py", "--check"])
    assert script.main() == 0


@pytest.mark.parametrize("name", script.BASES)
def test_each_verb_has_its_counterpart_with_the_same_arguments(name: str):
    theirs, ours = public(getattr(aio, f"Async{name}")), public(getattr(sync, name))
    beside = script.NOT_OF_THREADS | {"model", "name"}  # attributes there, properties here
    assert set(theirs) - beside == set(ours) - beside - {"close"}
    for verb in set(ours) & set(theirs) - beside:
        if not callable(theirs[verb]):
            continue
        assert list(inspect.signature(ours[verb]).parameters.values()) == list(  # type: ignore[arg-type]
            inspect.signature(theirs[verb]).parameters.values()  # type: ignore[arg-type]
        )
        assert not inspect.iscoroutinefunction(ours[verb])


def test_a_verb_that_is_added_is_written_with_its_arguments_and_its_agents_are_wrapped():
    source = '''
class AsyncAgent:
    async def split(self, at: int, *, name: str | None = None, **how: int) -> list[AsyncAgent]:
        """Split it."""
        return []
'''
    (item,) = script.functions(script.classes(source)[0])
    assert script.verb(item, source, "Agent") == [
        "    def split(self, at: int, *, name: str | None = None, **how: int) -> list[Agent]:",
        '        """Split it."""',
        "        return [Agent(one, self._cellar) for one in "
        "self._wait(self._behind.split(at, name=name, **how))]",
    ]
