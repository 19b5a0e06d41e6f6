"""Every level on every machine: what it lacks is emulated, and each is held to plain C++."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.kernel import levels

CHECK = Path(levels.__file__).parent / "native" / "check"
needs_kernel = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())


@needs_kernel
def test_a_level_that_the_environment_names_is_used_or_refused():
    assert imported("scalar").stdout.split() == ["True", "scalar"]
    refused = imported("mmx")
    assert refused.returncode != 0
    assert "KVCELLAR_KERNEL=mmx is no instruction set; choose" in refused.stderr


def imported(forced: str) -> subprocess.CompletedProcess[str]:
    """Import the kernel in a process of its own and print what it is."""
    code = (
        "from kvcellar.kernel import levels as k\n"
        "print(k.is_available(), k.level().name if k.is_available() else k.why_not())"
    )
    source = str(Path(levels.__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KVCELLAR_KERNEL": forced, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_kernel
def test_without_the_extension_the_package_says_how_to_get_it():
    assert imported("off").stdout.strip() == "False KVCELLAR_KERNEL=off"


@pytest.mark.slow
@pytest.mark.kernel
def test_random_steps_of_all_levels_of_x86_are_clean_under_the_sanitisers(tmp_path):
    needs("cmake", os.environ.get("CXX", "c++"))
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or " avx2 " not in cpu.read_text():
        pytest.skip("what AVX2 lacks is emulated on AVX2, which is not here")
    done = check(tmp_path, 20)
    for name in ("scalar", "avx2", "avx_vnni", "vnni", "bf16", "amx"):
        assert f"{name}: 20 steps" in done


@pytest.mark.slow
@pytest.mark.kernel
def test_random_steps_of_neon_agree_with_plain_cpp(tmp_path):
    needs("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")
    arm = "-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64"
    compiler = "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"
    done = check(tmp_path, 20, "-DKVC_SANITISE=OFF", *arm.split(), compiler, run=["qemu-aarch64"])
    for name in ("scalar", "neon"):
        assert f"{name}: 20 steps" in done


def needs(*programs: str) -> None:
    """Skip the test where one of these is not installed."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def check(folder: Path, n_steps: int, *options: str, run: list[str] | None = None) -> str:
    """Build the program that compares levels, run so many steps, and return what it says."""
    build_type = "-DCMAKE_BUILD_TYPE=RelWithDebInfo"
    said("cmake", "-S", CHECK, "-B", folder, build_type, *options)
    said("cmake", "--build", folder, "-j2")
    return said(*(run or []), folder / "check_kernel", n_steps)


def said(*command: object) -> str:
    """Run a program that succeeds, and return what it prints."""
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout
