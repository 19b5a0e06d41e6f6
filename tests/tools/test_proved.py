"""Files of tests that are not run again: until something that decides them changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import proved

FILES = {
    "src/kvcellar/__init__.py": """
_MODULES = {"kvcellar.far": "Far"}
""",
    "src/kvcellar/near.py": """
def late():
    from kvcellar.room.inner import thing
""",
    "src/kvcellar/room/__init__.py": "",
    "src/kvcellar/room/inner.py": "",
    "src/kvcellar/room/data.json": "{}",
    "src/kvcellar/room/built.so": "",
    "src/kvcellar/loaded/__init__.py": "",
    "src/kvcellar/loaded/by_name.py": "",
    "src/kvcellar/registry.py": 'load("kvcellar.loaded")',
    "src/kvcellar/far.py": "",
    "src/kvcellar/started.py": "",
    "tests/script.py": "",
    "src/kvcellar/other.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "",
    "tests/helper.py": "import kvcellar.registry",
    "tests/store/__init__.py": "",
    "tests/store/test_store.py": "",
    "tests/kernel/__init__.py": "",
    "tests/kernel/conftest.py": "",
    "tests/kernel/case.txt": "",
    "tests/kernel/test_one.py": '''
from pathlib import Path
import kvcellar.near
from tests import helper
PAGE = "docs/page.md"
PROGRAM = """
    from kvcellar import started
"""
SCRIPT = Path(__file__).parent / "script.py"

def test_one():
    assert True

def test_two():
    assert True
''',
    "tests/kernel/test_lazy.py": "from kvcellar import Far",
    "docs/page.md": "",
    "docs/other.md": "",
}
ONE = "tests/kernel/test_one.py"


@pytest.fixture
def root(tmp_path) -> Path:
    """A repository."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def is_proved(root: Path, name: str = ONE, machine: str = "one") -> bool:
    return name in proved.Proofs(root, machine).proved()


def note(root: Path, name: str = ONE) -> None:
    proved.Proofs(root, "one").note(name)


@pytest.mark.parametrize(
    "changed",
    [
        ONE,
        "src/kvcellar/__init__.py",
        "src/kvcellar/near.py",
        "src/kvcellar/room/inner.py",
        "src/kvcellar/room/data.json",
        "src/kvcellar/loaded/by_name.py",
        "src/kvcellar/registry.py",
        "src/kvcellar/started.py",
        "tests/script.py",
        "tests/helper.py",
        "tests/conftest.py",
        "tests/kernel/conftest.py",
        "tests/kernel/case.txt",
        "docs/page.md",
    ],
)
def test_a_file_is_proved_until_something_that_decides_it_changes(root, changed):
    assert not is_proved(root)
    note(root)
    assert is_proved(root)
    with (root / changed).open("a") as file:
        file.write("\n# changed")
    assert not is_proved(root)
    note(root)
    assert is_proved(root)


@pytest.mark.parametrize(
    "changed",
    [
        "src/kvcellar/other.py",
        "src/kvcellar/far.py",
        "src/kvcellar/room/built.so",
        "tests/store/test_store.py",
    ],
)
def test_what_decides_nothing_of_it_changes_nothing(root, changed):
    note(root)
    (root / changed).write_text("# changed")
    assert is_proved(root)


def test_a_name_that_the_package_opens_lazily_is_the_module_that_has_it(root):
    lazy = "tests/kernel/test_lazy.py"
    note(root, lazy)
    (root / "src" / "kvcellar" / "other.py").write_text("# changed")
    assert is_proved(root, lazy)
    (root / "src" / "kvcellar" / "far.py").write_text("# changed")
    assert not is_proved(root, lazy)


def test_another_machine_or_another_version_of_a_package_proves_nothing(root, monkeypatch):
    (root / ONE).write_text("import pytest")
    note(root)
    assert not is_proved(root, machine="another")
    assert is_proved(root)
    monkeypatch.setattr(proved.metadata, "version", lambda package: "0.0")
    assert not is_proved(root)


def test_a_program_that_came_since_runs_it_again(root, monkeypatch):
    (root / ONE).write_text('needs("chromium")')
    monkeypatch.setattr(proved.shutil, "which", lambda name: None)
    note(root)
    assert is_proved(root)
    monkeypatch.setattr(proved.shutil, "which", lambda name: f"/bin/{name}")
    assert not is_proved(root)


def test_rooms_whose_tests_depend_on_other_processes_always_run(root):
    note(root, "tests/store/test_store.py")
    assert not is_proved(root, "tests/store/test_store.py")


def test_a_run_leaves_out_what_has_passed_whole_and_nothing_else(root):
    (root / "tests" / "conftest.py").write_text(
        f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("plugin_of_proofs", {proved.__file__!r})
plugin = sys.modules["plugin_of_proofs"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)

def pytest_configure(config):
    config.pluginmanager.register(plugin.proving(config))
"""
    )
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "tests" / "kernel" / "test_lazy.py").write_text("def test_three(): assert False")
    (root / ONE).write_text("def test_one(): pass\ndef test_two(): pass")
    assert "1 passed, 1 deselected" in run(root, "-n0", "-k", "two", ONE)
    assert "1 passed" in run(root, "-n0", f"{ONE}::test_one")
    assert "1 failed, 2 passed" in run(root, "-n1", "tests/kernel")
    assert [*proved.json.loads((root / "tests" / "proved.json").read_text())] == [ONE]
    assert "1 failed in" in run(root, "-n1", "tests/kernel")
    (root / ONE).write_text("def test_one(): pass\ndef test_two(): assert 0")
    assert "2 failed, 1 passed" in run(root, "-n0", "tests/kernel")
    assert "2 failed, 1 passed" in run(root, "-n0", "tests/kernel")


def run(root: Path, *arguments: str) -> str:
    """Run pytest in a repository and return its last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    return done.stdout.strip().splitlines()[-1]
