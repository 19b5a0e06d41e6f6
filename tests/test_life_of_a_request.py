"""The page docs/request.md says which way a request takes; a real one takes it."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import kvcellar
from kvcellar.engine import Engine
from kvcellar.history import History
from kvcellar.kernel import levels
from tests.server.live import Live, load_demo, serving

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "request.md"

STEP = re.compile(r"^\d+\. `([\w.]+)` \(`([\w/]+)\.py`\)", re.MULTILINE)
BESIDE = re.compile(r"^- on a \w+, `([\w.]+)` \(`([\w/]+)\.py`\)", re.MULTILINE)
CLASS = re.compile(r"^\| `(\w+)` \| `([\w/]+)\.py` \|", re.MULTILINE)

MOST_IN, MOST_BACK = 15, 5
"""Classes in which a token may be handed on; fewer are welcome."""

QUESTION = "Remember this, and why: " + "one thing and then another, " * 12
"""Long enough that nobody has all of its tokens by chance, such as a window of the last few."""


def section(name: str) -> str:
    """The text under a heading of the page."""
    return PAGE.read_text(encoding="utf-8").split(f"\n## {name}\n")[1].split("\n## ")[0]


def steps(name: str) -> list[tuple[str, CodeType]]:
    """The functions that a section of the page names, with their code."""
    found = [
        (f"{where}: {name}", code_of(name, where)) for name, where in STEP.findall(section(name))
    ]
    assert len(found) >= 3, f"the section {name!r} has steps"
    return found


def named(name: str, where: str) -> Any:
    """What the page names; fails where there is no such thing any more."""
    value: Any = importlib.import_module(f"kvcellar.{where.replace('/', '.')}")
    for part in name.split("."):
        value = (
            inspect.getattr_static(value, part) if inspect.isclass(value) else getattr(value, part)
        )
    return value


def code_of(name: str, where: str) -> CodeType:
    """The code of a function that the page names."""
    value = named(name, where)
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    code: CodeType = inspect.unwrap(value).__code__
    return code


def classes(name: str) -> set[type]:
    """The classes that a section's table names, but for those of a kernel that is not built."""
    found = CLASS.findall(section(name))
    has_kernel = levels.is_available()
    return {
        named(of, where) for of, where in found if has_kernel or not where.startswith("kernel/")
    }


class Trace:
    """What is called and what returns or yields, in every thread, while it is recorded."""

    def __init__(self) -> None:
        self.events: list[tuple[str, CodeType]] = []
        self.is_recording = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self.is_recording and event in ("call", "return"):
            self.events.append((event, frame.f_code))

    def makes(self, kind: type) -> bool:
        """True if an instance of a class was made."""
        makers = (getattr(kind, name) for name in ("__init__", "__new__"))
        codes = [getattr(maker, "__code__", None) for maker in makers]
        return any(event == "call" and code in codes for event, code in self.events)

    @contextmanager
    def installed(self) -> Iterator[Trace]:
        """Threads that begin inside of the block are watched."""
        threading.setprofile(self)
        try:
            yield self
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]

    def follow(self, kind: str, wanted: list[tuple[str, CodeType]], start: int) -> int:
        """Find steps behind ``start``, in their order; return where the last one is."""
        at = start
        for i, (name, code) in enumerate(wanted):
            found = next(
                (j for j in range(at, len(self.events)) if self.events[j] == (kind, code)), None
            )
            before = wanted[i - 1][0] if i else "the beginning"
            happens = any(seen is code for _, seen in self.events)
            assert found is not None, f"{name}: no {kind} behind that of {before}; it " + (
                "happens at another time" if happens else "never happens"
            )
            at = found + 1
        return at


def holds(value: object, tokens: list[int]) -> bool:
    """True if a value is the prompt: its tokens, or the messages that become them."""
    if isinstance(value, History | list | tuple | np.ndarray):
        if len(value) == len(tokens) and np.ndim(value) == 1:
            return bool(np.array_equal(np.asarray(value, dtype=object), tokens))
        return any(isinstance(item, Mapping) and QUESTION in str(item) for item in value)
    return False


def look_around(tokens: list[int]) -> tuple[set[type], set[type]]:
    """Classes of the package that have an instance now, and those that hold the prompt."""
    alive: set[type] = set()
    holders: set[type] = set()
    for one in gc.get_objects():
        kind = type(one)
        module = str(kind.__module__)  # of a metaclass it need not be a text
        if module.startswith("kvcellar.") and kind not in holders:
            alive.add(kind)
            slots = {s for base in kind.__mro__ for s in getattr(base, "__slots__", ())}
            fields = {**getattr(one, "__dict__", {}), **{s: getattr(one, s, None) for s in slots}}
            parts = {type(value) for value in fields.values()}  # those of the kernel are not listed
            alive |= {part for part in parts if str(part.__module__).startswith("kvcellar.")}
            if any(holds(value, tokens) for value in (one, *fields.values())):
                holders.add(kind)
    return alive, holders


class Walk:
    """One streamed chat completion, watched on its whole way."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: set[type] = set()
        self.holders: set[type] = set()
        self.text = ""
        load = load_demo(backend="torch")  # whose steps the page follows
        with Trace().installed() as self.trace, serving(folder, load=load) as live:
            self._say(live, "Good morning.")  # the model is loaded, and warm
            monkeypatch.setattr(Engine, "_forward", self._looked_at(Engine._forward))
            self.trace.is_recording = True
            self.text = self._say(live, QUESTION)
            self.trace.is_recording = False

    def _looked_at(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def look(engine: Engine, batch: Any, positions: Any) -> Any:
            sequence = batch.parts[0].sequence
            if not self.holders:
                self.trace.is_recording = False
                self.alive, self.holders = look_around(list(sequence.tokens))
                self.trace.is_recording = True
            return forward(engine, batch, positions)

        return look

    @staticmethod
    def _say(live: Live, text: str) -> str:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        said = ""
        with live.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        said += choice["delta"].get("content") or ""
        return said


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path_factory.mktemp("home")))
        yield Walk(tmp_path_factory.mktemp("walk"), monkeypatch)


def test_a_request_takes_the_steps_of_the_page_in_their_order(walk: Walk) -> None:
    assert walk.text
    at = walk.trace.follow("call", steps("In"), 0)
    walk.trace.follow("return", steps("Out"), at)


def test_steps_are_numbered_one_after_the_other() -> None:
    numbers = re.findall(r"^(\d+)\. `", section("In") + section("Out"), re.MULTILINE)
    assert numbers == [str(i + 1) for i in range(len(numbers))]


def test_each_step_is_in_the_file_that_the_page_names() -> None:
    beside = [
        (f"{where}: {name}", code_of(name, where)) for name, where in BESIDE.findall(section("In"))
    ]
    assert len(beside) == 2, "what passes by the op, on a CPU and on a GPU"
    found = [*steps("In"), *steps("Out"), *beside]
    elsewhere = [
        step for step, code in found if not code.co_filename.endswith(f"/{step.split(': ')[0]}.py")
    ]
    assert elsewhere == []


def test_whoever_has_the_prompt_is_named_and_nobody_else(walk: Walk) -> None:
    carriers, keepers = classes("What carries it"), classes("What keeps it")
    assert walk.holders - carriers == keepers


@pytest.mark.parametrize(
    ("name", "most"), [("What carries it", MOST_IN), ("What carries it back", MOST_BACK)]
)
def test_what_carries_a_token_is_counted_and_each_of_it_is_met(walk: Walk, name: str, most: int):
    carriers = classes(name)
    said = re.search(r"\b(\d+)\s+classes\b", section(name))
    assert said is not None and int(said[1]) == len(CLASS.findall(section(name))) <= most
    idle = {kind for kind in carriers if kind not in walk.alive and not walk.trace.makes(kind)}
    assert idle == set(), "each is made on the way, or is there when the model reads the prompt"


def test_every_file_that_the_page_names_is_there() -> None:
    source = Path(kvcellar.__file__).parent
    for path in re.findall(r"`([\w/]+\.py)`", PAGE.read_text(encoding="utf-8")):
        assert (source / path).is_file() or (ROOT / path).is_file(), path
