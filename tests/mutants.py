"""``make mutants``: changes sources in one place after the other, and lists what no test notices.

mutmut makes the mutants, as ``[tool.mutmut]`` says: beside each function one copy per change. One
pytest session imports them all and runs every test once, to learn which statements it executes.
Each mutant then gets a fork of that session, in which its copy stands in the function's place; the
tests that execute its statement are run there until one of them fails: first those that noticed
other mutants of the function, then the quick ones.

What was noticed is kept in ``mutants/`` until its function changes; all others are run again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import gc
import importlib
import io
import os
import random
import re
import resource
import select
import signal
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol
from mutmut.__main__ import create_mutants
from mutmut.configuration import config
from mutmut.mutation.data import LineSpan, MutantLineSpans, SourceFileMutationData
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.utils.file_utils import copy_src_dir, walk_mutatable_files

SURVIVED, KILLED, UNREACHED, TIMEOUT, NOT_RUN = 0, 1, 33, 36, 70
"""How a mutant ended, in mutmut's numbers; the last is ours: its tests could not be run."""

N_BYTES = 6 << 30
"""Address space of one mutant: one that never stops shall not fill the machine."""

WAIT_S = 120
"""Seconds after which a test is ended that waits for what does not come."""

Place = tuple[Any, str, dict[str, Any]]
"""(module or class, name in it, what can stand there by mutmut's names)."""


@dataclass
class Mutant:
    """A change of one function.

    Attributes:
        name: mutmut's.
        data: how the mutants of its file ended.
        file: where its file is with all of its mutants.
        lines: of the statement that is changed, in the copy there that is not changed.
        shown: where it is in the source, and the line before and after.
    """

    name: str
    data: SourceFileMutationData
    file: str
    lines: range
    shown: str

    @property
    def function(self) -> str:
        return self.name.rpartition("__mutmut_")[0]

    @property
    def was_noticed(self) -> bool:
        return self.data.exit_code_by_key[self.name] in (KILLED, TIMEOUT)


def mutants_of(path: Path) -> list[Mutant]:
    """Return the mutants of a source file."""
    file = Path("mutants") / path
    data, index = SourceFileMutationData(path=path), MutantLineSpans.load(path)
    data.load()
    assert index is not None, "create_mutants has written it"
    spans = index.span_by_function_name
    source, copies = path.read_text().splitlines(), file.read_text().splitlines()
    found: list[Mutant] = []
    for key in data.exit_code_by_key:
        name = key.rpartition(".")[2]
        function = name.rpartition("__mutmut_")[0]
        start, before = copy_of(f"{function}__mutmut_orig", spans, copies)
        _, after = copy_of(name, spans, copies)
        at = next(i for i, line in enumerate(before) if i >= len(after) or line != after[i])
        statement = min(
            (one for one in statements("\n".join(before)) if at in one),
            key=len,
            default=range(len(before)),
        )
        first = next(i for i, _ in enumerate(source) if source[i : i + len(before)] == before)
        shown = f"{path}:{first + at + 1}\n    - {before[at].strip()}\n    + {after[at].strip()}"
        lines = range(start + statement.start, start + statement.stop)
        found.append(Mutant(key, data, str(file), lines, shown))
    return found


def copy_of(name: str, spans: Mapping[str, LineSpan], copies: list[str]) -> tuple[int, list[str]]:
    """Return the number of the first line of a copy, and its lines with the function's own name."""
    span = spans[name]
    at = next(n for n in range(span.start, span.end + 1) if f"def {name}(" in copies[n - 1])
    plain = re.sub(r"^x(_|ǁ.*ǁ)|__mutmut_\w+$", "", name)
    return at, [copies[at - 1].replace(name, plain), *copies[at : span.end]]


def statements(function: str) -> list[range]:
    """Return the lines of each statement in a function, from 0 on; of one with a body its head."""
    nodes = [n for n in ast.walk(ast.parse(textwrap.dedent(function))) if isinstance(n, ast.stmt)]
    heads = [
        (n.lineno, n.body[0].lineno - 1 if hasattr(n, "body") else n.end_lineno) for n in nodes
    ]
    return [range(first - 1, max(first, last)) for first, last in heads[1:]]


class Session:
    """A plugin of pytest that runs mutants in place of the tests."""

    def __init__(self, mutants: list[Mutant], n_children: int) -> None:
        self.mutants = mutants
        self.n_children = n_children
        self.places: dict[str, list[Place]] = {}
        self.seconds: dict[str, float] = {}
        self.noticed_by: dict[str, Counter[str]] = defaultdict(Counter)
        """By function, and by file, how many of its mutants each test has noticed."""
        self.told, self.telling = os.pipe()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests once, then the mutants."""
        names = sorted({mutant.name.rpartition(".")[0] for mutant in self.mutants})
        self.places = take_out_wrappers([importlib.import_module(name) for name in names])
        items = {item.nodeid: item for item in session.items}
        lines = self.run_unchanged(session.items)
        gc.collect()
        gc.freeze()
        running: dict[int, Mutant] = {}
        for number, mutant in enumerate(self.mutants):
            if number % 100 == 0:
                print(f"{time.strftime('%X')}  {number} of {len(self.mutants)}", flush=True)
            tests = {test for at in mutant.lines for test in lines[mutant.file].get(at, ())}
            noticed, nearby = (self.noticed_by[one] for one in (mutant.function, mutant.file))
            if not tests:
                self.note(mutant, UNREACHED)
                continue
            if len(running) == self.n_children:
                self.reap(running)
            pid = os.fork()
            if not pid:
                order = sorted(
                    tests, key=lambda test: (-noticed[test], -nearby[test], self.seconds[test])
                )
                self.child(mutant, [items[test] for test in order])
            running[pid] = mutant
        while running:
            self.reap(running)
        return True

    def run_unchanged(self, items: list[pytest.Item]) -> dict[str, dict[int, list[str]]]:
        """Run every test; return by file and line which of them execute it."""
        files = sorted({mutant.file for mutant in self.mutants})
        cov = coverage.Coverage(data_file=None, include=files)
        cov.start()
        for item, after in zip(items, [*items[1:], None], strict=True):
            cov.switch_context(item.nodeid)
            start = time.process_time()
            reports = runtestprotocol(item, nextitem=after, log=False)
            for report in reports:
                if report.failed:
                    pytest.exit(f"nothing is changed, and it fails:\n{report.longreprtext}", 1)
            self.seconds[item.nodeid] = time.process_time() - start
        cov.stop()
        print(f"{len(items)} tests pass in {sum(self.seconds.values()):.0f} s", flush=True)
        data = cov.get_data()
        return {file: data.contexts_by_lineno(str(Path(file).resolve())) for file in files}

    def child(self, mutant: Mutant, items: list[pytest.Item]) -> None:
        """Run tests until one fails; never return."""
        code = NOT_RUN
        try:
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            if hard == resource.RLIM_INFINITY:
                resource.setrlimit(resource.RLIMIT_AS, (N_BYTES, N_BYTES))
            set_mutant_under_test(mutant.name)  # for wrappers that somebody has kept
            for holder, name, copies in self.places[mutant.function]:
                setattr(holder, name, copies[mutant.name.rpartition(".")[2]])
            for item, after in zip(items, [*items[1:], None], strict=True):
                signal.setitimer(signal.ITIMER_PROF, 1 + 10 * self.seconds[item.nodeid])
                signal.alarm(WAIT_S)
                if any(
                    report.failed for report in runtestprotocol(item, nextitem=after, log=False)
                ):
                    os.write(
                        self.telling,
                        f"{mutant.function}\n{mutant.file}\n{item.nodeid}\n\n".encode(),
                    )
                    code = KILLED
                    break
            else:
                code = SURVIVED
        except (SystemExit, KeyboardInterrupt):  # of a test: pytest takes them for its own end
            code = KILLED
        finally:
            os._exit(code)

    def reap(self, running: dict[int, Mutant]) -> None:
        """Wait for a mutant."""
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if code == NOT_RUN:
            pytest.exit(f"the tests of {running[pid].name} could not be run", 1)
        is_late = code in (-signal.SIGPROF, -signal.SIGALRM)
        self.note(running.pop(pid), TIMEOUT if is_late else KILLED if code < 0 else code)
        if code == KILLED and select.select([self.told], [], [], 0)[0]:
            for one in os.read(self.told, 1 << 16).decode().split("\n\n")[:-1]:
                function, file, test = one.split("\n")
                self.noticed_by[function][test] += 1
                self.noticed_by[file][test] += 1

    def note(self, mutant: Mutant, code: int) -> None:
        """Keep how a mutant ended; show it where nobody has noticed it."""
        mutant.data.exit_code_by_key[mutant.name] = code
        mutant.data.save()
        if not mutant.was_noticed:
            reached = "  (no test reaches it)" if code == UNREACHED else ""
            print(f"{mutant.name}{reached}\n  {mutant.shown}", flush=True)


def take_out_wrappers(modules: list[Any]) -> dict[str, list[Place]]:
    """Put every function in the place of the wrapper by which mutmut calls it: that one is slow.

    Returns:
        By mutmut's name of a function, where it stands.
    """
    places: dict[str, list[Place]] = {}
    wrappers: dict[int, tuple[str, dict[str, Any]]] = {}
    for module in modules:
        for name in [name for name in vars(module) if name.startswith("mutants_x")]:
            function = name.removeprefix("mutants_").removesuffix("__mutmut")
            owner, attribute = function.split("ǁ")[1:] if "ǁ" in function else ("", function[2:])
            holder = getattr(module, owner) if owner else module
            copies = {k: v for k, v in vars(holder).items() if k.startswith(f"{function}__mutmut_")}
            key = f"{module.__name__}.{function}"
            if owner:
                places[key] = [(holder, attribute, copies)]
            else:
                wrappers[id(getattr(module, attribute))] = key, copies
    for module in list(sys.modules.values()):
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in wrappers:
                key, copies = wrappers[id(value)]
                places.setdefault(key, []).append((module, attribute, copies))
    for key, found in places.items():
        for holder, attribute, copies in found:
            setattr(holder, attribute, copies[f"{key.rpartition('.')[2]}__mutmut_orig"])
    return places


def main() -> int:
    """Make the mutants, run them, and say how many were noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("patterns", nargs="*", default=["*"], help="such as kvcellar.prefix.*")
    parser.add_argument("--sample", type=int, metavar="N", help="run N of them, drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from")
    parser.add_argument("--max-children", type=int, default=os.cpu_count(), metavar="N")
    asked = parser.parse_args()
    os.environ.setdefault("HYPOTHESIS_PROFILE", "mutants")
    set_mutant_under_test("")
    with contextlib.redirect_stdout(io.StringIO()):
        copy_src_dir()
        for path in walk_mutatable_files():
            if MutantLineSpans.load(path) is None:  # the settings have meant other files before
                (Path("mutants") / path).unlink()
        create_mutants(1)
    sys.path.insert(0, str(Path("mutants/src").resolve()))
    found = [mutant for path in walk_mutatable_files() for mutant in mutants_of(path)]
    found = [m for m in found if any(fnmatch.fnmatch(m.name, p) for p in asked.patterns)]
    if asked.sample is not None:
        found = random.Random(asked.seed).sample(found, min(asked.sample, len(found)))
    left = [mutant for mutant in found if not mutant.was_noticed]
    options = ["-q", "-s", "--assert=plain", "-p", "no:cacheprovider"]
    selected = [*config().pytest_add_cli_args, *config().pytest_add_cli_args_test_selection]
    status = pytest.main(
        [*options, "-o", "pythonpath=mutants/src", *selected],
        plugins=[Session(left, asked.max_children)],
    )
    n_noticed = sum(mutant.was_noticed for mutant in found)
    print(f"{n_noticed} of {len(found)} are noticed: {n_noticed / max(1, len(found)):.1%}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
