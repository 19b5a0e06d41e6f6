"""Importing the package needs NumPy and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvcellar
from kvcellar.installed import pip_command

NUMPY_ALONE = """
import importlib.abc, sys

class NumpyAlone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "kvcellar"):
            raise ModuleNotFoundError(f"import of {name}", name=top)

for name in list(sys.modules):
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names and not top.startswith("__"):
        del sys.modules[name]  # what .pth files of the environment have brought
sys.meta_path.insert(0, NumpyAlone())
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", NUMPY_ALONE + code],
        env={"PYTHONPATH": str(Path(kvcellar.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_package_imports_with_numpy_alone():
    done = run(
        "import kvcellar, kvcellar.bookkeeping\n"
        "assert all(hasattr(kvcellar, name) for name in kvcellar.__all__)\n"
        "third = {m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(m for m in third if not m.startswith('__')))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['kvcellar', 'numpy']"


def test_the_hook_of_these_tests_blocks_what_it_should():
    done = run("import pytest")
    assert "ModuleNotFoundError: import of pytest" in done.stderr


def test_a_backend_whose_package_is_missing_says_how_to_install_it():
    done = run(
        "import kvcellar as kv\n"
        "config = kv.make_config(kv.ModelCacheParams(1, 1, 1), 8)\n"
        "kv.make_decode_session('torch', config)"
    )
    assert (
        f"BackendError: backend 'torch' needs the package 'torch'; install it with: "
        f"{pip_command('torch')}"
    ) in done.stderr
