"""Files of tests that need not run again: all that decides them is as it was when they passed.

What decides a file is found in the sources: the modules of this repository that it imports, and
what these import in turn (also in functions, and by names in texts, as a registry loads a backend);
the other files of those modules' rooms, as the kernel's sources; the ``conftest.py`` around it;
versions of the packages that any of these import; Python, the processor's kind and the level of the
CPU kernel. ``make test`` (``KVCELLAR_PROVE``) notes the digest of a file when all of its tests have
passed, in ``proved.json``, to be committed with the change; and it leaves a file out while the
digest is that one. This is for :data:`ROOMS` alone, whose tests compute: nothing there depends on a
clock or on another process's pace. Pytest by itself, and ``make night``, run all of them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import platform
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

ROOMS = (
    "backends",
    "bookkeeping",
    "dialects",
    "engine",
    "integrations",
    "kernel",
    "models",
    "prefix",
)
"""Folders of tests that are left out while nothing that decides them has changed."""

PACKAGE, TESTS = Path("src/kvcellar").name, "tests"

CHOOSING = (f"{TESTS}.proved", f"{TESTS}.tiers")
"""Modules that name files, and choose tests without deciding what they find."""

PROGRAMS = (
    "aarch64-linux-gnu-g++",
    "c++",
    "chromium",
    "clang",
    "cmake",
    "qemu-aarch64",
    "nvidia-smi",
)
"""Programs without which a test that names them is skipped."""

_BUILT = (".pyc", ".so", ".o")
_MODULE = re.compile(rf"((?:{PACKAGE}|{TESTS})(?:\.\w+)+)(?:\.|:\w+)?")
"""The name of a module, or its beginning, or of something in it."""


class Sources:
    """Python files of a repository, and what each of them takes from the others.

    Attributes:
        root: folder of the repository, with ``src/kvcellar`` and ``tests``.
        files: file of each module, by the module's name.
    """

    def __init__(self, root: Path) -> None:
        """Find the modules; what they import is read when it is asked for."""
        self.root = root
        self.files = {
            **dict(_modules(root / "src", PACKAGE)),
            **dict(_modules(root, TESTS)),
        }
        self._taken: dict[str, _Taken] = {}

    @cached_property
    def _lazy(self) -> Mapping[str, str]:
        """Modules of the names that the package imports when somebody asks for them."""
        for node in ast.parse(self.files[PACKAGE].read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
                listed: dict[str, str] = ast.literal_eval(node.value)
                return {name: module for module, names in listed.items() for name in names.split()}
        return {}

    def behind(self, name: str) -> set[str]:
        """Return the modules that decide what one does: itself, and all that it takes, in turn."""
        found, left = {name}, [name]
        while left:
            new = self.taken(left.pop()).modules - found - {*CHOOSING}
            found |= new
            left += new
        return found

    def taken(self, name: str) -> _Taken:
        """Return what a module takes from others."""
        if name not in self._taken:
            self._taken[name] = self._read(name)
        return self._taken[name]

    def _read(self, name: str) -> _Taken:
        tree = ast.parse(self.files[name].read_bytes())
        if name == f"{TESTS}.conftest":  # in functions it imports what options ask for
            tree.body = [one for one in tree.body if not isinstance(one, ast.FunctionDef)]
        texts = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        modules, packages = self._imported(name, tree)
        if name != PACKAGE:
            modules |= self._by_texts(name, texts)
        for code in filter(None, map(_code, texts)) if name.startswith(f"{TESTS}.") else ():
            modules |= self._imported(f"{name}.text", code)[0]
        if name == PACKAGE:  # what it opens lazily counts where it is asked for
            lazy = {*self._lazy.values(), f"{PACKAGE}.cellar"}
            modules = {
                one for one in modules if not any(f"{one}.".startswith(f"{at}.") for at in lazy)
            }
        known = {self._known(one) for one in modules} - {""}
        return _Taken(
            known | {above for one in known for above in _above(one)} - {name}, packages, texts
        )

    def _imported(self, name: str, tree: ast.AST) -> tuple[set[str], set[str]]:
        """Return the modules and packages that code imports, and what it asks the package for."""
        is_package = name in self.files and self.files[name].name == "__init__.py"
        modules, packages, whole = set[str](), set[str](), set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    _sort(one.name, modules, packages)
                    whole |= {one.asname or PACKAGE} if one.name == PACKAGE else set()
            elif isinstance(node, ast.ImportFrom):
                above = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
                _sort(base, modules, packages)
                if base in self.files:
                    modules |= {self._named(base, one.name) for one in node.names}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in whole
            ):
                is_folder = node.attr == "__file__"
                modules |= self._inside(PACKAGE) if is_folder else {self._named(PACKAGE, node.attr)}
        return modules, packages

    def _named(self, base: str, name: str) -> str:
        """Return the module that a name of a package or a module is, or may come from."""
        is_inside = f"{base}.{name}" in self.files or name.startswith("__")
        if base == PACKAGE and not is_inside:
            return self._lazy.get(name, f"{PACKAGE}.cellar")
        return f"{base}.{name}"

    def _by_texts(self, name: str, texts: Iterable[str]) -> set[str]:
        """Return the modules that texts name: of a package, which is loaded by parts, all.

        A test may also name a file of Python, and the package itself, which is a command.
        """
        found, is_test = set[str](), name.startswith(f"{TESTS}.")
        for text in texts:
            if match := _MODULE.fullmatch(text):
                known = self._known(match[1])
                found |= self._inside(known) if known != PACKAGE else set()
            elif is_test and text == PACKAGE:
                found |= self._inside(PACKAGE)
            elif is_test and text.endswith(".py"):
                last = text.rpartition("/")[2]
                found |= {one for one, file in self.files.items() if file.name == last}
        return found

    def _inside(self, name: str) -> set[str]:
        """Return a module and, of a package, all that lie in it."""
        return {one for one in self.files if name and f"{one}.".startswith(f"{name}.")}

    def _known(self, name: str) -> str:
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        return name


class _Taken:
    """Modules of the repository, packages by their import names, and texts that a module uses."""

    def __init__(self, modules: set[str], packages: set[str], texts: set[str]) -> None:
        self.modules, self.packages, self.texts = modules, packages, texts


def _modules(base: Path, package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((base / package).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _code(text: str) -> ast.AST | None:
    """Return a text as the code of a program that imports something of ours, where it is that."""
    if "import" not in text or not any(one in text for one in (PACKAGE, TESTS)):
        return None
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None


def _above(name: str) -> Iterator[str]:
    """Yield the packages that are imported before a module."""
    while name := name.rpartition(".")[0]:
        yield name


def _sort(name: str, modules: set[str], packages: set[str]) -> None:
    """Add an imported name to the modules of the repository, or to the packages."""
    first = name.partition(".")[0]
    modules |= {name} if first in (PACKAGE, TESTS) else set()
    packages |= {first} - {PACKAGE, TESTS} - sys.stdlib_module_names


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def machine() -> str:
    """Return what of a machine decides a result: Python, processor, and the kernel's level."""
    from kvcellar.kernel import levels

    level = levels.level().name if levels.is_available() else levels.why_not()
    return f"{platform.python_version()} {platform.machine()} {level}"


class Proofs:
    """Digests of files of tests, and those with which they have passed."""

    def __init__(self, root: Path = REPOSITORY, machine: str | None = None) -> None:
        """Read what is noted.

        Args:
            root: folder of the repository.
            machine: what of the machine decides; None: as :func:`machine` says.
        """
        self.path = root / TESTS / "proved.json"
        self._sources = Sources(root)
        self._machine = machine
        self._noted: dict[str, str] = (
            json.loads(self.path.read_text()) if self.path.exists() else {}
        )
        self._hashes: dict[Path, str] = {}
        self._others: dict[Path, list[Path]] = {}

    def proved(self) -> frozenset[str]:
        """Return the files that have passed with what decides them as it is."""
        files = (self._sources.root / name for name in self._noted)
        names = (file.relative_to(self._sources.root).as_posix() for file in files if file.exists())
        return frozenset(name for name in names if self.digest(name) == self._noted[name])

    def note(self, name: str) -> None:
        """Note that a file has passed; others that are not there any more are forgotten."""
        digest = self.digest(name)
        if digest is None:
            return
        root = self._sources.root
        self._noted = {one: at for one, at in self._noted.items() if (root / one).exists()}
        self._noted[name] = digest
        staged = self.path.with_suffix(".staged")
        staged.write_text(json.dumps(self._noted, indent=2, sort_keys=True) + "\n")
        staged.replace(self.path)

    def digest(self, name: str) -> str | None:
        """Return the digest of all that decides a file; None where it always runs.

        Args:
            name: of the file, below the repository.
        """
        parts = Path(name).with_suffix("").parts
        if len(parts) < 3 or parts[0] != TESTS or parts[1] not in ROOMS:
            return None
        sources, module = self._sources, ".".join(parts)
        arounds = (f"{one}.conftest" for one in (*_above(module),))
        behind = (
            sources.behind(module)
            .union(*(sources.behind(one) for one in arounds if one in sources.files))
            .difference(CHOOSING)
        )
        taken = [sources.taken(one) for one in behind]
        texts = set[str]().union(
            *(sources.taken(one).texts for one in behind if one.startswith(f"{TESTS}."))
        )
        packages = set[str]().union(*(one.packages for one in taken))
        of = _distributions()
        digest = hashlib.sha256(f"{self._machine or machine()}\n".encode())
        for one in sorted((packages | texts) & of.keys()):
            versions = (f"{each} {metadata.version(each)}" for each in sorted(set(of[one])))
            digest.update(f"{one} {' '.join(versions)}\n".encode())
        for one in sorted({*PROGRAMS} & texts):
            digest.update(f"{one} {shutil.which(one) is not None}\n".encode())
        for file in sorted(self._files(behind, texts)):
            digest.update(
                f"{file.relative_to(sources.root).as_posix()} {self._hash(file)}\n".encode()
            )
        return digest.hexdigest()[:16]

    def _files(self, behind: Iterable[str], texts: Iterable[str]) -> set[Path]:
        """Return the files of modules, others in their rooms, and what tests name at the top."""
        sources, root = self._sources, self._sources.root
        found = {sources.files[one] for one in behind}
        rooms = {_room(sources.files[one], root) for one in behind}
        named = {text.partition("/")[0] for text in texts} - {"", "src", TESTS, ".", ".."}
        beside = {root / one for one in named if len(one) < 60 and (root / one).exists()}
        for folder in (*rooms, *beside):
            if folder not in self._others:
                listed = folder.rglob("*") if folder.is_dir() else [folder]
                self._others[folder] = [
                    one
                    for one in listed
                    if one.is_file()
                    and one.suffix not in _BUILT
                    and (one.suffix != ".py" or folder in beside)
                ]
            found.update(self._others[folder])
        return found

    def _hash(self, file: Path) -> str:
        if file not in self._hashes:
            self._hashes[file] = hashlib.sha256(file.read_bytes()).hexdigest()
        return self._hashes[file]


def _room(file: Path, root: Path) -> Path:
    """Return the room of a module: the folder under the package or the tests that it lies in."""
    base = root / "src" / PACKAGE if file.is_relative_to(root / "src") else root / TESTS
    parts = file.relative_to(base).parts
    return base / parts[0] if len(parts) > 1 else file


class LeavingOut:
    """Plugin of pytest that leaves out what is proved; a worker is told what that is."""

    def __init__(self, proved: frozenset[str]) -> None:
        """Take the files that are left out."""
        self._proved = proved

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Leave a proved file out."""
        root = config.rootpath
        is_inside = collection_path.is_relative_to(root)
        name = collection_path.relative_to(root).as_posix() if is_inside else ""
        return True if name in self._proved else None


class Proving(LeavingOut):
    """Plugin of pytest that leaves out what is proved, tells workers, and notes what has passed."""

    def __init__(self, proofs: Proofs) -> None:
        """Take the proofs of the repository."""
        super().__init__(proofs.proved())
        self._proofs = proofs
        self._left: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._is_part = False

    def pytest_report_header(self) -> str:
        """Say how many files are left out."""
        n_left_out = len(self._proved)
        return f"{n_left_out} files of tests passed with these very sources, and are left out"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: object) -> None:
        """Tell a worker what is left out."""
        node.workerinput["proved"] = sorted(self._proved)  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Count the tests of each file, which all workers have found alike."""
        self._left = Counter(one.partition("::")[0] for one in ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests of each file, where there are no workers."""
        if session.items:
            self._left = Counter(one.nodeid.partition("::")[0] for one in session.items)
        self._is_part |= any("::" in one for one in session.config.args)

    def pytest_deselected(self) -> None:
        """Note nothing where somebody has chosen among the tests of files."""
        self._is_part = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a file when the last of its tests has passed."""
        name = report.nodeid.partition("::")[0]
        if report.failed:
            self._failed.add(name)
        if report.when != "teardown":
            return
        self._left[name] -= 1
        if self._left[name] == 0 and name not in self._failed and not self._is_part:
            self._proofs.note(name)


def proving(config: pytest.Config) -> LeavingOut:
    """Return the plugin of a run; where it chooses among the tests of files, nothing is noted."""
    told = getattr(config, "workerinput", None)
    return (
        Proving(Proofs(config.rootpath)) if told is None else LeavingOut(frozenset(told["proved"]))
    )
