"""An installation without the compiled kernel works, and says what is missing and the way out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvcellar


@pytest.fixture(scope="module")
def without_kernel(tmp_path_factory):
    """Runs kvcellar from a copy of the package that has no compiled kernel."""
    root = tmp_path_factory.mktemp("installed")
    package = Path(kvcellar.__file__).parent
    shutil.copytree(
        package, root / "kvcellar", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )

    def run(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "kvcellar", *arguments],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
                "KVCELLAR_HOME": str(root / "home"),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


def test_a_run_without_the_kernel_says_so_once_in_a_sentence(without_kernel):
    ran = without_kernel("generate", "demo", "--raw", "--prompt", "def f", "--max-tokens", "2")
    assert ran.returncode == 0 and ran.stdout
    (said,) = [line for line in ran.stderr.splitlines() if "kernel" in line]
    assert "was not built when it was installed" in said and "several times slower" in said
    assert "C++17 compiler" in said and "pip install --no-deps --" in said
    assert "circular" not in ran.stderr and "import" not in said


@pytest.mark.parametrize(
    "arguments", [("inspect", "demo"), ("serve", "demo", "--host", "203.0.113.1")]
)
def test_other_commands_say_so_too(without_kernel, arguments):
    """``serve`` says it before it takes requests: here it takes none."""
    ran = without_kernel(*arguments)
    assert ran.stderr.count("was not built when it was installed") == 1, ran.stderr


def test_whoever_switched_it_off_is_not_told(without_kernel):
    ran = without_kernel("inspect", "demo", KVCELLAR_KERNEL="off")
    assert ran.returncode == 0 and "kernel" not in ran.stderr
